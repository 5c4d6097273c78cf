"""Precision matrices ``(..., D, D)``, or diagonals ``(..., D)`` in their place, of vectors ``(..., D)``.

A tensor with as many dimensions as the vector is a diagonal, one with one more is a matrix.
"""

import torch
from torch import Tensor

from bayesfed.guides import triangular
from bayesfed.guides.triangular import solve_lower

FLOOR = 1e-20
"""The smallest precision, far below those of wide priors for each of many rows, in whatever unit."""


def times(precision: Tensor, vector: Tensor) -> Tensor:
    """Λ v, with as many leading dimensions in both.

    Example:
        >>> import torch
        >>> from bayesfed.guides.precisions import times
        >>> times(torch.tensor([2.0, 3.0]), torch.ones(2)), times(torch.ones(2, 2), torch.ones(2))
        (tensor([2., 3.]), tensor([2., 2.]))
    """
    if precision.ndim == vector.ndim:
        return precision * vector
    return triangular.times(precision, vector)


def solve(precision: Tensor, vector: Tensor) -> Tensor:
    """Λ⁻¹ v, with as many leading dimensions in both."""
    if precision.ndim == vector.ndim:
        return vector / precision
    return torch.linalg.solve(precision, vector[..., None]).squeeze(-1)


def solve_root(root: Tensor, vector: Tensor, *, transposed: bool = False) -> Tensor:
    """C⁻¹ v, or C^{−⊤} v, of a lower triangular C ``(..., D, D)``, or of a diagonal ``(..., D)``."""
    if root.ndim == vector.ndim:
        return vector / root
    return solve_lower(root, vector[..., None], transposed=transposed).squeeze(-1)


def inverse(precision: Tensor, more: float | Tensor, *, matrix: bool) -> Tensor:
    """(Λ + more · I)⁻¹; ``more`` may be a diagonal ``(D,)``."""
    if not matrix:
        return 1 / (precision + more)
    unit = torch.eye(precision.shape[-1], dtype=precision.dtype, device=precision.device)
    return torch.linalg.inv(precision + more * unit)


def definite(precision: Tensor, *, matrix: bool) -> Tensor:
    """The precision if it is positive definite, else with absolute eigenvalues; none is below :data:`FLOOR`.

    A matrix that is not finite is returned as it is: its eigenvalues would fail for all others of the batch.
    """
    if not matrix:
        return precision.clamp(min=FLOOR)
    indefinite = torch.linalg.cholesky_ex(precision).info != 0
    # elsewhere, reading this would wait for the device
    if precision.device.type == "cpu" and not indefinite.any():
        return precision
    finite = precision.isfinite().all(-1).all(-1)
    values, vectors = torch.linalg.eigh(torch.where(finite[..., None, None], precision, 1.0))
    repaired = (vectors * values.abs().clamp(min=FLOOR)[..., None, :]) @ vectors.mT
    return torch.where((indefinite & finite)[..., None, None], repaired, precision)
