"""Sums over clients of estimates of log p(D_i | θ), and draws of θ at which a bound is enough."""

import pytest
import torch

from bayesfed.elbo import noise
from bayesfed.elbo.elbo import log_prior
from bayesfed.output import sum_of_evidence
from bayesfed.output.locals_given_theta import evidence_around_modes
from bayesfed.output.log_densities import sum_log_weights
from bayesfed.output.sums_over_points import evidence_bounds, evidence_by_shared_points
from tests.output.test_evidence import slopes_of_counts
from tests.output.test_shared_points import (
    CLIENTS,
    DRAWS,
    fitted_points,
    globals_of,
    grid,
    on_grid,
    prior_of,
    slopes,
)


def test_a_polynomial_in_the_globals_replaces_the_sum_over_clients_at_most_of_many_draws(
    monkeypatch,
):
    """Not at draws that are far from the others, and at none where the polynomial is not exact enough."""
    posterior, u, theta, exact = slopes_of_counts()
    computed, around_modes = [], sum_of_evidence.evidence_around_modes

    def counted(fitted, theta, count, *rest):
        computed.append(count)
        return around_modes(fitted, theta, count, *rest)

    monkeypatch.setattr(sum_of_evidence, "evidence_around_modes", counted)
    sum_log_weights(posterior, theta, len(u), noise.key(0), laplace=True)
    assert max(computed) == len(u)  # of few rows
    computed.clear()
    monkeypatch.setattr(sum_of_evidence, "WORTH", 1)
    found = sum_log_weights(posterior, theta, len(u), noise.key(0), laplace=True)
    assert max(computed) < len(u) / 4
    for s in (*range(0, len(u), 40), -2, -1):
        assert abs(found[s] - exact(s)) < 0.02
    monkeypatch.setattr(sum_of_evidence, "ERROR_OF_SUM", 0.0)
    computed.clear()
    every = sum_log_weights(posterior, theta, len(u), noise.key(0), laplace=True)
    assert sum(computed) == len(u)  # at no draw twice
    assert 0 < (found - every).abs().max() < 0.02


def around(z, spread):
    """Draws of θ from a Normal around the middle of others, as wide as ``spread`` in the guide's coordinates."""
    generator = torch.Generator().manual_seed(0)
    return z.mean(0) + spread * torch.randn(z.shape, generator=generator).to(z)


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_bounds_are_above_sums_over_fine_grids(spread, monkeypatch):
    """Near the posterior, and far, where priors are a hundredth as wide as the grid of points, and outside."""
    posterior, z, given, points = fitted_points(slopes, monkeypatch)
    far = around(z, spread) if spread else z
    given = given._replace(theta={"global": far})
    bounds, found = evidence_bounds(points, given), evidence_by_shared_points(points, given)
    drawn, v = globals_of(posterior, far), grid(-6.0, 8.0, 561)
    close = 0
    for s in range(0, DRAWS, 10):
        if drawn["tau"][s].min() < 0.05:  # narrower than the cells of the grid
            continue
        log_prior = prior_of(drawn, s, v[0])
        for k in range(CLIENTS):
            exact, _, _ = on_grid(posterior.federation.select([f"c{k}"]), v, log_prior)
            assert exact < bounds[s, k]
            close += bool(bounds[s, k] < exact + 20.0)
    assert close > 0
    assert bool(bounds.isfinite().all())
    assert bool((found.nan_to_num(-torch.inf) < bounds).all())


def test_draws_without_weight_have_a_bound_and_others_estimates(monkeypatch):
    """A draw far from the points that may have a weight is not left out. Few clients have a small limit here."""
    posterior, z, given, points = fitted_points(slopes, monkeypatch)
    theta = {"global": torch.cat([z, around(z, 2.0)])}
    count, chunk, key = 2 * DRAWS, torch.arange(CLIENTS), posterior.key(0)
    every = evidence_around_modes(posterior, theta, count, chunk, key).sum(1)
    far = evidence_by_shared_points(points, given._replace(theta=theta, size=count)).isnan().any(1)
    computed, where = [], sum_of_evidence.evidence_where

    def recorded(wanted, *rest):
        computed.append(wanted.any(1))
        return where(wanted, *rest)

    monkeypatch.setattr(sum_of_evidence, "evidence_where", recorded)
    monkeypatch.setattr(sum_of_evidence, "NEGLIGIBLE", 20.0)
    found = sum_log_weights(posterior, theta, count, key, laplace=True)
    bounded = far & ~torch.stack(computed).any(0)
    assert int(bounded.sum()) > 5 and int((far & ~bounded).sum()) > 0
    prior = log_prior(posterior.program, posterior.params, theta, count)
    assert bool(((every + prior)[bounded] < (every + prior)[~far].max() - 20).all())
    assert bool((found[bounded] > every[bounded]).all())
    rest = every > every.max() - 20
    assert not (bounded & rest).any()
    torch.testing.assert_close(found[rest], every[rest], atol=0.02, rtol=0)
