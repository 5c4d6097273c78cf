import os
import subprocess
import sys
import warnings
from pathlib import Path

import arviz as az
import numpy as np
import pandas as pd
import pytest

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.cli import app as cli
from bayesfed.cli import report
from bayesfed.cli.experiment import read_experiment
from tests.cli.experiments import fails, rows

# -- ways to start ---------------------------------------------------------------------------------


def test_python_runs_the_package_as_a_module():
    """Where scripts are not on the path; a mistake has the exit status of the script."""
    start = [sys.executable, "-m", "bayesfed"]
    shown = subprocess.run([*start, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["bayesfed", bf.__version__]
    assert subprocess.run([*start, "run", "none.toml"], capture_output=True).returncode == 2


# -- run ------------------------------------------------------------------------------------------


def test_a_run_leaves_everything(drawn_plots, schools, capsys):
    assert cli.main(["run", schools]) == 0
    folder = "runs/schools"
    assert sorted(os.listdir(folder)) == [
        "config.toml",
        "forest.png",
        "history.csv",
        "posterior.nc",
        "posterior.safetensors",
        "program.py",
        "run.safetensors",
        "summary.csv",
    ]
    history = rows(f"{folder}/history.csv")
    assert [(r["round"], r["clients"]) for r in history] == [("1", "8"), ("2", "8"), ("3", "8")]
    idata = az.from_netcdf(f"{folder}/posterior.nc")
    assert idata.posterior["theta"].shape == (1, 40, 8)
    assert idata.posterior["client"].values.tolist() == list("ABCDEFGH")
    assert np.allclose(idata.history["elbo"][0], [float(r["elbo"]) for r in history], rtol=1e-6)
    federation = datasets.eight_schools()
    path = f"{folder}/posterior.safetensors"
    posterior = bf.Posterior.load(path, models.eight_schools, federation)
    theta = posterior.sample(40)["theta"].reshape(1, 40, 8)
    assert np.array_equal(idata.posterior["theta"], theta)
    summary = rows(f"{folder}/summary.csv")
    assert [r["variable"] for r in summary[:3]] == ["mu", "tau", "theta[A]"]
    assert set(summary[0]) == {"variable", "mean", "sd", "hdi_3%", "hdi_97%"}
    assert float(summary[2]["mean"]) == pytest.approx(float(theta[..., 0].mean()), rel=1e-4)
    with open(f"{folder}/forest.png", "rb") as file:
        assert file.read(4) == b"\x89PNG"
    printed = capsys.readouterr().out
    assert "theta[H]" in printed
    assert all(str(name) in printed for name in os.listdir(folder))
    assert "r_hat" not in printed


def test_the_configuration_repeats_the_run(schools):
    assert cli.main(["run", schools, "--set", "schedule.seed=3", "--output", "a"]) == 0
    assert cli.main(["run", "a/config.toml", "--output", "b"]) == 0
    first, second = (rows(f"{folder}/history.csv") for folder in "ab")
    assert [r["elbo"] for r in first] == [r["elbo"] for r in second]
    with open("a/config.toml") as a, open("b/config.toml") as b:
        # all but the first line, which names the file, and the folder
        left, right = a.read().split("\n")[1:], b.read().split("\n")[1:]
    assert [line for line in left if "folder" not in line] == [
        line for line in right if "folder" not in line
    ]
    assert "lr_decay = 0.01" in left
    assert "seed = 3" in left


def test_ones_own_model_and_data(drawn_plots, towns, capsys):
    assert cli.main(["run", towns, "--output", "out/one"]) == 0
    idata = az.from_netcdf("out/one/posterior.nc")
    assert idata.posterior["client"].values.tolist() == ["007", "Ω $x_1$", "北京"]
    held = az.from_netcdf("out/one/held_out.nc")
    assert held.posterior["client"].values.tolist() == ["Øst"]
    assert np.array_equal(held.posterior["mu"], idata.posterior["mu"])
    summary = {r["variable"]: r["held_out"] for r in rows("out/one/summary.csv")}
    assert summary["town[007, 0]"] == "False"
    assert summary["town[Øst, 1]"] == "True"
    assert "town[Øst, 1] (held out)" in capsys.readouterr().out
    # paths are written as seen from the folder, so the run can be repeated from anywhere
    config = read_experiment(Path("out/one/config.toml"))
    assert config.model.name == "../../study/mine.py:heights"
    assert config.data.csv == "../../study/towns.csv"
    assert cli.main(["run", "out/one/config.toml", "--output", "out/two"]) == 0
    one, two = (rows(f"out/{name}/history.csv") for name in ("one", "two"))
    assert [r["elbo"] for r in one] == [r["elbo"] for r in two]


FORMULA = """
[model]
formula = "cm ~ u + (1 + v | town)"
[data]
csv = "towns.csv"
client = "town"
[schedule]
rounds = 2
[output]
num_samples = 40
"""


def test_a_formula(drawn_plots, towns, capsys):
    Path("study/formula.toml").write_text(FORMULA)
    assert cli.main(["run", "study/formula.toml", "--output", "out"]) == 0
    found = {row["variable"].split("[")[0] for row in rows("out/summary.csv")}
    assert found == {
        *("Intercept", "u", "sigma", "1|town", "v|town", "1|town_sigma", "v|town_sigma"),
        "cor(1, v)|town",
    }
    assert "cm ~ u + (1 + v | town) on towns.csv" in capsys.readouterr().out
    _, error = fails(capsys, "run", "study/formula.toml", "--set", "model.formula=cm ~ bs(u)")
    assert "model.formula: bs(u): give the knots, as in bs(x, knots=" in error
    _, error = fails(capsys, "run", "study/formula.toml", "--set", "model.name=eight_schools")
    assert "give either name (a model) or formula" in error
    _, error = fails(capsys, "run", "study/formula.toml", "--set", 'data.fields=["u"]')
    assert "a formula names its columns" in error
    _, error = fails(capsys, "run", "study/formula.toml", "--set", "data.missing=keep")
    assert 'missing = "drop" leaves out rows' in error
    _, error = fails(capsys, "run", "study/formula.toml", "--set", 'output.variables=["w|town"]')
    assert "the model has 1|town, v|town" in error


def test_a_warning_is_one_line(monkeypatch, capsys):
    def run(**_):
        print(warnings.formatwarning("x is odd", UserWarning, "x.py", 1), end="")

    usual = warnings.formatwarning
    monkeypatch.setattr(cli, "app", run)
    cli.main([])
    assert capsys.readouterr().out == "warning: x is odd\n" and warnings.formatwarning is usual


def test_rows_with_gaps_in_a_formula_s_columns_are_left_out_if_asked(drawn_plots, towns, capsys):
    frame = pd.read_csv("study/towns.csv")
    frame.loc[1, "u"] = frame.loc[0, "unused"] = float("nan")
    frame.to_csv("study/towns.csv", index=False)
    Path("study/formula.toml").write_text(FORMULA)
    _, error = fails(capsys, "run", "study/formula.toml")
    assert "row 1: 'u' is missing" in error and 'missing = "drop"' in error
    dropping = ("--set", "data.missing=drop", "--output", "out")
    with pytest.warns(UserWarning, match=f"leaves out 1 of {len(frame)} rows"):
        assert cli.main(["run", "study/formula.toml", *dropping]) == 0
    assert f" {len(frame) - 1} rows (" in capsys.readouterr().out


def test_a_network_s_name_says_that_it_is_made_in_a_file(towns, capsys):
    Path("study/formula.toml").write_text(
        FORMULA.replace('formula = "cm ~ u + (1 + v | town)"', 'name = "Network"')
    )
    _, error = fails(capsys, "run", "study/formula.toml")
    assert "write net = models.Network(...) in a file" in error


def test_effects_and_leave_one_out_are_printed_and_written_and_repeated(towns, capsys):
    effects = """
[[effects]]
variables = {u = 1}
[[effects]]
kind = "predictions"
variables = {u = [0, 1.5]}
level = "new"
[leave_one_out]
num_samples = 200
"""
    Path("study/formula.toml").write_text(FORMULA + effects)
    assert cli.main(["run", "study/formula.toml", "--output", "out"]) == 0
    printed = capsys.readouterr().out
    assert "Difference of E[cm]" in printed and "Level: for a new client" in printed
    assert "Leave-one-observation-out over" in printed
    (left_out,) = rows("out/leave_one_out.csv")
    assert (left_out["model"], left_out["weight"], left_out["unit"]) == (
        "model",
        "1",
        "observation",
    )
    table = rows("out/effects.csv")
    assert [(r["effect"], r["term"], r["u"]) for r in table] == [
        ("1", "u", ""),
        ("2", "", "0"),
        ("2", "", "1.5"),
    ]
    assert cli.main(["run", "out/config.toml", "--output", "again"]) == 0
    assert rows("again/effects.csv") == table
    assert rows("again/leave_one_out.csv") == [left_out]
    both = ["run", "study/formula.toml", "--output", "none", "--set", 'leave_one_out.compare=["a"]']
    capsys.readouterr()
    assert "load both posteriors, and bf.compare them" in fails(capsys, *both)[1]
    Path("study/formula.toml").write_text(FORMULA + effects.replace("u = 1}", "w = 1}"))
    capsys.readouterr()
    code, error = fails(capsys, "run", "study/formula.toml", "--output", "none")
    assert not Path("none").exists()
    assert code == 2
    assert "effects[0]: 'w' is no column of the formula's predictors: u, v" in error


def test_ones_own_guide(towns):
    own = ["run", towns, "--set", "algorithm.guide=mine.py:guide"]
    assert cli.main([*own, "--output", "a"]) == 0
    assert read_experiment(Path("a/config.toml")).algorithm["guide"] == "../study/mine.py:guide"
    assert cli.main(["run", "a/config.toml", "--output", "b"]) == 0


@pytest.mark.filterwarnings("ignore:the noise that privacy adds")
def test_a_private_run_says_what_it_spent(schools, capsys):
    set_ = ["privacy.clip=1.0", "privacy.epsilon=3.0", "privacy.mechanism=laplace"]
    assert cli.main(["run", schools, *(a for s in set_ for a in ("--set", s))]) == 0
    assert "ε = 3" in capsys.readouterr().out
    assert "[privacy]" in Path("runs/schools/config.toml").read_text()
    code, message = fails(capsys, "run", schools, "--set", "privacy.clip=-1.0")
    assert code == 2 and "clip is -1.0" in message


@pytest.mark.filterwarnings("ignore:Pareto k is above")
def test_large_variables_are_written_on_request(schools, capsys, monkeypatch):
    monkeypatch.setattr(report, "LARGE", 7)
    assert cli.main(["run", schools, "--output", "small"]) == 0
    assert "theta, 8 numbers in a draw, is in posterior.safetensors only" in capsys.readouterr().out
    small = az.from_netcdf("small/posterior.nc")
    assert set(small.posterior) == set(small["prior"]) == {"mu", "tau"}
    assert small.posterior_predictive["y"].shape == (1, 40, 8)
    monkeypatch.setattr(report, "LARGE", 0)
    assert cli.main(["run", schools, "--output", "none"]) == 0
    none = az.from_netcdf("none/posterior.nc")
    assert "posterior" not in none and bf.loo(none).n_data_points == 8
    assert rows("none/summary.csv") == []
    capsys.readouterr()
    monkeypatch.setattr(report, "LARGE", 7)
    assert [row["variable"] for row in rows("small/summary.csv")] == ["mu", "tau"]
    assert cli.main(["run", schools, "--output", "all", "--set", "output.large=true"]) == 0
    assert "theta" in az.from_netcdf("all/posterior.nc").posterior
    assert len(rows("all/summary.csv")) == 10
    assert "safetensors only" not in capsys.readouterr().out


def test_the_installed_command():
    result = subprocess.run(
        [sys.executable, "-m", "bayesfed.cli.app", "run", "x.toml"], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: x.toml: No such file or directory\n"


def test_the_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr() == (f"bayesfed {bf.__version__}\n", "")


def test_parquet_is_read_as_csv_is(towns, capsys, monkeypatch):
    assert cli.main(["run", towns, "--output", "csv"]) == 0
    frame = pd.read_csv("study/towns.csv", dtype={"town": "category"})
    frame.to_parquet("study/towns.parquet")
    text = Path(towns).read_text().replace('csv = "towns.csv"', 'parquet = "towns.parquet"')
    Path("study/columns.toml").write_text(text)
    assert cli.main(["run", "study/columns.toml", "--output", "out/parquet"]) == 0
    csv, parquet = (rows(f"{folder}/history.csv") for folder in ("csv", "out/parquet"))
    assert [r["elbo"] for r in csv] == [r["elbo"] for r in parquet]
    config = read_experiment(Path("out/parquet/config.toml"))
    assert config.data.parquet == "../../study/towns.parquet"
    code, error = fails(capsys, "run", "study/columns.toml", "--set", 'data.fields=["w"]')
    assert code == 2 and "has no column 'w'; it has town, u, v, cm" in error
    Path("study/towns.parquet").write_text("town,u,v,cm")
    assert fails(capsys, "run", "study/columns.toml")[1].startswith("data (study/towns.parquet): ")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert fails(capsys, "run", "study/columns.toml") == (
        2,
        "Parquet is read by pyarrow, which is not installed: pip install 'bayesfed[arrow]'",
    )


def test_a_model_with_settings(schools, capsys):
    kidney = ["--set", "data.dataset=kidney", "--set", "model.name=Cox"]
    assert cli.main(["run", schools, *kidney, "--set", "model.cuts=[15, 30.0]"]) == 0
    idata = az.from_netcdf("runs/schools/posterior.nc")
    assert idata.posterior["log_hazard"].shape == (1, 40, 3)
    assert cli.main(["run", "runs/schools/config.toml", "--output", "again"]) == 0
    first, second = (rows(f"{folder}/history.csv") for folder in ("runs/schools", "again"))
    assert [r["elbo"] for r in first] == [r["elbo"] for r in second]
    for setting, expected in {
        "model.cut=[15]": "model.cut is unknown; did you mean 'cuts'?",
        "model.cuts=15": "model.cuts is 15; it must be",
        "model.cuts=[30, 15]": "model: cuts are [30.0, 15.0]: they must be positive and ascend",
    }.items():
        code, error = fails(capsys, "run", schools, *kidney, "--set", setting)
        assert code == 2 and expected in error
    assert fails(capsys, "run", schools, *kidney) == (2, "model.cuts is missing")
    code, error = fails(capsys, "run", schools, "--set", "model.cuts=[15]")
    assert code == 2 and "model.cuts is unknown; eight_schools has no settings" in error
