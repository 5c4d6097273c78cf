"""The answers to a round, and the sum of uploads that the server can see: their total, or one of medians."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.deploy.messages import RoundId, Tensors
from bayesfed.engine.parts import ROWS

Parts = dict[str, Tensors]
"""The tensors of an answer: ``total``, ``sound`` and ``elbo``; with secure sums ``masked`` and ``sound``."""


class Answers(NamedTuple):
    """The answers to a round, by institution in the order of the members."""

    round: RoundId
    replies: dict[str, Parts]


def combine(replies: Sequence[Parts], median: bool) -> tuple[Tensors, Tensor]:
    """Return the sum of the uploads, or :func:`median_total`, and the sum of the ELBO terms."""
    total = {
        name: torch.stack([parts["total"][name] for parts in replies]).sum(0)
        for name in replies[0]["total"]
    }
    elbo = torch.stack([parts["elbo"]["terms"] for parts in replies]).sum(0)
    return (total | median_total(replies) if median else total), elbo


def median_total(replies: Sequence[Parts]) -> Tensors:
    """Return a sum in which every client has the median, number by number, of the institutions' mean uploads."""
    means, weight = [], torch.zeros(())
    for parts in replies:
        own = parts["total"].get(ROWS, parts["sound"]["clients"].sum())
        if bool(own > 0):
            means.append({name: value / own for name, value in parts["total"].items()})
            weight = weight + own
    return {
        name: weight * torch.stack([mean[name] for mean in means]).median(0).values
        for name in (replies[0]["total"].keys() - {ROWS} if means else ())
    }
