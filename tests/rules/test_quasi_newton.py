"""Quasi-Newton steps of the server: point estimates arrive at the optimum of their objective, which L-BFGS finds."""

import importlib.util
import shutil
import sys
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.algorithms import METHODS
from bayesfed.engine.stopping import drift
from bayesfed.engine.stopping.arrival import Arrival
from bayesfed.rules import Mean
from bayesfed.steps import Descent
from tests.scenarios import curves, deaths, falls, growth, hospitals, wards

PATH = Path(__file__).parents[2] / "experiments" / "own_optima.py"
SPEC = importlib.util.spec_from_file_location("own_optima", PATH)
own_optima = sys.modules["own_optima"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(own_optima)

EAGER = bf.Execution(compile=False)
PROBLEMS = {"hospitals": (deaths, hospitals), "falls": (falls, wards), "curves": (growth, curves)}


def optimum(problem, name, posterior):
    model, data = problem
    fitted = {n: v.double().mean(0) for n, v in posterior.sample(2).items()}
    torch.set_default_dtype(torch.float64)
    try:
        return fitted, own_optima.own_optimum(
            name, own_optima.hierarchy_of(model, data(), posterior), fitted
        )
    finally:
        torch.set_default_dtype(torch.float32)


def fit(problem, name, **options):
    model, data = problem
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bf.fit(model, data(), METHODS[name](), **options)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("FedAvg", "hospitals"),
        ("FedAvg", "falls"),
        ("FedAvg", "curves"),
        ("FedProx", "falls"),
        ("FedNova", "falls"),
        ("Scaffold", "falls"),
        ("FedCurv", "hospitals"),
        ("Ditto", "falls"),
        ("FedBABU", "falls"),
        ("PFedGP", "falls"),
        ("PFedGP", "curves"),
    ],
)
def test_a_fit_without_a_number_of_rounds_ends_at_the_optimum(name, problem):
    posterior = fit(PROBLEMS[problem], name)
    assert posterior.converged
    assert len(posterior.history["elbo"]) < 150
    fitted, found = optimum(PROBLEMS[problem], name, posterior)
    for variable in found.keys() - {"a", "b"}:
        np.testing.assert_allclose(fitted[variable], found[variable], rtol=0.01, atol=0.005)


def test_the_end_does_not_depend_on_units():
    first = fit(PROBLEMS["curves"], "FedAvg").params
    for day in (1e-3, 1e3):
        other = fit((partial(growth, day=day), partial(curves, day)), "FedAvg").params
        assert other["level.loc"] == pytest.approx(float(first["level.loc"]), rel=1e-3)
        assert other["slope.loc"] / day == pytest.approx(float(first["slope.loc"]), 1e-2)


def test_a_number_of_rounds_cohorts_and_minibatches_have_no_such_steps():
    assert "newton" in bf.start(falls, wards(), bf.FedAvg()).server
    for options in ({"rounds": 5}, {"rounds": 5, "batch_size": 1}):
        assert "newton" not in bf.start(falls, wards(), bf.FedAvg(), **options).server
    with pytest.raises(ValueError, match="rounds: FedAvg has no"):
        bf.fit(falls, wards(), bf.FedAvg(), clients_per_round=0.5)


@pytest.mark.parametrize("name", ["FedAvg", "PFedMAP"])
def test_a_run_goes_on_to_the_same_numbers_and_chunks_do_not_matter(name, tmp_path):
    path, part = tmp_path / "run.safetensors", tmp_path / "part.safetensors"

    def keep(done):
        if done.number == 7:
            shutil.copy(path, part)

    whole = fit(PROBLEMS["falls"], name, resume=path, callbacks=[keep])
    resumed = fit(PROBLEMS["falls"], name, resume=part)
    assert len(whole.history["elbo"]) > 7
    chunked = fit(PROBLEMS["falls"], name, execution=bf.Execution(chunk_size=4))
    for variable, value in whole.params.items():
        assert torch.equal(resumed.params[variable], value)
        torch.testing.assert_close(chunked.params[variable], value, rtol=1e-3, atol=1e-3)


def test_a_run_that_goes_round_a_kink_says_so_and_a_lower_rate_helps(monkeypatch):
    """At PerFedAvg's optimum on Grunfeld's data the gradient of the eighth firm is as large as its bound."""
    monkeypatch.setattr(Arrival, "bound", 60)
    monkeypatch.setattr(drift, "BOUND", 60)
    problem = models.varying_intercept, datasets.grunfeld
    posterior = fit(problem, "PerFedAvg")
    assert posterior.converged is False
    assert "has a kink" in posterior.caveat and "lower lr" in posterior.caveat
    assert bf.fit(problem[0], problem[1](), bf.PerFedAvg(lr=0.03)).converged


@dataclass(frozen=True)
class Own(Mean):
    """A rule of a user's own, whose sum may be of something else."""


@dataclass(frozen=True)
class OwnSteps(Descent):
    """Steps of a user's own."""


@pytest.mark.parametrize("parts", [{"rule": Own()}, {"steps": OwnSteps()}], ids=["rule", "steps"])
def test_parts_of_ones_own_are_left_alone(parts):
    with pytest.raises(ValueError, match="rounds: "):
        bf.fit(falls, wards(), bf.FedAvg().replace(**parts))
