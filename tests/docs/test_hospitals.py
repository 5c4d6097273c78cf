"""The files of the tutorial about five hospitals are an experiment and a node that go together."""

import shutil
from pathlib import Path

import pandas as pd

from bayesfed.cli.deployment import local_posteriors
from bayesfed.cli.experiment import read_node_file, read_rows
from bayesfed.deploy.coding_messages import Describe
from bayesfed.deploy.messages import pack, unpack
from bayesfed.deploy.node import Node

FILES = Path(__file__).resolve().parents[2] / "docs/hospitals"


def test_the_hospital_s_files(tmp_path):
    for path in FILES.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    rows = {"died": [0, 1, 0, 1], "arm": ["control", "treated"] * 2, "age": [60, 71, 66, 80]}
    pd.DataFrame(rows).to_csv(tmp_path / "aarhus.csv", index=False)
    node, experiment, base = read_node_file(tmp_path / "aarhus.toml")
    assert node.name in experiment.deployment.institutions
    assert node.socket == experiment.deployment.sockets[node.name]
    own = read_rows(experiment.data, tmp_path, alone=node.one_client)
    found = local_posteriors(node, experiment, own, tmp_path, base)
    assert list(found.federation) == ["aarhus"]
    worker = Node(node.name, found.federation, found.plan, tmp_path / node.name)
    columns, _ = unpack(worker.handle(pack(Describe(run="1", terms=found.plan.description))))
    assert columns.levels == {"arm": ("control", "treated")}
    kinds = {"age": "number", "arm": "text", "died": "number"}
    assert columns.kinds == kinds | {"hospital": "text"}
