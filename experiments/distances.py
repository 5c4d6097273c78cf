"""How far draws are from a reference: shifts of means in the reference's standard deviations, ratios of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Moments = tuple[np.ndarray, np.ndarray]


def moments(draws: Mapping[str, Any], names: Iterable[str]) -> Moments:
    """Return means and standard deviations ``(D,)`` of all entries of these variables."""
    parts = [np.asarray(draws[name], dtype=np.float64) for name in names]
    flat = [part.reshape(len(part), -1) for part in parts]
    mean, sd = (np.concatenate([f(x, axis=0) for x in flat] or [[]]) for f in (np.mean, np.std))
    return mean, sd


def distance(found: Moments, truth: Moments) -> tuple[float, float, float]:
    """Return the largest shift, and the least and the largest ratio, of all entries that vary."""
    varies = truth[1] > 1e-6  # the corner of a Cholesky factor does not
    shift = (np.abs(found[0] - truth[0])[varies] / truth[1][varies]).max()
    ratio = found[1][varies] / truth[1][varies]
    return float(shift), float(ratio.min()), float(ratio.max())


def words(found: Moments, truth: Moments) -> str:
    """Return a distance as one cell."""
    shift, least, most = distance(found, truth)
    return f"{shift:.2f}, {least:.2f}–{most:.2f}"


def cells(draws: Mapping[str, Any], reference: Mapping[str, Any], local: set[str]) -> list[str]:
    """Return shift and range of ratios of the global, then of the local variables: four cells.

    The cells of variables that are not there are empty, and the ratio of point estimates is "point".
    """
    made = []
    for wanted in (False, True):
        names = [name for name in reference if (name in local) == wanted]
        if not names:
            made += ["", ""]
            continue
        shift, least, most = distance(moments(draws, names), moments(reference, names))
        made += [f"{shift:.2f}", "point" if most < 1e-3 else f"{least:.2f}–{most:.2f}"]
    return made
