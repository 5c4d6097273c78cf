"""The files of the tutorial about a program at three hospitals give the table that stands in it."""

import re
import runpy
import shutil
from pathlib import Path

import pandas as pd

from bayesfed.cli.deployment import local_posteriors, run_on
from bayesfed.cli.experiment import read_experiment, read_node_file, read_rows
from bayesfed.deploy.node import Node
from tests.deploy.in_process import wire

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_three_nodes_give_the_table_of_the_page(tmp_path):
    for path in (DOCS / "wards").iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    rows = runpy.run_path(str(tmp_path / "rows.py"))
    first, nodes = (tmp_path / "north.toml").read_text(encoding="utf-8"), []
    for name in rows["HOSPITALS"]:
        rows["rows_of"](name).to_csv(tmp_path / f"{name}.csv", index=False)
        file = tmp_path / f"{name}.toml"
        file.write_text(first.replace("north", name), encoding="utf-8")
        node, experiment, base = read_node_file(file)
        own = read_rows(experiment.data, tmp_path)
        local = local_posteriors(node, experiment, own, tmp_path, base)
        nodes.append(Node(name, local.federation, local.plan, local.folder))
    run_on(
        wire(nodes),
        read_experiment(tmp_path / "experiment.toml"),
        tmp_path / "experiment.toml",
        tmp_path / "out",
    )
    found = pd.read_csv(tmp_path / "out" / "summary.csv", index_col="variable")
    page = (DOCS / "wards.md").read_text(encoding="utf-8")
    stated = re.findall(r"^(base|effect\[\d\]|tau) +(\S+) +(\S+) +\S+ +\S+$", page, re.MULTILINE)
    assert len(stated) == len(found) == 4
    for name, mean, sd in stated:
        assert abs(float(mean) - found.loc[name, "mean"]) < 0.1 * found.loc[name, "sd"]
        assert abs(float(sd) / found.loc[name, "sd"] - 1.0) < 0.1
