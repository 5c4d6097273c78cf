"""Sums over clients of estimates of log p(D_i | θ), and draws of θ at which a bound is enough."""

import math

import pytest
import torch

import bayesfed as bf
from bayesfed.elbo import noise
from bayesfed.elbo.elbo import log_prior
from bayesfed.output import log_densities, sum_of_evidence
from bayesfed.output.conditionals import is_exact, is_laplace
from bayesfed.output.draws import draw_theta, globals_at
from bayesfed.output.locals_given_theta import evidence_around_modes
from bayesfed.output.log_densities import sum_log_weights
from bayesfed.output.log_target import log_target
from bayesfed.output.sums_over_points import evidence_bounds, evidence_by_shared_points
from tests.guides import test_client_laplace
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


def test_sums_over_clients_with_many_variables_at_few_draws_give_all(monkeypatch):
    """An autoregression in each client: q(w_i | θ) is exact, and so is the sum, at draws of any width."""
    data = test_client_laplace.paths()
    federation = bf.Federation.from_arrays(data)
    fitted = bf.fit(
        test_client_laplace.autoregression, federation, bf.SFVI(corrected=False), rounds=20
    )
    assert is_exact(fitted.program)
    computed, by_draws = [], log_densities._sum_by_draws

    def counted(fitted, theta, count, key):
        computed.append(count)
        return by_draws(fitted, theta, count, key)

    monkeypatch.setattr(log_densities, "_sum_by_draws", counted)
    theta = draw_theta(fitted, 1500, noise.key(0))
    found = sum_log_weights(fitted, theta, 1500, noise.key(0))
    assert sum(computed) < 500
    values = globals_at(fitted, theta, 1500)
    values = [values[name] for name in test_client_laplace.PRIORS]
    exact = sum(test_client_laplace.log_evidence(rows, *values) for rows in data.values())
    near = exact > exact.max() - 10
    assert (found - exact)[near].square().mean().sqrt() < 0.02
    assert not (found > exact + 1).any()


def test_sums_are_quadratures_where_a_guide_that_is_an_approximation_is_not_exact():
    """Counts on random walks, beside the mean of many weights of draws from q(w_i | θ)."""
    federation = test_client_laplace.counted(clients=2)
    fitted = bf.fit(test_client_laplace.counts, federation, bf.SFVI(corrected=False), rounds=1)
    assert is_laplace(fitted.program) and not is_exact(fitted.program)
    theta = draw_theta(fitted, 3, noise.key(0))
    found = sum_log_weights(fitted, theta, 3, noise.key(1))
    again = sum_log_weights(fitted, theta, 3, noise.key(2))
    many = {name: value.repeat_interleave(4000, 0) for name, value in theta.items()}
    terms = log_densities._client_log_densities(fitted, many, 12000, noise.key(0))
    weights = torch.cat([p - q for p, q in terms], 1).unflatten(0, (3, 4000))
    exact = (weights.logsumexp(1) - math.log(4000)).sum(1)
    error = (weights - weights.logsumexp(1, keepdim=True)).exp().square().sum(1).sum(1).sqrt()
    spread = (found - again).abs().max() + 3 * error.max()
    assert spread < 0.4 < weights.std(1).max()
    assert (found - exact).abs().max() < spread + 0.1


def test_draws_without_an_end_have_no_weight_and_the_others_theirs():
    posterior, _, theta, _ = slopes_of_counts()
    z = theta["global"][:5, 0, 0]
    with_others = torch.cat([z[:2], torch.tensor([[-math.inf], [math.nan]]).to(z), z[2:]])
    key = noise.key(0)
    found = log_target(posterior, with_others, key, sum_log_weights, laplace=True)
    expected = log_target(posterior, z, key, sum_log_weights, laplace=True)
    assert torch.equal(found[2:4], torch.full_like(found[2:4], -math.inf))
    torch.testing.assert_close(found[[0, 1, 4, 5, 6]], expected, rtol=0, atol=1e-6)


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
