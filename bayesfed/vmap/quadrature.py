"""Integrals over one number of each row, as sums over nodes around the mode of the row's integrand."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NODES = 21, 41, 81
"""Possible numbers of nodes of an integral; :func:`bayesfed.vmap.summed_out.sum_out` chooses one."""
REACH = {21: 3.1, 41: 4.0, 81: 5.0}
"""The outermost node, as asinh of a number of scales (11, 27, 74): tails may be much wider than the peak."""
PASSES = 3
"""The number of search passes for the mode."""
SEARCH = np.sinh(np.linspace(-4, 4, 17))
"""The points of each search pass, in units of the scale, up to 27 of them away."""
DROP = 1e4
"""The most nats that an integrand falls in the search: a cliff makes it no narrower than 1/100 of the distance."""

LogDensity = Callable[[Tensor], Tensor]
"""The log integrand as a function of points ``(S, Q, K, B)``, Q of each row; the result has the same shape."""


class Place(NamedTuple):
    """The locations and scales of integrands: ``(S, K, B)``."""

    loc: Tensor
    scale: Tensor

    def points(self, z: Tensor) -> Tensor:
        """The points ``(S, Q, K, B)`` that lie ``z`` scales ``(Q,)`` from the location."""
        return self.loc.unsqueeze(1) + self.scale.unsqueeze(1) * z[:, None, None]


def find_modes(log_f: LogDensity, place: Place) -> Place:
    """The modes of integrands and the scales of the Normals that fit them there, without gradients.

    Each pass evaluates some points and moves to the vertex of the parabola through the highest point and its two
    neighbours: the mode of a Normal is found at once, however narrow. If the highest point is the last one, the next
    pass is centred there, with a larger scale.

    Example:
        >>> import torch
        >>> from bayesfed.vmap.quadrature import Place, find_modes
        >>> start = Place(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
        >>> place = find_modes(lambda u: -0.5 * ((u - 3) / 0.01) ** 2, start)
        >>> f"{place.loc.item():.3f} {place.scale.item():.3f}"
        '3.000 0.010'
    """
    with torch.no_grad():
        place = Place(place.loc.detach(), place.scale.detach())
        z, last = torch.as_tensor(SEARCH).to(place.loc), len(SEARCH) - 1
        for _ in range(PASSES):
            values = log_f(place.points(z)).nan_to_num(-torch.inf, -torch.inf, -torch.inf)
            values = values.maximum(values.amax(1, keepdim=True) - DROP)
            top = values.argmax(1, keepdim=True)
            bracketed = ((top > 0) & (top < last)).squeeze(1)
            three = [top.clamp(1, last - 1) + side for side in (-1, 0, 1)]
            left, at, right = (z[nth].squeeze(1) for nth in three)
            low, middle, high = (values.gather(1, nth).squeeze(1) for nth in three)
            up, down = (middle - low) / (at - left), (middle - high) / (right - at)
            bend = 2 * (up + down) / (right - left)
            slope = (up * (right - at) - down * (at - left)) / (right - left)
            found = Place(at + slope / bend, bend.rsqrt())
            edge = Place(z[top].squeeze(1), torch.full_like(at, 4.0))
            loc, scale = (torch.where(bracketed, *both) for both in zip(found, edge, strict=True))
            place = Place(place.loc + place.scale * loc, place.scale * scale)
        return place


def nodes(place: Place, count: int = NODES[0]) -> tuple[Tensor, Tensor]:
    """``count`` points ``(S, Q, K, B)`` and the logarithms of their weights: ∫ f(u) du ≈ Σ_q exp(log weight_q) f(u_q).

    The points are constants, so that the derivatives of the sum approximate those of the integral. They are evenly
    spaced in t, where u = sinh t in units of the scale. The error of this trapezoidal rule falls exponentially with the
    number of points if the integrand is smooth (Trefethen & Weideman 2014, *The exponentially convergent trapezoidal
    rule*, section 5), and with its square if the integrand has a kink.
    """
    t = torch.linspace(-REACH[count], REACH[count], count, dtype=torch.float64)
    z, log_weight = t.sinh().to(place.loc), (t.cosh() * (t[1] - t[0])).log().to(place.loc)
    return place.points(z), place.scale.log().unsqueeze(1) + log_weight[:, None, None]


def sample(log_f: LogDensity, place: Place, cells: int = 97) -> Tensor:
    """A draw ``(S, K, B)`` from the density proportional to f, taken as constant within an eighth of its scale."""
    z = torch.linspace(-6, 6, cells).to(place.loc)
    values = log_f(place.points(z)).movedim(1, -1)
    nth = torch.distributions.Categorical(logits=values).sample()
    jitter = (torch.rand(nth.shape).to(place.loc) - 0.5) * (z[1] - z[0])
    return place.loc + place.scale * (z[nth] + jitter)
