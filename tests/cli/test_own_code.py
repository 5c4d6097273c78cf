"""Experiment files that name a user's own parts, in a file beside them."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import bayesfed as bf
from bayesfed.cli.app import main
from bayesfed.cli.choices import named_algorithm
from bayesfed.cli.experiment import read_experiment
from bayesfed.engine import run_file
from docs import own_parts

MODEL = '''

import pyro
import pyro.distributions as dist


def heights(federation):
    """Heights in towns."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with federation.clients():
        town = pyro.sample("town_mean", dist.Normal(mu, 0.5))
        with federation.observations() as obs:
            pyro.sample("height", dist.Normal(town, 1.0), obs=obs.get("height"))
'''
EXPERIMENT = """
[model]
name = "mine.py:heights"
[data]
csv = "towns.csv"
client = "town"
fields = ["height"]
[algorithm]
{algorithm}
[schedule]
rounds = 3
[output]
num_samples = 40
"""
FORMS = {
    "a rule by name": 'name = "FedAvg"\nrule = "mine.py:FedAdam"',
    "a rule with fields": 'name = "FedAvg"\nlr = 0.2\n[algorithm.rule]\nname = "mine.py:FedAdam"\nlr = 0.05',
    "steps": 'name = "FedAvg"\nsteps = "mine.py:LastingMomentum"',
    "a function that returns a composition": 'name = "mine.py:with_momentum"\nlr = 0.05',
    "a composition": 'name = "mine.py:adam"',
    "all parts": 'globals = "Point"\nlocals = "AtPrior"\nsteps = "Descent"\nrule = "mine.py:TrimmedMean"',
}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A folder with data and the user's file, in which an experiment can be written."""
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "mine.py").write_text(Path(own_parts.__file__).read_text() + MODEL)
    generator = np.random.default_rng(0)
    pd.DataFrame(
        {"town": np.repeat(["a", "b", "c", "d"], [3, 5, 4, 2]), "height": generator.normal(size=14)}
    ).to_csv(folder / "towns.csv", index=False)
    monkeypatch.chdir(tmp_path)
    yield folder
    sys.modules.pop("mine", None)


def write(folder, form):
    text = EXPERIMENT.format(algorithm=FORMS[form])
    (folder / "towns.toml").write_text(text)
    return str(folder / "towns.toml")


def fails(capsys, *arguments):
    code = main(list(arguments))
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize("form", FORMS)
def test_a_run_and_its_repetition(study, form, capsys):
    """The resolved file names the user's own relative to itself, and repeats the run in another process."""
    assert main(["run", write(study, form), "--output", "results/a"]) == 0
    config = read_experiment(Path("results/a/config.toml"))
    names = [part["name"] for part in config.algorithm.values() if isinstance(part, dict)]
    assert any(name.startswith("../../study/mine.py:") for name in names), config.algorithm
    first = named_algorithm(read_experiment(study / "towns.toml"), study)
    assert named_algorithm(config, Path("results/a")) == first
    del sys.modules["mine"]  # as in another process
    assert main(["run", "results/a/config.toml", "--output", "b"]) == 0
    one, other = (load_file(f"{folder}/posterior.safetensors") for folder in ("results/a", "b"))
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert name == "history/seconds" or torch.equal(value, other[name]), name


def test_fields_of_a_part_are_set(study):
    write(study, "a rule with fields")
    algorithm = named_algorithm(read_experiment(study / "towns.toml"), study)
    assert (type(algorithm.rule).__name__, algorithm.rule.lr, algorithm.steps.lr) == (
        "FedAdam",
        0.05,
        0.2,
    )
    changed = read_experiment(study / "towns.toml", ["algorithm.rule.lr=0.5"])
    assert named_algorithm(changed, study).rule.lr == 0.5


def test_the_file_is_imported_once(study, capsys):
    """The model and the parts are of one module, which has the name that checkpoints look up."""
    (study / "mine.py").write_text(
        (study / "mine.py").read_text()
        + "\nwith open('count', 'a') as file:\n    file.write('x')\n"
    )
    assert main(["run", write(study, "a rule by name"), "--output", "a"]) == 0
    assert Path("count").read_text() == "x"
    mine = sys.modules["mine"]
    frame = pd.read_csv(study / "towns.csv", dtype={"town": str})
    rows = bf.Federation.from_frame(frame, client="town", fields=["height"])
    found = bf.Posterior.load("a/posterior.safetensors", mine.heights, rows)
    assert found.algorithm.rule == mine.FedAdam()


@pytest.mark.parametrize(
    "form", ["a rule by name", "steps", "a function that returns a composition"]
)
def test_resume(study, form, capsys, monkeypatch):
    monkeypatch.setattr(run_file, "_SHARE", float("inf"))
    file = write(study, form)
    assert main(["run", file, "--output", "whole"]) == 0
    assert main(["run", file, "--output", "part", "--set", "schedule.rounds=1"]) == 0
    del sys.modules["mine"]
    assert main(["run", file, "--output", "part", "--resume"]) == 0
    one, other = (load_file(f"{folder}/posterior.safetensors") for folder in ("whole", "part"))
    for name, value in one.items():
        assert name == "history/seconds" or torch.equal(value, other[name]), name
    again = ["run", file, "--output", "part", "--resume", "--set", "schedule.seed=1"]
    assert "seed" in fails(capsys, *again)


def test_two_files_of_one_name_clash(study, capsys):
    assert main(["run", write(study, "a rule by name"), "--output", "a"]) == 0
    shutil.copytree(study, "other")
    error = fails(capsys, "run", "other/towns.toml", "--output", "b")
    assert (
        "algorithm.rule.name" in error
        and "other/mine.py cannot be imported as the module 'mine'" in error
    )
    assert f"which is {study / 'mine.py'} already: give the file another name" in error


def test_a_file_that_is_called_like_a_module_of_python(study, capsys):
    shutil.copy(study / "mine.py", study / "json.py")
    file = write(study, "a rule by name")
    error = fails(capsys, "run", file, "--set", "algorithm.rule=json.py:FedAdam")
    assert "give the file another name" in error
    import json

    assert json.loads("1") == 1


def test_models_may_still_have_files_of_one_name(study, capsys):
    """They are named by nothing that outlives the run."""
    shutil.copytree(study, "other")
    for folder in (study, Path("other")):
        file = write(folder, "a rule by name")
        assert main(["run", file, "--output", "a", "--set", 'algorithm={name = "FedAvg"}']) == 0
    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rule=no.py:FedAdam", "algorithm.rule.name: there is no file"),
        ("rule=mine.py:FedAdm", "has no 'FedAdm'; did you mean 'FedAdam'?"),
        ("rule=mine.py:heights", "a part is a class with @dataclass(frozen=True)"),
        ("rule=broken.py:A", "broken.py cannot be imported: NameError: name 'oops' is not defined"),
        ("rule=nowhere:A", "No module named 'nowhere'"),
        (
            'rule={name = "mine.py:FedAdam", lrr = 1.0}',
            "algorithm.rule.lrr is unknown; did you mean 'lr'?",
        ),
        ("steps=mine.py:FedAdam", "it must be a Steps"),
        ("name=mine.py:heights", "algorithm"),
        ("name=mine.py:Point", "not a bayesfed.Algorithm"),
    ],
)
def test_mistakes_are_one_line(study, capsys, change, message):
    (study / "broken.py").write_text("oops\n")
    file = write(study, "a rule by name")
    if change.startswith("name"):
        (study / "towns.toml").write_text(EXPERIMENT.format(algorithm='name = "FedAvg"'))
    assert message in fails(capsys, "run", file, "--set", f"algorithm.{change}")
    assert not Path("runs").exists() and "broken" not in sys.modules


def test_a_part_of_an_installed_module(study, capsys, monkeypatch):
    file = write(study, "a rule by name")
    own = ["run", file, "--output", "a", "--set", "algorithm.rule=docs.own_parts:FedAdam"]
    assert main(own) == 0
    assert (
        read_experiment(Path("a/config.toml")).algorithm["rule"]["name"] == "docs.own_parts:FedAdam"
    )
