"""Precision matrices ``(..., D, D)``, or diagonals ``(..., D)`` in their place, of vectors ``(..., D)``.

Which of both a tensor is shows in its dimensions: a diagonal has as many as the vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = 1e-8
"""Least precision."""


def times(precision: Tensor, vector: Tensor) -> Tensor:
    """Λ v, of as many leading dimensions each.

    Example:
        >>> import torch
        >>> from bayesfed.guides.precisions import times
        >>> times(torch.tensor([2.0, 3.0]), torch.ones(2)), times(torch.ones(2, 2), torch.ones(2))
        (tensor([2., 3.]), tensor([2., 2.]))
    """
    if precision.ndim == vector.ndim:
        return precision * vector
    return (precision @ vector[..., None]).squeeze(-1)


def solve(precision: Tensor, vector: Tensor) -> Tensor:
    """Λ⁻¹ v, of as many leading dimensions each."""
    if precision.ndim == vector.ndim:
        return vector / precision
    return torch.linalg.solve(precision, vector[..., None]).squeeze(-1)


def inverse(precision: Tensor, more: float, *, matrix: bool) -> Tensor:
    """(Λ + more · I)⁻¹."""
    if not matrix:
        return 1 / (precision + more)
    unit = torch.eye(precision.shape[-1], dtype=precision.dtype, device=precision.device)
    return torch.linalg.inv(precision + more * unit)


def definite(precision: Tensor, *, matrix: bool) -> Tensor:
    """A positive definite one: of a matrix that is not, the eigenvalues by their size; none less than the floor."""
    if not matrix:
        return precision.clamp(min=FLOOR)
    mend = torch.linalg.cholesky_ex(precision).info != 0
    if (
        precision.device.type == "cpu" and not mend.any()
    ):  # elsewhere, asking would wait for the device
        return precision
    values, vectors = torch.linalg.eigh(precision)
    mended = (vectors * values.abs().clamp(min=FLOOR)[..., None, :]) @ vectors.mT
    return torch.where(mend[..., None, None], mended, precision)
