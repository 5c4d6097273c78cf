"""Draws of θ to a precision: exact means beside a grid, and a warning where it is not reached."""

from dataclasses import replace

import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.output import chains, khat
from bayesfed.output.fitted import CorrectionResult

SCHOOLS = datasets.eight_schools()
PRECISION = 0.01


@pytest.fixture(scope="module")
def posterior():
    return bf.fit(models.eight_schools, SCHOOLS, precision=PRECISION)


def grid_moments():
    """Means and standard deviations of mu and log tau: y_j ~ N(mu, tau² + sigma_j²)."""
    y, sigma = (SCHOOLS.batch().fields[name].flatten().double() for name in ("y", "sigma"))
    mu, log_tau = (
        torch.linspace(-30.0, 40.0, 1401).double(),
        torch.linspace(-9.0, 6.0, 1501).double(),
    )
    tau = log_tau.exp()
    log_p = torch.distributions.Normal(0.0, 5.0).log_prob(mu)[:, None]
    log_p = log_p + torch.distributions.HalfCauchy(5.0).log_prob(tau) + log_tau
    for one, error in zip(y, sigma, strict=True):
        spread = (tau**2 + error**2).sqrt()
        log_p = log_p + torch.distributions.Normal(mu[:, None], spread).log_prob(one)
    p = (log_p - log_p.max()).exp()
    p = p / p.sum()
    found = {}
    for name, values, weights in (("mu", mu, p.sum(1)), ("tau", log_tau, p.sum(0))):
        mean = (weights * values).sum()
        found[name] = mean, (weights * (values - mean).square()).sum().sqrt()
    return found


def test_means_have_the_error_that_is_said(posterior):
    assert posterior.monte_carlo_error <= PRECISION
    assert "precision" not in posterior.caveat
    count = 40_000
    draws = posterior.sample(count)
    values = {"mu": draws["mu"], "tau": draws["tau"].log()}
    error = (posterior.monte_carlo_error**2 + 1 / count) ** 0.5
    for name, (mean, sd) in grid_moments().items():
        assert abs(values[name].double().mean() - mean) / sd < 4 * error, name
        assert values[name].double().std() / sd == pytest.approx(1, abs=0.04)


def test_usual_draws_are_fewer(posterior):
    usual = bf.fit(models.eight_schools, SCHOOLS)
    assert PRECISION < usual.monte_carlo_error < 0.05
    assert usual.correction.count < posterior.correction.count
    assert usual.with_precision(PRECISION).monte_carlo_error <= PRECISION


def test_chains_draw_where_weights_fail(posterior, monkeypatch):
    asked = replace(posterior, correction=None, precision=0.028, converged=None)
    failed = CorrectionResult(reliable=False)
    found = asked.with_correction(failed)
    assert found.correction.chains > 1
    assert found.monte_carlo_error <= 0.028
    monkeypatch.setattr(chains, "can_sample", lambda _: False)
    assert asked.with_correction(failed).correction is None


def test_a_precision_that_is_not_reached_is_named(posterior, monkeypatch):
    coarse = replace(posterior, precision=0.002)
    assert "precision 0.002 was not reached: the Monte Carlo error" in coarse.caveat
    monkeypatch.setattr(khat, "WORK", 1.0)
    monkeypatch.setattr(chains, "can_sample", lambda _: False)
    none = posterior.with_precision(PRECISION)
    assert none.correction is None
    assert "precision 0.01 was not reached: there are no importance weights" in none.caveat


def test_the_precision_is_saved(posterior, tmp_path):
    posterior.save(tmp_path / "p.safetensors")
    found = bf.Posterior.load(tmp_path / "p.safetensors", models.eight_schools, SCHOOLS)
    assert found.precision == PRECISION
    assert found.monte_carlo_error == pytest.approx(posterior.monte_carlo_error)


def test_refused(posterior):
    with pytest.raises(ValueError, match=r"precision is 0\.0001"):
        posterior.with_precision(0.0001)
    with pytest.raises(ValueError, match="precision"):
        replace(posterior, epsilon=1.0).with_precision(0.01)
