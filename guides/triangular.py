"""Lower triangular matrices L ``(..., P, P)``, one for each draw and client.

Of :data:`MANY` matrices or more with up to :data:`SMALL` rows, entries are computed one after the other, each of all
matrices at once, which takes down to a tenth of the time of a call of LAPACK for each matrix. Of few it takes longer.
"""

import math
from collections.abc import Sequence
from typing import Any, Self

import pyro.distributions as dist
import torch
from pyro.distributions.util import broadcast_shape
from torch import Tensor
from torch.distributions import Distribution

SMALL, MANY = 4, 5000
Entries = Sequence[Sequence[Tensor]]
"""Entries of many matrices by row and column, ``(...)`` each; of lower triangular ones, those up to the diagonal."""


def solve_lower(
    root: Tensor, columns: Tensor, *, transposed: bool = False, unit: bool = False
) -> Tensor:
    """Return L⁻¹ B, or L^{−⊤} B, of B ``(..., P, Q)``; leading dimensions are broadcast.

    What is above the diagonal of ``root`` is not read. With ``unit`` the diagonal is not read either: it is 1.

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
    lead = broadcast_shape(root.shape[:-2], columns.shape[:-2])
    if not _by_entries(size, lead):
        root = (root.mT if transposed else root).expand(*lead, size, size)
        solve = torch.linalg.solve_triangular
        return solve(root, columns, upper=transposed, unitriangular=unit)
    entries = [[entry[..., None] for entry in row] for row in _entries(root)]
    return torch.stack(_solve(entries, columns.unbind(-2), transposed, unit), -2)


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
    if not _by_entries(size, precision.shape[:-2]):
        eye = torch.eye(size, dtype=precision.dtype, device=precision.device)
        upper = torch.linalg.cholesky_ex(precision.flip(-2, -1)).L.flip(-2, -1)
        return torch.linalg.solve_triangular(upper.mT, eye, upper=False)
    return _matrix(_inverse(_lower_factor(_entries(precision))))


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return A x of A ``(..., P, Q)`` and x ``(..., Q)``; leading dimensions are broadcast.

    Example:
        >>> import torch
        >>> from bayesfed.guides.triangular import times
        >>> times(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 1.0]))
        tensor([3., 7.])
    """
    lead = broadcast_shape(matrix.shape[:-2], vector.shape[:-1])
    if not _by_entries(matrix.shape[-1], lead):
        return (matrix @ vector[..., None]).squeeze(-1)
    columns, numbers = matrix.unbind(-1), vector.unbind(-1)
    found = columns[0] * numbers[0][..., None]
    for column, number in zip(columns[1:], numbers[1:], strict=True):
        found = found + column * number[..., None]
    return found


def product_of_normals(
    prior: tuple[Tensor, Tensor], loc: Tensor, diagonal: Tensor, below: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the mean ``(..., P)`` and L, L Lᵀ the covariance, of N(u; m, diag(λ)⁻¹) · N(u; a, (C Cᵀ)⁻¹).

    Args:
        prior: m and λ, ``(..., P)`` each.
        loc: a, ``(..., P)``.
        diagonal: d, ``(..., P)``, the diagonal of C = diag(d) (I + strictly lower triangle of W).
        below: W, ``(..., P, P)``.

    Example:
        >>> import torch
        >>> from bayesfed.guides.triangular import product_of_normals
        >>> zeros, ones = torch.zeros(2), torch.ones(2)
        >>> product_of_normals((zeros, ones), ones, ones, torch.zeros(2, 2))
        (tensor([0.5000, 0.5000]), tensor([[0.7071, 0.0000],
                [0.0000, 0.7071]]))
    """
    centre, weight = prior
    size = loc.shape[-1]
    leads = (x.shape[:-1] for x in (centre, weight, loc, diagonal, below[..., 0]))
    lead = broadcast_shape(*leads)
    if _by_entries(size, lead):
        return _product_by_entries(lead, centre, weight, loc, diagonal, below)
    root = root_of_precision(diagonal, below)
    factor = root @ root.mT
    tril = inverse_root(factor + torch.diag_embed(weight))
    natural = weight * centre + times(factor, loc)
    return times(tril, times(tril.mT, natural)), tril


def product_with_root(
    prior: tuple[Tensor, Tensor], loc: Tensor, diagonal: Tensor, below: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the mean ``(..., P)`` and L, L Lᵀ the covariance, of N(u; m, M Mᵀ) · N(u; a, (C Cᵀ)⁻¹).

    With R Rᵀ = (I + Mᵀ C Cᵀ M)⁻¹, L is M R. M is not inverted, so that it may be close to singular, as where variables
    have a correlation of nearly 1.

    Args:
        prior: m ``(..., P)``, and M, lower triangular, ``(..., P, P)``.
        loc: a, ``(..., P)``.
        diagonal: d, ``(..., P)``, the diagonal of C = diag(d) (I + strictly lower triangle of W).
        below: W, ``(..., P, P)``.

    Example:
        >>> import torch
        >>> from bayesfed.guides.triangular import product_with_root
        >>> zeros, ones = torch.zeros(2), torch.ones(2)
        >>> product_with_root((zeros, torch.eye(2)), ones, ones, torch.zeros(2, 2))
        (tensor([0.5000, 0.5000]), tensor([[0.7071, 0.0000],
                [0.0000, 0.7071]]))
    """
    centre, of_prior = prior
    root = root_of_precision(diagonal, below)
    turned = of_prior.mT @ root
    white = inverse_root(torch.eye(loc.shape[-1]).to(turned) + turned @ turned.mT)
    tril = of_prior @ white
    pull = times(turned, times(root.mT, loc - centre))
    return centre + times(tril, times(white.mT, pull)), tril


def _product_by_entries(lead: Sequence[int], *given: Tensor) -> tuple[Tensor, Tensor]:
    """Return :func:`product_of_normals`, over ``lead`` dimensions, of m, λ, a, d and W."""
    m, weight, a, d = (x.unbind(-1) for x in given[:-1])
    below, size = _entries(given[-1]), len(d)
    root = [[*(d[i] * entry for entry in row[:i]), d[i]] for i, row in enumerate(below)]
    white = [_inner([root[k][i] for k in range(i, size)], a[i:]) for i in range(size)]  # Cᵀ a
    natural = [weight[i] * m[i] + _inner(root[i], white) for i in range(size)]
    precision = [[_inner(root[i], root[j]) for j in range(i + 1)] for i in range(size)]
    for row, more in zip(precision, weight, strict=True):
        row[-1] = row[-1] + more
    factor = _lower_factor(precision)
    mean = _solve(factor, _solve(factor, natural, transposed=True), transposed=False)
    return torch.stack([number.expand(lead) for number in mean], -1), _matrix(_inverse(factor))


def root_of_precision(diagonal: Tensor, tril: Tensor) -> Tensor:
    """Return the root ``(..., P, P)`` with this diagonal ``(..., P)``, whose rows are in units of it: ``tril``."""
    return diagonal[..., None] * tril.tril(-1) + torch.diag_embed(diagonal)


class CholeskyNormal(dist.MultivariateNormal):
    """N(loc, LLᵀ). torch's own constructor and sampler import SymPy and its compiler: 0.4 s and more of a first fit.

    Args:
        loc: ``(..., P)``.
        scale_tril: L, ``(..., P, P)``.

    Example:
        >>> import torch
        >>> from bayesfed.guides.triangular import CholeskyNormal
        >>> CholeskyNormal(torch.zeros(2), torch.eye(2)).log_prob(torch.zeros(2))
        tensor(-1.8379)
    """

    def __init__(self, loc: Tensor, scale_tril: Tensor) -> None:
        batch, size = broadcast_shape(loc.shape[:-1], scale_tril.shape[:-2]), loc.shape[-1]
        self.loc = loc.expand(*batch, size)
        self.scale_tril = scale_tril.expand(*batch, size, size)
        self._unbroadcasted_scale_tril = scale_tril
        Distribution.__init__(self, torch.Size(batch), loc.shape[-1:], validate_args=False)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Self:
        """Return the same distribution with other batch dimensions."""
        return type(self)(
            self.loc.expand(*batch_shape, *self.event_shape), self._unbroadcasted_scale_tril
        )

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Return reparameterised draws."""
        shape = self._extended_shape(torch.Size(sample_shape))
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + (self._unbroadcasted_scale_tril @ noise[..., None]).squeeze(-1)


class TriangularNormal(CholeskyNormal):
    """The same, with a density that takes no call of LAPACK where L is one of many small ones.

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
        constant = white.shape[-1] * math.log(2 * math.pi)
        return -(_sum_of_last(white.square()) + constant) / 2 - log_det(root)


def log_det(root: Tensor) -> Tensor:
    """Return log |L|, ``(...)``."""
    return _sum_of_last(root.diagonal(dim1=-2, dim2=-1).log())


def _by_entries(size: int, lead: Sequence[int]) -> bool:
    """Return whether matrices are so small, and so many, that calls of LAPACK would take longer."""
    return size <= SMALL and math.prod(lead) >= MANY


def _sum_of_last(values: Tensor) -> Tensor:
    """Return sums over the last dimension; of many short rows, torch's own take several times as long."""
    if _by_entries(values.shape[-1], values.shape[:-1]):
        return sum(values.unbind(-1)[1:], values[..., 0])
    return values.sum(-1)


def _inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """Return Σ_k x_k y_k, over as many as there are of both."""
    return sum((x * y for x, y in zip(one[1:], other[1:], strict=False)), one[0] * other[0])


def _solve(
    lower: Entries, given: Sequence[Tensor], transposed: bool, unit: bool = False
) -> list[Tensor]:
    """Return T⁻¹ b, or T^{−⊤} b."""
    size, found = len(given), dict[int, Tensor]()
    for i in reversed(range(size)) if transposed else range(size):
        rest = given[i]
        for j, value in found.items():
            rest = rest - (lower[j][i] if transposed else lower[i][j]) * value
        found[i] = rest if unit else rest / lower[i][i]
    return [found[i] for i in range(size)]


def _lower_factor(symmetric: Entries) -> Entries:
    """Return T with Tᵀ T = A; of A, entries above the diagonal are not read."""
    size = len(symmetric)
    rows: list[list[Tensor]] = [[] for _ in range(size)]
    for j in reversed(range(size)):
        below = range(j + 1, size)
        root = (symmetric[j][j] - sum(rows[k][j].square() for k in below)).sqrt()
        entries = [
            (symmetric[j][i] - sum(rows[k][i] * rows[k][j] for k in below)) / root for i in range(j)
        ]
        rows[j] = [*entries, root]
    return rows


def _inverse(lower: Entries) -> Entries:
    """Return T⁻¹."""
    size, ones = len(lower), [1 / row[i] for i, row in enumerate(lower)]
    columns = [{j: ones[j]} for j in range(size)]
    for j, column in enumerate(columns):
        for i in range(j + 1, size):
            column[i] = -sum(lower[i][k] * column[k] for k in range(j, i)) * ones[i]
    return [[columns[j][i] for j in range(i + 1)] for i in range(size)]


def _entries(matrix: Tensor) -> Entries:
    return [row.unbind(-1) for row in matrix.unbind(-2)]


def _matrix(lower: Entries) -> Tensor:
    """Return matrices from their entries up to the diagonal."""
    size, zero = len(lower), torch.zeros_like(lower[-1][0])
    entries = [entry for row in lower for entry in [*row, *[zero] * (size - len(row))]]
    return torch.stack(torch.broadcast_tensors(*entries), -1).unflatten(-1, (size, size))
