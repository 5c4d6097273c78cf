"""Functions of θ that are computed at a few of many draws of θ, and by a polynomial at the others."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PER_FEATURE, ENOUGH = 3, 4
"""Draws per coefficient at which a function is computed; the least number of all draws relative to these."""
FARTHEST = 1.5
"""The largest leverage of a draw at which a polynomial is used: beyond, it extrapolates."""
CENTRAL = 0.95
"""The share of all draws, the nearest to their median, among which these are."""
TESTS = 12
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
        >>> polynomial = find_polynomial(z)
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

    def tests(self) -> Tensor:
        """Return positions of draws at which to test it: some of the farthest that are not too far, and others."""
        leverage = self.leverage
        inside = (leverage <= FARTHEST).nonzero()[:, 0]
        inside = inside[~torch.isin(inside, self.few)]
        far = inside[leverage[inside].argsort(descending=True)[:TESTS]]
        others = inside[torch.linspace(0, len(inside) - 1, min(TESTS, len(inside))).long()]
        return torch.cat([far, others]).unique()


def find_polynomial(z: Tensor) -> Polynomial | None:
    """Return a polynomial of degree two in draws ``(S, D)``, or one if they are too few for two.

    None if they are too few for both, not all finite, or most are equal.
    """
    z = z.double()
    low, middle, high = z.quantile(z.new_tensor([0.16, 0.5, 0.84]), dim=0)
    z = 2 * (z - middle) / (high - low)
    if not z.isfinite().all():
        return None
    distance = z.square().sum(1)
    near = (distance <= distance.quantile(CENTRAL)).nonzero()[:, 0]
    row, column = torch.triu_indices(z.shape[1], z.shape[1], device=z.device)
    one, products = z.new_ones(len(z), 1), z[:, row] * z[:, column]
    for parts in ([one, z, products], [one, z]):
        count = PER_FEATURE * sum(part.shape[1] for part in parts)
        if len(z) >= ENOUGH * count:
            features = torch.cat(parts, 1)
            few = near[torch.linspace(0, len(near) - 1, count, device=z.device).long()]
            return Polynomial(features, few, torch.linalg.pinv(features[few]))
    return None
