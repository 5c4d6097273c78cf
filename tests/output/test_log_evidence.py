"""The log evidence against closed forms and an integral on a grid."""

import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.output.log_evidence import LogEvidence, log_mean
from tests.scenarios import conjugate_hierarchy, exact, known_scales, ragged

SCHOOLS = datasets.eight_schools()


def of_schools():
    """log p(y) of eight schools, θ integrated out, μ and τ summed over a grid."""
    y, sigma = SCHOOLS["y"].double(), SCHOOLS["sigma"].double()
    mu = torch.linspace(-40, 50, 1801, dtype=torch.float64)[:, None]
    tau = torch.linspace(0.005, 120, 12_000, dtype=torch.float64)[None]
    log_density = dist.Normal(0.0, 5.0).log_prob(mu) + dist.HalfCauchy(5.0).log_prob(tau)
    for one, sd in zip(y, sigma, strict=True):
        log_density = log_density + dist.Normal(mu, (sd**2 + tau**2).sqrt()).log_prob(one)
    return float(log_density.flatten().logsumexp(0)) + math.log(0.05 * 0.01)


def of_known_scales(federation, between=8.0):
    """log p(y) of a Normal with covariance 25 + (8² + σ²) on the diagonal."""
    y, sigma = federation["y"].double(), federation["sigma"].double()
    cov = 25.0 + torch.diag(between**2 + sigma**2)
    return float(dist.MultivariateNormal(torch.zeros_like(y), cov).log_prob(y))


def test_where_q_is_the_posterior_it_is_exact():
    federation = ragged()
    found = bf.fit(conjugate_hierarchy, federation).log_evidence
    assert found.value == pytest.approx(exact(federation).log_evidence, abs=0.01)
    assert found.mcse < 0.01
    assert (found.clients, found.rows) == (len(federation), federation.rows)


@pytest.fixture(scope="module")
def schools():
    return bf.fit(models.eight_schools, SCHOOLS)


def test_from_the_weights_of_a_correction(schools, tmp_path):
    found = schools.log_evidence
    assert found.mcse < 0.05
    assert abs(found.value - of_schools()) < 4 * found.mcse
    assert not found.caveat
    schools.save(tmp_path / "schools.safetensors")
    again = bf.Posterior.load(tmp_path / "schools.safetensors", models.eight_schools, SCHOOLS)
    assert again.log_evidence == found


@pytest.mark.slow
def test_draws_of_chains_have_a_proposal_of_their_own(schools):
    found = schools.with_chains().log_evidence
    assert found.mcse < 0.1
    assert abs(found.value - of_schools()) < 4 * found.mcse


@pytest.mark.parametrize("moves", [{"loc": 0.4}, {"log_scale": -0.2}, {"log_scale": 0.5}], ids=str)
def test_from_the_weights_of_a_wrong_q(moves):
    posterior = bf.fit(known_scales, SCHOOLS, rounds=30)
    moved = {f"global.{n}": posterior.params[f"global.{n}"] + by for n, by in moves.items()}
    found = replace(posterior, params=posterior.params | moved).log_evidence
    assert 0.001 < found.mcse < 0.05
    assert abs(found.value - of_known_scales(SCHOOLS)) < 4 * found.mcse + 0.002


def narrow(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with federation.clients():
        theta = pyro.sample("theta", dist.Normal(mu, 2.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(theta, obs["sigma"]), obs=obs.get("y"))


def test_the_difference_is_a_bayes_factor():
    first, second = (bf.fit(model, SCHOOLS).log_evidence for model in (known_scales, narrow))
    found = first - second
    truth = of_known_scales(SCHOOLS) - of_known_scales(SCHOOLS, 2.0)
    assert abs(found.value - truth) < 4 * found.mcse + 0.005
    assert found.factor == pytest.approx(math.exp(found.value))
    assert found.khats == (first.khat, second.khat)
    assert (second - first).value == -found.value


def test_the_monte_carlo_error_is_that_of_many_estimates():
    """Log-Normal weights of scale 0.7, whose mean is exp(0.245), in 300 samples of 1000."""
    with_seed = torch.Generator().manual_seed(0)
    log_weights = 0.7 * torch.randn(300, 1000, generator=with_seed, dtype=torch.float64)
    found = torch.tensor([log_mean(one)[:2] for one in log_weights])
    assert abs(float(found[:, 0].mean()) - 0.245) < 0.005
    assert float(found[:, 1].mean() / found[:, 0].std()) == pytest.approx(1.0, abs=0.15)


def test_weights_that_are_too_uneven_are_reported():
    found = LogEvidence(-10.0, 0.2, 0.9, 1000, 8, 8)
    assert "Pareto k 0.90 > 0.67" in repr(found)
    assert "Pareto k 0.90 > 0.67" in repr(found - LogEvidence(-11.0, 0.1, 0.1, 1000, 8, 8))


def estimated(federation):
    mu = pyro.param("mu", torch.tensor(0.0))
    tau = pyro.sample("tau", dist.HalfNormal(5.0))
    with federation.clients():
        theta = pyro.sample("theta", dist.Normal(mu, 1.0 + tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(theta, obs["sigma"]), obs=obs.get("y"))


def test_parameters_without_a_prior_are_named():
    assert "given the estimates of mu" in bf.fit(estimated, SCHOOLS, rounds=5).log_evidence.caveat


def test_fits_without_weights_are_refused_by_name(schools):
    with pytest.raises(ValueError, match="this fit by FedAvg has not"):
        bf.fit(models.eight_schools, SCHOOLS, bf.FedAvg(), rounds=2).log_evidence  # noqa: B018
    with pytest.raises(ValueError, match="posterior of 2 of the fit.s 8 clients"):
        schools.select(["A", "B"]).log_evidence  # noqa: B018


def test_other_data_are_refused(schools):
    few = bf.fit(known_scales, SCHOOLS.select(["A", "B", "C"]), rounds=20).log_evidence
    with pytest.raises(ValueError, match="8 clients with 8 rows, and 3 with 3"):
        schools.log_evidence - few
