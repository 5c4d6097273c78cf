"""Tests of the log density of a Normal and its derivatives against torch's."""

import pytest
import torch

from bayesfed.functional.multivariate_normal import Gaussian, conditioned


@pytest.fixture(autouse=True)
def seeded(float64):
    torch.manual_seed(0)


def problem(*batch):
    root = torch.randn(*batch, 4, 4)
    return torch.randn(*batch, 4), root @ root.mT + torch.eye(4), torch.randn(4)


def test_value_and_gradients_are_those_of_torch():
    mean, covariance, y = problem(3, 2)
    found = []
    for family in (Gaussian, torch.distributions.MultivariateNormal):
        leaves = [v.clone().requires_grad_() for v in (mean, covariance)]
        value = family(*leaves).log_prob(y)
        grads = torch.autograd.grad(value.square().sum(), leaves)
        found.append([value, grads[0], (grads[1] + grads[1].mT) / 2])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_it_is_differentiable_twice():
    mean, covariance, y = problem(2)

    def density(mean, root):
        return Gaussian(mean, root @ root.mT + torch.eye(4)).log_prob(y)

    root = torch.linalg.cholesky(covariance)
    inputs = (mean.requires_grad_(), root.requires_grad_())
    assert torch.autograd.gradcheck(density, inputs)
    assert torch.autograd.gradgradcheck(density, inputs)


def test_means_and_covariances_broadcast():
    mean, covariance, y = problem(3)
    one = covariance[0].clone().requires_grad_()
    value = Gaussian(mean, one).log_prob(y)
    assert value.shape == (3,)
    (grad,) = torch.autograd.grad(value.sum(), one)
    parts = []
    for m in mean:
        again = covariance[0].clone().requires_grad_()
        parts.append(torch.autograd.grad(Gaussian(m, again).log_prob(y), again)[0])
    torch.testing.assert_close(grad, sum(parts))


def test_draws_have_its_moments():
    """20,000 draws: the standard error of a mean is 0.007 sd, of a variance 1 %."""
    mean, covariance, _ = problem()
    drawn = Gaussian(mean, covariance).expand([20_000]).rsample()
    sd = covariance.diagonal().sqrt()
    assert ((drawn.mean(0) - mean).abs() < 4 * sd / 20_000**0.5).all()
    assert ((drawn.T.cov() - covariance).abs() < 0.05 * sd[:, None] * sd).all()


def test_conditioning_is_that_of_the_precision_matrix():
    """Given x_B, the precision of x_Q is the block P_QQ of P = C⁻¹ and its mean m_Q − P_QQ⁻¹ P_QB (y − m_B)."""
    mean, covariance, y = problem(3, 2)
    found, variance = conditioned(mean, covariance, y[:3], torch.ones(3, dtype=torch.bool))
    precision = torch.linalg.inv(covariance)
    torch.testing.assert_close(variance[..., 0], 1 / precision[..., 3, 3])
    shift = (precision[..., 3, :3] * (y[:3] - mean[..., :3])).sum(-1) / precision[..., 3, 3]
    torch.testing.assert_close(found[..., 0], mean[..., 3] - shift)


def test_conditioning_passes_over_what_is_masked():
    mean, covariance, y = problem(2)
    mask = torch.tensor([True, False, True])
    known = torch.tensor([0, 2, 3])
    less = mean[:, known], covariance[:, known][:, :, known], y[:3][mask]
    alone = conditioned(*less, torch.ones(2, dtype=torch.bool))
    covariance[:, 1], covariance[:, :, 1], mean[:, 1] = torch.nan, torch.nan, torch.nan
    together = conditioned(mean, covariance, y[:3].where(mask, torch.nan), mask)
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other)
