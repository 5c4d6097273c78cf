"""Figures that adapt to the width of the page: positions are percentages, and labels are text of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from xml.etree.ElementTree import Element

import numpy as np
from matplotlib.ticker import MaxNLocator

from bayesfed.data.plural import plural
from bayesfed.report.facts import ByClient
from bayesfed.report.html import Content, tag
from bayesfed.report.numbers import format_row

MOST_ROWS, EXTREMES = 40, 8
"""The most clients of which each has a row of a forest plot; else the highest and the lowest have one."""
BINS = 120
"""The number of groups of neighbouring clients in a plot of many."""


class Row(NamedTuple):
    """A row of a forest plot; the interval ``narrow`` and the diamond ``seen`` may be absent."""

    label: str
    mean: float
    wide: tuple[float, float]
    narrow: tuple[float, float] | None = None
    seen: float | None = None


class Scale(NamedTuple):
    """The range of an axis."""

    lower: float
    upper: float

    def percent(self, value: float) -> str:
        """Return the place of a value, in per cent of the axis."""
        place = (value - self.lower) / (self.upper - self.lower)
        return f"{100 * min(max(place, 0.0), 1.0):.2f}%"

    def ticks(self, count: int) -> list[tuple[float, str]]:
        """Return about ``count`` round values within the range, and their texts."""
        values = np.asarray(
            MaxNLocator(count, steps=[1, 2, 2.5, 5, 10]).tick_values(self.lower, self.upper)
        )
        step, inside = (
            values[1] - values[0],
            values[(values >= self.lower) & (values <= self.upper)],
        )
        exact = [
            d for d in range(6) if np.allclose(inside.round(d), inside, rtol=0, atol=step / 1e3)
        ]
        decimals = exact[0] if exact else None
        return [
            (float(v), f"{v:.3g}" if decimals is None or abs(v) >= 1e9 else f"{v:,.{decimals}f}")
            for v in inside
        ]


def scale_of(values: Sequence[float] | np.ndarray) -> Scale | None:
    """Return a scale on which all finite values lie; None if there is none."""
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return None
    lower, upper = float(finite.min()), float(finite.max())
    margin = 0.04 * (upper - lower) or 0.5 * abs(upper) or 0.5
    return Scale(lower - margin, upper + margin)


def forest(rows: Sequence[Row], *, line: float | None = None) -> Content:
    """Return a forest plot with a common axis: a row for each interval, the numbers beside it.

    Args:
        rows: from above.
        line: a value at which a vertical line is drawn.
    """
    every = [x for row in rows for x in (*row.wide, row.mean, row.seen) if x is not None]
    scale = scale_of([*every, *([] if line is None else [line])])
    if scale is None:
        return tag("p", "None of the values is finite.", class_="soft")

    def spot(kind: str, at: float | None) -> Content:
        style = "" if at is None else f"left:{scale.percent(at)}"
        return tag("span", class_=kind, style=style) if style else None

    lines = []
    for row in rows:
        shown = row.mean if row.seen is None else row.seen
        first, *ends = format_row([shown, *row.wide], (row.wide[1] - row.wide[0]) / 4)
        marks = [
            spot("line", line),
            _bar(scale, row.wide, "wide"),
            _bar(scale, row.narrow, "narrow") if row.narrow else None,
            spot("dot", row.mean),
            spot("seen", row.seen),
        ]
        plot = tag("td", tag("div", marks, class_="plot"))
        numbers = tag("td", first, " ", tag("span", "({} to {})".format(*ends)), class_="number")
        lines.append(tag("tr", tag("th", row.label), plot, numbers))
    ticks = [tag("span", text, style=f"left:{scale.percent(at)}") for at, text in scale.ticks(4)]
    axis = [tag("th"), tag("td", tag("div", ticks, class_="plot")), tag("td")]
    return tag("table", tag("tbody", lines, tag("tr", axis, class_="ticks")), class_="forest")


def _bar(scale: Scale, ends: tuple[float, float], kind: str) -> Element:
    left, right = (float(scale.percent(end)[:-1]) for end in ends)
    return tag("span", class_=kind, style=f"left:{left:.2f}%;width:{right - left:.2f}%")


def by_client(found: ByClient) -> Content:
    """Return a figure of all clients: a forest plot, or for many a band over all and the rows of the extreme ones."""
    order = np.argsort(-found.mean if found.tail is None else found.tail, kind="stable")
    order = order[np.isfinite(found.mean[order])]
    rows = [_row(found, k) for k in order]
    line = (
        None if found.tail is not None else float(found.mean[order].mean()) if len(order) else None
    )
    if len(rows) <= MOST_ROWS:
        return forest(rows, line=line)
    lowest, highest = ("largest", "smallest") if found.tail is not None else ("highest", "lowest")
    what = "observed value beside its prediction" if found.tail is not None else "mean"
    whole = _ranked(found) if found.tail is None else _tails(found)
    return [
        whole,
        tag("h3", f"The {plural(EXTREMES, 'client')} of {len(rows):,} with the {lowest} {what}"),
        forest(rows[:EXTREMES], line=line),
        tag("h3", f"The {EXTREMES} with the {highest}"),
        forest(rows[-EXTREMES:], line=line),
    ]


def _row(found: ByClient, k: int) -> Row:
    wide, narrow = (tuple(ends[k].tolist()) for ends in (found.wide, found.narrow))
    seen = None if found.observed is None else float(found.observed[k])
    return Row(found.clients[k], float(found.mean[k]), wide, narrow, seen)


def _ranked(found: ByClient) -> Content:
    """Return bands of the intervals of many clients, by the rank of their means."""
    order = np.argsort(found.mean, kind="stable")
    groups = np.array_split(order, min(BINS, len(order)))
    middle = np.array([found.mean[some].mean() for some in groups])
    wide = np.array([found.wide[some].mean(0) for some in groups])
    narrow = np.array([found.narrow[some].mean(0) for some in groups])
    scale = scale_of(np.concatenate([wide.ravel(), middle]))
    if scale is None:
        return None
    at = np.linspace(0, 100, len(groups))
    shapes = [
        _area(at, wide, scale, "band"),
        _area(at, narrow, scale, "half"),
        _line(at, middle, scale, "curve"),
    ]
    ranks = Scale(1.0, float(len(order)))
    return frame(shapes, ranks, scale, f"clients by rank of the mean of {found.label}")


def _tails(found: ByClient) -> Content:
    """Return a histogram of the tail probabilities of many clients, flat if the model describes them all."""
    assert found.tail is not None
    counts = np.histogram(found.tail, np.linspace(0, 1, 21))[0].astype(float)
    scale = Scale(0.0, 1.05 * float(counts.max()))
    at, edges = np.repeat(np.linspace(0, 100, 21), 2)[1:-1], np.repeat(counts, 2)
    shapes = [
        _area(at, np.stack([np.zeros_like(edges), edges], 1), scale, "half"),
        _line(np.array([0.0, 100.0]), np.full(2, counts.mean()), scale, "prior"),
    ]
    return frame(
        shapes, Scale(0.0, 1.0), scale, "probability of a value above the observed one; clients"
    )


def elbo_curve(elbo: np.ndarray) -> Content:
    """Return the ELBO by round; what lies below the range of the last three quarters is cut off."""
    last = elbo[len(elbo) // 4 :]
    scale = scale_of(last)
    if scale is None or len(elbo) < 2:
        return None
    at = np.linspace(0, 100, len(elbo))
    shown = np.isfinite(elbo)
    line = _line(at[shown], elbo[shown].clip(2 * scale.lower - scale.upper), scale, "curve")
    return frame([line], Scale(1.0, float(len(elbo))), scale, "ELBO by round")


def density(densities: np.ndarray) -> Content:
    """Return a small plot of the densities of posterior and prior, ``(2, G)``."""
    scale = Scale(0.0, 1.05 * float(densities[0].max()) or 1.0)
    at = np.linspace(0, 100, densities.shape[1])
    both = np.stack([np.zeros_like(at), densities[0]], 1)
    shapes = [_area(at, both, scale, "band"), _line(at, densities[0], scale, "curve")]
    if np.isfinite(densities[1]).all():
        shapes.append(_line(at, densities[1].clip(max=scale.upper), scale, "prior"))
    return _svg(shapes, "spark")


def frame(shapes: Sequence[Element], x: Scale, y: Scale, title: str) -> Element:
    """Return a plot with axes."""
    texts = [
        tag("span", text, class_="y", style=f"top:{y.percent(y.upper + y.lower - at)}")
        for at, text in y.ticks(4)
    ]
    texts += [
        tag("span", text, class_="x", style=f"left:{x.percent(at)}") for at, text in x.ticks(5)
    ]
    texts.append(tag("span", title, class_="title"))
    return tag("div", _svg(shapes, "whole"), texts, class_="frame", role="img", aria_label=title)


def _svg(shapes: Sequence[Element], kind: str) -> Element:
    return tag("svg", shapes, class_=kind, viewBox="0 0 100 100", preserveAspectRatio="none")


def _points(at: np.ndarray, values: np.ndarray, scale: Scale) -> str:
    high = 100 * (scale.upper - values) / (scale.upper - scale.lower)
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in zip(at, high, strict=True))


def _line(at: np.ndarray, values: np.ndarray, scale: Scale, kind: str) -> Element:
    return tag("polyline", points=_points(at, values, scale), class_=kind)


def _area(at: np.ndarray, ends: np.ndarray, scale: Scale, kind: str) -> Element:
    there, back = _points(at, ends[:, 0], scale), _points(at[::-1], ends[::-1, 1], scale)
    return tag("polygon", points=f"{there} {back}", class_=kind)
