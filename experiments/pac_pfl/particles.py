"""How many particles are enough: error against k on houses of two kinds and of one. Makes particles.md and .png.

    python experiments/pac_pfl/particles.py                # twenty minutes on two cores

PACPFL on houses that face east or west and on houses that face south, 150 hours each, with the settings that
regression.py has chosen for the first; k = 1 is one prior for all. RSMSE of the 24 clients that train and of the 24
that join, mean ± standard error over 5 seeds; "paired" is the mean change from k = 1 of the same seed, both groups
together.
"""

from __future__ import annotations

import argparse

import matplotlib.pyplot as plt
import torch
from regression import HERE, forecasts
from tables import done

COUNTS = (1, 2, 4)
POINT = {"kind": "GPyTorch's", "scale": 1.0, "tau": 1.0}
PLACES = ("east-west-150", "south-150")


def errors(name: str, count: int, seed: int) -> list[float]:
    """RSMSE and calibration error of both groups, with k particles."""
    return forecasts(name, "PACPFL", POINT | {"particles": count}, seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="take fits that are stored")
    args = parser.parse_args()
    calls = [(name, k, seed) for name in PLACES for k in COUNTS for seed in range(args.seeds)]
    found = {call: values for call, values in done(errors, calls, args.jobs, args.resume)}
    lines = ["| houses | k | trained | joined | paired |", "| --- |" + " --- |" * 4]
    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for name in PLACES:
        values = torch.tensor(
            [[found[name, k, s] for s in range(args.seeds)] for k in COUNTS], dtype=torch.float64
        )[..., [0, 2]]  # (k, seed, group)
        change = (values - values[:1]).mean(-1)
        for i, k in enumerate(COUNTS):
            mean, error = values[i].mean(0), values[i].std(0) / args.seeds**0.5
            cells = " | ".join(f"{m:.3f} ± {e:.3f}" for m, e in zip(mean, error, strict=True))
            paired = f"{change[i].mean():+.3f} ± {change[i].std() / args.seeds**0.5:.3f}"
            lines.append(f"| {name} | {k} | {cells} | {paired if k > 1 else '–'} |")
        both = values.mean(-1)
        halves = both.std(1) / args.seeds**0.5
        axes.errorbar(COUNTS, both.mean(1), halves, marker="o", capsize=3, label=name)
    axes.set(xlabel="particles k", ylabel="RSMSE", xticks=COUNTS)
    axes.legend()
    figure.savefig(HERE / "particles.png", dpi=150)
    print("\n".join(lines))
    (HERE / "particles.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
