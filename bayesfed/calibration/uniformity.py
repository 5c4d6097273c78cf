"""Are ranks uniform? Simultaneous bands of the ECDF, a test of symmetry, and both in words.

Under a calibrated posterior the rank of the true value among L independent draws is uniform on 0, ..., L (Talts,
Betancourt, Simpson, Vehtari & Gelman 2018, *Validating Bayesian inference algorithms with simulation-based
calibration*). Of n ranks R_k = #{rank < k} is then Binomial(n, k / (L + 1)) at each k = 1, ..., L, and

    γ = min_k 2 min(P(Bin ≤ R_k), P(Bin ≥ R_k))

is the statistic of Säilynoja, Bürkner & Vehtari 2022, *Graphical test for discrete uniformity and its applications in
goodness-of-fit evaluation and multiple sample comparison*. Its distribution is simulated.

VSBC (Yao, Vehtari, Simpson & Gelman 2018, *Yes, but did it work?: evaluating variational inference*) asks less, whether
ranks are symmetric: intervals may have the wrong width, but point estimates are not biased.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import numpy as np

DRAWS = 199
"""L: central intervals of 50, 80, 90 and 95 % have whole numbers of the 200 ranks."""
SIMULATIONS = 4000
"""The number of simulated sets of ranks: the smallest p-value is about its inverse."""
CUT_OFF = 1.0
"""The shift in standard deviations above which ranks at their end cannot show that intervals are too wide."""
CLEAR = 2.0
"""Standard errors from which a shift or a spread of the ranks is named."""


def below(ranks: np.ndarray, draws: int) -> np.ndarray:
    """Return R_k, the number of ranks below k = 1, ..., L: ``(E, L)`` for ranks ``(n, E)``.

    Example:
        >>> import numpy as np
        >>> from bayesfed.calibration.uniformity import below
        >>> below(np.array([[0], [2], [3]]), 3).tolist()
        [[1, 1, 2]]
    """
    entries, size = ranks.shape[1], draws + 1
    flat = (ranks + size * np.arange(entries)).ravel()
    counts = np.bincount(flat, minlength=size * entries).reshape(entries, size)
    return counts.cumsum(1)[:, :-1]


@cache
def _tails(n: int, draws: int) -> np.ndarray:
    """Return 2 min(P(Bin ≤ r), P(Bin ≥ r)) for k = 1, ..., L and r = 0, ..., n: ``(L, n + 1)``."""
    z, r = np.arange(1, draws + 1)[:, None] / (draws + 1), np.arange(n + 1)
    choose = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in r]
    density = np.exp(np.array(choose) + r * np.log(z) + (n - r) * np.log1p(-z))
    lower, upper = density.cumsum(1), density[:, ::-1].cumsum(1)[:, ::-1]
    return np.minimum(1.0, 2 * np.minimum(lower, upper))


def _gamma(counts: np.ndarray, n: int) -> np.ndarray:
    """Return γ of counts R_k ``(E, L)``: ``(E,)``."""
    draws = counts.shape[1]
    return _tails(n, draws)[np.arange(draws), counts].min(1)


@cache
def _simulated(n: int, draws: int) -> np.ndarray:
    """Return γ of simulated sets of n uniform ranks, in ascending order."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(SIMULATIONS // 500):
        ranks = rng.integers(0, draws + 1, (n, 500))
        found.append(_gamma(below(ranks, draws), n))
    return np.sort(np.concatenate(found))


def p_uniform(ranks: np.ndarray, draws: int) -> np.ndarray:
    """Return the p-value of uniformity of each column of ranks ``(n, E)``: ``(E,)``.

    Example:
        >>> import numpy as np
        >>> from bayesfed.calibration.uniformity import p_uniform
        >>> rng = np.random.default_rng(1)
        >>> uniform, narrow = rng.integers(0, 200, (100, 1)), 199 * rng.integers(0, 2, (100, 1))
        >>> bool(p_uniform(uniform, 199) > 0.05), bool(p_uniform(narrow, 199) < 0.001)
        (True, True)
    """
    n = len(ranks)
    at_most = np.searchsorted(_simulated(n, draws), _gamma(below(ranks, draws), n), side="right")
    return (1 + at_most) / (1 + SIMULATIONS)


def bands(n: int, draws: int, prob: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest R_k inside the simultaneous bands, ``(L,)`` each."""
    limit = np.quantile(_simulated(n, draws), 1 - prob)
    inside = _tails(n, draws) >= limit
    return inside.argmax(1), n - inside[:, ::-1].argmax(1)


def combine(p_values: np.ndarray) -> float:
    """Return one p-value of several dependent ones, by the Cauchy combination test (Liu & Xie 2020).

    Example:
        >>> import numpy as np
        >>> from bayesfed.calibration.uniformity import combine
        >>> round(combine(np.array([0.02, 0.02, 0.02])), 3)
        0.02
    """
    clipped = np.clip(p_values, 1 / (1 + SIMULATIONS), 1 - 1 / (1 + SIMULATIONS))
    mean = np.tan((0.5 - clipped) * math.pi).mean()
    return float(0.5 - math.atan(mean) / math.pi)


@cache
def _signs(n: int) -> np.ndarray:
    """Return random signs of n replications, ``(SIMULATIONS, n)``."""
    return np.random.default_rng(0).choice([-1.0, 1.0], (SIMULATIONS, n))


def p_symmetric(ranks: np.ndarray, draws: int) -> float:
    """Return the p-value of symmetry of ranks ``(n, E)`` of E exchangeable entries, by VSBC.

    The statistic is the largest distance between the ECDFs of the ranks r and of L − r. Its distribution is that under
    random signs: all ranks of a replication are replaced by L − r, or not.
    """
    size = draws + 1
    at = np.arange(len(ranks))[:, None] * size + ranks
    counts = np.bincount(at.ravel(), minlength=len(ranks) * size).reshape(len(ranks), size)
    difference = (counts - counts[:, ::-1]).cumsum(1).astype(float)
    observed = np.abs(difference.sum(0)).max()
    flipped = np.abs(_signs(len(ranks)) @ difference).max(1)
    return float((1 + (flipped >= observed - 1e-9).sum()) / (1 + SIMULATIONS))


def shift_and_spread(ranks: np.ndarray, draws: int) -> tuple[float, float]:
    """Return how far the ranks ``(n, E)`` lie too high, and how far too near their ends, in standard errors.

    Ranks become numbers that are standard Normal if ranks are uniform, and whose mean and standard deviation are those
    of the errors of Normal estimates. Their mean is compared with 0 and their variance with 1; standard errors are over
    replications, whose entries depend on each other.
    """
    quantile = NormalDist().inv_cdf
    scores = np.array([quantile((k + 0.5) / (draws + 1)) for k in range(draws + 1)])
    z, square = scores[ranks], (scores**2).mean()
    spread = ((z - z.mean()) ** 2).mean(1) - square
    found = []
    for value, variance in ((z.mean(1), square), (spread, 2 * square**2)):
        independent = math.sqrt(
            variance / z.size
        )  # of few replications the other may be much too small
        error = max(value.std(ddof=1) / math.sqrt(len(value)), independent)
        found.append(float(value.mean() / error))
    if abs(z.mean()) > CUT_OFF:
        found[1] = max(found[1], 0.0)
    return found[0], found[1]


def in_words(shift: float, spread: float) -> str:
    """Name the fault of ranks that are not uniform.

    Example:
        >>> from bayesfed.calibration.uniformity import in_words
        >>> in_words(0.3, 5.0), in_words(-4.0, 1.0)
        ('intervals too narrow', 'estimates too high')
    """
    found = []
    if abs(spread) > CLEAR:
        found.append(f"intervals too {'narrow' if spread > 0 else 'wide'}")
    if abs(shift) > CLEAR:
        found.append(f"estimates too {'low' if shift > 0 else 'high'}")
    return ", ".join(found) or "ranks not uniform"
