import contextlib
import csv
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import arviz as az
import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from safetensors.torch import load_file

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.algorithms import METHODS
from bayesfed.cli import app as cli
from bayesfed.cli import forest, report
from bayesfed.cli.catalogue import MODELS
from bayesfed.cli.experiment import read_experiment

SCHOOLS = """
[model]
name = "eight_schools"
[data]
dataset = "eight_schools"
[algorithm]
name = "SFVI"
local_steps = 1
draws = 2
[schedule]
rounds = 3
[output]
num_samples = 40
"""

MY_MODEL = '''
import pyro
import pyro.distributions as dist
from beside import SPREAD


def heights(federation):
    """Heights in towns."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        town = pyro.sample("town", dist.Normal(mu, SPREAD).to_event(1))
        bias = pyro.sample("bias", dist.Normal(0.0, tau))
        with federation.observations() as obs:
            mean = bias + (town * obs["x"]).sum(-1)
            pyro.sample("height", dist.Normal(mean, 1.0), obs=obs.get("height"))


def guide(federation):
    import torch

    loc = pyro.param("loc", torch.zeros(2), event_dim=1)
    pyro.sample("mu", dist.Normal(loc, 1.0).to_event(1))
    pyro.sample("tau", dist.LogNormal(0.0, 1.0))
    with federation.clients():
        rows = pyro.param("rows", torch.zeros(len(federation), 1, 2), event_dim=1)
        pyro.sample("town", dist.Normal(rows, 1.0).to_event(1))
        pyro.sample("bias", dist.Normal(0.0, 1.0))
'''


@pytest.fixture
def schools(tmp_path, monkeypatch):
    """An experiment file in the working directory; returns its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schools.toml").write_text(SCHOOLS)
    return "schools.toml"


@pytest.fixture
def towns(tmp_path, monkeypatch):
    """An experiment on a CSV with a model of one's own, in another folder than the present one."""
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "beside.py").write_text("SPREAD = 0.5\n")
    (folder / "mine.py").write_text(MY_MODEL)
    generator = np.random.default_rng(0)
    pd.DataFrame(
        {
            "town": np.repeat(["007", "Ω $x_1$", "Øst", "北京"], [3, 5, 4, 2]),
            "u": generator.normal(size=14),
            "v": generator.normal(size=14),
            "cm": generator.normal(size=14),
        }
    ).to_csv(folder / "towns.csv", index=False)
    (folder / "towns.toml").write_text(
        SCHOOLS.replace('"eight_schools"', '"mine.py:heights"', 1).replace(
            'dataset = "eight_schools"',
            'csv = "towns.csv"\nclient = "town"\nfields = {x = ["u", "v"], height = "cm"}\n'
            'hold_out = ["Øst"]',
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        bf.SFVI, "default", bf.SFVI(personal_steps=20)
    )  # of the town that is held out
    return "study/towns.toml"


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def fails(capsys, *arguments):
    """The exit code and the one line on stderr."""
    code = cli.main(list(arguments))
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert error.endswith("\n")
    return code, error[len("error: ") : -1]


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


def test_an_earlier_run_is_never_overwritten_unasked(schools):
    for _ in range(3):
        assert cli.main(["run", schools, "--set", "schedule.rounds=1"]) == 0
    assert sorted(os.listdir("runs")) == ["schools", "schools-2", "schools-3"]
    assert cli.main(["run", schools, "--overwrite", "--set", "schedule.rounds=2"]) == 0
    assert sorted(os.listdir("runs")) == ["schools", "schools-2", "schools-3"]
    assert len(rows("runs/schools/history.csv")) == 2
    assert len(rows("runs/schools-2/history.csv")) == 1


def test_a_killed_run_leaves_its_history(schools):
    command = [sys.executable, "-m", "bayesfed.cli.app", "run", schools]
    command += ["--set", "execution.compile=false", "--set", "schedule.rounds=100000"]
    with subprocess.Popen(command) as process:
        history = "runs/schools/history.csv"
        end = time.monotonic() + 120
        while not (os.path.exists(history) and len(rows(history)) >= 3):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = rows(history)
    assert [int(r["round"]) for r in done] == list(range(1, len(done) + 1))
    left = [name for name in os.listdir("runs/schools") if not name.startswith(".")]
    assert sorted(left) == ["config.toml", "history.csv", "run.safetensors"]


def killed_after(rounds, *arguments):
    """``bayesfed run`` in a process that is killed once so many rounds are in its history."""
    command = [sys.executable, "-m", "bayesfed.cli.app", "run", *arguments]
    with subprocess.Popen(command) as process:
        history, end = "runs/schools/history.csv", time.monotonic() + 120
        while not (os.path.exists(history) and len(rows(history)) >= rounds):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def numbers(folder):
    """What the rounds of a run came to, and its posterior."""
    history = [(r["round"], r["elbo"], r["clients"]) for r in rows(f"{folder}/history.csv")]
    tensors = load_file(f"{folder}/posterior.safetensors")
    tensors.pop("history/seconds")
    return history, {name: value.numpy().tobytes() for name, value in tensors.items()}


def test_a_killed_run_goes_on(schools, capsys):
    """To what a run that never stopped has; states in files, and a history that ends in the middle of a line."""
    set_ = ["schedule.rounds=40", "schedule.clients_per_round=3", "execution.states=states"]
    set_ = [argument for key in set_ for argument in ("--set", key)]
    killed_after(3, schools, *set_, "--resume")  # there is nothing to go on with: it begins
    with open("runs/schools/history.csv", "a") as file:
        file.write("99,-3")
    Path("runs/schools/.forest.png.0123abcd").touch()
    assert cli.main(["run", schools, *set_, "--resume"]) == 0
    assert "going on in runs/schools" in capsys.readouterr().out
    assert not list(Path("runs/schools").glob(".*"))
    assert cli.main(["run", schools, *set_[:4], "--output", "whole"]) == 0
    assert numbers("runs/schools") == numbers("whole")


def test_a_run_that_has_ended_is_shown_again_and_not_written(schools, capsys):
    assert cli.main(["run", schools, "--resume"]) == 0
    first, before = capsys.readouterr().out, written("runs/schools")
    assert cli.main(["run", schools, "--resume"]) == 0
    assert set(capsys.readouterr().out.splitlines()) <= {
        "SFVI, 3 rounds, going on in runs/schools",
        *first.splitlines(),
    }
    assert written("runs/schools") == before
    other = ["--set", "output.num_samples=30"]
    assert cli.main(["run", schools, *other, "--resume"]) == 0
    assert az.from_netcdf("runs/schools/posterior.nc").posterior.sizes["draw"] == 30
    Path("runs/schools/forest.png").unlink()  # as if killed before its end
    assert cli.main(["run", schools, *other, "--resume"]) == 0
    assert Path("runs/schools/forest.png").exists()


def written(folder):
    """When each file was written last."""
    return {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()}


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


def test_a_run_goes_on_with_more_rounds(schools, capsys):
    steady = ["--set", "algorithm.lr_decay=1.0"]
    assert cli.main(["run", schools, *steady, "--resume"]) == 0
    longer = [*steady, "--set", "schedule.rounds=5"]
    assert cli.main(["run", schools, *longer]) == 0
    assert "runs/schools holds a run, with which --resume would go on" in capsys.readouterr().out
    assert cli.main(["run", schools, *longer, "--resume"]) == 0
    assert sorted(os.listdir("runs")) == ["schools", "schools-2"]
    assert numbers("runs/schools") == numbers("runs/schools-2")
    assert "rounds = 5" in Path("runs/schools/config.toml").read_text()
    code, error = fails(capsys, "run", schools, *steady, "--resume")
    assert code == 2 and "is a run of 5 rounds already" in error
    code, error = fails(capsys, "run", schools, *longer, "--set", "schedule.seed=1", "--resume")
    assert code == 2 and "is a run with seed 0, this one has 1" in error
    assert numbers("runs/schools") == numbers("runs/schools-2")


def test_a_folder_without_a_run(schools, capsys):
    os.makedirs("out")
    Path("out/notes.txt").touch()
    code, error = fails(capsys, "run", schools, "--output", "out", "--resume")
    assert (code, error) == (
        2,
        "out: there is no run.safetensors to go on with: leave out --resume",
    )
    code, error = fails(capsys, "run", schools, "--overwrite", "--resume")
    assert (code, error) == (2, "give either --resume or --overwrite")


def test_ctrl_c_says_what_is_kept(schools, capsys, monkeypatch):
    record = report.RunFolder.record

    def interrupt(folder, done):
        record(folder, done)
        if done.number == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(report.RunFolder, "record", interrupt)
    code, error = fails(capsys, "run", schools)
    assert code == 130
    assert (
        error
        == "interrupted; the rounds so far (2) are in runs/schools/history.csv; --resume goes on"
    )
    assert len(rows("runs/schools/history.csv")) == 2


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


# -- the report -----------------------------------------------------------------------------------


def test_the_population_mean_is_found_in_the_model():
    def find(model, federation):
        return forest.population_means(bf.fit(model, federation, bf.SFVI(local_steps=1), rounds=1))

    assert find(models.eight_schools, datasets.eight_schools()) == {"theta": "mu"}
    data = {n: {"x": [[0.5, 1.0]], "y": [1.0]} for n in "ab"}
    federation = bf.Federation.from_arrays(data)
    found = find(models.varying_slope, federation)
    assert found == {"alpha": "mu_alpha", "beta": "mu_beta"}
    assert find(models.varying_intercept, federation) == {"alpha": "mu"}

    def elsewhere(federation):  # mu is a mean, but not that of theta
        import pyro

        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
            scale = pyro.sample("scale", dist.LogNormal(mu, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(mu + theta, scale), obs=obs.get("y"))

    assert find(elsewhere, federation) == {}


def test_many_clients_and_panels_can_be_drawn(tmp_path):
    import xarray as xr

    generator = np.random.default_rng(0)
    draws = xr.Dataset(
        {
            "w": (("chain", "draw", "client", "w_dim_0"), generator.normal(size=(2, 20, 80, 15))),
            "m": (("chain", "draw"), generator.normal(size=(2, 20))),
        },
        coords={"client": [f"c{i}" for i in range(80)]},
    )
    forest.plot_forest(tmp_path / "a.png", draws, {}, variables=["w"])
    forest.plot_forest(tmp_path / "b.png", draws.drop_vars("m"), {}, variables=["w"], title="$x")
    forest.plot_forest(tmp_path / "c.png", draws, {}, variables=[])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "b.png", "c.png"]


def test_each_global_variable_has_an_axis_of_its_own(tmp_path, monkeypatch):
    """An effect of 0.02 ± 0.001 beside an intercept of 100."""
    import xarray as xr

    figures, generator = [], np.random.default_rng(0)
    monkeypatch.setattr(forest.Figure, "savefig", lambda self, *_, **__: figures.append(self))
    monkeypatch.setattr(forest, "atomically", lambda path: contextlib.nullcontext(path))
    sizes = {"Intercept": (100.0, 5.0), "age": (0.02, 0.001)}
    draws = {n: (("chain", "draw"), generator.normal(*s, (1, 50))) for n, s in sizes.items()}
    clients = {"a": (("chain", "draw", "client"), generator.normal(size=(1, 50, 2)))}
    posterior = xr.Dataset(draws | clients, coords={"client": ["c", "d"]})
    forest.plot_forest(tmp_path / "a.png", posterior, {}, variables=[])
    widths = [np.ptp(axis.get_xlim()) for axis in figures[0].axes]
    assert widths[0] > 10 and widths[1] < 0.01


def test_the_digits_are_those_for_training():
    from bayesfed.cli.choices import load_clients
    from bayesfed.cli.experiment import DataSection

    found = load_clients(DataSection(dataset="digits"), None, Path())
    assert torch.equal(found["x"], datasets.digits()[0]["x"])


def test_numbers_have_the_decimals_their_sd_needs():
    assert report.format_row([0.1, float("nan")], sd=float("nan")) == ["0.100", "nan"]
    assert report.format_row([2.0], sd=0.0) == ["2.000"]


def test_a_long_summary_is_cut(schools, capsys):
    from rich.console import Console

    table = pd.DataFrame(
        torch.rand(50, 4).numpy(),
        columns=["mean", "sd", "hdi_3%", "hdi_97%"],
        index=[f"v{i}" for i in range(50)],
    )
    report.print_summary(table, Console())
    assert "... and 10 more in summary.csv" in capsys.readouterr().out


def test_of_no_variables_there_is_an_empty_summary(capsys):
    """A server's of a network: it has no globals, and the clients' are at their sites."""
    from rich.console import Console
    from xarray import Dataset

    table = report.summary(Dataset())
    report.print_summary(table, Console())
    assert table.to_csv(index_label="variable") == "variable,mean,sd,hdi_3%,hdi_97%\n"


def test_points_stop_on_rows_that_are_held_out(tmp_path, capsys):
    """The others are trained on."""
    file = tmp_path / "smoking.toml"
    file.write_text(
        'model.name = "hierarchical_logistic"\ndata.dataset = "china_smoking"\n'
        'algorithm.name = "FedAvg"\nalgorithm.lr = 0.3\nalgorithm.personal_steps = 5\n'
        "schedule.held_out = 0.2\nschedule.batch_size = 100\noutput.num_samples = 4\n"
    )
    assert cli.main(["run", str(file), "--output", str(tmp_path / "out")]) == 0
    assert "at most 500 rounds" in capsys.readouterr().out
    assert len(pd.read_csv(tmp_path / "out" / "history.csv")) < 500
    rows = datasets.china_smoking().split(test=0.2, seed=0)[0].rows
    kept = az.from_netcdf(tmp_path / "out" / "posterior.nc")
    assert kept.observed_data["y"].size == rows
