"""Values outside the support of an outcome's distribution, or at an end of it where there is no density."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import TransformedDistribution, constraints

from bayesfed.elbo.sites import innermost


def in_support(fn: Any, value: Tensor) -> Tensor:
    """Return whether values lie in the support of a distribution: bool, of its batch shape.

    Counts are whole numbers. Their sum is at most the total, unless that is 1, torch's default: the density of a
    Multinomial does not read it.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> from bayesfed.checks.supports import in_support
        >>> in_support(dist.Multinomial(probs=torch.ones(2)), torch.tensor([[2.0, 1.0], [0.5, 0.5]])).tolist()
        [True, False]
    """
    support = fn.support
    if not isinstance(support, constraints.multinomial):
        return support.check(value)
    total = torch.as_tensor(support.upper_bound)
    counts = ((value >= 0) & (value == value.round())).all(-1)
    return counts & ((value.sum(-1) <= total) | (total == 1).all())


def at_edge(fn: Any, value: Tensor) -> Tensor:
    """Return whether values lie at an end of a continuous distribution's support: bool, of its batch shape.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> from bayesfed.checks.supports import at_edge
        >>> at_edge(dist.Beta(2.0, 2.0), torch.tensor([0.0, 0.5, 1.0])).tolist()
        [True, False, True]
    """
    return _any(_ends(fn, value), len(fn.event_shape))


def has_density(fn: Any, value: Tensor) -> Tensor:
    """Return whether the density at values is neither zero nor infinite: bool, of the distribution's batch shape.

    A transform may move an end of its range inwards, such as a sigmoid the numbers 0 and 1: there is no density either.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> from bayesfed.checks.supports import has_density
        >>> has_density(dist.Beta(2.0, 1.0), torch.tensor([0.0, 0.5, 1.0])).tolist()
        [False, True, True]
    """
    finite, inner, back = fn.log_prob(value).isfinite(), innermost(fn), value
    if not isinstance(inner, TransformedDistribution):
        return finite
    for transform in reversed(inner.transforms):
        back = transform.inv(back)
    for transform in inner.transforms:
        back = transform(back)
    return finite & ~_any(_ends(fn, value) & (back != value), len(fn.event_shape))


def _ends(fn: Any, value: Tensor) -> Tensor:
    """Return which entries of values lie at an end."""
    support = fn.support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    found = torch.zeros_like(value, dtype=torch.bool)
    if support.is_discrete:
        return found
    if support is constraints.simplex:
        return value == 0
    for bound in (getattr(support, f"{side}_bound", None) for side in ("lower", "upper")):
        found = found if bound is None else found | (value == bound)
    return found


def _any(entries: Tensor, event: int) -> Tensor:
    return entries.flatten(-event).any(-1) if event else entries
