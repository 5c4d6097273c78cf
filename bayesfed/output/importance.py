"""Importance weights: effective sample size, Pareto k-hat, truncation and resampling."""

from __future__ import annotations

import math

import torch
from pyro.ops.stats import fit_generalized_pareto
from torch import Tensor

EQUAL = 0.99
"""Relative effective sample size above which weights are equal up to round-off, and have no tail to speak of."""
TAIL = 0.05
"""The share of all weight in each tail of an entry whose effective sample size is computed."""


def effective_sample_size(weights: Tensor) -> float:
    """Return the number of equal weights that have the variance of these ``(S,)`` (Kong 1992)."""
    return float(weights.sum().square() / weights.square().sum())


def least_effective_size(weights: Tensor, z: Tensor) -> float:
    """Return the smallest number of independent draws whose mean would be as exact as the weighted mean of an entry.

    It is the variance of an entry over the squared error of its mean, Σ w² (z − m)² of weights that sum to 1 (Owen
    2013, *Monte Carlo theory, methods and examples*, equation 9.8). Draws without weight may be infinite.

    Args:
        weights: ``(S,)``.
        z: draws ``(S, D)``.

    Example:
        >>> import torch
        >>> from bayesfed.output.importance import least_effective_size
        >>> z = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 3.0], [0.0, -3.0]])
        >>> round(least_effective_size(torch.ones(4), z), 2)
        4.0
        >>> round(least_effective_size(torch.tensor([3.0, 3.0, 1.0, 1.0]), z), 2)
        2.67
    """
    counts = weights > 0
    shares, z = (weights[counts] / weights.sum()).double(), z[counts].double()
    squares = (z - shares @ z).square()
    sizes = (shares @ squares) / (shares.square() @ squares)
    return float(sizes.nan_to_num(0.0).min())  # a single draw: 0 / 0


def least_tail_size(weights: Tensor, z: Tensor) -> float:
    """Return the smallest number of independent draws that would have the tails of an entry as exactly.

    As :func:`least_effective_size`, of the indicators of values below the 5 % and above the 95 % quantile (the tail
    ESS of Vehtari, Gelman, Simpson, Carpenter & Bürkner 2021, *Rank-normalization, folding, and localization*).

    Args:
        weights: ``(S,)``.
        z: draws ``(S, D)``.

    Example:
        >>> import torch
        >>> from bayesfed.output.importance import least_effective_size, least_tail_size
        >>> z = torch.arange(-50.0, 50.0)[:, None]
        >>> round(least_tail_size(torch.ones(100), z))
        100
        >>> weights = torch.ones(100).where(z[:, 0] < 49, 5.0)  # the largest draw has the weight of five
        >>> round(least_effective_size(weights, z)), round(least_tail_size(weights, z))
        (70, 25)
    """
    z, order = z.sort(0)
    shares = (weights / weights.sum()).double()[order]
    up_to = shares.cumsum(0)
    sizes = []
    for inside in (up_to <= TAIL, up_to > 1 - TAIL):
        centred = inside.double() - (shares * inside).sum(0)
        sizes.append((shares * centred.square()).sum(0) / (shares * centred).square().sum(0))
    return float(torch.stack(sizes).nan_to_num(0.0).min())  # no draw inside: 0 / 0


def truncate_weights(log_weights: Tensor) -> Tensor:
    """Turn log weights ``(S,)`` into weights that sum to 1, truncated at √S times their mean; NaN counts as weight 0.

    Ionides 2008, *Truncated importance sampling*.
    """
    weights = (log_weights - log_weights.nan_to_num(-torch.inf).max()).exp().nan_to_num(0.0)
    weights = weights.clamp(max=weights.mean() * len(weights) ** 0.5)
    return weights / weights.sum()


def temper_weights(log_weights: Tensor, size: float) -> Tensor:
    """Raise weights to the largest power, at most 1, at which their effective sample size is at least as asked.

    A proposal that is fitted to them lies between that of the draws and the target (Neal 2001, *Annealed importance
    sampling*). They sum to 1; NaN counts as weight 0.

    Example:
        >>> import torch
        >>> from bayesfed.output.importance import effective_sample_size, temper_weights
        >>> round(effective_sample_size(temper_weights(torch.linspace(-100.0, 0.0, 50), 20)))
        20
    """
    log_weights = log_weights.nan_to_num(-torch.inf)
    log_weights = log_weights - log_weights.max()
    power = 0.0
    for step in 0.5 ** torch.arange(21).double():  # from above: 1 itself is tried first
        more = power + float(step)
        if more <= 1.0 and effective_sample_size((more * log_weights).exp()) >= size:
            power = more
    return (power * log_weights).nan_to_num(-torch.inf).softmax(0)


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
    return _fit_tail(log_weights)[0]


def pareto_smooth(log_weights: Tensor) -> tuple[Tensor, float]:
    """Replace the largest of weights ``(S,)`` by quantiles of the distribution that :func:`pareto_k` fits to them.

    Vehtari, Simpson, Gelman, Yao & Gabry 2024, *Pareto smoothed importance sampling*, section 3. Weights that are equal
    up to round-off, or too uneven for a fit, are returned as they are; NaN counts as weight 0.

    Returns:
        Log weights ``(S,)``, and Pareto k.
    """
    smooth = log_weights.double().nan_to_num(-torch.inf)
    k, scale, top = _fit_tail(smooth)
    if k == 0.0 or math.isinf(k):
        return smooth, k
    count, largest = len(top) - 1, smooth.max()
    below = (torch.arange(count, dtype=smooth.dtype, device=smooth.device) + 0.5) / count
    quantiles = top[0] + scale * torch.expm1(-k * torch.log1p(-below)) / k
    smooth[smooth.argsort()[-count:]] = largest + quantiles.log().clamp(max=0.0)
    return smooth, k


def _fit_tail(log_weights: Tensor) -> tuple[float, float, Tensor]:
    """Return k and scale of a generalised Pareto distribution, and the weights that it is fitted to, threshold first.

    The largest weight is 1.
    """
    largest = log_weights.max()
    tail = min(len(log_weights) // 5, math.ceil(3 * len(log_weights) ** 0.5))
    top = (log_weights - largest).sort().values[-tail - 1 :].exp()
    if effective_sample_size((log_weights - largest).exp()) > EQUAL * len(log_weights):
        return 0.0, 0.0, top
    above = top[1:] - top[0]
    if not top.isfinite().all() or not above[tail // 4] > 0:
        return math.inf, 0.0, top
    try:
        k, scale = fit_generalized_pareto(above.cpu())  # its grid of values lies on the CPU
    except ZeroDivisionError:  # the weights are of sizes too different for its grid
        return math.inf, 0.0, top
    return float(k), float(scale), top


def tail_share(log_weights: Tensor, k: float) -> float:
    """Estimate the share of all weight that a generalised Pareto tail of shape k has beyond the largest of ``(S,)``."""
    largest = float(log_weights.nan_to_num(-torch.inf).softmax(0).nan_to_num(0.0).max())
    return largest / (1 - k) if k < 1 else math.inf
