"""Cholesky factors of many symmetric matrices with the same zeros: banded, block-diagonal, arrows, trees.

    H = Pᵀ L Lᵀ P

The order P is one of independent sets (George & Liu 1989, *The evolution of the minimum degree ordering algorithm*): a
stage eliminates at once all of a set of variables that have few neighbours and are no neighbours of each other. Of a
chain it is every second variable, which is cyclic reduction; of a tree all leaves. So a chain of 500 variables has
about nine stages of a few batched operations each, and its factor two entries a column beside the diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from pyro.distributions.util import broadcast_shape
from torch import Tensor


class Stage(NamedTuple):
    """Variables that are eliminated at once.

    Attributes:
        nodes: the variables, ``(E,)``.
        neighbours: of each the variables that are left and that it depends on, ``(E, M)``, padded with P.
        diagonal: the places of their diagonal entries, ``(E,)``.
        beside: the places of the entries with their neighbours, ``(E, M)``, padded with the last place.
        pairs: the places of the entries of all pairs of neighbours, ``(E * M * M,)``, the last place for one of two.
    """

    nodes: Tensor
    neighbours: Tensor
    diagonal: Tensor
    beside: Tensor
    pairs: Tensor


@dataclass(frozen=True, eq=False)
class Elimination:
    """The order in which variables are eliminated.

    Attributes:
        stages: sets of variables, in order.
        rows: of each entry of the factor, those of the diagonal first, the larger of its variables' numbers, ``(Z,)``.
        columns: the smaller one.
        work: the multiplications of a factorisation, about.
    """

    stages: Sequence[Stage]
    rows: Tensor
    columns: Tensor
    work: int

    @property
    def size(self) -> int:
        """The number of variables."""
        return sum(len(stage.nodes) for stage in self.stages)

    def to(self, device: torch.device) -> Elimination:
        """The same on a device."""
        stages = [Stage(*(x.to(device) for x in stage)) for stage in self.stages]
        return replace(
            self, stages=stages, rows=self.rows.to(device), columns=self.columns.to(device)
        )


def find_elimination(pattern: Tensor) -> Elimination:
    """Find an order for matrices whose entries are zero where a symmetric ``(P, P)`` is False.

    Example:
        >>> import torch
        >>> from bayesfed.guides.elimination import find_elimination
        >>> apart = (torch.arange(500)[:, None] - torch.arange(500)).abs()
        >>> chain = find_elimination(apart <= 1)
        >>> len(chain.stages), len(chain.rows)
        (9, 1485)
    """
    size = len(pattern)
    pattern = pattern.cpu() | pattern.cpu().mT
    around = [set(row.nonzero()[:, 0].tolist()) - {i} for i, row in enumerate(pattern)]
    left, order = set(range(size)), []
    places = {(i, i): i for i in range(size)}

    def place(i: int, j: int) -> int:
        return places.setdefault((max(i, j), min(i, j)), len(places))

    for i in range(size):
        for j in sorted(around[i]):
            place(i, j)
    while left:
        least = min(len(around[i]) for i in left)
        chosen: list[int] = []
        barred: set[int] = set()
        for i in sorted(left, key=lambda i: (len(around[i]) > 2 * least, i)):
            if len(around[i]) <= 2 * least and i not in barred:
                chosen.append(i)
                barred |= around[i]
        order.append([(i, sorted(around[i])) for i in chosen])
        for i in chosen:
            for j in around[i]:
                around[j] |= around[i] - {j}
                around[j].discard(i)
                for k in around[i]:
                    if k < j:
                        place(j, k)
        left -= set(chosen)
    pad = len(places)
    stages, work = [], 0
    for chosen_here in order:
        most = max(len(near) for _, near in chosen_here)
        work += len(chosen_here) * (1 + most) ** 2
        beside, near_all, pairs = [], [], []
        for i, near in chosen_here:
            fill = most - len(near)
            near_all.append(near + [size] * fill)
            beside.append([place(i, j) for j in near] + [pad] * fill)
            for j in near + [None] * fill:
                for k in near + [None] * fill:
                    both = j is not None and k is not None and j >= k
                    pairs.append(place(j, k) if both else pad)
        nodes = torch.tensor([i for i, _ in chosen_here])
        shape = len(chosen_here), most
        lists = (near_all, beside)
        near_t, beside_t = (torch.tensor(x, dtype=torch.int64).reshape(shape) for x in lists)
        at = torch.tensor([place(i, i) for i, _ in chosen_here])
        stages.append(Stage(nodes, near_t, at, beside_t, torch.tensor(pairs, dtype=torch.int64)))
    rows, columns = (torch.tensor(x) for x in zip(*places, strict=True))
    return Elimination(stages, rows, columns, work)


class SparseRoot(NamedTuple):
    """L of matrices ``(..., P, P)``.

    Attributes:
        order: the order of elimination.
        diagonals: of each stage the diagonal of L, ``(..., E)``.
        beside: of each stage the other entries of its columns, ``(..., E, M)``.
        definite: whether the matrices are positive definite, ``(...)``; else L is of no use.
    """

    order: Elimination
    diagonals: Sequence[Tensor]
    beside: Sequence[Tensor]
    definite: Tensor

    def solve(self, b: Tensor) -> Tensor:
        """H⁻¹ b of ``(..., P)``."""
        b, solved = _padded(b), []
        for stage, d, off in zip(self.order.stages, self.diagonals, self.beside, strict=True):
            y = b[..., stage.nodes] / d
            solved.append(y)
            b = _add(b, stage.neighbours.flatten(), -(off * y[..., None]).flatten(-2))
        return self._back(solved)

    def spread(self, noise: Tensor) -> Tensor:
        """Pᵀ L^{−⊤} of standard Normal noise ``(..., P)``, whose covariance is H⁻¹."""
        return self._back([noise[..., stage.nodes] for stage in self.order.stages])

    def _back(self, right: Sequence[Tensor]) -> Tensor:
        """Pᵀ L^{−⊤} of vectors by stages."""
        size = self.order.size
        x = torch.zeros_like(right[0][..., :1]).expand(*right[0].shape[:-1], size + 1)
        for i in reversed(range(len(right))):
            stage = self.order.stages[i]
            y = right[i] - (self.beside[i] * x[..., stage.neighbours]).sum(-1)
            x = _add(x, stage.nodes, y / self.diagonals[i])
        return x[..., :-1]

    def white(self, x: Tensor) -> Tensor:
        """Lᵀ P x of ``(..., P)``, in the order of the variables: the noise of :meth:`spread`."""
        x = _padded(x)
        found = torch.zeros_like(x)
        for stage, d, off in zip(self.order.stages, self.diagonals, self.beside, strict=True):
            y = d * x[..., stage.nodes] + (off * x[..., stage.neighbours]).sum(-1)
            found = _add(found, stage.nodes, y)
        return found[..., :-1]

    def log_det(self) -> Tensor:
        """½ log |H|, ``(...)``."""
        return sum(d.log().sum(-1) for d in self.diagonals)  # type: ignore[return-value]


def sparse_root(order: Elimination, entries: Tensor) -> SparseRoot:
    """L of matrices with these entries ``(..., Z)`` at the rows and columns of the order."""
    values = _padded(entries)
    diagonals, beside, definite = [], [], torch.ones_like(entries[..., 0], dtype=torch.bool)
    for stage in order.stages:
        pivots = values[..., stage.diagonal]
        definite = definite & (pivots > 0).all(-1)
        d = torch.where(pivots > 0, pivots, 1.0).sqrt()
        off = values[..., stage.beside] / d[..., None]
        values = _add(values, stage.pairs, -(off[..., None] * off[..., None, :]).flatten(-3))
        diagonals.append(d)
        beside.append(off)
    return SparseRoot(order, diagonals, beside, definite)


def _padded(x: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros_like(x[..., :1])], -1)


def _add(x: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Add values ``(..., E)`` at places ``(E,)`` of ``(..., P + 1)``; the last place stays as it was."""
    inside = (places < x.shape[-1] - 1).to(x.dtype)
    batch = broadcast_shape(x.shape[:-1], values.shape[:-1])
    x = x.expand(*batch, x.shape[-1])
    return x.index_add(-1, places, (values * inside).expand(*batch, len(places)))
