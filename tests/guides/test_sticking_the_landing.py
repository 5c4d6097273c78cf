"""Draws, densities and gradients of sticking the landing."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from bayesfed.guides.sticking_the_landing import StickingTheLanding

pytestmark = pytest.mark.usefixtures("float64")

TRIL = torch.tensor([[1.0, 0.0], [0.5, 2.0]], dtype=torch.float64)
FAMILIES = {
    "Normal": (lambda loc, scale: dist.Normal(loc, scale).to_event(1), [0.3, 1.5]),
    "LogNormal": (lambda loc, scale: dist.LogNormal(loc, scale).to_event(1), [0.3, 0.5]),
    "MultivariateNormal": (
        lambda loc, scale: dist.MultivariateNormal(loc, scale_tril=scale[..., None] * TRIL),
        [-0.2, 0.7],
    ),
}


def params(values, requires_grad=True):
    return [torch.full((3, 2), v).requires_grad_(requires_grad) for v in values]


@pytest.mark.parametrize("name", FAMILIES)
def test_draws_and_densities_are_the_familys(name):
    family, values = FAMILIES[name]
    q, plain = StickingTheLanding(family, *params(values)), family(*params(values))
    assert (q.batch_shape, q.event_shape) == (plain.batch_shape, plain.event_shape)
    assert str(q.support) == str(plain.support)
    drawn = []
    for fn in (q, plain):
        torch.manual_seed(0)
        drawn.append(fn.rsample((4,)))
    assert torch.equal(*drawn)
    assert torch.equal(q.log_prob(drawn[0]), plain.log_prob(drawn[1]))
    wide = q.expand((5, 3))
    assert wide.rsample().shape == (5, 3, 2)
    torch.testing.assert_close(wide.log_prob(drawn[0][0]), plain.log_prob(drawn[0][0]).expand(5, 3))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_is_zero_at_the_posterior_for_every_draw(name):
    family, values = FAMILIES[name]
    posterior = family(*params(values, requires_grad=False))

    def gradients(make):
        leaves = params(values)
        q = make(leaves)
        torch.manual_seed(0)
        w = q.rsample((10,))
        objective = posterior.log_prob(w) - q.log_prob(w)
        return torch.cat(
            [
                torch.stack(torch.autograd.grad(o.sum(), leaves, retain_graph=True))
                for o in objective
            ]
        )

    assert (
        gradients(lambda leaves: StickingTheLanding(family, *leaves)).abs().max() < 1e-12
    )  # float64 round-off
    # the gradient of the plain family is zero only on average
    assert gradients(lambda leaves: family(*leaves)).abs().max() > 0.1


def test_away_from_the_posterior_the_mean_gradient_is_the_same():
    """The score has mean zero, so both estimate −d KL / d loc = 0.7; four Monte Carlo errors."""
    posterior = dist.Normal(1.0, 1.0)
    loc, scale = torch.tensor(0.3, requires_grad=True), torch.tensor(0.8, requires_grad=True)
    for make in (StickingTheLanding, lambda family, *p: family(*p)):
        q = make(dist.Normal, loc, scale)
        torch.manual_seed(0)
        w = q.rsample((10_000,))
        grads = torch.autograd.grad((posterior.log_prob(w) - q.log_prob(w)).mean(), [loc, scale])
        assert abs(float(grads[0]) - 0.7) < 0.04
        assert abs(float(grads[1]) - (1 / 0.8 - 0.8)) < 0.08


def test_it_is_a_pyro_distribution():
    with pyro.plate("rows", 4, dim=-1):
        value = pyro.sample(
            "w", StickingTheLanding(lambda loc: dist.Normal(loc, 1.0), torch.tensor(0.0))
        )
    assert value.shape == (4,)
