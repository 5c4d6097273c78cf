"""Runs that are killed, interrupted or longer than before: what is kept, and how they go on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import arviz as az
from safetensors.torch import load_file

from bayesfed.cli import app as cli
from bayesfed.cli import report
from tests.cli.experiments import fails, rows


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
