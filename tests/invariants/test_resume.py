"""Invariant 4: a run that stopped after any round goes on to the very numbers of one that never stopped."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import bayesfed as bf
from bayesfed.engine import run_file
from bayesfed.engine.states import States
from bayesfed.steps.gradients import annealed
from tests.invariants.cases import CASES, federation

ROUNDS = 3


class Stopped(Exception):
    pass


def fit(name, path=None, after=None, **settings):
    algorithm, model = CASES[name]()
    given = {n: settings.pop(n) for n in ("compile", "states", "chunk_size") if n in settings}
    execution = bf.Execution(**{"compile": False, **given})
    how = {"rounds": ROUNDS, "clients_per_round": 3, "execution": execution} | settings
    calls = [] if after is None else [after]
    return bf.fit(
        model, federation(), algorithm, resume=path, callbacks=calls, progress=False, **how
    )


def until(number):
    """Stops a run after that round."""

    def after(done):
        if done.number == number:
            raise Stopped

    return after


def same(one, other):
    for part in ("params", "local_params"):
        for name, value in getattr(other, part).items():
            assert torch.equal(getattr(one, part)[name], value), name
    for column in ("elbo", "clients"):
        assert torch.equal(one.history[column], other.history[column])


@pytest.fixture
def every_round(monkeypatch):
    monkeypatch.setattr(run_file, "_SHARE", float("inf"))


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_to_the_same_numbers(name, tmp_path, every_round):
    """From what its file was after any round; the last one has only to be read."""
    path = tmp_path / "run.safetensors"

    def keep(done):
        shutil.copy(path, tmp_path / f"{done.number}.safetensors")

    whole = fit(name, path, keep)
    for number in range(1, ROUNDS + 1):
        same(fit(name, tmp_path / f"{number}.safetensors"), whole)


@pytest.mark.parametrize("number", [1, ROUNDS])
def test_a_run_that_is_stopped_goes_on(number, tmp_path, every_round):
    path, whole = tmp_path / "run.safetensors", fit("PFedVEM")
    with pytest.raises(Stopped):
        fit("PFedVEM", path, until(number))
    same(fit("PFedVEM", path), whole)
    same(fit("PFedVEM", path), whole)  # a run that is over is read


def test_a_run_that_is_written_rarely_goes_on_too(tmp_path, monkeypatch):
    monkeypatch.setattr(run_file, "_SHARE", 1e-9)  # after the first round, and never again
    monkeypatch.setattr(
        "bayesfed.fitting.save", lambda run, due: None
    )  # a kill, which saves nothing
    path = tmp_path / "run.safetensors"
    with pytest.raises(Stopped):
        fit("PFedVEM", path, until(2))
    assert notes(path)["done"] == 1
    same(fit("PFedVEM", path), fit("PFedVEM"))
    assert notes(path)["done"] == ROUNDS


def test_a_compiled_run_goes_on_compiled(tmp_path, every_round, monkeypatch):
    monkeypatch.setattr("bayesfed.tracing.compiler._COMPILING", 0.0)
    monkeypatch.setattr("bayesfed.tracing.compiler._COMPILING_ONE", 0.0)
    monkeypatch.setattr("bayesfed.tracing.inductor.compile_graph", lambda graph, inputs: graph)
    whole = fit("FedAvg of a network", compile="auto")
    path = tmp_path / "run.safetensors"
    with pytest.raises(Stopped):
        fit("FedAvg of a network", path, until(2), compile="auto")
    assert notes(path)["compiled"]
    again = fit("FedAvg of a network", path, compile="auto")
    assert "graphs" in again.compiled
    same(again, whole)


def notes(path):
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["bayesfed run"])


# -- clients' states in files ----------------------------------------------------------------------

ALL = {"clients_per_round": 4}  # with which every client takes part
KEPT = ["SFVI", "PVI", "PFedVEM of a network", "Scaffold of a network"]


@pytest.mark.parametrize("name", [*KEPT, "FedAvg"])
def test_with_states_in_files_too(name, tmp_path, every_round):
    """From what file and folder were after any round, the first that was written being none."""
    path, states = tmp_path / "run.safetensors", tmp_path / "states"

    def keep(done):
        shutil.copy(path, tmp_path / f"{done.number}.safetensors")
        shutil.copytree(states, tmp_path / f"states {done.number}")

    whole = fit(name, path, keep, states=states, **ALL)
    same(whole, fit(name, **ALL))
    for number in range(1, ROUNDS + 1):
        folder = tmp_path / f"states {number}"
        same(fit(name, tmp_path / f"{number}.safetensors", states=folder, **ALL), whole)


@pytest.mark.parametrize("share", [float("inf"), 1e-9], ids=["every round", "the first only"])
def test_a_round_that_was_half_done_is_undone(share, tmp_path, monkeypatch):
    """In the third round, after the second client; the run was last written after the second round, or before all."""
    monkeypatch.setattr(run_file, "_SHARE", share)
    path, states, put, calls = tmp_path / "run", tmp_path / "states", States.put, []

    def half(kept, clients, state):
        put(kept, clients, state)
        calls.append(clients)
        if len(calls) == 10:
            raise Stopped

    monkeypatch.setattr(States, "put", half)
    with pytest.raises(Stopped):
        fit("PFedVEM", path, states=states, chunk_size=1, **ALL)
    monkeypatch.setattr(States, "put", put)
    assert notes(path)["done"] == (2 if share > 1 else 0)
    before = {name: value.clone() for name, value in load_file(path).items()}
    same(
        fit("PFedVEM", path, states=states, chunk_size=1, **ALL),
        fit("PFedVEM", chunk_size=1, **ALL),
    )
    assert before.keys() == load_file(path).keys()


def test_a_run_that_was_stopped_before_it_was_written_starts_again(tmp_path, monkeypatch):
    path, states, begin = tmp_path / "run", tmp_path / "states", States.begin

    def half(kept, clients, state):
        begin(kept, clients, state)
        raise Stopped

    monkeypatch.setattr(States, "begin", half)
    with pytest.raises(Stopped):
        fit("SFVI", path, states=states, **ALL)
    monkeypatch.setattr(States, "begin", begin)
    assert list(states.glob("*.npy")) and not path.exists()
    same(fit("SFVI", path, states=states, **ALL), fit("SFVI", **ALL))


def test_file_and_folder_belong_together(tmp_path):
    fit("SFVI", tmp_path / "a", states=tmp_path / "states of a", **ALL)
    fit("SFVI", tmp_path / "b", states=tmp_path / "states of b", **ALL)
    with pytest.raises(ValueError, match="states of b does not have the clients' states of this"):
        fit("SFVI", tmp_path / "a", states=tmp_path / "states of b", **ALL)
    with pytest.raises(FileExistsError, match="states of another run"):
        fit("SFVI", tmp_path / "c", states=tmp_path / "states of b", **ALL)
    with pytest.raises(ValueError, match="a run with states in files true, this one has false"):
        fit("SFVI", tmp_path / "a", **ALL)
    files = (tmp_path / "states of a").glob("*.npy")
    next(file for file in files if not file.stem.startswith("personal")).unlink()
    with pytest.raises(ValueError, match="npy is gone: start again"):
        fit("SFVI", tmp_path / "a", states=tmp_path / "states of a", **ALL)


def test_killed_processes_go_on(tmp_path):
    """A few of the kills of experiments/kills.md."""
    command = [sys.executable, "experiments/kills.py", "PFedVEM", "--kills", "6"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    for line in done.stdout.splitlines()[2:]:
        cells = line.strip("| ").split(" | ")
        assert cells[2] == "3" and cells[5] == cells[6] != "0"


# -- what may change and what may not --------------------------------------------------------------


@pytest.mark.parametrize("states", [False, True], ids=["in memory", "in files"])
def test_a_run_may_get_more_rounds(states, tmp_path):
    """Where rates do not fall, to the numbers of a run that was as long from the start."""
    steady = replace(CASES["SFVI"]()[0], lr_decay=1.0)

    def run(rounds, path=None, algorithm=steady):
        folder = tmp_path / "states" if path and states else None
        execution = bf.Execution(compile=False, states=folder)
        return bf.fit(
            CASES["SFVI"]()[1],
            federation(),
            algorithm,
            rounds=rounds,
            **ALL,
            resume=path,
            execution=execution,
            progress=False,
        )

    assert len(run(2, tmp_path / "run").history["elbo"]) == 2
    longer = run(5, tmp_path / "run")
    assert longer.history["elbo"].shape == (5,)
    same(longer, run(5))
    with pytest.raises(ValueError, match="run is a run of 5 rounds already: ask for at least as"):
        run(4, tmp_path / "run")


def test_rates_that_fall_are_those_of_the_longer_run(tmp_path, every_round, monkeypatch):
    rates = []

    def watched(final, done):
        rates.append(done)
        return annealed(final, done)

    monkeypatch.setattr(sys.modules["bayesfed.engine.stopping.fixed_rounds"], "annealed", watched)
    path = tmp_path / "run"
    fit("SFVI", path, rounds=2)
    fit("SFVI", path, rounds=4)
    assert rates == [0.0, 0.5, 0.5, 0.75]
    with pytest.raises(Stopped):
        fit("SFVI", tmp_path / "other", until(1), rounds=9)
    assert len(fit("SFVI", tmp_path / "other", rounds=2).history["elbo"]) == 2  # or fewer


def test_more_rounds_of_a_private_run(tmp_path):
    """With given noise they spend more; an epsilon was spread over those that were asked for."""
    private = {"mechanism": "laplace", "clip": 0.1, "seed": 1}
    noisy = bf.Privacy(noise=0.05, **private)
    fit("PACPFL", tmp_path / "noise", privacy=noisy, rounds=2)
    longer = fit("PACPFL", tmp_path / "noise", privacy=noisy, rounds=4)
    assert len(longer.history["elbo"]) == 4
    unseeded = replace(noisy, seed=None)
    spent = [unseeded.spent(rounds, 3, 5) for rounds in (2, 4)]
    assert spent[1] == pytest.approx(2 * spent[0])  # Laplace's rounds add up
    fit("PACPFL", tmp_path / "told", privacy=unseeded, rounds=2)
    with pytest.warns(
        UserWarning, match="the run is resumed after round 2 with new noise and cohorts"
    ):
        again = fit("PACPFL", tmp_path / "told", privacy=unseeded, rounds=4)
    assert again.epsilon == pytest.approx(spent[1])
    spread = bf.Privacy(epsilon=50.0, **private)
    fit("PACPFL", tmp_path / "epsilon", privacy=spread, rounds=2)
    with pytest.raises(ValueError, match="a run with rounds 2, this one has 4"):
        fit("PACPFL", tmp_path / "epsilon", privacy=spread, rounds=4)


def hierarchy(scale=5.0, noise=1.0):
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, scale))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(a, noise), obs=obs.get("y"))

    return model


def test_another_question_gets_no_old_answer(tmp_path):
    """Neither from a run nor from a posterior."""
    clients = {name: {"y": torch.arange(3.0) + i} for i, name in enumerate("abcd")}
    path, saved = tmp_path / "run", tmp_path / "posterior"

    def ask(model, clients):
        data = bf.Federation.from_arrays(clients)
        here = bf.Execution(compile=False)
        return bf.fit(model, data, rounds=2, resume=path, execution=here, progress=False)

    def load(model, clients, **how):
        return bf.Posterior.load(saved, model, bf.Federation.from_arrays(clients), **how)

    ask(hierarchy(), clients).save(saved)
    ask(hierarchy(), clients)
    load(hierarchy(), clients)
    moved = clients | {"c": {"y": clients["c"]["y"] + torch.tensor([0, 1e-5, 0])}}
    for model, data, words in (
        (hierarchy(5.1), clients, "another model.*the prior of 'mu' has changed"),
        (hierarchy(5.0, 1.01), clients, "another model.*the likelihood of 'y' has changed"),
        (hierarchy(), moved, "other data.*field 'y' of client 'c' has changed"),
    ):
        with pytest.raises(ValueError, match=words.replace(".*", r".*\(")):
            ask(model, data)
        with pytest.raises(ValueError, match=words):
            load(model, data)
    with pytest.raises(ValueError, match="is a run with client 'd'"):
        ask(hierarchy(), {name: clients[name] for name in "abc"})
    with pytest.raises(ValueError, match="is a run of the same clients in another order"):
        ask(hierarchy(), {name: clients[name] for name in "abdc"})
    with pytest.raises(ValueError, match=r'dtype "torch.float32", this one has "torch.float64"'):
        ask(hierarchy(), {n: {"y": c["y"].double()} for n, c in clients.items()})


def test_another_call_does_not_go_on(tmp_path):
    path = tmp_path / "run.safetensors"
    fit("SFVI", path)
    with pytest.raises(ValueError, match=r"is a run with seed 0, this one has 1"):
        fit("SFVI", path, seed=1)
    with pytest.raises(ValueError, match=r"is a run with algorithm"):
        fit("PVI", path)
    with pytest.raises(
        ValueError, match=r"with algorithm\.[\w.]*personal_steps 3, this one has 4:"
    ):
        for steps in (3, 4):
            algorithm = bf.FedAvg(personal_steps=steps)
            bf.fit(
                CASES["PFedVEM"]()[1], federation(), algorithm, rounds=1, resume=tmp_path / "steps"
            )
    with pytest.raises(ValueError, match=r"is a run with privacy null"):
        fit("SFVI", path, privacy=bf.Privacy(clip=1.0))
    other = tmp_path / "posterior.safetensors"
    fit("SFVI").save(other)
    with pytest.raises(ValueError, match="no run of bayesfed's"):
        fit("SFVI", other)
    other.write_bytes(b"short")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        fit("SFVI", other)
    path.unlink()
    earlier = {"bayesfed run": json.dumps({"settings": {}, "notes": {}})}
    save_file({"a": torch.zeros(1)}, path, earlier)
    with pytest.raises(ValueError, match="written by another version of bayesfed"):
        fit("SFVI", path)
