"""Gaussian factors of q(z) in natural parameters, and the factor that approximates a function at a Gaussian (PVI).

t(z) ∝ exp(hᵀ z − ½ zᵀ Λ z),   z = θ in unconstrained coordinates
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.elbo.program import Program

_FAR = 3.0
"""How far a step may move the mean, in standard deviations of the Gaussian before."""


class Natural(NamedTuple):
    """Natural parameters of Gaussians: ``precision`` Λ ``(..., D, D)`` and ``shift`` h = Λ m ``(..., D)``."""

    precision: Tensor
    shift: Tensor

    def plus(self, other: Natural) -> Natural:
        """Return the products of these Gaussians and others."""
        return Natural(self.precision + other.precision, self.shift + other.shift)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return the mean ``(..., D)`` and the lower Cholesky factor of the covariance ``(..., D, D)``."""
        factor = torch.linalg.cholesky_ex(self.precision).L
        loc = torch.cholesky_solve(self.shift[..., None], factor).squeeze(-1)
        return loc, torch.linalg.cholesky_ex(torch.cholesky_inverse(factor)).L


def antithetic(q: Natural, program: Program, keys: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """Return the means ``(K, D)`` of K Gaussians and draws ``(S, K, 1, D)`` in pairs around them."""
    loc, scale_tril = q.moments()
    (site,) = program.random
    (half,) = program.noise(keys, draws // 2, local=False)[site]
    offset = (scale_tril[:, None] @ half[..., None]).squeeze(-1)
    z = loc[:, None] + torch.cat([offset, -offset])
    return loc, z.detach()


def factor_of(f: Tensor, z: Tensor, loc: Tensor) -> Natural:
    """Return the Gaussian factor that approximates f at q: Λ = −E[∇²f], h = E[∇f] + Λ m.

    Args:
        f: ``(S, K)``, a function of the draws.
        z: the draws ``(S, K, 1, D)``.
        loc: the mean m of q, ``(K, D)``.
    """
    (grad,) = torch.autograd.grad(f.sum(), z, create_graph=True)
    rows = []
    for d in range(z.shape[-1]):
        slope = grad[..., d].sum()
        (row,) = (
            torch.autograd.grad(slope, z, retain_graph=True, allow_unused=True)
            if slope.requires_grad
            else (None,)
        )
        rows.append(torch.zeros_like(z) if row is None else row)
    hessian = torch.stack(rows, -1).mean(0).squeeze(1)
    precision = -(hessian + hessian.mT) / 2
    shift = grad.detach().mean(0).squeeze(1) + (precision @ loc[..., None]).squeeze(-1)
    return Natural(precision, shift)


def step_towards(q: Natural, target: Natural, step: float) -> Natural:
    """Take a step from q to the target, shorter, row by row, where it would leave the region of q's draws.

    It would where the precision would lose its positive definiteness or the mean would move by more than
    :data:`_FAR`.
    """
    before, _ = q.moments()
    size = torch.full(q.shift.shape[:1], step, dtype=q.shift.dtype, device=q.shift.device)
    for _ in range(30):
        new = Natural(
            torch.lerp(q.precision, target.precision, size[:, None, None]),
            torch.lerp(q.shift, target.shift, size[:, None]),
        )
        factor, info = torch.linalg.cholesky_ex(new.precision)
        shift = torch.cholesky_solve(new.shift[..., None], factor).squeeze(-1) - before
        distance = (shift * (q.precision @ shift[..., None]).squeeze(-1)).sum(-1).sqrt()
        stays = (info == 0) & (distance <= _FAR)
        if size.device.type == "cpu" and stays.all():  # elsewhere, asking would wait for the device
            break
        size = torch.where(stays, size, size / 2)
    return Natural(
        torch.where(stays[:, None, None], new.precision, q.precision),
        torch.where(stays[:, None], new.shift, q.shift),
    )
