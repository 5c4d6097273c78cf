"""Clients that are left out, against closed forms and integrals on a grid."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binom, halfnorm, norm

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.output import leave_one_client_out as module
from tests.scenarios import conjugate_hierarchy, deaths, exact, hospitals, known_scales, ragged

SCHOOLS = datasets.eight_schools()


def others(federation, name):
    return federation.select([n for n in federation.names if n != name])


def of_mu(federation):
    """Mean and standard deviation of μ under ``known_scales``."""
    y, variance = federation["y"].double(), federation["sigma"].double() ** 2 + 64
    precision = 1 / 25 + (1 / variance).sum()
    return float((y / variance).sum() / precision), float(precision.rsqrt())


@pytest.fixture(scope="module")
def schools():
    return bf.fit(known_scales, SCHOOLS)


@pytest.mark.parametrize("name", ["A", "C", "H"])
def test_without_a_client_by_weights(schools, name):
    """Within four Monte Carlo errors of 4000 draws; what is left out moves μ by more."""
    found = schools.without(name)
    assert found.khat < 0.7
    assert found.federation.names == others(SCHOOLS, name).names
    mean, sd = of_mu(others(SCHOOLS, name))
    draws = found.sample(20_000)
    assert abs(float(draws["mu"].mean()) - mean) < 0.07 * sd
    assert abs(float(draws["mu"].std()) / sd - 1) < 0.05
    assert abs(mean - of_mu(SCHOOLS)[0]) > 0.07 * sd or name == "H"
    assert draws["theta"].shape == (20_000, 7)


def test_the_others_variables_are_those_given_theta(schools):
    """The means of θ_i, from the closed form without A."""
    few = others(SCHOOLS, "A")
    mean, _ = of_mu(few)
    y, variance = few["y"], few["sigma"] ** 2
    expected = (y * 64 + mean * variance) / (64 + variance)
    found = schools.without("A").sample(20_000)["theta"].mean(0)
    assert float((found - expected).abs().max()) < 0.3


def of_clients(federation):
    """By client log p(D_i | D_-i) of the conjugate hierarchy: the difference of two log evidences."""
    whole = exact(federation).log_evidence
    return [whole - exact(others(federation, n)).log_evidence for n in federation.names]


def test_predictive_densities_and_shifts():
    federation = ragged(12, seed=2)
    found = bf.leave_one_client_out(bf.fit(conjugate_hierarchy, federation))
    gap = np.abs(found.table["elpd"] - of_clients(federation))
    assert (gap < 4 * found.table["mcse"] + 0.005).all()
    assert found.elpd == pytest.approx(sum(of_clients(federation)), abs=0.05)
    mean, sd = exact(federation).mu
    shifts = [(exact(others(federation, n)).mu[0] - mean) / sd for n in federation.names]
    np.testing.assert_allclose(found.shifts["mu"], shifts, atol=0.1)
    assert not found.refined
    assert not found.caveat


def test_conflict_is_the_tail_of_the_predictive_distribution(schools):
    """A new school's estimate is Normal: its mean that of μ, its variance that of μ plus 64 plus σ²."""
    expected = []
    for name in SCHOOLS.names:
        mean, sd = of_mu(others(SCHOOLS, name))
        own = SCHOOLS.select([name])
        spread = math.sqrt(sd**2 + 64 + float(own["sigma"]) ** 2)
        expected.append(2 * norm.sf(abs(float(own["y"]) - mean) / spread))
    found = bf.leave_one_client_out(schools, 8000).table["conflict"]
    np.testing.assert_allclose(found, expected, atol=0.04)


def with_outlier():
    """Eleven hospitals with 6 to 10 % deaths, and one with 45 %."""
    federation = hospitals()
    died = federation["deaths"].clone()
    died[3] = (0.45 * federation["n"][3]).round()
    rows = {
        name: {"n": federation["n"][i : i + 1], "deaths": died[i : i + 1]}
        for i, name in enumerate(federation.names)
    }
    return bf.Federation.from_arrays(rows)


MU, TAU = np.meshgrid(np.linspace(-4.5, 0.5, 201), np.linspace(0.004, 3.0, 300), indexing="ij")


def log_densities(federation):
    """log p(D_i | μ, τ) of ``deaths`` on a grid, by Gauss-Hermite quadrature around each client's mode."""
    found = {}
    for name in federation.names:
        own = federation.select([name])
        n, died = float(own["n"]), float(own["deaths"])
        rate = (died + 0.5) / (n + 1)
        centre, width = math.log(rate / (1 - rate)), 1.3 / math.sqrt(n * rate * (1 - rate))
        a = centre + width * np.linspace(-8, 8, 81)
        logp = binom.logpmf(died, n, 1 / (1 + np.exp(-a)))
        z = (a - MU[..., None]) / TAU[..., None]
        parts = logp - z**2 / 2 - np.log(TAU * math.sqrt(math.tau))[..., None]
        top = parts.max(-1, keepdims=True)
        found[name] = np.log(np.exp(parts - top).sum(-1)) + top[..., 0] + math.log(a[1] - a[0])
    return found


@pytest.mark.slow
def test_an_outlier_whose_weights_are_too_uneven():
    """Without it τ is a third as large; importance weights cannot show that, new proposals do."""
    federation = with_outlier()
    posterior = bf.fit(deaths, federation)
    densities = log_densities(federation)
    prior = norm.logpdf(MU, 0, 2) + halfnorm.logpdf(TAU)
    odd = "hospital 3"
    rest = prior + sum(value for name, value in densities.items() if name != odd)
    p = np.exp(rest - rest.max())
    p /= p.sum()
    tau, sd = (p * TAU).sum(), math.sqrt((p * TAU**2).sum() - (p * TAU).sum() ** 2)
    found = posterior.without(odd)
    draws = found.sample(20_000)["tau"]
    assert float(posterior.sample()["tau"].mean()) > tau + 4 * sd
    assert abs(float(draws.mean()) - tau) < 0.15 * sd
    assert abs(float(draws.std()) / sd - 1) < 0.15
    elpd = math.log((p * np.exp(densities[odd])).sum())
    table = bf.leave_one_client_out(posterior)
    row = table.table.set_index("client").loc[odd]
    assert odd in table.refined
    assert row["mcse"] < 0.05
    assert abs(row["elpd"] - elpd) < 4 * row["mcse"] + 0.02
    assert row["moves"] == "tau"
    assert row["conflict"] < 0.01
    assert odd in repr(table)


def test_auxiliary_variables_are_shown_as_what_derives_from_them():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"hospital": np.repeat(list("abcd"), 15), "age": rng.normal(60, 10, 60)})
    frame["y"] = 0.1 * frame["age"] + rng.normal(size=60)
    model = bf.formula("y ~ age + (1 | hospital)", frame)
    found = bf.leave_one_client_out(bf.fit(model, model.federation), 300)
    assert found.shifts.columns.tolist() == ["Intercept", "age", "sigma", "1|hospital_sigma"]


def test_clients_that_cannot_be_left_out_are_named(schools, monkeypatch):
    monkeypatch.setattr(module.khat, "limit", lambda draws: -9.0)
    monkeypatch.setattr(module, "FINITE_VARIANCE", -9.0)

    def fail(*_):
        raise ValueError

    monkeypatch.setattr(module, "leave_out", fail)
    assert "'A'" in bf.leave_one_client_out(schools, 200).caveat


def test_what_cannot_be_left_out_is_refused(schools):
    with pytest.raises(KeyError, match="'Z' took no part"):
        schools.without("Z")
    with pytest.raises(ValueError, match="no other clients"):
        schools.without(*SCHOOLS.names)
    with pytest.raises(ValueError, match="2 of the fit's 8 clients"):
        schools.select(["A", "B"]).without("A")
    point = bf.fit(known_scales, SCHOOLS, bf.FedAvg(), rounds=2)
    with pytest.raises(ValueError, match="FedAvg has no importance weights"):
        bf.leave_one_client_out(point)


def test_some_of_the_clients_of_a_corrected_fit():
    posterior = bf.fit(models.eight_schools, SCHOOLS)
    assert posterior.correction is not None
    every, some = (bf.leave_one_client_out(p) for p in (posterior, posterior.select(["C", "A"])))
    assert some.table["client"].tolist() == ["C", "A"]
    both = every.table.set_index("client")["elpd"][["C", "A"]] - some.table["elpd"].to_numpy()
    assert both.abs().max() < 1e-4


def test_missing_outcomes_are_left_out():
    federation = ragged(6, seed=1)
    odd = federation.names[int(federation.lengths.argmax())]
    rows = {name: federation["y"][federation.owner == i] for i, name in enumerate(federation.names)}
    gap = rows[odd].clone()
    gap[0] = torch.nan
    present = with_rows(rows | {odd: gap[1:]})
    found, expected = (
        bf.leave_one_client_out(bf.fit(conjugate_hierarchy, data)).table
        for data in (with_rows(rows | {odd: gap}), present)
    )
    np.testing.assert_allclose(found["elpd"], of_clients(present), atol=0.03)
    np.testing.assert_allclose(found["conflict"], expected["conflict"], atol=0.06)


def with_rows(rows):
    return bf.Federation.from_arrays({n: {"y": y} for n, y in rows.items()}, missing="keep")
