"""What replaces operations of torch that import SymPy gives the same numbers."""

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import biject_to, constraints

from bayesfed.elbo.moments import unconstrained_shape
from bayesfed.guides.newton import pull_back
from bayesfed.guides.triangular import CholeskyNormal, TriangularNormal


def test_products_of_vectors_and_derivatives_are_those_of_torch():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    unused = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    values, vectors = (x**3).cumsum(1), torch.randn(5, 4, 3, dtype=torch.float64)
    found, none = pull_back(values, (x, unused), vectors)
    expected, _ = torch.autograd.grad(
        values, (x, unused), vectors, create_graph=True, allow_unused=True, is_grads_batched=True
    )
    assert none is None and torch.equal(found, expected)
    again, expected = (
        torch.autograd.grad(y.sum(), x, retain_graph=True) for y in (found, expected)
    )
    assert torch.equal(again[0], expected[0])
    detached, _ = pull_back(values, (x, unused), vectors, attached=False)
    assert not detached.requires_grad and torch.equal(detached, found)


@pytest.mark.parametrize("family", [CholeskyNormal, TriangularNormal])
def test_a_normal_is_that_of_torch(family):
    loc, root = torch.randn(5, 1, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    root = root.tril(-1) + torch.eye(3, dtype=torch.float64)
    own = family(loc, root)
    other = dist.MultivariateNormal(loc, scale_tril=root)
    assert own.batch_shape == other.batch_shape and own.event_shape == other.event_shape
    x = torch.randn(2, 5, 1, 3, dtype=torch.float64)
    torch.testing.assert_close(own.log_prob(x), other.log_prob(x))
    torch.testing.assert_close(own.covariance_matrix, other.covariance_matrix)
    torch.testing.assert_close(own.entropy(), other.entropy())
    wide, expected = own.expand([5, 4]), other.expand([5, 4])
    assert type(wide) is family and wide.batch_shape == expected.batch_shape
    torch.testing.assert_close(wide.log_prob(x[:, :, 0, None]), expected.log_prob(x[:, :, 0, None]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draws = own.rsample((20_000,))
    torch.testing.assert_close(draws.mean(0), loc, rtol=0.0, atol=0.08)
    covariance = torch.cov((draws - loc).flatten(0, 2).mT)
    torch.testing.assert_close(covariance, root @ root.mT, rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    ("support", "shape"),
    [
        (constraints.real, (4, 3)),
        (constraints.positive, (4, 3)),
        (constraints.unit_interval, (4, 3)),
        (constraints.interval(torch.zeros(3), torch.ones(3)), (4, 3)),
        (constraints.independent(constraints.interval(0.0, 2.0), 1), (4, 3)),
        (constraints.simplex, (4, 3)),
        (constraints.independent(constraints.simplex, 1), (2, 4, 3)),
        (constraints.corr_cholesky, (4, 3, 3)),
        (dist.constraints.ordered_vector, (4, 3)),
    ],
    ids=str,
)
def test_shapes_of_unconstrained_coordinates_are_those_of_torch(support, shape):
    found = unconstrained_shape(support, torch.Size(shape))
    assert found == biject_to(support).inverse_shape(torch.Size(shape))
