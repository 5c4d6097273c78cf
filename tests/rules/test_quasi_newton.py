"""Quasi-Newton steps of the server: point estimates arrive at the optimum of their objective, which L-BFGS finds."""

import shutil
import warnings
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
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
from tests.scripts import load

own_optima = load("experiments/own_optima.py")

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
        pytest.param("PFedGP", "curves", marks=pytest.mark.slow),
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


def test_a_distribution_of_globals_that_are_points_says_who_needs_no_number_of_rounds():
    def program(federation):
        mu = pyro.param("mu", torch.tensor(0.0))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))

    data = bf.Federation.from_arrays({"a": {"y": [1.0, 2.0]}, "b": {"y": [4.0, 5.0]}})
    with pytest.raises(ValueError, match="rounds: SFVI has no.* or take PFedVEM, which stops by"):
        bf.fit(program, data)
    posterior = bf.fit(program, data, bf.PFedVEM())
    assert posterior.converged
    assert float(posterior.params["mu"]) == pytest.approx(3.0, abs=1e-3)


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


@pytest.mark.parametrize("model", [models.varying_intercept, models.varying_slope])
def test_bounds_of_steps_make_no_kink(model):
    """With a bound that cut gradients off the first went round a kink for 500 rounds: the eighth firm's was at it."""
    problem = model, datasets.grunfeld
    posterior = fit(problem, "PerFedAvg")
    assert posterior.converged
    assert len(posterior.history["elbo"]) < 60
    fitted, found = optimum(problem, "PerFedAvg", posterior)
    for variable, value in found.items():
        np.testing.assert_allclose(fitted[variable], value, rtol=0.01, atol=0.002)


def test_a_run_whose_steps_do_not_become_short_says_so(monkeypatch):
    monkeypatch.setattr(Arrival, "bound", 5)
    monkeypatch.setattr(drift, "BOUND", 5)
    posterior = fit(PROBLEMS["falls"], "FedAvg")
    assert posterior.converged is False
    assert "have not become short" in posterior.caveat and "a kink" in posterior.caveat


def test_clients_by_themselves_are_at_their_optimum_after_a_few_rounds():
    """After 200 rounds of five plain steps they were up to 1.4 standard deviations away on logistic regressions."""

    def data():
        generator, clients = np.random.default_rng(0), {}
        for i in range(4):
            x = generator.normal(size=60)
            y = generator.random(60) < 1 / (1 + np.exp(1 - i - x))
            clients[f"client {i}"] = {"x": x[:, None], "y": y.astype(float)}
        return bf.Federation.from_arrays(clients)

    problem = models.hierarchical_logistic, data
    posterior = fit(problem, "Local")
    assert posterior.converged
    assert len(posterior.history["elbo"]) < 6
    fitted, found = optimum(problem, "Local", posterior)
    assert found.keys() == {"alpha", "beta"}
    for variable, value in found.items():
        np.testing.assert_allclose(fitted[variable], value, rtol=0.005, atol=0.002)


def test_a_client_by_itself_whose_answers_a_field_separates_is_named():
    x = np.linspace(-1.0, 1.0, 20)
    mixed, apart = (np.abs(x) < 0.5) | (x > 0.8), x > 0
    clients = {
        name: {"x": x[:, None], "y": y.astype(float)}
        for name, y in (("mixed", mixed), ("apart", apart))
    }
    with pytest.warns(UserWarning, match="1 of 2 clients, such as 'apart', have no finite optimum"):
        posterior = bf.fit(
            models.hierarchical_logistic, bf.Federation.from_arrays(clients), bf.Local()
        )
    assert posterior.converged


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
