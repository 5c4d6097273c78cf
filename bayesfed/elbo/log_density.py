"""The log density of one sample site of a trace, with its mask and its scale, by row and by client."""

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


def sum_log_density(site: Mapping[str, Any]) -> Tensor:
    """Σ_b log p(y_b) of a sample site over the rows of each client: ``(S, K)``, or what is broadcast to it.

    Rows that share a discrete variable of their client depend on each other. Their joint density takes one sum over the
    values of the variable, where the density of each row given the earlier ones takes as many as there are rows.

    Args:
        site: a node of a trace or a handler's message, inside the clients plate.

    Example:
        >>> from pyro import poutine
        >>> from bayesfed import datasets, models
        >>> from bayesfed.elbo.log_density import sum_log_density
        >>> trace = poutine.trace(models.eight_schools).get_trace(datasets.eight_schools())
        >>> tuple(sum_log_density(trace.nodes["y"]).shape)
        (8,)
    """
    fn = site["fn"]
    if not hasattr(fn, "log_prob_of_rows") or fn.row_mask is not site["mask"]:
        return log_density(site).sum(-1)
    scale = torch.as_tensor(site["scale"])
    if scale.ndim and scale.shape[-1] > 1:
        return log_density(site).sum(-1)
    return (scale[..., 0] if scale.ndim else scale) * fn.log_prob_of_rows(site["value"])
