"""What does privacy cost 120 clients that learn a prior together? Makes private.md and .png.

    python experiments/pac_pfl/private.py                  # a quarter of an hour on two cores

Each client has 10 rows of a polynomial. One particle (as the paper's private variant), networks for mean and kernel, 50
or 200 rounds in which all clients take part, Adam at 0.03. Cells are the mean RSMSE of the first 24 clients and of 24
that join later and only condition. Mean ± standard error over 5 seeds. Clip and rounds are chosen for each ε and
mechanism from a grid of three and two, on another seed: looking at that choice spends no privacy of these clients. δ =
10⁻³.
"""

from __future__ import annotations

import math
from typing import Any

import matplotlib.pyplot as plt
import regression
import torch
from regression import DRAWS, HERE, OLD, TUNING, runner

import bayesfed as bf

CLIENTS = 120
EPSILONS = {
    "none": (math.inf,),
    "gaussian": (0.3, 1.0, 3.0, 10.0),
    "laplace": (10.0, 100.0, 1000.0),
}
GRID: dict[str, tuple[Any, ...]] = {"clip": (3.0, 10.0, 30.0), "rounds": (50, 200)}


def measure(mechanism: str, epsilon: float, point: dict[str, Any], seed: int) -> list[float]:
    """Return RSMSE of clients that trained, and of those that joined."""
    torch.manual_seed(seed)
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
            found += regression.errors(draws, rows, "rsmse")
    except (FloatingPointError, ValueError):
        return [math.inf, math.inf]
    return found


def draw(found: dict[tuple[str, str], list[float]]) -> None:
    """Draw the error of clients that join against ε."""
    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for mechanism, several in EPSILONS.items():
        values = torch.tensor([found[mechanism, f"{epsilon:g}"] for epsilon in several])
        mean, half = values.mean(1), values.std(1) / values.shape[1] ** 0.5
        if mechanism == "none":
            axes.axhline(mean[0], color="black", linestyle="--", label="not private")
        else:
            axes.errorbar(several, mean, half, marker="o", capsize=3, label=mechanism)
    axes.set(xscale="log", xlabel="ε", ylabel="RSMSE of clients that join")
    axes.legend()
    figure.savefig(HERE / "private.png", dpi=150)


def main() -> None:
    given = runner.arguments(__doc__, jobs=2, seeds=5)
    trials: dict[Any, list[Any]] = {}
    for mechanism, several in EPSILONS.items():
        grid = GRID | ({"clip": (math.inf,)} if mechanism == "none" else {})
        for epsilon in several:
            points = runner.combinations(grid)
            trials[mechanism, epsilon] = [(mechanism, epsilon, each, TUNING) for each in points]
    best, rows, joined, chosen = runner.best(measure, trials, sum, given), {}, {}, {}
    for (mechanism, epsilon), ((*call, _), _) in best.items():
        key = mechanism, f"{epsilon:g}"
        chosen[key] = f"{call[2]['clip']:g}", call[2]["rounds"]
        rows[key] = [(*call, seed) for seed in range(given.seeds)]

    def cells(key: tuple[str, str], found: list[list[float]]) -> list[str]:
        joined[key] = [run[1] for run in found]
        return [*(runner.plus_minus([run[i] for run in found]) for i in (0, 1)), *chosen[key]]

    runner.table("mechanism | ε | trained | joined | clip | rounds", rows, measure, given, cells)
    if given.usual and not given.rows:
        draw(joined)


if __name__ == "__main__":
    main()
