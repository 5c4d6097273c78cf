"""Importance weights: effective sample size, Pareto k-hat, truncation and resampling."""

from __future__ import annotations

import math

import torch
from pyro.ops.stats import fit_generalized_pareto
from torch import Tensor

EQUAL = 0.99
"""Relative effective sample size above which weights are equal up to round-off, and have no tail to speak of."""


def effective_sample_size(weights: Tensor) -> float:
    """Return the number of equal weights that have the variance of these ``(S,)`` (Kong 1992)."""
    return float(weights.sum().square() / weights.square().sum())


def truncate_weights(log_weights: Tensor) -> Tensor:
    """Turn log weights ``(S,)`` into weights that sum to 1, truncated at √S times their mean; NaN counts as weight 0.

    Ionides 2008, *Truncated importance sampling*.
    """
    weights = (log_weights - log_weights.nan_to_num(-torch.inf).max()).exp().nan_to_num(0.0)
    weights = weights.clamp(max=weights.mean() * len(weights) ** 0.5)
    return weights / weights.sum()


def systematic_resample(weights: Tensor, count: int) -> Tensor:
    """Choose ``count`` draws by weight; return their positions (Carpenter, Clifford & Fearnhead 1999)."""
    at = (torch.arange(count, dtype=weights.dtype, device=weights.device) + 0.5) / count
    return torch.searchsorted(weights.cumsum(0), at).clamp(max=len(weights) - 1)


def pareto_k(log_weights: Tensor) -> float:
    """Estimate Pareto k of weights ``(S,)``, by a generalised Pareto distribution fitted to the largest of them.

    Weights have about 1/k moments (Yao, Vehtari, Simpson & Gelman 2018, *Yes, but did it work?*, section 2). Returns
    infinity if a few weights are as large as all others together, and 0 if all are equal up to round-off. In single
    precision the log weights of 20,000 rows have only some dozens of values.
    """
    if effective_sample_size((log_weights - log_weights.max()).exp()) > EQUAL * len(log_weights):
        return 0.0
    tail = min(len(log_weights) // 5, math.ceil(3 * len(log_weights) ** 0.5))
    top = (log_weights - log_weights.max()).sort().values[-tail - 1 :].exp()
    above = top[1:] - top[0]
    if not top.isfinite().all() or not above[tail // 4] > 0:
        return math.inf
    return float(fit_generalized_pareto(above.cpu())[0])  # its grid of values lies on the CPU


def tail_share(log_weights: Tensor, k: float) -> float:
    """Estimate the share of all weight that a generalised Pareto tail of shape k has beyond the largest of ``(S,)``."""
    largest = float(log_weights.nan_to_num(-torch.inf).softmax(0).nan_to_num(0.0).max())
    return largest / (1 - k) if k < 1 else math.inf
