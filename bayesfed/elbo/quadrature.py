"""Integrals over one number of each row: Gauss–Hermite quadrature, around where the integrand of the row lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NODES = 25
REACH = 5
"""How many steps of its scale an integrand is looked at on either side of where it is thought to lie."""
PASSES = 5
DROP = 1e4
"""By how many nats it falls at most: no scale shrinks more than a hundredfold in a pass, or grows tenfold."""

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

    A parabola through the highest of eleven points and its two neighbours gives the next eleven: the mode of a Normal
    is found at once, however narrow, and no step leads to where the integrand overflows.

    Example:
        >>> import torch
        >>> from bayesfed.elbo.quadrature import Place, around
        >>> start = Place(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
        >>> place = around(lambda u: -0.5 * ((u - 3) / 0.01) ** 2, start)
        >>> f"{place.loc.item():.3f} {place.scale.item():.3f}"
        '3.000 0.010'
    """
    with torch.no_grad():
        place = Place(place.loc.detach(), place.scale.detach())
        z = torch.arange(-REACH, REACH + 1).to(place.loc)
        for _ in range(PASSES):
            values = log_f(place.points(z)).nan_to_num(-torch.inf, -torch.inf, -torch.inf)
            values = values.maximum(values.amax(1, keepdim=True) - DROP)
            top = values.argmax(1, keepdim=True).clamp(1, 2 * REACH - 1)
            low, middle, high = (values.gather(1, top + side).squeeze(1) for side in (-1, 0, 1))
            bend = (2 * middle - low - high).clamp(1e-2, DROP)
            step = (high - low) / 2 / bend
            step = top.squeeze(1) - REACH + step.clamp(-REACH, REACH)
            place = Place(place.loc + place.scale * step, place.scale / bend.sqrt())
        return place


def nodes(place: Place) -> tuple[Tensor, Tensor]:
    """Points ``(S, Q, K, B)`` and the logarithms of their weights: ∫ f(u) du ≈ Σ_q exp(log weight_q) f(u_q).

    The points are constants, so that the derivatives of the sum are those of the integral as far as the sum is it.
    Exact where f is a Normal density times a polynomial of degree 2Q − 1 (Liu & Pierce 1994, *A note on Gauss–Hermite
    quadrature*, eq. 5).
    """
    x, weight = np.polynomial.hermite_e.hermegauss(NODES)
    z = torch.as_tensor(x).to(place.loc)
    log_weight = torch.as_tensor(np.log(weight) + x**2 / 2).to(place.loc)
    return place.points(z), place.scale.log().unsqueeze(1) + log_weight[:, None, None]


def drawn(log_f: LogDensity, place: Place, cells: int = 97) -> Tensor:
    """A draw ``(S, K, B)`` from the density that is proportional to f, flat within an eighth of its scale."""
    z = torch.linspace(-6, 6, cells).to(place.loc)
    values = log_f(place.points(z)).movedim(1, -1)
    nth = torch.distributions.Categorical(logits=values).sample()
    jitter = (torch.rand(nth.shape).to(place.loc) - 0.5) * (z[1] - z[0])
    return place.loc + place.scale * (z[nth] + jitter)
