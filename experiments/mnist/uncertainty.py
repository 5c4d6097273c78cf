"""Is the predictive entropy higher on images that a client has never seen? Makes uncertainty.md and uncertainty.png.

    python experiments/mnist/uncertainty.py --seeds 3 --data PATH        # about ten minutes on two cores

The recipe few_images: 100 clients with five digits each, fitted with the settings of few_images.md, then 50 personal
steps. Each client has a predictive entropy on test images of its own digits, of the five digits that it has never seen,
and of its own digits turned by 90 degrees. The table is the area under the ROC curve with which entropy separates the
second and the third from the first, in each client by itself: mean of the clients, ± standard error over the seeds.
Predictions have the label shares of all clients together: with a client's own an unseen digit is improbable. The
picture is of seed 0, a line for each client.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import recipes
import torch
from run import HERE, METHODS, fitted, of_all_clients, runner
from scipy.stats import gaussian_kde
from sklearn.metrics import roc_auc_score

import bayesfed as bf

CHOSEN = {"FedAvg": ({"rate": 0.7}, 0.3), "FedABML": ({"rate": 0.3, "lam": 0.1}, 0.3)}
"""The point of the grid and the personal rate of few_images.md."""
KINDS = ("own digits", "unseen digits", "own digits, turned")


def unseen(task: recipes.Task, data: recipes.Digits, seed: int) -> bf.Federation:
    """Return 200 test images of the other digits for every client."""
    rng = np.random.default_rng(seed)
    clients = {}
    for name in task.test.names:
        own = np.unique(task.test.select([name])["y"])
        rows = rng.choice(np.flatnonzero(~np.isin(data.test_y, own)), 200, replace=False)
        images = torch.from_numpy(data.test_x[rows]).flatten(1).float() / 255
        clients[name] = {"x": images, "y": torch.from_numpy(data.test_y[rows].astype(np.int64))}
    return bf.Federation.from_arrays(clients)


def turned(federation: bf.Federation) -> bf.Federation:
    """Return the same images, turned by 90 degrees."""
    images = federation["x"].reshape(-1, 28, 28).rot90(1, (1, 2)).flatten(1)
    fields = {"x": images, "y": federation["y"]}
    return bf.Federation(fields, federation.offsets, federation.names)


def entropies(data: str, method: str, seed: int) -> list[list[np.ndarray]]:
    """Return the predictive entropy, in nats, of the rows of each kind and client."""
    source = recipes.load(data)
    task = recipes.few_images(source, seed)
    point, rate = CHOSEN[method]
    posterior = fitted(task, "few_images", METHODS[method], point, seed)
    own = posterior.personalize(of_all_clients(posterior, task.train), steps=50, lr=rate)
    found = []
    for rows in (task.test, unseen(task, source, seed), turned(task.test)):
        alike = of_all_clients(posterior, rows)
        probabilities = own.probabilities(alike, METHODS[method].draws)["y"].double()
        entropy = torch.special.entr(probabilities).sum(1)
        found.append([part.numpy() for part in entropy.split(rows.lengths.tolist())])
    return found


def areas(own: list[np.ndarray], other: list[np.ndarray]) -> float:
    """Return the mean over clients of the area under the ROC curve."""
    found = [
        roc_auc_score(np.repeat([0, 1], [len(a), len(b)]), np.concatenate([a, b]))
        for a, b in zip(own, other, strict=True)
    ]
    return float(np.mean(found))


def draw(of_method: dict[str, list[list[np.ndarray]]], path: Path) -> None:
    figure, axes = plt.subplots(
        1, len(of_method), figsize=(9, 3.2), sharey=True, layout="constrained"
    )
    grid = np.linspace(0, np.log(10), 200)
    for axis, (method, kinds) in zip(axes, of_method.items(), strict=True):
        for number, (kind, clients) in enumerate(zip(KINDS, kinds, strict=True)):
            for values in clients:
                axis.plot(grid, gaussian_kde(values, 0.3)(grid), color=f"C{number}", alpha=0.06)
            pooled = gaussian_kde(np.concatenate(clients), 0.1)(grid)
            axis.plot(grid, pooled, color=f"C{number}", label=kind)
        axis.set(title=method, xlabel="predictive entropy (nats)", ylim=(0, 3))
    axes[0].set_ylabel("density")
    axes[-1].legend()
    figure.savefig(path, dpi=110)


def measure(data: str, method: str, seed: int) -> list[float]:
    """Return the areas of the unseen and of the turned digits."""
    own, *others = entropies(data, method, seed)
    return [areas(own, other) for other in others]


def main() -> None:
    given = runner.arguments(__doc__, seeds=3, data=runner.MNIST)
    data = str(given.data)
    rows = {name: [(data, name, seed) for seed in range(given.seeds)] for name in CHOSEN}

    def cells(_: Any, found: list[list[float]]) -> list[str]:
        return [*(runner.plus_minus([run[i] for run in found]) for i in range(2)), given.seeds]

    runner.table(
        f"method | {' | '.join(KINDS[1:])} | seeds", rows, measure, given, cells, threads=2
    )
    if given.usual:
        draw({name: entropies(data, name, 0) for name in CHOSEN}, HERE / "uncertainty.png")


if __name__ == "__main__":
    main()
