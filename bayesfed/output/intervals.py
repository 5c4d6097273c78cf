"""Highest-density intervals of draws."""

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
        >>> from bayesfed.output.intervals import highest_density
        >>> highest_density(np.array([9.0, 1.0, 2.0, 1.5, 5.0]), 0.4)
        array([1., 2.])
    """
    ordered, within = np.sort(draws, 0), int(prob * len(draws))
    widths = np.subtract(ordered[within:], ordered[: len(draws) - within], dtype=np.float64)
    lower = widths.argmin(0)[None]
    return np.stack([np.take_along_axis(ordered, at, 0)[0] for at in (lower, lower + within)], -1)
