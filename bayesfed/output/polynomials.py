"""Functions of θ that are computed at a few of many draws of θ, and by a polynomial at the others."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement
from typing import NamedTuple

import torch
from torch import Tensor

MORE, ENOUGH = 1 / 3, 3
"""Draws at which a function is computed beyond one per coefficient, relative to these; the least number of all draws
relative to both."""
FARTHEST = 3.0
"""The largest leverage of a draw at which a polynomial is used: beyond, it extrapolates."""
CENTRAL = 0.95
"""The share of all draws, the nearest to their median, among which these are."""
TESTS = 6
"""Draws of the largest leverage, and others, at which it is compared with the function."""


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
        (4, True)
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
    def far(self) -> Tensor:
        """Positions of draws that are so far from the few that it is not used there."""
        return (self.leverage > FARTHEST).nonzero()[:, 0]

    def tests(self) -> Tensor:
        """Return positions of draws at which to test it: some of the farthest that are not too far, and others."""
        leverage = self.leverage
        inside = (leverage <= FARTHEST).nonzero()[:, 0]
        inside = inside[~torch.isin(inside, self.few)]
        far = inside[leverage[inside].argsort(descending=True)[:TESTS]]
        others = inside[torch.linspace(0, len(inside) - 1, min(TESTS, len(inside))).long()]
        return torch.cat([far, others]).unique()


def evaluations(draws: int, size: int, degree: int) -> int:
    """Return at about how many of S draws of θ, a vector of ``size`` numbers, a function is computed for a polynomial.

    If they are too few for one, at all.
    """
    coefficients = math.comb(size + degree, degree)
    few = coefficients + int(MORE * coefficients)
    return (
        draws if draws < ENOUGH * few else min(draws, few + 2 * TESTS + int((1 - CENTRAL) * draws))
    )


def find_polynomial(z: Tensor, degree: int) -> Polynomial | None:
    """Return a polynomial in draws ``(S, D)`` of a degree, or the largest lower one that they are enough for.

    The function is computed at discrete Leja points among the draws, which the pivots of an LU decomposition give (Bos,
    De Marchi, Sommariva & Vianello 2010, *Computing multivariate Fekete and Leja points by numerical linear algebra*),
    and at some others.

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
        features = _monomials(z, highest)
        count = features.shape[1]
        more = int(MORE * count)
        if len(z) >= ENOUGH * (count + more):
            permutation = torch.linalg.lu(features[near])[0]
            order = near[permutation.argmax(0)]
            others = order[count:].sort().values
            some = others[torch.linspace(0, len(others) - 1, more, device=z.device).long()]
            few = torch.cat([order[:count], some])
            return Polynomial(features, few, torch.linalg.pinv(features[few]))
    return None


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
