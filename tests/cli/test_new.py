"""``bayesfed new`` makes a folder whose experiment, formula and test run at once."""

import subprocess
import sys

import pandas as pd
import pytest

from bayesfed.cli import app as cli


@pytest.fixture
def study(tmp_path, monkeypatch, capsys):
    """A new study, in the working directory."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "my_study"]) == 0
    assert "cd my_study && bayesfed run experiment.toml" in capsys.readouterr().out
    return tmp_path / "my_study"


def test_files(study):
    files = "README.md check_data.py experiment.toml model.py rows.csv test_study.py"
    assert " ".join(sorted(path.name for path in study.iterdir())) == files
    readme = (study / "README.md").read_text(encoding="utf-8")
    assert not [name for name in files.split()[1:] if f"`{name}`" not in readme]


def test_its_experiment_runs(study, monkeypatch):
    monkeypatch.chdir(study)
    assert cli.main(["run", "experiment.toml"]) == 0
    effects = pd.read_csv("runs/experiment/effects.csv")
    assert effects.loc[0, "3%"] < 5.0 < effects.loc[0, "97%"]  # of which the rows were made


def test_the_formula_in_place_of_the_model(study, monkeypatch):
    monkeypatch.chdir(study)
    text = (study / "experiment.toml").read_text(encoding="utf-8")
    text = text.replace('name = "model.py', '# name = "model.py').replace("# formula", "formula")
    (study / "formula.toml").write_text(text, encoding="utf-8")
    assert cli.main(["run", "formula.toml", "--set", "schedule.rounds=3"]) == 0
    assert "1|clinic_sigma" in (study / "runs/formula/summary.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [["-m", "pytest", "-q"], ["check_data.py", "rows.csv"]])
def test_its_test_and_its_data_check(study, command):
    done = subprocess.run([sys.executable, *command], cwd=study, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout or "120 rows of 6 clients: no problems" in done.stdout


def test_a_folder_that_exists_is_refused(study, capsys):
    (study / "model.py").write_text("mine")
    assert cli.main(["new", "my_study"]) == 2
    assert capsys.readouterr().err == "error: my_study exists already: give another name\n"
    assert (study / "model.py").read_text() == "mine"
