"""How many particles are enough, on houses of two kinds and of one? Makes particles.md and .png.

    python experiments/pac_pfl/particles.py                # twenty minutes on two cores

PACPFL on houses that face east or west and on houses that face south, 150 hours each, with the settings that
regression.py has chosen for the first; k = 1 is one prior for all. RSMSE of the 24 clients that train and of the 24
that join, mean ± standard error over 5 seeds; "paired" is the mean change from k = 1 of the same seed, both groups
together.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from regression import HERE, forecasts, runner

COUNTS = (1, 2, 4)
POINT = {"kind": "GPyTorch's", "scale": 1.0, "tau": 1.0}
PLACES = ("east-west-150", "south-150")


def measure(name: str, count: int, seed: int) -> list[float]:
    """Return RSMSE and calibration error of both groups, with k particles."""
    return forecasts(name, "PACPFL", POINT | {"particles": count}, seed)


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
        for name in PLACES
        for k in COUNTS
    }
    runner.table("houses | k | trained | joined | paired", rows, measure, given, cells)
    if given.usual and not given.rows:
        figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
        for name in PLACES:
            values = torch.stack([both[name, k] for k in COUNTS])
            halves = values.std(1) / given.seeds**0.5
            axes.errorbar(COUNTS, values.mean(1), halves, marker="o", capsize=3, label=name)
        axes.set(xlabel="particles k", ylabel="RSMSE", xticks=COUNTS)
        axes.legend()
        figure.savefig(HERE / "particles.png", dpi=150)


if __name__ == "__main__":
    main()
