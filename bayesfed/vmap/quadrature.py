"""Integrals over one number of each row: sums over points around where the integrand of the row lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NODES = 21, 41, 81
"""Of an integral: the first that is good enough, see :func:`bayesfed.vmap.choose.for_batches`."""
REACH = {21: 3.1, 41: 4.0, 81: 5.0}
"""How far they lie, in asinh of the scale: 11, 27, 74 of them, as a peak may be narrower than what is around."""
PASSES = 3
LOOKS = np.sinh(np.linspace(-4, 4, 17))
"""Where an integrand is looked at in each pass, in steps of its scale: close by, and as far as 27 of them."""
DROP = 1e4
"""By how many nats it falls at most: so no cliff makes it look narrower than a hundredth of the way to it."""

LogDensity = Callable[[Tensor], Tensor]
"""Of points ``(S, Q, K, B)``, Q of each row: the log integrand, of the same shape."""


class Place(NamedTuple):
    """Where integrands lie, and how wide they are: ``(S, K, B)``."""

    loc: Tensor
    scale: Tensor

    def points(self, z: Tensor) -> Tensor:
        """Those that lie ``z`` scales from there: of ``(Q,)``, ``(S, Q, K, B)``."""
        return self.loc.unsqueeze(1) + self.scale.unsqueeze(1) * z[:, None, None]


def around(log_f: LogDensity, place: Place) -> Place:
    """The modes of integrands and the scales of the Normals that fit them there, without gradients.

    A parabola through the highest of some points and its two neighbours says where to look next: the mode of a Normal
    is found at once, however narrow. Where the highest is the last one, the next look is around it, farther apart.

    Example:
        >>> import torch
        >>> from bayesfed.vmap.quadrature import Place, around
        >>> start = Place(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
        >>> place = around(lambda u: -0.5 * ((u - 3) / 0.01) ** 2, start)
        >>> f"{place.loc.item():.3f} {place.scale.item():.3f}"
        '3.000 0.010'
    """
    with torch.no_grad():
        place = Place(place.loc.detach(), place.scale.detach())
        z, last = torch.as_tensor(LOOKS).to(place.loc), len(LOOKS) - 1
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

    The points are constants, so that the derivatives of the sum are those of the integral as far as the sum is it. They
    lie evenly in t where u = sinh t in scales: the trapezoidal rule, whose error falls exponentially with the number of
    points where the integrand is smooth (Trefethen & Weideman 2014, *The exponentially convergent trapezoidal rule*,
    section 5), and by its square where it has a kink.
    """
    t = torch.linspace(-REACH[count], REACH[count], count, dtype=torch.float64)
    z, log_weight = t.sinh().to(place.loc), (t.cosh() * (t[1] - t[0])).log().to(place.loc)
    return place.points(z), place.scale.log().unsqueeze(1) + log_weight[:, None, None]


def drawn(log_f: LogDensity, place: Place, cells: int = 97) -> Tensor:
    """A draw ``(S, K, B)`` from the density that is proportional to f, flat within an eighth of its scale."""
    z = torch.linspace(-6, 6, cells).to(place.loc)
    values = log_f(place.points(z)).movedim(1, -1)
    nth = torch.distributions.Categorical(logits=values).sample()
    jitter = (torch.rand(nth.shape).to(place.loc) - 0.5) * (z[1] - z[0])
    return place.loc + place.scale * (z[nth] + jitter)
