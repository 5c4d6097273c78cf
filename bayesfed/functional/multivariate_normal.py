"""A multivariate Normal whose gradient needs one matrix inverse, not the derivative of a Cholesky factorisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pyro.distributions as dist
import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from pyro.distributions.util import broadcast_shape
from torch import Tensor

from bayesfed.tracing.compiler import tracing


class Gaussian(dist.TorchDistribution):
    """N(mean, covariance) for many small dense covariances, batched in front.

    With α = Σ⁻¹ (y − m), ∂ ln p / ∂Σ = (α αᵀ − Σ⁻¹) / 2 and ∂ ln p / ∂m = α (Rasmussen & Williams 2006, eq. 5.9).
    In all else it agrees with torch's MultivariateNormal, which differentiates the Cholesky factorisation.

    Args:
        mean: ``(..., B)``.
        covariance: ``(..., B, B)``, positive definite.

    Example:
        >>> import torch
        >>> from bayesfed.functional.multivariate_normal import Gaussian
        >>> Gaussian(torch.zeros(2), torch.eye(2)).log_prob(torch.zeros(2))
        tensor(-1.8379)
    """

    has_rsample = True
    arg_constraints = {}  # noqa: RUF012  (torch's interface)
    support = dist.constraints.real_vector

    def __init__(self, mean: Tensor, covariance: Tensor) -> None:
        self.loc, self.covariance_matrix = mean, covariance
        batch = broadcast_shape(mean.shape[:-1], covariance.shape[:-2])
        super().__init__(batch, mean.shape[-1:], validate_args=False)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Gaussian:
        """Return the same distribution with a larger batch shape."""
        size = self.event_shape[0]
        return Gaussian(
            self.loc.expand(*batch_shape, size),
            self.covariance_matrix.expand(*batch_shape, size, size),
        )

    def log_prob(self, value: Tensor) -> Tensor:
        """Return ln p, ``(...)``."""
        return _LogDensity.apply(value - self.loc, self.covariance_matrix)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return reparameterised draws."""
        shape = self._extended_shape(torch.Size(sample_shape))
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + (psd_safe_cholesky(self.covariance_matrix) @ noise[..., None]).squeeze(-1)


def conditioned(
    mean: Tensor, covariance: Tensor, value: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each of the last Q variables given the first B (Rasmussen & Williams 2006, eq. A.6).

        m_Q + C_QB C_BB⁻¹ (y − m_B),     diag(C_QQ − C_QB C_BB⁻¹ C_BQ)

    Args:
        mean: ``(..., B + Q)``.
        covariance: ``(..., B + Q, B + Q)``.
        value: y, ``(..., B)``.
        mask: bool ``(..., B)``: True for each of the first B that is known; the values of the others are ignored.

    Returns:
        ``(..., Q)`` each.

    Example:
        >>> import torch
        >>> from bayesfed.functional.multivariate_normal import conditioned
        >>> covariance = torch.tensor([[4.0, 2.0], [2.0, 2.0]])
        >>> conditioned(torch.zeros(2), covariance, torch.tensor([4.0]), torch.tensor([True]))
        (tensor([2.]), tensor([1.]))
    """
    size = value.shape[-1]
    known, cross = covariance[..., :size, :size], covariance[..., :size, size:]
    known = known.where(mask[..., None] & mask[..., None, :], 0.0) + torch.diag_embed(~mask)
    residual = (value - mean[..., :size]).where(mask, 0.0)
    factor = psd_safe_cholesky(known)
    white = torch.linalg.solve_triangular(factor, cross.where(mask[..., None], 0.0), upper=False)
    gap = torch.linalg.solve_triangular(factor, residual[..., None], upper=False)
    variance = covariance.diagonal(dim1=-2, dim2=-1)[..., size:] - white.square().sum(-2)
    least = torch.finfo(variance.dtype).tiny
    return mean[..., size:] + (white * gap).sum(-2), variance.clamp(min=least)


def _cholesky(covariance: Tensor) -> Tensor:
    """Return the Cholesky factor; in a traced graph, which cannot retry with more jitter, NaN if there is none."""
    if not tracing():
        return psd_safe_cholesky(covariance)
    factor, info = torch.linalg.cholesky_ex(covariance)
    return torch.where((info > 0)[..., None, None], torch.nan, factor)


class _LogDensity(torch.autograd.Function):
    """The log density ln N(residual; 0, covariance), twice differentiable."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, covariance: Tensor) -> Tensor:
        factor = _cholesky(covariance)
        inverse = torch.cholesky_inverse(factor)
        alpha = (inverse @ residual[..., None]).squeeze(-1)
        ctx.save_for_backward(residual, covariance, inverse)
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        quadratic = (residual * alpha).sum(-1)
        return -quadratic / 2 - log_det - residual.shape[-1] * math.log(2 * math.pi) / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        residual, covariance, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted
            inverse = torch.linalg.inv(covariance)
        alpha = inverse @ residual[..., None]
        weight = grad[..., None, None]
        of_covariance = torch.addcmul(inverse * (-weight / 2), alpha * (weight / 2), alpha.mT)
        of_residual = -alpha.squeeze(-1) * grad[..., None]
        return of_residual.sum_to_size(residual.shape), of_covariance.sum_to_size(covariance.shape)
