"""Methods at the optimum of their own objective, which L-BFGS finds from Pyro's own trace."""

import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.engine.stopping.convergence import Convergence
from tests.rules.test_quasi_newton import EAGER, PROBLEMS, fit, optimum, own_optima
from tests.scenarios import curves, deaths, falls, growth, hospitals, wards


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("PerFedAvg", "curves"),
        ("PFedMe", "curves"),
        ("FedPer", "curves"),
        ("FedRep", "curves"),
        ("FedABML", "hospitals"),
        ("PFedBayes", "hospitals"),
        ("PFedMAP", "curves"),
        ("PFedVEM", "hospitals"),
        ("Ditto", "curves"),
    ],
)
def test_globals_and_clients_end_at_the_optimum(name, problem):
    """With steps of the papers PFedMAP was 178 standard deviations away on growth curves, PerFedAvg 10."""
    posterior = fit(PROBLEMS[problem], name)
    assert posterior.converged
    fitted, found = optimum(PROBLEMS[problem], name, posterior)
    clients = {"a", "b"} & found.keys()
    assert bool(clients) == (name != "PerFedAvg")
    for variable in found.keys() - clients:
        np.testing.assert_allclose(fitted[variable], found[variable], rtol=0.005, atol=0.002)
    draws = posterior.sample(4000)
    for variable in clients:
        mean = draws[variable].double().mean(0).numpy()
        np.testing.assert_allclose(mean, found[variable], rtol=0.01, atol=0.03)


@pytest.mark.parametrize("name", ["FedPer", "FedRep"])
def test_a_client_without_a_finite_optimum_is_named(name):
    """The log rate of a ward without a fall goes to −∞; those of the others, and the slope, arrive."""
    data = wards()
    none = [ward for ward in data.names if not data.select([ward])["falls"].any()]
    assert none
    with pytest.warns(
        UserWarning, match=rf"{len(none)} of 15 clients, such as '{none[0]}', have no"
    ):
        posterior = bf.fit(falls, data, getattr(bf, name)())
    assert posterior.converged
    fitted, found = optimum(PROBLEMS["falls"], name, posterior)
    there = [ward not in none for ward in data.names]
    assert (~np.isnan(found["a"])).reshape(-1).tolist() == there
    np.testing.assert_allclose(fitted["slope"], found["slope"], atol=0.002)
    np.testing.assert_allclose(fitted["a"][there], found["a"][there], atol=0.01)


@pytest.mark.parametrize("name", ["Ditto", "PFedMAP"])
def test_clients_that_are_held_near_the_others_have_an_optimum(name):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        posterior = bf.fit(falls, wards(), getattr(bf, name)())
    assert not any("no finite optimum" in str(warning.message) for warning in said)
    fitted, found = optimum(PROBLEMS["falls"], name, posterior)
    np.testing.assert_allclose(fitted["a"], found["a"], atol=0.01)


def test_the_mean_and_variance_of_copies_say_where_they_have_not_arrived(monkeypatch):
    """FedBE needs no number of rounds where a part of the clients takes part, either."""
    monkeypatch.setattr(Convergence, "bound", 30)
    schools = datasets.eight_schools()
    with pytest.warns(UserWarning, match="not converged after 30 rounds"):
        posterior = bf.fit(models.eight_schools, schools, bf.FedBE(), clients_per_round=4)
    assert not posterior.converged


@pytest.mark.parametrize("problem", ["hospitals", "curves"])
def test_an_ensemble_ends_around_the_mode(problem):
    """FedBE's, whose clients are integrated out; it was 3 to 60 standard deviations away after 200 rounds."""
    posterior = fit(PROBLEMS[problem], "FedBE")
    assert posterior.converged
    assert len(posterior.history["elbo"]) < 60
    narrow = torch.full_like(posterior.params["global.log_scale"], -20.0)
    centre = replace(posterior, params=posterior.params | {"global.log_scale": narrow})
    fitted, found = optimum(PROBLEMS[problem], "FedBE", centre)
    for variable, value in found.items():
        np.testing.assert_allclose(fitted[variable], value, rtol=0.005, atol=0.002)


@pytest.mark.parametrize("problem", ["hospitals", "falls"])
def test_copies_of_a_gaussian_agree_at_the_largest_elbo(problem):
    """Without control variates they were 1.9 and 2.0 sd away after 500 rounds, of 8 draws a step 0.06 on falls."""
    program, data = PROBLEMS[problem]
    posterior = bf.fit(program, data(), bf.SFVIAvg(corrected=False))
    assert posterior.converged
    assert len(posterior.history["elbo"]) < 15
    _, found = optimum(PROBLEMS[problem], "SFVIAvg", posterior)
    draws = posterior.sample(20_000)
    for variable, value in found.items():
        drawn = draws[variable].double().numpy()
        assert abs(drawn.mean(0) - value) < 0.05 * drawn.std(0)


def test_particles_end_at_the_hyper_posterior():
    """Whose moments are sums over a grid, clients integrated out. After 200 rounds PACPFL was 5.2 sd away."""
    posterior = fit(PROBLEMS["hospitals"], "PACPFL")
    assert posterior.converged
    assert len(posterior.history["elbo"]) < 40
    torch.set_default_dtype(torch.float64)
    try:
        hierarchy = own_optima.Hierarchy(deaths, hospitals())
        mode, covariance = own_optima.laplace(hierarchy)
        axis = torch.linspace(-5, 5, 31)
        theta = mode + torch.cartesian_prod(axis, axis) @ torch.linalg.cholesky(covariance).mT
        with torch.no_grad():
            density = hierarchy(theta)[0]
        weight = (density + own_optima.Marginal(hierarchy, 9)(theta).detach()).softmax(0)
        values = hierarchy.constrained(theta)
    finally:
        torch.set_default_dtype(torch.float32)
    draws = posterior.sample(4000)
    for name, value in values.items():
        mean = (weight * value).sum()
        sd = (weight * (value - mean).square()).sum().sqrt()
        drawn = draws[name].double()
        assert abs(drawn.mean() - mean) < 0.1 * sd
        assert 0.8 < drawn.std() / sd < 1.05


def test_ten_changes_of_units_leave_particles_alone(float64):
    """Ages and weights times 10^-3 to 10^3, the priors alike."""
    generator, found = torch.Generator().manual_seed(0), []
    for powers in [(0, 0), *(6 * torch.rand(10, 2, generator=generator) - 3).tolist()]:
        day, gram = (10.0**power for power in powers)
        problem = partial(growth, day=day, gram=gram), partial(curves, day, gram)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, rows = problem
            posterior = bf.fit(model, rows(), bf.PACPFL(particles=3), rounds=3, execution=EAGER)
        draws, slope = posterior.sample(8), gram / day
        units = {"level": gram, "slope": slope, "sd_level": gram, "sd_slope": slope, "sigma": gram}
        found.append(torch.stack([draws[name] * unit for name, unit in units.items()]))
    torch.testing.assert_close(torch.stack(found[1:]), found[0].expand(10, 5, 8), rtol=1e-5, atol=0)
