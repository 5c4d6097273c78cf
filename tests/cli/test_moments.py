"""Moments from the command line: asked for over nodes, then fitted again without these."""

import runpy

import numpy as np
import pandas as pd
import pytest

import bayesfed as bf
from bayesfed.cli.app import main
from bayesfed.cli.deployment import make_node, run_on
from bayesfed.cli.experiment import read_experiment, read_node_file
from tests.cli.test_node_files import local_of
from tests.deploy.in_process import wire

EXPERIMENT = """
[model]
formula = "stay ~ age + arm + (1 | hospital)"

[data]
client = "hospital"

[algorithm]
corrected = false

[schedule]
rounds = 3

[execution]
compile = false

[deployment]
institutions = ["aarhus", "bergen"]
reveal = "moments"
"""
NODE_FILE = """
name = "{name}"
experiment = "experiment.toml"
one_client = true
reveal = "moments"
fewest_rows = 2

[data]
csv = "{name}.csv"
"""
AGAIN = """
[model]
name = "result/program.py:model"

[data]
moments = "result/moments.safetensors"

[algorithm]
corrected = false

[schedule]
rounds = 3
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    (tmp_path / "again.toml").write_text(AGAIN)
    generator = np.random.default_rng(0)
    for name in ("aarhus", "bergen"):
        age = generator.normal(60, 10, 60).round()
        arm = np.where(np.arange(60) % 2, "drug", "placebo")
        stay = 5 + 0.05 * age - (arm == "drug") + generator.normal(size=60)
        frame = pd.DataFrame({"age": age, "arm": arm, "stay": stay.round(2)})
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        (tmp_path / f"{name}.toml").write_text(NODE_FILE.format(name=name))
    return tmp_path


def table_of(folder):
    return pd.read_csv(folder / "summary.csv", index_col="variable")


def test_a_study_of_moments(study, capsys):
    """The program and the moments of a run are fitted again by an experiment of one process."""
    nodes = []
    for name in ("aarhus", "bergen"):
        file, _, _ = read_node_file(study / f"{name}.toml")
        nodes.append(make_node(file, local_of(study / f"{name}.toml")))
    assert nodes[0].consent.fewest_rows == 2
    path = study / "experiment.toml"
    run_on(wire(nodes), read_experiment(path), path, study / "result")
    assert "moments.safetensors" in capsys.readouterr().out
    assert main(["run", "again.toml", "--output", "again"]) == 0
    first, again = table_of(study / "result"), table_of(study / "again")
    pd.testing.assert_frame_equal(first, again.loc[first.index], rtol=1e-3, atol=1e-3)
    assert "1|hospital[aarhus]" in again.index
    (study / "rows.csv").write_text("age,arm,stay\n60,drug,\n")
    assert main(["predict", "aarhus.toml", "rows.csv"]) == 0
    assert "1,aarhus,stay," in capsys.readouterr().out
    posterior = bf.Posterior.load(
        study / "result" / "posterior.safetensors",
        runpy.run_path(str(study / "result" / "program.py"))["model"],
        bf.Moments.load(study / "result" / "moments.safetensors").federation(),
    )
    assert posterior.sample(5)["_u|hospital"].shape == (5, 2)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"data.hold_out": '["aarhus"]'}, "hold_out is for rows"),
        ({"data.client": "hospital"}, "moments have their clients"),
        ({"leave_one_out.name": "a"}, "effects, leave_one_out: they need the clients' rows"),
        ({"data.moments": "none.safetensors"}, "there is no file"),
    ],
)
def test_settings_that_need_rows_are_refused(study, capsys, settings, problem):
    model = hospital_model()
    (study / "result").mkdir()
    (study / "result" / "program.py").write_text(model)
    bf.Moments.of(bf.Federation.from_arrays({"aarhus": {"stay": np.tile([0.0, 1.0], 20)}})).save(
        study / "result" / "moments.safetensors"
    )
    changes = [f"--set={name}={value}" for name, value in settings.items()]
    assert main(["run", "again.toml", *changes]) != 0
    assert problem in " ".join(capsys.readouterr().err.split())


def hospital_model():
    return """
import pyro
import pyro.distributions as dist


def model(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("stay", dist.Normal(a, 1.0), obs=obs.get("stay"))
"""
