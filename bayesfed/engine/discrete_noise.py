"""Discrete Gaussian and discrete Laplace noise, drawn exactly: whole numbers, multiples of the step of a grid.

::

    Gaussian: P(x) ∝ exp(−x² / 2t²)        Laplace: P(x) ∝ exp(−|x| / t)        x, t whole numbers

Noise that is computed in floating point takes values that depend on the sum to which it is added, in its last bits
(Mironov 2012; Haney et al. 2022). A whole multiple of the step plus a whole multiple of the step can be any multiple.

*Exact* means that only uniform integers, and comparisons of uniform numbers with exp(−x) for a rational x, decide what
is returned. A comparison uses double precision where its error bound allows, and else as many digits as it needs: once
in 2⁴⁵ comparisons or so. What is left out is a probability below e⁻⁵⁰⁰ in each share of Laplace noise.

*Gaussian* (Canonne, Kamath & Steinke 2020, Algorithm 3, with t for their ⌊t⌋ + 1, as t is whole): a discrete Laplace
variable of the same t is accepted with probability ``exp(−(|x| − t)² / 2t²)``. *Laplace* (their Algorithm 2): u + t v,
u uniform below t and accepted with probability exp(−u / t), v geometric, with a random sign.

*Shares.* The sum of the shares of any M′ institutions is to be noise enough. Gaussian: each draws a discrete Gaussian
variable with t / √M′, at least :data:`LEAST_SHARE`; the sum is no discrete Gaussian, but its Rényi divergences exceed
those of the Gaussian by less than D Σ_k 10 exp(−2π² t² k / (k + 1)), k < M′, of D numbers, t of a share (Kairouz, Liu &
Steinke 2021, Proposition 14): less than 10⁻³⁶ M′ D. The tests compare ε and δ with exact sums. Laplace: a
discrete Laplace variable is a compound Poisson sum of whole numbers ±l with rates exp(−l / t) / l (the difference of
two negative binomial variables, a sum of M′ of which is geometric): a share has 1 / M′ of these rates. It is drawn by
thinning: candidates l, uniform in [2ʲ, 2ʲ⁺¹) for each j, are accepted with probability (2ʲ / l) exp(−l / t).
"""

import math
import os
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Source = Callable[[int], bytes]
"""A source of that many random bytes."""
Integers = NDArray[np.int64]
LARGEST = 2**45
"""The largest t: sums with such noise are exact in double precision."""
LEAST_SHARE = 3
"""The least t of a share of Gaussian noise."""
_MARGIN = 2.0**-46
"""More than the error of exp in double precision plus the width 2⁻⁵² of what is known of a uniform number."""
_AT_ONCE = 2**14


def draw(
    mechanism: Literal["gaussian", "laplace"],
    scale: float,
    shape: Sequence[int],
    of: int = 1,
    source: Source = os.urandom,
) -> Tensor:
    """Draw noise, int64, of a scale that is rounded up to a whole number t; or one of ``of`` shares of it.

    Raises:
        ValueError: a scale above :data:`LARGEST`.

    Example:
        >>> from bayesfed.engine.discrete_noise import draw
        >>> x = draw("laplace", 1000.0, (10_000,))
        >>> x.dtype, bool((x.abs().double().mean() - 1000).abs() < 60)  # Laplace's scale is its mean absolute value
        (torch.int64, True)
    """
    if not 0 < scale <= LARGEST:
        raise ValueError(f"noise of {scale:.3g} steps of the grid: it must have between 0 and 2^45")
    count = math.prod(shape)
    if mechanism == "gaussian":
        least = 1 if of == 1 else LEAST_SHARE
        found = _gaussian(max(least, math.ceil(scale / math.sqrt(of))), count, source)
    elif of == 1:
        found = _laplace(math.ceil(scale), count, source)
    else:
        found = _laplace_share(math.ceil(scale), count, of, source)
    return torch.from_numpy(found).reshape(tuple(shape))


def _gaussian(t: int, count: int, source: Source) -> Integers:
    found = np.empty(0, np.int64)
    while (missing := count - len(found)) > 0:
        x = _laplace(t, missing + missing // 3 + 8, source)
        beyond = np.abs(x) - t
        accepted = _exp(beyond.astype(float) ** 2 / (2.0 * t * t), beyond, 2 * t * t, 2, source)
        found = np.concatenate([found, x[accepted]])
    return found[:count]


def _laplace(t: int, count: int, source: Source) -> Integers:
    found = np.empty(0, np.int64)
    while (missing := count - len(found)) > 0:
        u = _below(np.full(2 * missing + 8, t), source)
        u = u[_exp(u / t, u, t, 1, source)]
        v = np.zeros_like(u)
        longer = np.arange(len(u))
        while len(longer := longer[_exp(np.ones(len(longer)), longer, 1, 0, source)]):
            v[longer] += 1
        x = u + t * v
        negative = (_words(len(x), source) & 1).astype(bool)
        found = np.concatenate([found, np.where(negative, -x, x)[~negative | (x > 0)]])
    return found[:count]


def _laplace_share(t: int, count: int, of: int, source: Source) -> Integers:
    """Draw compound Poisson sums, some thousands at a time."""
    levels = t.bit_length() + 9  # l < 2^levels, and above it are less than exp(−2⁹) in all
    rate = -(-2 * levels // of)  # of candidates, a few of which belong to no level
    found = np.zeros(count, np.int64)
    for start in range(0, count, _AT_ONCE):
        part = found[start : start + _AT_ONCE]
        owner = np.repeat(np.arange(len(part)), _poisson(rate, len(part), source))
        j = _below(np.full(len(owner), rate * of), source)
        owner, j = owner[j < 2 * levels], j[j < 2 * levels]
        sign, first = 1 - 2 * (j & 1), np.int64(1) << (j >> 1)
        size = first + (_words(len(j), source).astype(np.int64) & (first - 1))
        kept = _below(size, source) < first
        kept[kept] = _exp(size[kept] / t, size[kept], t, 1, source)
        np.add.at(part, owner[kept], (sign * size)[kept])
    return found


def _poisson(rate: int, count: int, source: Source) -> Integers:
    """Draw Poisson variables as sums of ``rate`` variables of mean 1.

    Such a variable is 0 with probability 1 / e. Else it is k ≥ 1, ∝ 1 / k!: of uniform integers below 2, 3, …, those
    before the first that is not 0 number k − 1 with probability k / (k + 1)!, accepted with probability (k + 1) / 2k.
    """
    found = np.zeros(count * rate, np.int64)
    open_ = np.flatnonzero(~_exp(np.ones(len(found)), found, 1, 0, source))
    while len(open_):
        k, longer = np.ones(len(open_), np.int64), np.arange(len(open_))
        while len(longer := longer[_below(k[longer] + 1, source) == 0]):
            k[longer] += 1
        accepted = _below(2 * k, source) < k + 1
        found[open_[accepted]] = k[accepted]
        open_ = open_[~accepted]
    return found.reshape(count, rate).sum(1)


# -- uniform numbers, and comparisons ------------------------------------------------------------------------------


def _words(count: int, source: Source) -> NDArray[np.uint64]:
    return np.frombuffer(source(8 * count), np.uint64)


def _below(bounds: Integers, source: Source) -> Integers:
    """Draw uniform integers ``0 ≤ u < bound``, of 63 bits of which those that would favour some are drawn again."""
    limit = 2**63 - 1 - (2**63 - 1) % bounds
    found = (_words(len(bounds), source) >> np.uint64(1)).astype(np.int64)
    while len(again := np.flatnonzero(found >= limit)):
        found[again] = (_words(len(again), source) >> np.uint64(1)).astype(np.int64)
    return found % bounds


def _exp(
    x: NDArray[np.float64], root: Integers, divisor: int, power: int, source: Source
) -> NDArray[np.bool_]:
    """Draw true with probability exp(−x); x to double precision, and as ``root ** power / divisor``."""
    words = _words(len(x), source) >> np.uint64(12)
    u, p = words * 2.0**-52, np.exp(-x)
    found: NDArray[np.bool_] = u < p
    for i in np.flatnonzero(np.abs(u - p) <= _MARGIN):
        found[i] = _is_below(int(words[i]), Fraction(int(root[i]) ** power, divisor), source)
    return found


def _is_below(word: int, x: Fraction, source: Source) -> bool:
    """Compare a uniform number, of which 52 bits are drawn, with exp(−x): more bits and digits until it is clear."""
    bits = 52
    while True:
        context = Context(prec=20 + bits // 3)
        power = context.divide(Decimal(-x.numerator), Decimal(x.denominator))
        p, error = Fraction(context.exp(power)), (x + 2) / Fraction(10) ** (bits // 3 + 18)
        if Fraction(word + 1, 2**bits) <= p - error:
            return True
        if Fraction(word, 2**bits) >= p + error:
            return False
        word, bits = word << 64 | int.from_bytes(source(8), "little"), bits + 64
