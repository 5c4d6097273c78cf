"""The answers to a round, and the sum of uploads that the server can see: their total, or that of a robust rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.deploy.messages import RoundId, Tensors
from bayesfed.engine.parts import flat, nested
from bayesfed.rules import Rule
from bayesfed.rules.rule import Robust

Parts = dict[str, Tensors]
"""The tensors of an answer: ``total``, ``sound`` and ``elbo``; with secure sums ``masked`` and ``sound``."""


class Answers(NamedTuple):
    """The answers to a round, by institution in the order of the members."""

    round: RoundId
    replies: dict[str, Parts]


def combine(replies: Sequence[Parts], rule: Rule) -> tuple[Tensors, Tensor]:
    """Return the sum of the uploads, or the combination of a robust rule, and the sum of the ELBO terms."""
    totals = [parts["total"] for parts in replies]
    total = {name: torch.stack([one[name] for one in totals]).sum(0) for name in totals[0]}
    clients = [parts["sound"]["clients"].sum() for parts in replies]
    if isinstance(rule, Robust):
        total |= flat(rule.combine([nested(one) for one in totals], clients))
    elbo = torch.stack([parts["elbo"]["terms"] for parts in replies]).sum(0)
    return total, elbo
