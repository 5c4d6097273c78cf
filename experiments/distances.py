"""How far draws are from a reference: shifts of means in the reference's standard deviations, ratios of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
Moments = tuple[np.ndarray, np.ndarray]


class Summary(NamedTuple):
    """What is compared of the draws of a variable: of each of its D entries, ``(D,)``.

    Attributes:
        mean: their mean.
        sd: their standard deviation.
        kurtosis: the fourth central moment in units of the squared variance; 3 of a Normal.
        quantiles: at :data:`QUANTILES`, ``(5, D)``.
        size: the effective number of draws.
    """

    mean: np.ndarray
    sd: np.ndarray
    kurtosis: np.ndarray
    quantiles: np.ndarray
    size: np.ndarray


def summary(draws: Any) -> Summary:
    """Return the summary of independent draws ``(S, ...)`` of a variable; a summary is returned as it is."""
    if isinstance(draws, Summary):
        return draws
    x = _flat(draws)
    mean, sd = x.mean(0), x.std(0)
    fourth = ((x - mean) ** 4).mean(0)
    kurtosis = fourth / np.where(sd > 0, sd, 1.0) ** 4
    quantiles = np.quantile(x, QUANTILES, axis=0)
    return Summary(mean, sd, kurtosis, quantiles, np.full_like(mean, len(x)))


def _flat(draws: Any) -> np.ndarray:
    """Return draws ``(S, ...)`` as ``(S, D)``, in double precision."""
    return np.asarray(draws, dtype=np.float64).reshape(len(draws), -1)


def moments(draws: Mapping[str, Any], names: Iterable[str]) -> Moments:
    """Return means and standard deviations ``(D,)`` of all entries of these variables, from draws or summaries."""
    parts = []
    for value in (draws[name] for name in names):
        known = isinstance(value, Summary)
        parts.append(value[:2] if known else (_flat(value).mean(0), _flat(value).std(0)))
    mean, sd = (np.concatenate([part[i] for part in parts] or [[]]) for i in (0, 1))
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
