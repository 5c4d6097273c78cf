"""q(w_i | θ) as Laplace's approximation at θ itself, of clients whose many variables depend on each other.

    û(θ) = argmax_u log p(u, D_i | θ)          Newton steps from the mode at the centre of q(θ)
    H(θ) = −∇²_u log p(u, D_i | θ) at û
    q(u | θ) = N(û + H⁻¹ ∇_u log p(û, D_i | θ), H⁻¹)

It is the posterior of u where the model is linear and Gaussian in u given θ, however it depends on θ: random walks,
autoregressions, Gaussian processes, effects within effects. A client learns nothing but the mode, where its next visit
starts. It needs its rows, and factorises H at each draw of θ.

The entries of H that are zero for all clients are found by tracing. Then few products H v are computed, one for each
set of columns that have no row in common (Curtis, Powell & Reid 1974, *On the estimation of sparse Jacobian matrices*),
and the factor has few entries too, see :mod:`bayesfed.guides.elimination`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesfed.data.plural import plural
from bayesfed.guides.elimination import Elimination, SparseRoot, find_elimination, sparse_root
from bayesfed.guides.newton import pull_back
from bayesfed.guides.precision_normal import DenseRoot, PrecisionNormal, Root
from bayesfed.tracing.compiler import tracing
from bayesfed.tracing.replacements import Replacements

LogJoint = Callable[[Tensor, Any], Tensor]
"""log p(u, D_i | θ_s) of u ``(S, K, 1, P)`` and a value of θ: ``(S, K)``."""
DENSE = 50
"""A factor is sparse if it needs fewer than P³ / 50 multiplications."""
ZERO = 1e-5
"""An entry of H below this, in units of the diagonal, is zero."""
STEPS = 2
"""Newton steps from the mode at the centre of q(θ) to that at θ, where log p is not quadratic in u."""
AT_ONCE = 1_000_000
"""Numbers in all products beyond which they are computed one after another where nothing is recorded: at once, torch
copies each matrix of the model for each of them."""
FRACTIONS = (1.0, 0.3, 0.1, 0.01, 0.0)
"""Fractions of a Newton step that are tried."""


@dataclass(frozen=True, eq=False)
class Structure:
    """What tracing has found of H.

    Attributes:
        seeds: sets of columns without a row in common, ``(C, P)`` of 0 and 1.
        places: of each entry of the factor its place in the C products, C · P if it is zero in H: ``(Z,)``.
        order: the order of elimination; None if the factor is dense, with one product for each column.
        quadratic: log p(u, D_i | θ) is quadratic in u, and one Newton step gives û.
        concave: it is concave in u wherever H was computed.
    """

    seeds: Tensor
    places: Tensor
    order: Elimination | None
    quadratic: bool
    concave: bool

    def __str__(self) -> str:
        kind = "dense" if self.order is None else f"{len(self.seeds)} products"
        return f"{plural(self.seeds.shape[1], 'number')}, {kind}"


def laplace_at(
    structure: Structure, log_joint: LogJoint, theta: Any, fixed: Any, start: Tensor, least: Tensor
) -> PrecisionNormal:
    """Laplace's approximation of K clients' variables at S draws of θ.

    Args:
        structure: that of H.
        log_joint: the log density.
        theta: θ, attached to the graph of the gradients that are wanted.
        fixed: θ, detached.
        start: the mode at another θ, ``(S, K, 1, P)``.
        least: the precision where H is not positive definite, if its entries are smaller: ``(P,)``.
    """
    attached = torch.is_grad_enabled()
    u = start.detach()
    for _ in range(0 if structure.quadratic else STEPS):
        u, _ = newton_step(structure, lambda u: log_joint(u, fixed), u, least)
    grad, root = _derivatives(structure, lambda u: log_joint(u, theta), u, least, attached)
    return PrecisionNormal(u + root.solve(grad), root)


def laplace_near(
    structure: Structure, log_joint: Callable[[Tensor], Tensor], u: Tensor, least: Tensor
) -> tuple[PrecisionNormal, Tensor]:
    """Laplace's approximation by one Newton step from u ``(S, K, 1, P)``, and twice the gain of that step ``(S, K)``.

    Arguments as of :func:`laplace_at`.
    """
    grad, root = _derivatives(structure, log_joint, u, least, attached=False)
    step = root.solve(grad)
    return PrecisionNormal(u + step, root), (grad * step).sum((-2, -1))


def newton_step(
    structure: Structure, log_joint: Callable[[Tensor], Tensor], u: Tensor, least: Tensor
) -> tuple[Tensor, Tensor]:
    """u after the best of the fractions :data:`FRACTIONS` of a Newton step, and twice the gain of a whole one."""
    grad, root = _derivatives(structure, log_joint, u, least, attached=False)
    with torch.no_grad():
        step = root.solve(grad)
        values = [log_joint(u + fraction * step).nan_to_num(-torch.inf) for fraction in FRACTIONS]
        best = torch.stack(values).argmax(0)
        taken = torch.tensor(FRACTIONS, dtype=u.dtype, device=u.device)[best]
        return u + taken[..., None, None] * step, (grad * step).sum((-2, -1))


def has_structure(structure: Structure, log_joint: Callable[[Tensor], Tensor], u: Tensor) -> bool:
    """Return whether H has no entries at u ``(S, K, 1, P)`` but those of the structure, by a product with a vector."""
    if structure.order is None:
        return True
    size, order = u.shape[-1], structure.order
    v = torch.linspace(1.0, 2.0, size, dtype=u.dtype, device=u.device).cos() + 2
    _, products = _products(log_joint, u, torch.cat([structure.seeds, v[None]]), attached=False)
    entries = _entries(structure, products[:-1])
    found = (entries * v[order.columns]).new_zeros(*entries.shape[:-1], size)
    found = found.index_add(-1, order.rows, entries * v[order.columns])
    found = found.index_add(-1, order.columns[size:], entries[..., size:] * v[order.rows[size:]])
    sizes = torch.zeros_like(found).index_add(-1, order.rows, entries.abs())
    sizes = sizes.index_add(-1, order.columns[size:], entries[..., size:].abs())
    tolerance = 100 * ZERO * sizes.amax(-1, keepdim=True)
    return not bool(((found - products[-1]).abs() > tolerance).any())


def _entries(structure: Structure, products: Tensor) -> Tensor:
    """The entries of H that the factor has ``(S, K, 1, Z)``, from the products ``(C, S, K, 1, P)``."""
    flat = products.movedim(0, -2).flatten(-2)
    return torch.cat([flat, torch.zeros_like(flat[..., :1])], -1)[..., structure.places]


def _derivatives(
    structure: Structure,
    log_joint: Callable[[Tensor], Tensor],
    u: Tensor,
    least: Tensor,
    attached: bool,
) -> tuple[Tensor, Root]:
    """∇_u log p ``(S, K, 1, P)``, and a factor of H."""
    grad, products = _products(log_joint, u, structure.seeds, attached)
    if structure.order is None:
        precision = products.movedim(0, -2)
        root: Root = _dense_root(precision, least)
    else:
        root = _sparse_root(structure.order, _entries(structure, products), least)
    return grad, root


def _products(
    log_joint: Callable[[Tensor], Tensor], u: Tensor, seeds: Tensor, attached: bool
) -> tuple[Tensor, Tensor]:
    """∇_u log p ``(S, K, 1, P)``, and H v of C vectors, ``(C, S, K, 1, P)``."""
    with torch.enable_grad():
        u = u.detach().requires_grad_()
        with Replacements():
            value = log_joint(u).sum() + 0.0 * u.sum()
        (grad,) = torch.autograd.grad(value, u, create_graph=True)
        grad = grad + 0.0 * u
        each = seeds.reshape(len(seeds), *[1] * (u.ndim - 1), -1).expand(len(seeds), *u.shape)
        one_by_one = each.numel() > AT_ONCE and not attached and not tracing()
        (found,) = pull_back(grad, [u], each, attached, one_by_one)
        assert found is not None
    return (grad, -found) if attached else (grad.detach(), -found.detach())


def _dense_root(precision: Tensor, least: Tensor) -> DenseRoot:
    """L, or the root of a larger diagonal matrix where H is not positive definite."""
    tril, info = torch.linalg.cholesky_ex(precision)
    definite = ((info == 0) & tril.detach().isfinite().all(-1).all(-1))[..., None, None]
    above = precision.detach().abs().sum(-1).nan_to_num(1.0).clamp(min=least)
    return DenseRoot(torch.where(definite, tril, torch.diag_embed(above.sqrt())))


def _sparse_root(order: Elimination, entries: Tensor, least: Tensor) -> SparseRoot:
    """:func:`_dense_root` of matrices with these entries ``(..., Z)``."""
    root = sparse_root(order, entries)
    size, sizes = order.size, entries.detach().abs().nan_to_num(1.0)
    above = torch.zeros_like(sizes[..., :1]).expand(*sizes.shape[:-1], size)
    above = above.index_add(-1, order.rows, sizes)
    above = above.index_add(-1, order.columns[size:], sizes[..., size:]).clamp(min=least).sqrt()
    definite = root.definite[..., None]
    return root._replace(
        diagonals=[
            torch.where(definite, d, above[..., stage.nodes])
            for d, stage in zip(root.diagonals, order.stages, strict=True)
        ],
        beside=[torch.where(definite[..., None], x, 0.0) for x in root.beside],
    )


# -- structure -------------------------------------------------------------------------------------


def find_structure(
    log_joints: Iterable[tuple[int, Callable[[Tensor], Tensor]]], points: Tensor
) -> Structure:
    """The structure of H, from its values at two points.

    Args:
        log_joints: of K clients at a time, K and a function of u ``(2, K, 1, P)``, at two values of θ.
        points: two values of u, ``(2, 1, 1, P)``.
    """
    size = points.shape[-1]
    seen = torch.zeros(2, 2, size, size, dtype=torch.bool, device=points.device)
    quadratic = concave = True
    each = torch.eye(size, dtype=points.dtype, device=points.device)
    for clients, log_joint in log_joints:
        u = points.expand(2, clients, 1, size)
        found = _products(log_joint, u, each, attached=False)[1].movedim(0, -2)
        again = _products(log_joint, u.flip(0), each, attached=False)[1].movedim(0, -2)
        root = found.diagonal(dim1=-2, dim2=-1).abs().sqrt()
        units = root[..., None] * root[..., None, :]
        small = torch.stack([found, again]).abs() <= ZERO * units
        seen |= ~small.flatten(2, 3).all(2)
        quadratic = quadratic and bool(((found - again).abs() <= 10 * ZERO * units).all())
        ridge = torch.diag_embed(
            100 * ZERO * root.square()
        )  # round-off of a matrix that is ill-conditioned
        concave = concave and not bool(torch.linalg.cholesky_ex(found + ridge).info.any())
    pattern = seen.flatten(0, 1).any(0)
    # zeros that differ between points, as those of rectified units do, are zeros of these points only
    pattern = pattern | pattern.mT | each.bool() | (pattern != seen.flatten(0, 1).all(0)).any()
    order = find_elimination(pattern).to(points.device)
    if DENSE * order.work >= size**3:
        return Structure(each, torch.zeros(0, dtype=torch.int64), None, quadratic, concave)
    sets, hubs = _column_sets(pattern.cpu())
    seeds = torch.zeros(max(sets) + 1, size)
    seeds[torch.tensor(sets), torch.arange(size)] = 1.0
    numbers = [
        len(seeds) * size
        if not pattern[i, j]
        else sets[i] * size + j
        if i in hubs
        else sets[j] * size + i
        for i, j in zip(order.rows.tolist(), order.columns.tolist(), strict=True)
    ]
    places = torch.tensor(numbers, device=points.device)
    return Structure(seeds.to(points), places, order, quadratic, concave)


def _column_sets(pattern: Tensor) -> tuple[list[int], set[int]]:
    """The number of each column's set, and the columns that have a set of their own.

    Rows with many entries would put every column into a set of its own. Their entries are taken from the columns of the
    same numbers, as H is symmetric.
    """
    size = len(pattern)
    degrees = pattern.sum(0)
    hubs = {int(j) for j in (degrees > math.sqrt(size) + 2).nonzero()[:, 0]}
    sets, number = [0] * size, 0
    for j in sorted(hubs):
        sets[j], number = number, number + 1
    others = [j for j in range(size) if j not in hubs]
    taken: list[Tensor] = []
    free = torch.tensor([i not in hubs for i in range(size)])
    for j in others:
        rows = pattern[:, j] & free
        k = next((k for k, seen in enumerate(taken) if not (seen & rows).any()), len(taken))
        if k == len(taken):
            taken.append(torch.zeros(size, dtype=torch.bool))
        taken[k] |= rows
        sets[j] = number + k
    return sets, hubs
