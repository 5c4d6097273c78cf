"""Functions of θ at few of many draws, and by polynomials at the others."""

import pytest
import torch

from bayesfed.output.polynomials import interpolate

DRAWS = 4000


def draws():
    """Draws of two numbers, some of them far from the others."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(DRAWS, 2, generator=generator, dtype=torch.float64)
    z[:30] *= 8
    return z


def funnel(z):
    """A log likelihood that falls by thousands of nats far away, where it is no number for large values."""
    found = -z[:, 0].exp() * (1.5 * z[:, 1]).square() - 0.3 * z[:, 0].square()
    return found.where(z[:, 0] < 8, torch.nan)


def counted(function, z):
    """The function of positions, and the list of all positions at which it is computed."""
    computed = []

    def at(some):
        computed.extend(some.tolist())
        return function(z[some])

    return at, computed


def test_few_values_give_a_log_density_that_is_no_polynomial():
    z = draws()
    exact, prior = funnel(z), -z.square().sum(1) / 9
    at, computed = counted(funnel, z)
    found = interpolate(z, at, prior, 0.01)
    assert len(computed) == len(set(computed)) < DRAWS / 6
    level = (exact + prior).nan_to_num(-torch.inf)
    plausible = level > level.max() - 10
    assert (found - exact)[plausible].square().mean().sqrt() < 0.01
    low = level < level.max() - 30
    assert not (found + prior)[low].gt(level.max() - 20).any()
    assert torch.equal(found.isnan(), exact.isnan())


def test_no_draw_is_left_out_where_the_log_density_is_not_known():
    """A client's part of a sum may be low where the sum is largest."""
    z = draws()[30:]
    at, computed = counted(lambda z: -2000 * z.square().sum(1) + z[:, 0].sin(), z)
    found = interpolate(z, at, None, 0.01)
    assert len(computed) < DRAWS / 4
    assert (found - at(torch.arange(len(z)))).square().mean().sqrt() < 0.02


@pytest.mark.parametrize("known", [True, False])
def test_a_function_with_a_kink_is_computed_at_each_draw_once(known):
    z = draws()
    at, computed = counted(lambda z: -z.abs().sum(1), z)
    found = interpolate(z, at, torch.zeros(DRAWS) if known else None, 1e-4)
    assert sorted(computed) == list(range(DRAWS))
    assert torch.equal(found, -z.abs().sum(1))


@pytest.mark.parametrize("count", [1, 3, 20])
def test_few_draws_have_no_polynomial(count):
    z = draws()[30 : 30 + count]
    at, computed = counted(funnel, z)
    found = interpolate(z, at, None, 0.01)
    assert len(computed) == count and torch.equal(found, funnel(z))
