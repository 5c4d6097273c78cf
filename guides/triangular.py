"""Lower triangular matrices L ``(..., P, P)``, one for each draw and client.

Of :data:`MANY` matrices or more with up to :data:`SMALL` rows, entries are computed one after the other, each of all
matrices at once, which takes down to a tenth of the time of a call of LAPACK for each matrix. Of few it takes longer.
"""

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

SMALL, MANY = 4, 5000


def solve_lower(root: Tensor, columns: Tensor, *, transposed: bool = False) -> Tensor:
    """Return L⁻¹ B, or L^{−⊤} B, of B ``(..., P, Q)``; leading dimensions are broadcast.

    Example:
        >>> import torch
        >>> from bayesfed.guides.triangular import solve_lower
        >>> root = torch.tensor([[2.0, 0.0], [1.0, 4.0]])
        >>> solve_lower(root, root @ torch.eye(2)), solve_lower(root, root.mT @ torch.eye(2), transposed=True)
        (tensor([[1., 0.],
                [0., 1.]]), tensor([[1., 0.],
                [0., 1.]]))
    """
    size = root.shape[-1]
    lead = torch.broadcast_shapes(root.shape[:-2], columns.shape[:-2])
    if not _by_entries(root.expand(*lead, size, size)):
        root = root.mT if transposed else root
        return torch.linalg.solve_triangular(root, columns, upper=transposed)
    entries, given = _entries(root), columns.unbind(-2)
    found: dict[int, Tensor] = {}
    for i in reversed(range(size)) if transposed else range(size):
        rest = given[i]
        for j, value in found.items():
            rest = rest - (entries[j][i] if transposed else entries[i][j])[..., None] * value
        found[i] = rest / entries[i][i][..., None]
    return torch.stack([found[i] for i in range(size)], -2)


def inverse_root(precision: Tensor) -> Tensor:
    """Return L with L Lᵀ = precision⁻¹; not finite where the precision is not, so that errors are seen.

    Example:
        >>> import torch
        >>> from bayesfed.guides.triangular import inverse_root
        >>> inverse_root(torch.tensor([[0.25, 0.0], [0.0, 4.0]]))
        tensor([[2.0000, 0.0000],
                [0.0000, 0.5000]])
    """
    size = precision.shape[-1]
    eye = torch.eye(size, dtype=precision.dtype, device=precision.device)
    if not _by_entries(precision):
        upper = torch.linalg.cholesky_ex(precision.flip(-2, -1)).L.flip(-2, -1)
        return torch.linalg.solve_triangular(upper.mT, eye, upper=False)
    a, zero = _entries(precision), torch.zeros_like(precision[..., 0, 0])
    upper = [[zero] * size for _ in range(size)]  # U with U Uᵀ = precision
    for j in reversed(range(size)):
        later = range(j + 1, size)
        upper[j][j] = (a[j][j] - sum(upper[j][k].square() for k in later)).sqrt()
        for i in range(j):
            products = sum(upper[i][k] * upper[j][k] for k in later)
            upper[i][j] = (a[i][j] - products) / upper[j][j]
    transposed = torch.stack(
        [torch.stack([upper[i][j] for i in range(size)], -1) for j in range(size)], -2
    )
    return solve_lower(transposed, eye)


def outer(root: Tensor) -> Tensor:
    """Return L Lᵀ."""
    if not _by_entries(root):
        return root @ root.mT
    entries, size = _entries(root), range(root.shape[-1])
    rows = [[_inner(entries[i], entries[j], min(i, j) + 1) for j in size] for i in size]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


class TriangularNormal(dist.MultivariateNormal):
    """A MultivariateNormal with a given L, whose density takes no call of LAPACK where L is one of many small ones.

    Example:
        >>> import torch
        >>> from bayesfed.guides.triangular import TriangularNormal
        >>> TriangularNormal(torch.zeros(2), scale_tril=torch.eye(2)).log_prob(torch.zeros(2))
        tensor(-1.8379)
    """

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of values ``(..., P)``."""
        root: Any = self._unbroadcasted_scale_tril
        white = solve_lower(root, (value - self.loc)[..., None]).squeeze(-1)
        log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return -(white.square().sum(-1) + white.shape[-1] * math.log(2 * math.pi)) / 2 - log_det


def _by_entries(matrix: Tensor) -> bool:
    """Return whether matrices are so small, and so many, that calls of LAPACK would take longer."""
    return matrix.shape[-1] <= SMALL and matrix.shape[:-2].numel() >= MANY


def _inner(one: tuple[Tensor, ...], other: tuple[Tensor, ...], count: int) -> Tensor:
    total = one[0] * other[0]
    for k in range(1, count):
        total = total + one[k] * other[k]
    return total


def _entries(matrix: Tensor) -> list[tuple[Tensor, ...]]:
    return [row.unbind(-1) for row in matrix.unbind(-2)]
