"""Draws of outcomes that a distribution's own sampler does not make."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from bayesfed.elbo import handlers
from bayesfed.elbo.sites import innermost, name_of


class NoSampler(NotImplementedError):
    """An outcome cannot be drawn from its distribution."""


class Outcomes(Messenger):
    """Draw sites that have no value; counts have the totals of their own rows."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] or msg["done"] or handlers.is_plate(msg):
            return
        fn, totals = msg["fn"], _totals(msg)
        if totals is None:
            try:
                msg["value"] = fn()
            except (NotImplementedError, TypeError):
                raise NoSampler(
                    f"site {msg['name']!r}: {name_of(fn)} has no sampler of batches, so that there are no predictions"
                ) from None
        else:
            msg["value"] = _draw_counts(innermost(fn), totals)
        msg["done"] = True


def _totals(msg: Any) -> Tensor | None:
    """The totals of counts, which their density is conditional on, NaN where unknown; None for the distribution's own.

    Raises:
        NoSampler: there are neither totals nor outcomes.
    """
    fn, seen, mask = innermost(msg["fn"]), msg["infer"].get("obs"), msg["mask"]
    if not isinstance(fn, dist.Multinomial | dist.DirichletMultinomial):
        return None
    total = torch.as_tensor(fn.total_count)
    given = bool((total != 1).any())
    if seen is None and not given:
        raise NoSampler(
            f"site {msg['name']!r}: {name_of(fn)} has no total_count, which predictions of rows without outcomes need. "
            "Give it, or write OneHotCategorical for single draws"
        )
    totals = total
    if seen is not None:
        there = torch.as_tensor(True if mask is None else mask)
        totals = torch.where(there, seen.sum(-1), total if given else torch.nan)
    return None if totals.unique().numel() == 1 and (totals == total).all() else totals


def _draw_counts(fn: Any, totals: Tensor) -> Tensor:
    """Draw counts ``(*batch, k)`` with these totals, each by a binomial distribution given those before it."""
    dirichlet = isinstance(fn, dist.DirichletMultinomial)
    probs = fn._dirichlet.sample() if dirichlet else fn.probs
    totals = totals.to(probs).expand(probs.shape[:-1])
    left = totals.nan_to_num(0.0)
    remaining, counts = probs.flip(-1).cumsum(-1).flip(-1), []
    for p in (probs / remaining).clamp(0, 1).unbind(-1)[:-1]:
        counts.append(torch.binomial(left, p.nan_to_num(0.0)))
        left = left - counts[-1]
    return torch.stack([*counts, left], -1).where(totals.isfinite().unsqueeze(-1), torch.nan)
