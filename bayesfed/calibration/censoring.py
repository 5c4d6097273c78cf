"""Censored rows of simulated data: until when each row is observed, and the field that says which are censored.

A row that is censored in the clients' data is observed until its time there, and a simulated event after that time is
censored at it. A row with an event has no end of observation, for its data do not say when it would have been. These
ends are covariates: simulated times do not depend on them, as is assumed wherever a time is censored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions.util import broadcast_shape
from torch import Tensor

from bayesfed.data.federation import Federation
from bayesfed.elbo.sites import innermost
from bayesfed.models.cox import PiecewiseExponential
from bayesfed.models.weibull_survival import CensoredWeibull


@dataclass(frozen=True, eq=False)
class FollowUp:
    """Until when the rows of a site are observed.

    Attributes:
        ends: in the unit of the times, infinite where there is no end, ``(rows,)``.
        field: the field that says which rows are censored, ``(rows,)``.
        of_event: its value, 0 or 1, where the time is that of an event; a censored row has the other one.
    """

    ends: Tensor
    field: str
    of_event: int

    def censor(self, times: Tensor) -> Tensor:
        """Return times of events ``(..., rows)``, those after the end replaced by it.

        Example:
            >>> import torch
            >>> from bayesfed.calibration.censoring import FollowUp
            >>> follow_up = FollowUp(torch.tensor([2.0, torch.inf]), "event", 1)
            >>> times = follow_up.censor(torch.tensor([3.0, 3.0]))
            >>> times, follow_up.indicator(times)
            (tensor([2., 3.]), tensor([0., 1.]))
        """
        return torch.minimum(times, self.ends.to(times))

    def indicator(self, times: Tensor) -> Tensor:
        """Return the values of the field at times after :meth:`censor`, ``(..., rows)``."""
        event = (times < self.ends.to(times)).to(times)
        return event if self.of_event else 1.0 - event


def find_event(node: Mapping[str, Any], mask: Tensor) -> Tensor | None:
    """Return 1 for events and 0 for censored rows of a batch, ``(rows,)``; None if the site cannot be censored.

    Args:
        node: of an observed site in Pyro's trace.
        mask: of the batch's rows, ``(K, B)``.
    """
    fn = innermost(node["fn"])
    if not isinstance(fn, CensoredWeibull | PiecewiseExponential):
        return None
    return fn.event.expand(broadcast_shape(fn.event.shape, mask.shape))[..., mask].reshape(-1)


def find_follow_up(
    events: Mapping[str, Tensor], fields: Mapping[str, str], federation: Federation
) -> dict[str, FollowUp]:
    """Return until when the rows of each site with censored rows are observed.

    Args:
        events: site to 1 for events and 0 for censored rows, ``(rows,)``.
        fields: observed site to the field with its outcomes.
        federation: the clients.

    Raises:
        ValueError: no field, or more than one, has these values; two sites read the same one.
    """
    found: dict[str, FollowUp] = {}
    for site, event in events.items():
        if bool((event == 1).all()):
            continue
        times = federation[fields[site]]
        candidates = []
        for name in federation.fields:
            value = federation[name].to(event)
            if value.shape == event.shape:
                candidates += [
                    (name, k) for k in (1, 0) if torch.equal(value, event if k else 1 - event)
                ]
        named = [pair for pair in candidates if pair[0] in ("event", "cens")] or candidates
        if len(named) != 1 or any(named[0][0] == other.field for other in found.values()):
            raise ValueError(
                f"site {site!r} has censored rows, and which field says so is not clear: give it a field of its own, "
                "'event', 1 for the time of an event and 0 for a censored time"
            )
        ends = times.where((event == 0) & ~times.isnan(), torch.inf)
        found[site] = FollowUp(ends, *named[0])
    return found
