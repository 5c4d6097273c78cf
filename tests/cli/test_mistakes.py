"""Mistakes in experiments and commands: one line that says what to write, and nothing written."""

import os

import numpy as np
import pandas as pd
import pytest

from bayesfed.algorithms import METHODS
from bayesfed.cli import app as cli
from bayesfed.cli.catalogue import MODELS
from tests.cli.experiments import fails, rows

# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.round=1", "schedule.round is unknown; did you mean 'rounds'?"),
        ("schedule.rounds=ten", 'schedule.rounds is "ten"; it must be a whole number'),
        ("schedule.clients_per_round=9", "clients_per_round is 9; it must be between 1 and the 8"),
        ("schedule.clients_per_round=1.5", "clients_per_round is 1.5; as a float it is a fraction"),
        ("execution.device=gpu", "execution: device is 'gpu', which torch "),
        ("schedule", "--set schedule: write it as --set section.key=value"),
        (
            "model.name=eight_school",
            "model.name is \"eight_school\"; did you mean 'eight_schools'?",
        ),
        ("model.name=no.py:f", "model.name: there is no file no.py"),
        ("model.name=no.py", 'model.name is "no.py"; say which function: "no.py:function"'),
        (
            "data.dataset=grunfield",
            "\"grunfield\"; did you mean 'grunfeld'? choose",
        ),
        ("data.hold_out=['J']", 'data.hold_out: there is no client "J"; they are A, B, C'),
        ("algorithm.name=SVFI", "algorithm.name is \"SVFI\"; did you mean 'SFVI'? choose one of"),
        ("algorithm.guide=mine", "algorithm.guide is 'mine'; give \"file.py:function\""),
        ("output.variables=['tau']", 'there is no local variable "tau"; the model has theta'),
        (
            "output.variables=['teta']",
            "no local variable \"teta\"; did you mean 'theta'? the model has theta",
        ),
        ("output.variables=['mu']", 'there is no local variable "mu"; the model has theta'),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(schools, capsys, override, message):
    code, error = fails(capsys, "run", schools, "--set", override)
    assert code == 2
    assert message in error
    assert not os.path.exists("runs")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.csv=no.csv", "data.csv: there is no file study/no.csv"),
        ("data.client=city", "the file has no column 'city'; it has town, u, v, cm"),
        ('data.fields.x=["town"]', "field 'town' is categorical or text"),
        ("data.hold_out=['Ost']", "no client \"Ost\"; did you mean 'Øst'?"),
        ("data.hold_out=['007', 'Ω $x_1$', 'Øst', '北京']", "names every client"),
        (
            "model.name=mine.py:height",
            "'height'; did you mean 'heights'? it has heights",
        ),
        ("model.name=broken.py:f", "broken.py cannot be imported: NameError: name 'oops' is not"),
        ("data.fields={x = ['u', 'v']}", "site 'height'"),
        ("data.fields={height = 'cm'}", "unknown field 'x': the federation has height"),
    ],
)
def test_mistakes_in_ones_own_model_and_data(towns, capsys, override, message):
    with open("study/broken.py", "w") as file:
        file.write("oops\n")
    code, error = fails(capsys, "run", towns, "--set", override)
    assert code == 2
    assert message in error
    assert not os.path.exists("runs")


def test_missing_values(towns, capsys):
    frame = pd.read_csv("study/towns.csv")
    frame.loc[4, "u"] = np.nan
    frame.to_csv("study/towns.csv", index=False)
    code, error = fails(capsys, "run", towns)
    assert code == 2
    assert "field 'x' is NaN" in error
    assert "row 1" in error
    with pytest.warns(UserWarning, match="leaves out 1 of"):
        assert cli.main(["run", towns, "--set", "data.missing=drop"]) == 0


def test_files_that_cannot_be_read(schools, capsys):
    assert fails(capsys, "run", "no.toml") == (2, "no.toml: No such file or directory")
    assert fails(capsys, "run", ".") == (2, ".: Is a directory")
    with open("bad.toml", "w") as file:
        file.write("[model]\nname = eight\n")
    code, error = fails(capsys, "run", "bad.toml")
    assert code == 2
    assert error.startswith("bad.toml: ")
    assert "line 2" in error
    with open("taken", "w") as file:
        file.write("a file")
    code, error = fails(capsys, "run", schools, "--output", "taken")
    assert (code, error) == (2, "taken: File exists")


def test_a_failure_inside_a_run_is_exit_1_and_keeps_the_history(schools, capsys):
    rate = ["--set", "algorithm.local_lr=1e30"]
    code, error = fails(capsys, "run", schools, "--set", "schedule.rounds=50", *rate)
    assert code == 1
    assert "not finite" in error
    done = rows("runs/schools/history.csv")
    assert f"; the rounds so far ({len(done)}) are in runs/schools/history.csv" in error


def test_debug_gives_the_traceback(schools):
    with pytest.raises(ValueError, match=r"model\.name"):
        cli.main(["run", schools, "--debug", "--set", "model.name=x"])


def test_commands_that_do_not_exist(capsys):
    assert fails(capsys, "rum")[0] == 2
    assert fails(capsys, "run")[0] == 2
    assert fails(capsys, "run", "a.toml", "--nope")[0] == 2
    code, error = fails(capsys, "list", "things")
    assert code == 2
    assert "'things' is not one of 'models', 'datasets', 'algorithms', 'guides'" in error


# -- list -----------------------------------------------------------------------------------------


def test_list_shows_everything(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["list"]) == 0
    everything = capsys.readouterr().out
    names = [*MODELS, *METHODS, "MeanField", "FullRank", "Flow", "randhie"]
    assert "eight_schools" in MODELS and "mlp" not in MODELS
    assert all(name in everything for name in names)
    assert "standardise" not in everything
    assert cli.main(["list", "algorithms"]) == 0
    algorithms = capsys.readouterr().out
    assert "eight_schools" not in algorithms
    lines = algorithms.partition("settings of SFVI")[2].splitlines()
    line = next(line for line in lines if line.strip().startswith("local_steps"))
    assert line.split()[:2] == ["local_steps", "10"]
    assert "Adam steps" in line
    assert ":class:" not in algorithms


def test_without_a_command_there_is_help(capsys):
    assert cli.main([]) == 0
    assert "Usage: bayesfed" in capsys.readouterr().out
