"""A cohort of clients as one dense batch with the two plates that a Pyro program opens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.indep_messenger import IndepMessenger
from torch import Tensor

from bayesfed.data.columns import UnknownName
from bayesfed.data.missing import MaskMissing

CLIENTS = "clients"
OBSERVATIONS = "observations"


class Fields(dict[str, Tensor]):
    """The fields of a batch by name: ``obs["x"]`` must be there, ``obs.get("y")`` may be None.

    Attributes:
        constant: the names of fields that a program has read as constant within each client.
    """

    constant: set[str]

    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        self.constant = set()

    def __missing__(self, name: str) -> Tensor:
        raise UnknownName(
            f"unknown field {name!r}: the federation has {', '.join(self) or 'no fields'}"
        )


@dataclass(frozen=True)
class Batch:
    """K clients with B rows each, padded: the input of one execution of a model.

    Attributes:
        fields: field name to tensor of shape ``(K, B, *event)``.
        mask: bool ``(K, B)``, False where a row is padding.
        scale: ``(K, 1)``: n_i / b_i, so that the log likelihood of a minibatch estimates that of all n_i rows; or
            ``(K, B)`` where rows count differently, which adds up to n_i.
        index: int64 ``(K,)``: the clients' positions in their federation.
        gaps: a field may have missing values, NaN.
        given: evidence of the clients' own rows, by its use and by site: see
            :class:`~bayesfed.elbo.handlers.GivenOwnRows`.
    """

    fields: Fields
    mask: Tensor
    scale: Tensor
    index: Tensor
    gaps: bool = False
    given: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def event_shape(self, field: str) -> torch.Size:
        """Return the shape of one row of a field: ``()`` for a number, ``(P,)`` for a vector."""
        return self.fields[field].shape[2:]

    def of_clients(self, field: str) -> Tensor:
        """Return a field that is constant within each client, ``(K, 1, *event)``: for priors inside ``clients()``."""
        self.fields.constant.add(field)
        return self.fields[field][:, :1]

    def __len__(self) -> int:
        return len(self.index)

    @property
    def rows(self) -> Tensor:
        """n_i, the number of all rows of each client: ``(K,)``, of the floating type."""
        if self.scale.shape[-1] > 1:
            return torch.where(self.mask, self.scale, 0.0).sum(-1)
        return self.scale.squeeze(-1) * self.mask.sum(-1)

    @property
    def device(self) -> torch.device:
        """The device of the fields."""
        return self.mask.device

    def clients(self) -> IndepMessenger:
        """Open ``pyro.plate("clients", K, dim=-2)``: variables that are sampled inside never leave a client."""
        return pyro.plate(CLIENTS, len(self), dim=-2)

    @contextmanager
    def observations(self) -> Iterator[Fields]:
        """Open ``pyro.plate("observations", B, dim=-1)``, masked and scaled by n_i / b_i."""
        with (
            pyro.plate(OBSERVATIONS, self.mask.shape[1], dim=-1),
            poutine.mask(mask=self.mask),
            poutine.scale(scale=self.scale),
            MaskMissing() if self.gaps else nullcontext(),
        ):
            yield self.fields

    @contextmanager
    def jointly(self) -> Iterator[tuple[Fields, Tensor]]:
        """Provide the rows of each client as one event, for a likelihood in which they depend on each other.

        The block gets the fields ``(K, B, *event)`` and the mask ``(K, B)`` of the rows that count. The log density of
        a minibatch is multiplied by n_i / b_i. On average that is not the log density of all rows, but it is a
        composite likelihood (see :class:`~bayesfed.models.GaussianProcess`).
        """
        with poutine.scale(scale=self.scale):
            yield self.fields, self.mask

    def head(self) -> Batch:
        """Return the same clients with their first row only, for terms that do not depend on the rows."""
        fields = Fields({name: value[:, :1] for name, value in self.fields.items()})
        return replace(self, fields=fields, mask=self.mask[:, :1], scale=self.scale[:, :1])

    def select(self, clients: Tensor) -> Batch:
        """Return some of the clients, by position."""
        fields = Fields({name: value[clients] for name, value in self.fields.items()})
        mask, scale, index = self.mask[clients], self.scale[clients], self.index[clients]
        given = {
            use: {n: v[clients] for n, v in found.items()} for use, found in self.given.items()
        }
        return replace(self, fields=fields, mask=mask, scale=scale, index=index, given=given)

    def drop(self, *names: str) -> Batch:
        """Return the batch without some fields: ``obs.get(name)`` is None, so a site observed there is sampled."""
        fields = {name: value for name, value in self.fields.items() if name not in names}
        return replace(self, fields=Fields(fields))
