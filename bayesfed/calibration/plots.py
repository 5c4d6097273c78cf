"""Plots of ranks: differences of ECDFs with simultaneous bands, and histograms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bayesfed.calibration import uniformity
from bayesfed.calibration.uniformity import DRAWS

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS = 20
"""Bins of a histogram of 200 ranks."""
_BLUE, _GREY = "#2f6db0", "0.88"


def plot_ecdf(ranks: xr.Dataset, names: Sequence[str] | None = None) -> Figure:
    """Plot by variable the ECDF of the ranks minus that of uniform ones, with its simultaneous 95 % band.

    A line above zero is of ranks that are too low: estimates are too high. One above zero on the left and below it on
    the right is of ranks near both ends: intervals are too narrow.

    Args:
        ranks: of :class:`~bayesfed.calibration.result.Calibration`.
        names: variables; by default all.
    """
    n = ranks.sizes["replication"]
    z = np.arange(1, DRAWS + 1) / (DRAWS + 1)
    lower, upper = uniformity.bands(n, DRAWS)
    figure, panels = _panels(ranks, names)
    for name, ax in panels:
        ax.fill_between(z, lower / n - z, upper / n - z, color=_GREY, linewidth=0)
        flat = ranks[name].to_numpy().reshape(n, -1)
        lines = uniformity.below(flat, DRAWS) / n - z
        ax.plot(z, lines.T, color=_BLUE, linewidth=1, alpha=max(0.15, 1 / math.sqrt(len(lines))))
        ax.axhline(0.0, color="0.6", linewidth=0.6)
        ax.set_title(name, fontsize="medium")
    figure.supxlabel("rank / 200")
    figure.supylabel("ECDF difference")
    return figure


def plot_ranks(ranks: xr.Dataset, names: Sequence[str] | None = None) -> Figure:
    """Plot by variable a histogram of the ranks of all entries, with the interval in which 95 % of its bins lie.

    The interval is that of independent ranks: those of the entries of one replication depend on each other, so that of
    such variables more bins lie outside.

    Args:
        ranks: of :class:`~bayesfed.calibration.result.Calibration`.
        names: variables; by default all.
    """
    figure, panels = _panels(ranks, names)
    for name, ax in panels:
        flat = ranks[name].to_numpy().ravel()
        mean = len(flat) / BINS
        error = 1.96 * math.sqrt(mean * (1 - 1 / BINS))
        ax.axhspan(max(0.0, mean - error), mean + error, color=_GREY, linewidth=0)
        ax.axhline(mean, color="0.6", linewidth=0.6)
        edges = np.arange(0, DRAWS + 2, (DRAWS + 1) // BINS) - 0.5
        ax.hist(flat, edges.tolist(), color=_BLUE, alpha=0.7)
        ax.set_title(name, fontsize="medium")
    figure.supxlabel("rank")
    return figure


def _panels(
    ranks: xr.Dataset, names: Sequence[str] | None
) -> tuple[Figure, Iterator[tuple[str, Axes]]]:
    """Return a figure with an axes for each variable.

    Raises:
        KeyError: there is no such variable.
    """
    import matplotlib.pyplot as plt

    chosen = list(map(str, ranks)) if names is None else list(names)
    for name in chosen:
        if name not in ranks:
            raise KeyError(f"no variable {name!r}: {', '.join(map(str, ranks))}")
    columns = min(4, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(2.6 * columns, 2.2 * rows), squeeze=False, layout="constrained"
    )
    for ax in axes.ravel()[len(chosen) :]:
        ax.set_axis_off()
    return figure, zip(chosen, axes.ravel(), strict=False)
