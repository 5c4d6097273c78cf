"""Error against ε: 120 clients with 10 rows of a polynomial each learn their prior in private. Makes private.md, .png.

    python experiments/pac_pfl/private.py                  # a quarter of an hour on two cores

One particle (as the paper's private variant), networks for mean and kernel, 50 or 200 rounds in which all clients take
part, Adam at 0.03. Cells are the mean RSMSE of the first 24 clients and of 24 that join later and are never asked: they
condition, at home. Mean ± standard error over 5 seeds. Clip and rounds are chosen for each ε and mechanism from a grid
of three and two, on another seed: looking at that choice spends no privacy of these clients. δ = 10⁻³.
"""

from __future__ import annotations

import argparse
import math
import warnings
from typing import Any

import matplotlib.pyplot as plt
import regression
import torch
from regression import DRAWS, HERE, OLD, TUNING
from tables import combinations, done, keep

import bayesfed as bf
from bayesfed import metrics

CLIENTS = 120
EPSILONS = {
    "none": (math.inf,),
    "gaussian": (0.3, 1.0, 3.0, 10.0),
    "laplace": (10.0, 100.0, 1000.0),
}
GRID: dict[str, tuple[Any, ...]] = {"clip": (3.0, 10.0, 30.0), "rounds": (50, 200)}


def errors(mechanism: str, epsilon: float, point: dict[str, Any], seed: int) -> list[float]:
    """RSMSE of clients that trained, and of those that joined."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    warnings.simplefilter("ignore")
    train, test = regression.polynomials(seed, old=CLIENTS)
    privacy = None
    if mechanism != "none":
        privacy = bf.Privacy(clip=point["clip"], epsilon=epsilon, delta=1e-3, mechanism=mechanism)
    try:
        posterior = bf.fit(
            regression.prior("networks", 1),
            train.select(train.names[:CLIENTS]),
            bf.PACPFL(particles=1, lr=0.03),
            rounds=point["rounds"],
            privacy=privacy,
            seed=seed,
            progress=False,
        )
        found = []
        for names in (train.names[:OLD], train.names[CLIENTS:]):
            rows = test.select(names)
            draws = posterior.personalize(train.select(names)).predict(rows, DRAWS)["y"]
            clients = metrics.regression(draws, rows["y"], rows.owner, rows.names).clients
            found.append(float(clients["rsmse"].mean()))
    except (FloatingPointError, ValueError):
        return [math.inf, math.inf]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="take fits that are stored")
    args = parser.parse_args()
    kinds = [(m, epsilon) for m, several in EPSILONS.items() for epsilon in several]
    trials = [
        (*kind, point, TUNING)
        for kind in kinds
        for point in combinations(GRID | ({"clip": (math.inf,)} if kind[0] == "none" else {}))
    ]
    best: dict[tuple[str, float], tuple[float, dict[str, Any]]] = {}
    for (mechanism, epsilon, point, _), found in done(errors, trials, args.jobs, args.resume):
        print(mechanism, epsilon, point, *(f"{v:.3f}" for v in found), flush=True)
        kind = (mechanism, epsilon)
        if sum(found) < best.get(kind, (math.inf,))[0]:
            best[kind] = sum(found), point
    runs = [(*kind, best[kind][1], seed) for kind in best for seed in range(args.seeds)]
    of_kind: dict[tuple[str, float], list[list[float]]] = {kind: [] for kind in best}
    for (*kind, _, _), found in done(errors, runs, args.jobs, args.resume):
        of_kind[tuple(kind)].append(found)
    header = ["| mechanism | ε | trained | joined | clip | rounds |", "| --- |" + " --- |" * 5]
    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for mechanism, several in EPSILONS.items():
        lines = []
        for epsilon in several:
            values = torch.tensor(of_kind[mechanism, epsilon], dtype=torch.float64)
            mean, error = values.mean(0), values.std(0) / args.seeds**0.5
            lines.append((float(mean[1]), float(error[1])))
            cells = " | ".join(f"{m:.3f} ± {e:.3f}" for m, e in zip(mean, error, strict=True))
            point = best[mechanism, epsilon][1]
            row = f"| {mechanism} | {epsilon:g} | {cells} | {point['clip']:g} | {point['rounds']} |"
            print(row, flush=True)
            keep(HERE / "private.md", header, row, list(EPSILONS), columns=2)
        if mechanism == "none":
            axes.axhline(lines[0][0], color="black", linestyle="--", label="not private")
        else:
            means, halves = zip(*lines, strict=True)
            axes.errorbar(several, means, halves, marker="o", capsize=3, label=mechanism)
    axes.set(xscale="log", xlabel="ε", ylabel="RSMSE of clients that join")
    axes.legend()
    figure.savefig(HERE / "private.png", dpi=150)


if __name__ == "__main__":
    main()
