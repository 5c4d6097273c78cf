"""How many particles are enough, on clients of two kinds and of one? Makes particles.md and .png.

    python experiments/pac_pfl/particles.py                # ten minutes on two cores
    python experiments/pac_pfl/particles.py polynomials    # a few minutes

PACPFL on houses that face east or west and on houses that face south, 150 hours each, with the settings that
regression.py has chosen for the first; on polynomials of two kinds, 10 rows a client, with those chosen for them. k = 1
is one prior for all. RSMSE of the 24 clients that train and of the 24 that join, mean ± standard error over 5 seeds;
"paired" is the mean change from k = 1 of the same seed, both groups together.

The paper varies k on the houses alone: the error of clients that train falls with k on both kinds, most from one
particle to two and where houses face both ways, which it puts down to the two modes. If that is the reason, "paired" is
below zero on the polynomials and on east-west-150, by more than on south-150, whose clients are of one kind. All
steps are Adam's.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from regression import HERE, forecasts, runner

LINEAR = {"kind": "GPyTorch's", "scale": 1.0, "tau": 1.0}
NETWORKS = {"kind": "networks", "scale": 1.0, "tau": 24.0}
POINTS = {"east-west-150": LINEAR, "south-150": LINEAR, "polynomials": NETWORKS}
COUNTS = {"east-west-150": (1, 2, 4), "south-150": (1, 2, 4), "polynomials": (1, 2, 4, 8)}


def measure(name: str, count: int, seed: int) -> list[float]:
    """Return RSMSE and calibration error of both groups, with k particles."""
    return forecasts(name, "PACPFL", POINTS[name] | {"particles": count}, seed)


def draw(both: dict[tuple[str, int], torch.Tensor]) -> None:
    """Draw the error of both groups against k: houses on the left, polynomials on the right."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for name, counts in COUNTS.items():
        values = torch.stack([both[name, k] for k in counts])
        halves = values.std(1) / values.shape[1] ** 0.5
        axes = panels[int(name == "polynomials")]
        axes.errorbar(counts, values.mean(1), halves, marker="o", capsize=3, label=name)
        axes.set(xlabel="particles k", ylabel="RSMSE", xticks=counts)
    for axes in panels:
        axes.legend()
    figure.savefig(HERE / "particles.png", dpi=150)


def main() -> None:
    given, both = runner.arguments(__doc__, jobs=2, seeds=5), {}

    def cells(key: tuple[str, int], found: list[list[float]]) -> list[str]:
        half = len(found) // 2
        trained, joined = ([run[i] for run in found[:half]] for i in (0, 2))
        means, first = (
            [(run[0] + run[2]) / 2 for run in part] for part in (found[:half], found[half:])
        )
        change = [a - b for a, b in zip(means, first, strict=True)]
        both[key] = torch.tensor(means)
        paired = runner.plus_minus(change, "+.3f", ".3f") if any(change) else "–"
        return [runner.plus_minus(trained), runner.plus_minus(joined), paired]

    rows = {
        (name, k): [(name, each, seed) for each in (k, 1) for seed in range(given.seeds)]
        for name, counts in COUNTS.items()
        for k in counts
    }
    runner.table("data | k | trained | joined | paired", rows, measure, given, cells)
    if given.usual and not given.rows:
        draw(both)


if __name__ == "__main__":
    main()
