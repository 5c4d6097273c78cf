"""Pareto k-hat is small if q is the posterior, large if it is not, and reported to the user."""

from dataclasses import replace

import arviz as az
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.output.arviz_compat import OLD
from bayesfed.output.importance import pareto_k
from bayesfed.output.khat import LIMIT, limit, log_weights
from tests.scenarios import known_scales


def test_khat_of_an_exact_q_is_small():
    posterior = bf.fit(known_scales, datasets.eight_schools())
    assert posterior.khat < 0.5
    assert posterior.caveat == ""
    assert "Pareto" not in repr(posterior)


def test_khat_of_locals_independent_of_the_globals_is_large_and_reported():
    algorithm = bf.SFVI(global_guide=bf.MeanField(), conditioned=False)
    posterior = bf.fit(models.eight_schools, datasets.eight_schools(), algorithm)
    assert posterior.khat > LIMIT
    assert f"Pareto k {posterior.khat:.2f} > 0.67" in repr(posterior)
    assert posterior.to_arviz(8).posterior.attrs["khat"] == posterior.khat


def test_khat_agrees_with_arviz():
    """For the same draws, up to the smoothing of the tail."""
    posterior = bf.fit(models.varying_slope, datasets.grunfeld())
    weights = posterior.elbo(1000).double().numpy()
    if OLD:
        _, expected = az.psislw(weights)
    else:
        from arviz_stats.base import array_stats

        _, expected = array_stats.psislw(-weights)
    assert pareto_k(log_weights(posterior)) == pytest.approx(float(expected), abs=0.05)


@pytest.mark.parametrize("algorithm", [bf.FedAvg(), bf.PACPFL()], ids=str)
def test_point_estimates_and_particles_have_none(algorithm):
    assert bf.fit(models.eight_schools, datasets.eight_schools(), algorithm, rounds=1).khat is None


def test_a_private_run_has_none():
    privacy = bf.Privacy(epsilon=100.0, clip=10.0)
    with pytest.warns(UserWarning, match="would move q"):
        posterior = bf.fit(known_scales, datasets.eight_schools(), rounds=2, privacy=privacy)
    assert posterior.khat is None


def test_khat_if_one_weight_dominates():
    posterior = bf.fit(known_scales, datasets.eight_schools(), rounds=1)
    moved = {name: value + 50.0 for name, value in posterior.params.items()}
    wrong = replace(posterior, params=moved)
    assert pareto_k(log_weights(wrong)) > LIMIT
    assert not torch.isnan(torch.tensor(pareto_k(log_weights(wrong))))


def test_the_limit_is_lower_for_few_draws():
    """Vehtari et al. 2024: min(1 − 1 / log10 S, 0.7)."""
    assert limit(100) == pytest.approx(0.5)
    assert limit(1000) == pytest.approx(2 / 3)
    assert limit(10_000) == LIMIT


def test_the_caveat_names_both_flaws():
    """A fit that has not converged, and whose weights are too uneven."""
    posterior = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=20)
    both = replace(
        posterior, moving={"mu": 2.0}, rising=0.0, correction=None, correctable=False
    ).caveat
    assert "not converged after 20 rounds" in both
    assert "too uneven to correct it by" in both


@pytest.mark.parametrize(
    ("k", "size", "poor"), [(0.6, 500, True), (0.6, 1000, False), (0.4, 500, False)]
)
def test_weights_without_a_finite_variance_and_few_draws_are_reported(k, size, poor):
    posterior = bf.fit(models.eight_schools, datasets.eight_schools())
    weighted = replace(posterior.correction, khat=k, ess=size)
    caveat = replace(posterior, correction=weighted).caveat
    assert ("Pareto k 0.60 > 0.5" in caveat and "effective sample size of 500" in caveat) is poor
    assert (
        "posterior.with_chains() draws from the posterior" in caveat
    ) is False  # tried: it takes seconds
    assert bool(caveat) is poor
