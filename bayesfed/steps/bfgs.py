"""BFGS for K functions at once, each of a few variables (Nocedal & Wright 2006, eq. 6.17).

It needs a value and a gradient in a step, where Newton's method needs second derivatives: of losses of many rows these
cost as much as ten gradients, and memory.
"""

from collections.abc import Callable

import torch
from torch import Tensor

STEPS, TOLERANCE, LONGEST = 100, 1e-6, 2.0
"""The most steps; twice the predicted gain below which none is taken; the longest step in one number."""
ROUND_OFF = 8
"""The increase of a value that counts as round-off, in units of its last digit."""


def minima(
    slope: Callable[[Tensor], tuple[Tensor, Tensor]],
    starts: list[Tensor],
    inverse: Tensor,
) -> Tensor:
    """Return the minima ``(K, P)`` of K functions; each ends by itself, whatever the others are.

    Args:
        slope: returns the values ``(K,)`` and gradients ``(K, P)`` of the functions at ``(K, P)``.
        starts: ``(K, P)`` each; every function starts at that with its lowest value.
        inverse: the inverse of the Hessians, as far as it is known: ``(K, P, P)``, positive definite.

    Example:
        >>> import torch
        >>> from bayesfed.steps.bfgs import minima
        >>> precision = torch.tensor([[[4.0, 1.0], [1.0, 0.5]]])
        >>> def slope(u):
        ...     gradient = (precision @ (u - 1)[..., None])[..., 0]
        ...     return 0.5 * ((u - 1) * gradient).sum(-1), gradient
        >>> minima(slope, [torch.zeros(1, 2)], torch.eye(2)[None]).numpy().round(3).tolist()
        [[1.0, 1.0]]
    """
    u = starts[0]
    value, grad = slope(u)
    for start in starts[1:]:
        other, there = slope(start)
        lower = (other < value) | (other.isfinite() & ~value.isfinite())
        value, u = torch.where(lower, other, value), torch.where(lower[:, None], start, u)
        grad = torch.where(lower[:, None], there, grad)
    last, first = ROUND_OFF * torch.finfo(value.dtype).eps, inverse
    length = torch.ones_like(value)
    for _ in range(STEPS):
        step = -(inverse @ grad[..., None]).squeeze(-1)
        gain = -(grad * step).sum(-1)
        inverse = torch.where((gain < 0)[:, None, None], first, inverse)  # by round-off
        step = torch.where((gain < 0)[:, None], -(first @ grad[..., None]).squeeze(-1), step)
        moving = gain.abs() > TOLERANCE
        if not moving.any():
            break
        step = torch.where(moving[:, None], step, 0.0)
        step = step * (LONGEST / step.abs().amax(-1, keepdim=True).clamp(min=LONGEST))
        step = length[:, None] * step
        other, there = slope(u + step)
        better = moving & there.isfinite().all(-1) & (other <= value + last * value.abs())
        there = torch.where(other.isfinite()[:, None], there, torch.inf)
        found, known = updated(inverse, step, there - grad)
        longer = torch.where(better[:, None, None], 2 * inverse, inverse)
        inverse = torch.where(known[:, None, None], found, longer)
        length = torch.where(better, 1.0, torch.where(known, length, 0.1 * length))
        value, u = torch.where(better, other, value), torch.where(better[:, None], u + step, u)
        grad = torch.where(better[:, None], there, grad)
    return u


def updated(inverse: Tensor, step: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverse Hessians ``(K, P, P)`` after steps ``(K, P)`` that have changed the gradients, and of which.

    They are known, ``(K,)``, where a gradient has grown along its step, as it does where the curvature is positive.
    """
    curvature = (step * change).sum(-1)
    known = curvature > 1e-6 * step.norm(dim=-1) * change.norm(dim=-1)
    known &= curvature.isfinite() & change.isfinite().all(-1)
    curvature = torch.where(known, curvature, 1.0)[:, None, None]
    change = torch.where(known[:, None], change, 0.0)
    eye = torch.eye(step.shape[-1], dtype=step.dtype, device=step.device)
    left = eye - step[:, :, None] * change[:, None] / curvature
    found = left @ inverse @ left.mT + step[:, :, None] * step[:, None] / curvature
    return found, known
