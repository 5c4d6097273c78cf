"""The forest plot of a run: the clients beside the population from which they are drawn.

ArviZ's ``plot_forest`` has no such pairs: it puts all variables on one axis and mixes the components of a vector, and
clients that were held out lose their names.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro.distributions as dist
import torch
import xarray as xr
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pyro import poutine

from bayesfed.elbo import handlers, noise
from bayesfed.elbo.sites import innermost
from bayesfed.engine.files import atomically
from bayesfed.output.posterior import Posterior
from bayesfed.report.numbers import highest_density

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def population_means(posterior: Posterior) -> dict[str, str]:
    """Return the global variable that is the location of each local one, found by running the model once.

    A local variable counts if its prior is a location family (Normal, Student's t, Laplace, Cauchy) whose location is
    the value of one global variable, for example ``{"theta": "mu"}``.
    """
    program = posterior.program
    batch = posterior.federation.batch(torch.arange(1), torch.zeros(1, 1, dtype=torch.int64))
    params = handlers.Parameters(posterior.params, program.local_params)
    with torch.no_grad(), noise.seeded(0), handlers.trusted(batch.device), params:
        nodes = poutine.trace(program.model).get_trace(batch).nodes
    found = {}
    for local in program.locals:
        prior = innermost(nodes[local.name]["fn"])
        if not isinstance(prior, dist.Normal | dist.StudentT | dist.Laplace | dist.Cauchy):
            continue
        for site in program.globals:
            value = nodes[site.name]["value"]
            same = site.event_shape == local.event_shape
            if same and bool((prior.loc == value.expand(prior.loc.shape)).all()):
                found[local.name] = site.name
    return found


@dataclass
class _Intervals:
    """Labelled intervals: ``mean`` ``(R,)``, ``wide`` and ``narrow`` ``(R, 2)``."""

    labels: list[str]
    mean: np.ndarray
    wide: np.ndarray
    narrow: np.ndarray


_CLIENT, _HELD, _GLOBAL = "#2f6db0", "#d1731b", "#3b3b3b"
_MOST_PANELS, _MOST_LABELS, _COLUMNS = 12, 60, 4


def plot_forest(
    path: Path,
    posterior: xr.Dataset,
    means: dict[str, str],
    *,
    variables: Sequence[str],
    held_out: xr.Dataset | None = None,
    client_dim: str = "client",
    title: str = "",
) -> None:
    """Draw every client's interval beside the population's, a panel for each scalar of each local variable.

    Args:
        path: the PNG to write, atomically.
        posterior: draws of the clients that took part.
        means: the global variable that is the location of each local one (:func:`population_means`).
        variables: local variables to show; at most 12 panels are drawn.
        held_out: draws of clients that took no part; they stand below the others.
        client_dim: the name of the client dimension.
        title: of the figure.
    """
    panels = [(name, i) for name in variables for i in np.ndindex(*posterior[name].shape[3:])]
    panels = panels[:_MOST_PANELS]
    names = [str(name) for name in posterior if "client" not in posterior[name].dims]
    globals_ = [(name, i) for name in names for i in np.ndindex(*posterior[name].shape[2:])]
    scales = [list(some) for _, some in groupby(globals_[:_MOST_LABELS], lambda one: one[0])]
    count = sum(d.sizes["client"] for d in (posterior, held_out) if d is not None)
    columns = min(_COLUMNS, max(len(panels), 1))
    lines = math.ceil(len(panels) / columns)
    height = 0.9 + 0.24 * (min(count, _MOST_LABELS) + 2)
    heights = [0.36 + 0.24 * len(some) for some in scales]
    below = max(0.9, 0.5 + sum(heights))
    figure = Figure(figsize=(max(2.2 + 2.9 * columns, 6.5), lines * height + below + 0.9))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.08)
    ratios = [max(lines, 0.01) * height, below]
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=ratios)[:, 0]
    band = any(name in means for name, _ in panels)
    if panels:
        axes = upper.subplots(lines, columns, sharey=True, squeeze=False)
        for axis, (name, index) in zip(axes.flat, panels, strict=False):
            _panel(axis, posterior, held_out, name, index, means.get(name), band)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis in axes[:, 0]:
            axis.set_ylabel(client_dim, color="0.35")
    grid = {"height_ratios": heights or [1.0]}
    axes = lower.subplots(len(scales) or 1, 1, squeeze=False, gridspec_kw=grid)[:, 0]
    for axis, some in zip(axes, scales or [[]], strict=True):  # each variable has a unit of its own
        rows = _rows(posterior, some)
        _draw(axis, rows, np.arange(len(rows.labels)), _GLOBAL, "D")
        _finish(axis, rows.labels)
    axes[0].set_title("globals", loc="left", fontweight="bold", fontsize=10)
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left", parse_math=False)
    note = "Dots: posterior means. Thick and thin lines: 50 % and 94 % highest-density intervals."
    if band:
        note += "\nDiamond and grey bands: the population mean that the clients are drawn around."
    if held_out is not None:
        note += " Orange: held out of the fit."
    figure.supxlabel(note, fontsize=8, color="0.35", x=0.01, ha="left")
    with atomically(path) as temporary, warnings.catch_warnings():
        # characters that the font lacks are drawn as boxes
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(temporary, dpi=140, format="png", metadata={"Software": None})


def _panel(
    axis: Axes,
    posterior: xr.Dataset,
    held_out: xr.Dataset | None,
    name: str,
    index: tuple[int, ...],
    mean: str | None,
    band: bool,
) -> None:
    labels = []
    start = 0
    if band:
        labels.append("population")
        start = 1
    if mean is not None:
        rows = _rows(posterior, [(mean, index)])
        for interval, shade in ((rows.wide[0], 0.10), (rows.narrow[0], 0.14)):
            axis.axvspan(*interval, color=_GLOBAL, alpha=shade, linewidth=0)
        axis.axvline(rows.mean[0], color=_GLOBAL, linewidth=0.8, alpha=0.6)
        _draw(axis, rows, np.zeros(1), _GLOBAL, "D")
        axis.set_title(f"◆ {rows.labels[0]}", loc="right", fontsize=9, color=_GLOBAL)
    for draws, colour in ((posterior, _CLIENT), (held_out, _HELD)):
        if draws is None:
            continue
        clients = draws["client"].values.tolist()
        rows = _client_rows(draws, name, index)
        _draw(axis, rows, start + np.arange(len(clients)), colour, "o")
        labels += [str(client) for client in clients]
        start += len(clients)
    _finish(axis, labels)
    axis.set_title(_label(name, index), loc="left", fontweight="bold", fontsize=10)


def _draw(axis: Axes, rows: _Intervals, y: np.ndarray, colour: str, marker: str) -> None:
    size = 4.5 if len(y) <= _MOST_LABELS else 2.0
    axis.hlines(y, *rows.wide.T, color=colour, linewidth=1.1 * size / 4.5)
    axis.hlines(y, *rows.narrow.T, color=colour, linewidth=3.0 * size / 4.5)
    edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.7}
    axis.plot(rows.mean, y, marker, markersize=size + 0.5, color=colour, zorder=3, **edge)


def _finish(axis: Axes, labels: list[str]) -> None:
    if len(labels) <= _MOST_LABELS:
        axis.set_yticks(np.arange(len(labels)), labels, fontsize=9, parse_math=False)
    else:
        axis.set_yticks([])
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=8, color="0.6")
    axis.locator_params(axis="x", nbins=5)
    axis.grid(axis="x", color="0.9", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color("0.6")


def _rows(draws: xr.Dataset, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> _Intervals:
    """Return a row for each scalar of global variables."""
    values = [_scalar(draws, name, index) for name, index in wanted]
    return _intervals([_label(*w) for w in wanted], np.stack(values, -1) if values else None)


def _client_rows(draws: xr.Dataset, name: str, index: tuple[int, ...]) -> _Intervals:
    """Return a row for each client, of one scalar of a local variable."""
    return _intervals(draws["client"].values.tolist(), _scalar(draws, name, index))


def _scalar(draws: xr.Dataset, name: str, index: tuple[int, ...]) -> np.ndarray:
    """Return draws of one scalar: dims ``chain``, ``draw`` and, for a local variable, ``client``."""
    return draws[name].isel({f"{name}_dim_{j}": i for j, i in enumerate(index)}).values


def _intervals(labels: list[str], values: np.ndarray | None) -> _Intervals:
    """Return intervals of draws ``(chain, draw, R)``."""
    if values is None:
        return _Intervals([], np.empty(0), np.empty((0, 2)), np.empty((0, 2)))
    draws = values.reshape(-1, values.shape[-1])
    wide, narrow = (highest_density(draws, prob) for prob in (0.94, 0.5))
    return _Intervals(labels, draws.mean(0), wide, narrow)


def _label(name: str, index: tuple[int, ...]) -> str:
    return f"{name}[{', '.join(map(str, index))}]" if index else name
