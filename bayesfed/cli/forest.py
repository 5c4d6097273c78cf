"""The forest plot of a run: the clients beside the population that they are drawn from.

ArviZ's ``plot_forest`` knows no such pairs: it puts all variables on one axis, the components of a vector between each
other, and a client held out loses its name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyro.distributions as dist
import torch
import xarray as xr
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pyro import poutine

from bayesfed.elbo import handlers, noise
from bayesfed.engine.files import atomically
from bayesfed.output import arviz_compat
from bayesfed.output.posterior import Posterior

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def population_means(posterior: Posterior) -> dict[str, str]:
    """Which global site is the location of which local one, found by running the model once.

    A local site counts if its prior is a location family (Normal, Student's t, Laplace, Cauchy)
    whose location is the value of one global site, e.g. ``{"theta": "mu"}``.
    """
    program = posterior.program
    batch = posterior.federation.batch(torch.arange(1)).head()
    params = handlers.Parameters(posterior.params, program.local_params)
    with torch.no_grad(), noise.seeded(0), handlers.trusted(batch.device), params:
        nodes = poutine.trace(program.model).get_trace(batch).nodes
    found = {}
    for local in program.locals:
        prior = nodes[local.name]["fn"]
        while isinstance(prior, dist.Independent):
            prior = prior.base_dist
        if not isinstance(prior, dist.Normal | dist.StudentT | dist.Laplace | dist.Cauchy):
            continue
        for site in program.globals:
            value = nodes[site.name]["value"]
            same = site.event_shape == local.event_shape
            if same and bool((prior.loc == value.expand(prior.loc.shape)).all()):
                found[local.name] = site.name
    return found


@dataclass
class _Rows:
    """Labelled intervals: ``mean`` ``(R,)``, ``wide`` and ``narrow`` ``(R, 2)``."""

    labels: list[str]
    mean: np.ndarray
    wide: np.ndarray
    narrow: np.ndarray


_CLIENT, _HELD, _GLOBAL = "#2f6db0", "#d1731b", "#3b3b3b"
_MOST_PANELS, _MOST_LABELS, _COLUMNS = 12, 60, 4


def forest(
    path: Path,
    posterior: xr.Dataset,
    means: dict[str, str],
    *,
    sites: Sequence[str],
    held_out: xr.Dataset | None = None,
    client_dim: str = "client",
    title: str = "",
) -> None:
    """Draw every client's interval beside the population's, a panel per scalar of each local site.

    Args:
        path: the PNG to write, atomically.
        posterior: draws of the clients that took part.
        means: local site to the global site that is its location (:func:`population_means`).
        sites: local sites to show; at most 12 panels are drawn.
        held_out: draws of clients that took no part; they stand below the others.
        client_dim: what a client is called.
        title: of the figure.
    """
    panels = [(site, index) for site in sites for index in np.ndindex(*posterior[site].shape[3:])][
        :_MOST_PANELS
    ]
    names = [str(name) for name in posterior if "client" not in posterior[name].dims]
    globals_ = [(name, i) for name in names for i in np.ndindex(*posterior[name].shape[2:])]
    globals_ = globals_[:_MOST_LABELS]
    count = sum(d.sizes["client"] for d in (posterior, held_out) if d is not None)
    columns = min(_COLUMNS, max(len(panels), 1))
    lines = math.ceil(len(panels) / columns)
    height = 0.9 + 0.24 * (min(count, _MOST_LABELS) + 2)
    below = 0.9 + 0.24 * len(globals_)
    figure = Figure(figsize=(max(2.2 + 2.9 * columns, 6.5), lines * height + below + 0.9))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.08)
    ratios = [max(lines, 0.01) * height, below]
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=ratios)[:, 0]
    if panels:
        axes = upper.subplots(lines, columns, sharey=True, squeeze=False)
        band = any(site in means for site, _ in panels)
        for axis, (site, index) in zip(axes.flat, panels, strict=False):
            _panel(axis, posterior, held_out, site, index, means.get(site), band)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis in axes[:, 0]:
            axis.set_ylabel(client_dim, color="0.35")
    axis = lower.subplots()
    rows = _rows(posterior, globals_)
    _draw(axis, rows, np.arange(len(rows.labels)), _GLOBAL, "D")
    _finish(axis, rows.labels)
    axis.set_title("globals", loc="left", fontweight="bold", fontsize=10)
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left", parse_math=False)
    note = "Dots: posterior means. Thick and thin lines: 50 % and 94 % highest-density intervals."
    if any(site in means for site, _ in panels):
        note += "\nDiamond and grey bands: the population mean that the clients are drawn around."
    if held_out is not None:
        note += " Orange: held out of the fit."
    figure.supxlabel(note, fontsize=8, color="0.35", x=0.01, ha="left")
    with atomically(path) as temporary, warnings.catch_warnings():
        # a name in a script that the font lacks is drawn as boxes
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(temporary, dpi=140, format="png", metadata={"Software": None})


def _panel(
    axis: Axes,
    posterior: xr.Dataset,
    held_out: xr.Dataset | None,
    site: str,
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
        rows = _client_rows(draws, site, index)
        _draw(axis, rows, start + np.arange(len(clients)), colour, "o")
        labels += [str(name) for name in clients]
        start += len(clients)
    _finish(axis, labels)
    axis.set_title(_label(site, index), loc="left", fontweight="bold", fontsize=10)


def _draw(axis: Axes, rows: _Rows, y: np.ndarray, colour: str, marker: str) -> None:
    size = 4.5 if len(y) <= _MOST_LABELS else 2.0
    axis.hlines(y, *rows.wide.T, color=colour, linewidth=1.1 * size / 4.5)
    axis.hlines(y, *rows.narrow.T, color=colour, linewidth=3.0 * size / 4.5)
    axis.plot(
        rows.mean,
        y,
        linestyle="",
        marker=marker,
        markersize=size + 0.5,
        color=colour,
        markeredgecolor="white",
        markeredgewidth=0.7,
        zorder=3,
    )


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


def _rows(draws: xr.Dataset, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> _Rows:
    """One row per scalar component of sites without clients."""
    values = [_scalar(draws, name, index) for name, index in wanted]
    return _intervals([_label(*w) for w in wanted], np.stack(values, -1) if values else None)


def _client_rows(draws: xr.Dataset, site: str, index: tuple[int, ...]) -> _Rows:
    """One row per client, of one scalar component of a local site."""
    return _intervals(draws["client"].values.tolist(), _scalar(draws, site, index))


def _scalar(draws: xr.Dataset, site: str, index: tuple[int, ...]) -> np.ndarray:
    """Draws of one scalar component: dims ``chain``, ``draw`` and, for a local site, ``client``."""
    return draws[site].isel({f"{site}_dim_{j}": i for j, i in enumerate(index)}).values


def _intervals(labels: list[str], values: np.ndarray | None) -> _Rows:
    """Intervals of draws ``(chain, draw, R)``."""
    if values is None:
        return _Rows([], np.empty(0), np.empty((0, 2)), np.empty((0, 2)))
    data = xr.Dataset({"v": (("chain", "draw", "row"), values)})
    wide, narrow = (arviz_compat.hdi(data, prob)["v"] for prob in (0.94, 0.5))
    return _Rows(labels, values.mean((0, 1)), wide, narrow)


def _label(site: str, index: tuple[int, ...]) -> str:
    return f"{site}[{', '.join(map(str, index))}]" if index else site
