"""Functions of θ that are computed at a few of many draws of θ, and by a polynomial at the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement
from typing import NamedTuple

import torch
from torch import Tensor

SPREAD, LEJA = 3.0, 4 / 3
"""Draws per coefficient at which a function is computed, if they are spread evenly, or lie at Leja points."""
ENOUGH = {SPREAD: 4, LEJA: 3}
"""The least numbers of all draws relative to these."""
FARTHEST = 4.0
"""The largest leverage of a draw at which a polynomial is used, times the draws per coefficient: beyond, it
extrapolates."""
CENTRAL = 0.95
"""The share of all draws, the nearest to their median, among which these are."""
TESTED = 4
"""The divisor of their number for that of draws of the largest leverage, and of others, at which a polynomial is
compared with the function."""
DEGREES, MOST = (3, 5, 7, 9), 300
"""The degrees of polynomials that are tried one after another, and the largest number of coefficients."""
SHARE = 0.6
"""The largest share of all draws at which a function is computed for a polynomial."""
PLAUSIBLE, LEAST = 20.0, 5
"""How many nats the log density of a draw is below the largest, at most, if errors there matter; the least number of
such draws that show them."""
NEGLIGIBLE, SAFE = 100.0, 5.0
"""How many nats it is below the largest, at least, if it has no weight whatever the proposal; the factor on the largest
error of a polynomial, which is added where that shows it."""


class Polynomial(NamedTuple):
    """A polynomial in θ, fitted by least squares to a function's values at a few of S draws.

    Attributes:
        features: the powers of θ at all draws, ``(S, F)``.
        few: positions of these draws, ``(M,)``.
        weights: the pseudo-inverse of their features, ``(F, M)``.

    Example:
        >>> import torch
        >>> from bayesfed.output.polynomials import find_polynomial
        >>> z = torch.linspace(-2.0, 2.0, 60, dtype=torch.float64)[:, None]
        >>> polynomial = find_polynomial(z, 2)
        >>> len(polynomial.few), torch.allclose(polynomial.fitted(z[polynomial.few] ** 2), z**2)
        (9, True)
    """

    features: Tensor
    few: Tensor
    weights: Tensor

    def fitted(self, values: Tensor) -> Tensor:
        """Return the polynomial of values at the few draws ``(M, ...)`` at all draws ``(S, ...)``."""
        coefficients = self.weights @ values.double().flatten(1)
        found = (self.features @ coefficients).to(values.dtype)
        return found.unflatten(1, values.shape[1:]) if values.ndim > 1 else found

    @property
    def leverage(self) -> Tensor:
        """The variance of the polynomial at each draw, in units of that of a value, ``(S,)``."""
        return (self.features @ self.weights).square().sum(1)

    @property
    def is_far(self) -> Tensor:
        """Whether a draw is so far from the few that it is not used there, bool ``(S,)``."""
        return self.leverage > FARTHEST * self.features.shape[1] / len(self.few)

    @property
    def far(self) -> Tensor:
        """Positions of draws that are so far from the few that it is not used there."""
        return self.is_far.nonzero()[:, 0]

    def others(self, some: Tensor) -> Tensor:
        """Return the positions of the draws that are not among some, by position."""
        return _others(len(self.features), some)

    def tests(self) -> Tensor:
        """Return positions of draws at which to test it: some of the farthest that are not too far, and others."""
        leverage, each = self.leverage, len(self.few) // TESTED
        inside = (~self.is_far).nonzero()[:, 0]
        inside = inside[~torch.isin(inside, self.few)]
        far = inside[leverage[inside].argsort(descending=True)[:each]]
        others = inside[torch.linspace(0, len(inside) - 1, min(each, len(inside))).long()]
        return torch.cat([far, others]).unique()


def evaluations(draws: int, size: int, degree: int) -> int:
    """Return at about how many of S draws of θ, a vector of ``size`` numbers, a function is computed for a polynomial.

    At Leja points and others for one of this degree; if the draws are too few, at all.
    """
    few = math.ceil(LEJA * math.comb(size + degree, degree))
    if draws < ENOUGH[LEJA] * few:
        return draws
    return min(draws, few + 2 * (few // TESTED) + int((1 - CENTRAL) * draws))


def find_polynomial(z: Tensor, degree: int, each: float = SPREAD) -> Polynomial | None:
    """Return a polynomial in draws ``(S, D)`` of a degree, or the largest lower one that they are enough for.

    Draws that are spread evenly make it most exact near the centre. At discrete Leja points, which the pivots of an LU
    decomposition give (Bos, De Marchi, Sommariva & Vianello 2010, *Computing multivariate Fekete and Leja points by
    numerical linear algebra*), and a third as many others, fewer are enough.

    Args:
        z: the draws.
        degree: the highest degree.
        each: the number of draws per coefficient at which the function is computed, :data:`SPREAD` or :data:`LEJA`.

    None if the draws are too few for degree one, not all finite, or most are equal.
    """
    z = z.double()
    low, middle, high = z.quantile(z.new_tensor([0.16, 0.5, 0.84]), dim=0)
    z = 2 * (z - middle) / (high - low)
    if not z.isfinite().all():
        return None
    distance = z.square().sum(1)
    near = (distance <= distance.quantile(CENTRAL)).nonzero()[:, 0]
    for highest in range(degree, 0, -1):
        coefficients = math.comb(z.shape[1] + highest, highest)
        count = math.ceil(each * coefficients)
        if len(z) >= ENOUGH[each] * count:
            features, leja = _monomials(z, highest), near[:0]
            if each == LEJA:
                first = _first_pivots(features[near])
                leja, near = near[first], near[_others(len(near), first)]
            spread = torch.linspace(0, len(near) - 1, count - len(leja), device=z.device).long()
            few = torch.cat([leja, near[spread]])
            return Polynomial(features, few, torch.linalg.pinv(features[few]))
    return None


def interpolate(
    z: Tensor, compute: Callable[[Tensor], Tensor], offset: Tensor | None, error: float
) -> Tensor:
    """Return a function at draws ``(S, D)``, by a polynomial at most of them where there is one: ``(S,)``.

    Polynomials of higher degrees follow one that is not exact enough. They leave out draws that have no weight, as that
    one shows: a log density may fall far away by thousands of nats, no polynomial of a low degree.

    Args:
        z: the draws.
        compute: the function at some of the draws, by position.
        offset: what is added to it in the log density of the draws, ``(S,)``; None if that is not known.
        error: the largest root mean square error at draws whose log density is not far below the largest.

    Example:
        >>> import torch
        >>> from bayesfed.output.polynomials import interpolate
        >>> generator, computed = torch.Generator().manual_seed(0), []
        >>> z = torch.randn(2000, 1, dtype=torch.float64, generator=generator)
        >>> def sine(draws):
        ...     computed.extend(draws.tolist())
        ...     return z[draws, 0].sin()
        >>> found = interpolate(z, sine, torch.zeros(2000), 0.001)
        >>> len(computed) < 200, bool((found - z[:, 0].sin()).abs().max() < 0.01)
        (True, True)
    """
    values = z.new_full((len(z),), torch.nan, dtype=torch.float64)
    known = torch.zeros_like(values, dtype=torch.bool)
    left, size = (~known).nonzero()[:, 0], 0
    for degree in _degrees(z.shape[1]):
        polynomial = find_polynomial(z[left], degree, LEJA)
        if polynomial is None or polynomial.features.shape[1] <= size:
            break
        size = polynomial.features.shape[1]
        some = left[torch.cat([polynomial.few, polynomial.tests(), polynomial.far])]
        some = some[~known[some]]
        if known.sum() + len(some) > SHARE * len(z):
            break
        values[some] = compute(some).double()
        known[some] = True
        fitted = polynomial.fitted(values[left[polynomial.few], None])[:, 0]
        errors, unknown = fitted - values[left], ~known[left]
        tests = ~unknown & ~polynomial.is_far & errors.isfinite()
        tests[polynomial.few] = False
        below = torch.zeros_like(fitted)
        if offset is not None:  # how far log densities are below the largest
            level = (values + offset)[left]
            below = level.where(level.isfinite(), -torch.inf).max() - fitted - offset[left]
        plausible = tests & (torch.minimum(below, below + errors) < PLAUSIBLE)
        exact = errors[plausible].square().mean().sqrt() < error
        if bool(exact) and int(plausible.sum()) >= LEAST:
            values[left[unknown]] = fitted[unknown]
            return values
        negligible = known[left] & ~values[left].isfinite()
        if bool(tests.any()):
            negligible |= below > NEGLIGIBLE + SAFE * errors[tests].abs().max()
        values[left[unknown & negligible]] = fitted[unknown & negligible]
        left = left[~negligible]
    rest = values.isnan() & ~known
    values[rest] = compute(rest.nonzero()[:, 0]).double()
    return values


def _degrees(size: int) -> Iterator[int]:
    """Yield the degrees of polynomials in ``size`` numbers that are tried one after another."""
    for degree in DEGREES:
        while math.comb(size + degree, degree) > MOST and degree > 1:
            degree -= 1
        yield degree


def is_polynomial(z: Tensor, values: Tensor, degree: int, error: float) -> bool:
    """Return whether values ``(S,)`` at draws ``(S, D)`` are a polynomial of a degree, to a root mean square error.

    Draws that are far from most others do not count.

    Example:
        >>> import torch
        >>> from bayesfed.output.polynomials import is_polynomial
        >>> z = torch.linspace(-2.0, 2.0, 60)[:, None]
        >>> is_polynomial(z, z[:, 0] ** 3, 3, 0.1), is_polynomial(z, z[:, 0].abs(), 3, 0.1)
        (True, False)
    """
    polynomial = find_polynomial(z, degree, LEJA)
    if polynomial is None:
        return False
    errors = polynomial.fitted(values[polynomial.few, None])[:, 0] - values
    return bool(errors[~polynomial.is_far].square().mean().sqrt() < error)


def _first_pivots(features: Tensor) -> Tensor:
    """Return the rows of ``(S, F)`` that an LU decomposition takes as its F pivots, in order."""
    order = list(range(len(features)))
    pivots = torch.linalg.lu_factor_ex(features).pivots  # columns may depend on each other
    for row, other in enumerate(pivots.tolist()):
        order[row], order[other - 1] = order[other - 1], order[row]  # pivots count from 1
    return torch.tensor(order[: features.shape[1]], device=features.device)


def _others(count: int, some: Tensor) -> Tensor:
    """Return the positions up to ``count`` that are not among some, in order."""
    every = torch.ones(count, dtype=torch.bool, device=some.device)
    return every.index_fill_(0, some, False).nonzero()[:, 0]


def _monomials(z: Tensor, degree: int) -> Tensor:
    """Return the products of up to ``degree`` coordinates of draws ``(S, D)``: ``(S, F)``."""
    columns = z.unbind(1)
    return torch.stack(
        [
            torch.stack([columns[i] for i in which]).prod(0) if which else torch.ones_like(z[:, 0])
            for size in range(degree + 1)
            for which in combinations_with_replacement(range(z.shape[1]), size)
        ],
        1,
    )
