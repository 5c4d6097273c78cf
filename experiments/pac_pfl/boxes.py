"""How do errors of each method vary between clients, on polynomials and on houses? Makes boxes.md and .png.

    python experiments/pac_pfl/boxes.py                    # ten minutes on two cores

Each method of regression.py, with the settings that regression.md has chosen, is fitted once, on seed 0, to polynomials
of two kinds and to houses that face east or west with 150 hours (PV-EW 150, of which the paper has box plots). Cells
are quartiles over 24 clients: first quartile, median, third quartile. The picture has a box for each group of clients:
quartiles, whiskers to the last client within 1.5 times their distance, circles for those beyond. Pooled GP is not in
the picture, as in the paper: its errors on polynomials are several times the others'. Polynomials of the two kinds have
errors far apart (length scales 3 and 0.3): half of a box is one kind, half the other.

In the paper PAC-PFL has the lowest medians of both errors and the least spread of the calibration error; its spread of
RSMSE is that of MTL and pFedGP.
"""

from __future__ import annotations

import re
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from regression import HERE, METHODS, predictions, runner, task

from bayesfed import metrics

PLACES = ("polynomials", "east-west-150")
GROUPS = ("trained", "joined")
ERRORS = {"rsmse": "RSMSE", "calibration": "calibration error"}


def chosen(name: str, method: str) -> dict[str, Any]:
    """Return the settings of the method's grid that regression.md has for this data set."""
    lines = (HERE / "regression.md").read_text(encoding="utf-8").splitlines()
    (settings,) = [
        line.split(" | ")[-1] for line in lines if line.startswith(f"| {name} | {method} |")
    ]
    words = dict(re.findall(r"(\w+) (\S+) of \(", settings))
    return {
        setting: next(value for value in values if str(value) == words[setting])
        for setting, values in METHODS[method].grid.items()
    }


def measure(name: str, method: str) -> list[list[float]]:
    """Return RSMSE and calibration error of each client that trained, then of each that joined."""
    torch.manual_seed(0)
    reports = [
        metrics.regression(draws, rows["y"], rows.owner, rows.names).clients
        for draws, rows in predictions(*task(name, 0), method, chosen(name, method))
    ]
    return [report[error].tolist() for report in reports for error in ERRORS]


def quartiles(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in np.quantile(values, (0.25, 0.5, 0.75)))


def draw(found: dict[tuple[str, str], list[list[float]]]) -> None:
    """Draw a panel for each data set and error, and in it two boxes for each method."""
    shown = [method for method in METHODS if method != "Pooled GP"]
    figure, panels = plt.subplots(2, 2, figsize=(10, 6), layout="constrained")
    for row, name in zip(panels, PLACES, strict=True):
        for j, (axes, error) in enumerate(zip(row, ERRORS.values(), strict=True)):
            for i, group in enumerate(GROUPS):
                boxes = axes.boxplot(
                    [found[name, method][2 * i + j] for method in shown],
                    positions=np.arange(len(shown)) + 0.4 * i - 0.2,
                    widths=0.3,
                    patch_artist=True,
                    boxprops={"facecolor": f"C{i}", "alpha": 0.6},
                    medianprops={"color": "black"},
                    flierprops={"markersize": 3},
                )
                boxes["boxes"][0].set_label(group)
            axes.set(title=name, ylabel=error, xticks=range(len(shown)), xticklabels=shown)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figure.savefig(HERE / "boxes.png", dpi=150)


def main() -> None:
    given, clients = runner.arguments(__doc__, jobs=2), {}

    def cells(key: tuple[str, str], found: list[list[list[float]]]) -> list[str]:
        clients[key] = found[0]
        return [quartiles(values) for values in found[0]]

    rows = [(name, method) for name in PLACES for method in METHODS]
    heads = [f"{error}, {group}" for group in GROUPS for error in ERRORS.values()]
    runner.table(" | ".join(["data | method", *heads]), rows, measure, given, cells)
    if given.usual and not given.rows:
        draw(clients)


if __name__ == "__main__":
    main()
