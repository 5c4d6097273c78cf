"""Is the predictive entropy higher on images that a client has never seen? Makes uncertainty.md and uncertainty.png.

    python experiments/mnist/uncertainty.py --seeds 3 --data PATH        # about twenty minutes on one core

The recipe few_images: 100 clients with five digits each, fitted with the settings of few_images.md, except that
FedABML's KL has its weight λ = 1 of the paper's objective; then 50 personal steps. Each client has a predictive entropy
on test images of its own digits, and on three other kinds: the five digits that it has never seen, its own digits
turned by 90 degrees, and its own digits from another source, scikit-learn's 8 × 8 digits, enlarged to MNIST's size. The
table is the area under the ROC curve with which entropy separates each of the three from the first, in each client by
itself: mean of the clients, ± standard error over the seeds. At 0.5 entropy does not separate them. Predictions have
the label shares of all clients together: with a client's own an unseen digit is improbable. The picture is of seed 0, a
line for each client.

The last column is the nearest to the paper (its Figures 5 and 6), which prints no numbers: there, too, labels stay the
same and pictures change, from FashionMNIST to MNIST and from CIFAR-10 to SVHN, each client has a curve of its entropy's
density, and the curves differ clearly for the first pair and less for the second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import recipes
import torch
import torch.nn.functional as functional
from methods import METHODS
from run import HERE, fitted_network, of_all_clients, runner
from scipy.stats import gaussian_kde
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import bayesfed as bf

CHOSEN = {"FedAvg": ({"rate": 0.7}, 0.3), "FedABML": ({"rate": 0.3, "lam": 1.0}, 0.3)}
"""Settings and the personal rate: those of few_images.md, but for λ."""
KINDS = ("own digits", "unseen digits", "own digits, turned", "own digits, another source")


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


def enlarged(images: np.ndarray) -> torch.Tensor:
    """Return images ``(n, 8, 8)`` with values from 0 to 16 as ``(n, 784)`` with values from 0 to 1.

    Like MNIST's they are 20 pixels wide and high, with a black margin of 4.
    """
    small = torch.from_numpy(images).float()[:, None] / 16
    large = functional.interpolate(small, (20, 20), mode="bilinear")
    return functional.pad(large, (4, 4, 4, 4)).flatten(1)


def from_another_source(federation: bf.Federation, seed: int) -> bf.Federation:
    """Return 200 of scikit-learn's digits for every client, as many of each of its own digits."""
    rng = np.random.default_rng(seed)
    source = load_digits()
    images, labels = enlarged(source.images), torch.from_numpy(source.target)
    clients = {}
    for name in federation.names:
        own = np.unique(federation.select([name])["y"])
        rows = np.concatenate(
            [
                rng.choice(np.flatnonzero(source.target == digit), 200 // len(own), replace=False)
                for digit in own
            ]
        )
        clients[name] = {"x": images[rows], "y": labels[rows]}
    return bf.Federation.from_arrays(clients)


def entropies(data: str, method: str, seed: int) -> list[list[np.ndarray]]:
    """Return the predictive entropy, in nats, of the rows of each kind and client."""
    source = recipes.load(data)
    task = recipes.few_images(source, seed)
    point, rate = CHOSEN[method]
    posterior = fitted_network(task, "few_images", METHODS[method], point, seed)
    own = posterior.personalize(of_all_clients(posterior, task.train), steps=50, lr=rate)
    others = (unseen(task, source, seed), turned(task.test), from_another_source(task.test, seed))
    found = []
    for rows in (task.test, *others):
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
    """Return the areas of the three other kinds."""
    own, *others = entropies(data, method, seed)
    return [areas(own, other) for other in others]


def main() -> None:
    given = runner.arguments(__doc__, seeds=3, data=runner.MNIST)
    data = str(given.data)
    rows = {name: [(data, name, seed) for seed in range(given.seeds)] for name in CHOSEN}

    def cells(_: Any, found: list[list[float]]) -> list[str]:
        return [*(runner.plus_minus([run[i] for run in found]) for i in range(3)), given.seeds]

    runner.table(
        f"method | {' | '.join(KINDS[1:])} | seeds", rows, measure, given, cells, threads=2
    )
    if given.usual:
        draw({name: entropies(data, name, 0) for name in CHOSEN}, HERE / "uncertainty.png")


if __name__ == "__main__":
    main()
