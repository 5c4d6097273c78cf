"""The log density of one sample site of a trace, with its mask and its scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor


def log_density(site: Mapping[str, Any], fn: Any = None) -> Tensor:
    """log p(value) of a sample site: ``(S, K, B or 1)``, or what is broadcast to it.

    Rows that are masked count as 0, and each row of a minibatch counts n_i / b_i times.

    Args:
        site: a node of a trace or a handler's message, with ``fn``, ``value``, ``mask`` and ``scale``.
        fn: another distribution of the same value; by default that of the site.

    Example:
        >>> from pyro import poutine
        >>> from bayesfed import datasets, models
        >>> from bayesfed.elbo.log_density import log_density
        >>> schools = datasets.eight_schools()
        >>> trace = poutine.trace(models.eight_schools).get_trace(schools)
        >>> tuple(log_density(trace.nodes["mu"]).shape), tuple(log_density(trace.nodes["y"]).shape)
        ((), (8, 1))
    """
    fn = site["fn"] if fn is None else fn
    return torch.as_tensor(scale_and_mask(fn.log_prob(site["value"]), site["scale"], site["mask"]))
