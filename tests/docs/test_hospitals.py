"""The files of the tutorial about five hospitals are a model, an experiment and a node that go together."""

import shutil
from pathlib import Path

import pandas as pd
import torch

import bayesfed as bf
from bayesfed.cli.choices import load_clients
from bayesfed.cli.deployment import make_plan
from bayesfed.cli.experiment import read_node_file, read_rows

FILES = Path(__file__).resolve().parents[2] / "docs/hospitals"


def test_the_hospital_s_files(tmp_path):
    for path in FILES.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    rows = {"age": [60, 71, 66, 80], "treated": [0, 1, 0, 1], "died": [0, 1, 0, 0]}
    pd.DataFrame(rows).to_csv(tmp_path / "aarhus.csv", index=False)
    node, experiment, base = read_node_file(tmp_path / "aarhus.toml")
    assert node.name in experiment.deployment.institutions
    assert node.socket == experiment.deployment.sockets[node.name]
    own = read_rows(experiment.data, tmp_path, alone=node.one_client)
    federation = load_clients(experiment.data, own, tmp_path, node.name)
    assert (federation.names, federation.rows) == (("aarhus",), 4)
    plan = make_plan(experiment, base)
    posterior = bf.fit(plan.model, federation, plan.algorithm, rounds=2)
    assert torch.isfinite(posterior.sample(10)["arm"]).all()
