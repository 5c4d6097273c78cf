"""Intervals of draws, and numbers as text."""

import math
from collections.abc import Sequence

import numpy as np


def highest_density(draws: np.ndarray, prob: float) -> np.ndarray:
    """Return the shortest intervals that hold a share of the draws, as ArviZ's ``hdi`` does.

    Args:
        draws: ``(S, ...)``.
        prob: the share.

    Returns:
        Lower and upper ends, ``(..., 2)``.

    Example:
        >>> import numpy as np
        >>> from bayesfed.report.numbers import highest_density
        >>> highest_density(np.array([9.0, 1.0, 2.0, 1.5, 5.0]), 0.4)
        array([1., 2.])
    """
    ordered, within = np.sort(draws, 0), int(prob * len(draws))
    widths = np.subtract(ordered[within:], ordered[: len(draws) - within], dtype=np.float64)
    lower = widths.argmin(0)[None]
    return np.stack([np.take_along_axis(ordered, at, 0)[0] for at in (lower, lower + within)], -1)


def format_row(row: Sequence[float], sd: float) -> list[str]:
    """Return numbers with as many decimals as two significant digits of the sd need, without negative zeros.

    Example:
        >>> from bayesfed.report.numbers import format_row
        >>> format_row([12.3456, 0.0876], sd=0.0876), format_row([-0.1, 56.7], sd=56.7)
        (['12.346', '0.088'], ['0', '57'])
    """
    usable = math.isfinite(sd) and sd > 0
    decimals = min(max(1 - math.floor(math.log10(sd)), 0), 8) if usable else 3
    return [f"{value:z.{decimals}f}" for value in row]
