"""Draws and clients as two levels of ``torch.vmap``, and the conversion of tensors between inside and outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.vmap import vmap_increment_nesting

RANDOM = "error"
"""vmap's treatment of random numbers: a program that draws its own would differ from step to step."""


@dataclass(frozen=True)
class Levels:
    """The numbers and sizes of vmap's levels, draws around clients; ``draws`` is None without a plate of draws."""

    draws: tuple[int, int] | None
    clients: tuple[int, int]

    def inside(self, value: Tensor) -> Tensor:
        """Convert a tensor ``(S or 1, K or 1, *shape)`` to one of ``shape`` inside vmap."""
        for level in (self.draws, self.clients):
            if level is None or value.shape[0] == 1 != level[1]:
                value = value.squeeze(0)
            else:
                value = _functorch._add_batch_dim(value, 0, level[0])
        return value

    def outside(self, value: Tensor) -> Tensor:
        """Convert a tensor of ``shape`` inside vmap to ``(S or 1, K or 1, *shape)``.

        The caller has left vmap's interpreters.
        """
        at = {}
        while _functorch.is_batchedtensor(value):
            at[_functorch.maybe_get_level(value)] = _functorch.maybe_get_bdim(value)
            value = _functorch.get_unwrapped(value)
        draw = None if self.draws is None else at.get(self.draws[0])
        client = at.get(self.clients[0])
        if client is not None and draw is not None and client >= draw:
            client += 1  # its number does not count the dimension of draws
        moved = [axis for axis in (draw, client) if axis is not None]
        value = value.movedim(moved, tuple(range(len(moved))))
        if draw is None:
            value = value[None]
        return value.unsqueeze(1) if client is None else value

    def leave(self, value: Tensor, layout: Layout) -> Tensor:
        """Convert a site's tensor ``(*batch, *event)`` to ``(S, K, B or 1, *own, *event)``, S if there are draws."""
        value = layout.outside(self.outside(value))
        return value if self.draws else value.squeeze(0)

    def enter(self, value: Tensor, layout: Layout, event: int) -> Tensor:
        """The inverse of :meth:`leave`; the last ``event`` dimensions are no batch dimensions outside."""
        lead = value.ndim - event
        return layout.inside(self.inside(value.reshape((*[1] * (3 - lead), *value.shape))))


@contextmanager
def opened(draws: int | None, clients: int) -> Iterator[Levels]:
    """Open both levels of vmap."""
    with ExitStack() as stack:
        outer = None
        if draws is not None:
            outer = stack.enter_context(vmap_increment_nesting(draws, RANDOM)), draws
        inner = stack.enter_context(vmap_increment_nesting(clients, RANDOM)), clients
        yield Levels(outer, inner)


@dataclass(frozen=True)
class Layout:
    """The dimensions of a site: ``(*batch, *event)`` in the program, ``(S, K, B or 1, *own, *event)`` outside.

    Attributes:
        batch: the batch shape that the program gives the site.
        local: whether dimension -2 is the client, of size 1.
        rows: whether dimension -1 holds the client's rows, or has size 1.
    """

    batch: torch.Size
    local: bool
    rows: bool

    @property
    def width(self) -> int:
        """The size of the dimension of rows outside: B or 1."""
        return self.batch[-1] if self.local and self.rows else 1

    @property
    def own(self) -> list[int]:
        """The program's own batch dimensions, which become part of the event."""
        left = len(self.batch) - (2 if self.local else 0)
        return [*range(left)] + ([left + 1] if self.local and not self.rows else [])

    def outside(self, value: Tensor) -> Tensor:
        """Permute ``(S, K, *batch, *event)`` to ``(S, K, B or 1, *own, *event)``."""
        axes, first = [2 + axis for axis in self.own], 2 + len(self.batch)
        front = [0, 1]
        if self.local:
            axes.append(first - 2)  # the client: 1
            front += [first - 1] if self.rows else []
        value = value.permute(*front, *axes, *range(first, value.ndim))
        if self.local:
            value = value.squeeze(len(front) + len(axes) - 1)
        return value if self.local and self.rows else value.unsqueeze(2)

    def inside(self, value: Tensor) -> Tensor:
        """Permute ``(B or 1, *own, *event)`` to ``(*batch, *event)``."""
        if not self.local:
            return value.squeeze(0)
        own = list(range(1, 1 + len(self.own)))
        rest = range(1 + len(own), value.ndim)
        if self.rows:
            return value.permute(*own, 0, *rest).unsqueeze(len(own))
        left, last = own[:-1], own[-1:]
        return value.permute(*left, 0, *last, *rest)

    def pooled(self, value: Tensor) -> Tensor:
        """The value in a program that runs for K clients at once without vmap, of ``(K or 1, 1, *own, *event)``."""
        parts = [self.inside(one) for one in value]
        return torch.cat(parts, len(self.batch) - 2) if self.local else parts[0]
