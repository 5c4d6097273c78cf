"""The two plates: a cohort of clients as one dense batch that a Pyro program runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints, transform_to

from bayesfed.data.columns import UnknownName

CLIENTS = "clients"
OBSERVATIONS = "observations"
MISSING = "missing"
"""What the ``infer`` of an observed site says of its rows, where data may have gaps."""


class Fields(dict[str, Tensor]):
    """What a client's rows hold: ``obs["x"]`` must be there, ``obs.get("y")`` may be None.

    Attributes:
        constant: the names of fields that a program has read as ones of a client, not of its rows.
    """

    constant: set[str]

    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        self.constant = set()

    def __missing__(self, name: str) -> Tensor:
        raise UnknownName(
            f"unknown field {name!r}: the federation has {', '.join(self) or 'no fields'}"
        )


class Gaps(Messenger):
    """Leave out outcomes that are missing: their rows do not count, and hold some value of the support."""

    def _pyro_sample(self, msg: Any) -> None:
        fn, value = msg["fn"], msg["value"]
        if not msg["is_observed"] or not isinstance(value, Tensor) or not value.is_floating_point():
            return
        there = ~value.isnan()
        some = transform_to(fn.support)(torch.zeros_like(value)) if _flat(fn) else 0.0
        msg["value"] = torch.where(there, value, some)
        there = there.flatten(value.ndim - fn.event_dim).all(-1) if fn.event_dim else there
        msg["mask"] = there if msg["mask"] is None else msg["mask"] & there
        msg["infer"] = {**msg["infer"], MISSING: ~there}


def _flat(fn: Any) -> bool:
    """Whether values are reals, positive numbers and the like, which 0 over the reals can stand for."""
    support = fn.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return not support.is_discrete and support.event_dim == 0


@dataclass(frozen=True)
class Batch:
    """K clients with B rows each, padded: what one execution of a model sees.

    Attributes:
        fields: field name to tensor of shape ``(K, B, *event)``.
        mask: bool ``(K, B)``, False where a row is padding.
        scale: ``(K, 1)``: n_i / b_i, so that a minibatch stands for all of the client's rows.
        index: int64 ``(K,)``: the clients' positions in their federation.
        gaps: a field may have missing values, NaN.
    """

    fields: Fields
    mask: Tensor
    scale: Tensor
    index: Tensor
    gaps: bool = False

    def event_shape(self, field: str) -> torch.Size:
        """The shape of one row of a field: ``()`` for a number, ``(P,)`` for a vector."""
        return self.fields[field].shape[2:]

    def of_clients(self, field: str) -> Tensor:
        """A field that is the same in all rows of a client, ``(K, 1, *event)``: for priors inside ``clients()``."""
        self.fields.constant.add(field)
        return self.fields[field][:, :1]

    def __len__(self) -> int:
        return len(self.index)

    @property
    def rows(self) -> Tensor:
        """n_i, the rows that a client has in all: ``(K,)``, of the floating type."""
        return self.scale.squeeze(-1) * self.mask.sum(-1)

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.mask.device

    def clients(self) -> IndepMessenger:
        """``pyro.plate("clients", K, dim=-2)``: what is sampled inside never leaves a client."""
        return pyro.plate(CLIENTS, len(self), dim=-2)

    @contextmanager
    def observations(self) -> Iterator[Fields]:
        """``pyro.plate("observations", B, dim=-1)``, masked and scaled by n_i / b_i."""
        with (
            pyro.plate(OBSERVATIONS, self.mask.shape[1], dim=-1),
            poutine.mask(mask=self.mask),
            poutine.scale(scale=self.scale),
            Gaps() if self.gaps else nullcontext(),
        ):
            yield self.fields

    @contextmanager
    def jointly(self) -> Iterator[tuple[Fields, Tensor]]:
        """The rows of a client as one event, for a likelihood in which they depend on each other.

        The fields ``(K, B, *event)`` and which rows count, ``(K, B)``. The log density of a minibatch counts n_i / b_i
        times: not that of all rows on average, but a likelihood still (see :class:`~bayesfed.models.GaussianProcess`).
        """
        with poutine.scale(scale=self.scale):
            yield self.fields, self.mask

    def head(self) -> Batch:
        """The same clients with their first row only, for what does not depend on the rows."""
        fields = Fields({name: value[:, :1] for name, value in self.fields.items()})
        return replace(self, fields=fields, mask=self.mask[:, :1])

    def drop(self, *names: str) -> Batch:
        """The same batch without some fields: ``obs.get(name)`` is None, so the site is sampled."""
        kept = {name: value for name, value in self.fields.items() if name not in names}
        return replace(self, fields=Fields(kept))


@dataclass(frozen=True)
class Rows:
    """The rows that K clients use at their local steps: ``rows(step)`` is a minibatch, ``rows(None)`` all of them.

    Attributes:
        at: makes these batches.
        lengths: n_i, int64 ``(K,)``, on the CPU: how long the work is must be known without waiting for a device.
        width: rows of a minibatch.
    """

    at: Callable[[int | None], Batch]
    lengths: Tensor
    width: int

    def __call__(self, step: int | None) -> Batch:
        """The minibatch of a step."""
        return self.at(step)

    def schedule(self, epochs: int, steps: int | None = None) -> Tensor:
        """Which clients take each step: bool ``(steps, K)``, on the CPU.

        Args:
            epochs: passes over a client's rows, in minibatches.
            steps: so many steps for every client, instead.

        Example:
            >>> import torch
            >>> from bayesfed.data.batch import Rows
            >>> Rows(lambda step: None, torch.tensor([5, 2]), width=2).schedule(epochs=1).tolist()
            [[True, True], [True, False], [True, False]]
        """
        last = epochs * ((self.lengths + self.width - 1) // self.width)
        if steps is not None:
            last = torch.full_like(last, steps)
        return torch.arange(int(last.max()), device="cpu")[:, None] < last
