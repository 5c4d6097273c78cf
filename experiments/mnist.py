"""Personal classifiers on MNIST, every method tuned over its grid on a validation split: makes mnist.md.

    python experiments/mnist.py --data PATH                         # all recipes that are written here
    python experiments/mnist.py --data PATH "few images" --methods FedAvg FedABML --seeds 3

PATH is an MNIST npz with x_train, y_train, x_test, y_test. An MLP 784-100-10, 10 % of the clients in a round, 5 local
epochs, batches of 50, 100 rounds. After that every client takes 0, 5, 25 and 50 gradient steps on its own rows, at
the rate that the grid chose for them; a method's posterior is averaged over 20 draws (points: one). The grid is run
on seed 0 and judged by validation NLL at 50 steps; the table is of the test images, mean ± s.e. over the seeds:
accuracy % / NLL / ECE of all clients' rows together.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mnist_data
import torch

import bayesfed as bf
from bayesfed.algorithms.family import fed_avg, per_fed_avg
from bayesfed.metrics import classification
from bayesfed.models import Network, mlp

HERE = Path(__file__).parent
STEPS = (0, 5, 25, 50)
RECIPES = {
    "few images": mnist_data.few_images,
    "small shards": mnist_data.small_shards,
}


@dataclass(frozen=True)
class Method:
    """How a method is made from a point of its grid: the algorithm, the network's settings, the personal rate."""

    make: Callable[..., tuple[Any, dict[str, Any], float]]
    grid: dict[str, tuple[float, ...]]

    def points(self) -> Iterator[dict[str, float]]:
        """Every combination of the grid's values."""
        for values in itertools.product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))


def abml(rate: float, weight: float, follow: float) -> tuple[Any, dict[str, Any], float]:
    """σ = 0.1 for good; ``rate`` = η σ², ``follow`` = η' λ / n with the n = 20 rows that every client has."""
    sigma = 0.1
    algorithm = bf.FedABML(
        lr=rate / sigma**2, prior_lr=follow * 20 / weight, kl_weight=weight, particles=1
    )
    return algorithm, {"spread": "fixed", "scale": sigma}, rate / sigma**2


METHODS = {
    "FedAvg": Method(
        lambda rate, personal: (fed_avg(lr=rate), {}, personal),
        {"rate": (0.1, 0.3), "personal": (0.03, 0.1)},
    ),
    "Per-FedAvg": Method(
        lambda rate, outer: (per_fed_avg(lr=rate, prior_lr=outer), {}, rate),
        {"rate": (0.03, 0.1), "outer": (0.1, 0.3)},
    ),
    "FedABML": Method(abml, {"rate": (0.1, 0.3), "weight": (0.003, 0.01), "follow": (0.5, 1.0)}),
}


def fitted(task: mnist_data.Task, method: Method, point: dict[str, float], seed: int) -> Any:
    """The posterior, and the personal rate."""
    algorithm, settings, personal = method.make(**point)
    torch.manual_seed(seed)
    model = Network(mlp(784, 100, task.classes), **settings)
    posterior = bf.fit(
        model,
        task.train,
        algorithm,
        rounds=100,
        clients_per_round=0.1,
        batch_size=50,
        seed=seed,
        progress=False,
    )
    return posterior, personal


def scores(posterior: Any, personal: float, task: Any, rows: Any, steps: tuple[int, ...]) -> list:
    """(accuracy %, NLL, ECE) after each number of personal steps."""
    draws = 1 if posterior.algorithm.point else 20
    found = []
    for count in steps:
        own = posterior.personalize(task.train, steps=count, lr=personal, batch_size=50)
        probabilities = own.probabilities(rows, draws)["y"]
        overall = classification(probabilities, rows["y"], rows.owner, rows.names).overall
        found.append((100 * overall["accuracy"], overall["nll"], overall["ece"]))
    return found


def run(recipe: str, name: str, data: Path, seeds: int) -> Iterator[str]:
    method = METHODS[name]
    task = RECIPES[recipe](data, 0)
    best: tuple[float, dict[str, float]] = (math.inf, {})
    for point in method.points():
        start = time.perf_counter()
        try:
            (score,) = scores(*fitted(task, method, point, 0), task, task.valid, (50,))
        except FloatingPointError:
            score = (math.nan, math.inf, math.nan)
        shown = ", ".join(f"{key} {value:g}" for key, value in point.items())
        print(
            f"  {name}: {shown}: {score[0]:.1f} / {score[1]:.3f}, "
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )
        if score[1] < best[0]:
            best = score[1], point
    per_seed = []
    for seed in range(seeds):
        task = RECIPES[recipe](data, seed)
        per_seed.append(scores(*fitted(task, method, best[1], seed), task, task.test, STEPS))
    values = torch.tensor(per_seed, dtype=torch.float64)  # (seeds, steps, 3)
    mean, error = values.mean(0), values.std(0) / seeds**0.5
    cells = [
        f"{m[0]:.1f} ± {e[0]:.1f} / {m[1]:.3f} ± {e[1]:.3f} / {m[2]:.3f}"
        for m, e in zip(mean.tolist(), error.tolist(), strict=True)
    ]
    chosen = ", ".join(f"{key} {value:g} of {method.grid[key]}" for key, value in best[1].items())
    yield f"| {recipe} | {name} | {' | '.join(cells)} | {chosen} |"


HEADER = [
    f"| recipe | method | {' | '.join(f'{k} steps' for k in STEPS)} | chosen |",
    "| --- | --- |" + " --- |" * (len(STEPS) + 1),
]


def keep(path: Path, row: str) -> None:
    """Put a row into the table in place of the one it repeats."""
    old = path.read_text().splitlines()[len(HEADER) :] if path.exists() else []
    kept = [line for line in old if line.split(" | ")[:2] != row.split(" | ")[:2]]
    fresh = path.with_suffix(".tmp")
    fresh.write_text("\n".join([*HEADER, *sorted([*kept, row])]) + "\n")
    fresh.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", default=list(RECIPES), metavar="recipe")
    parser.add_argument(
        "--data", type=Path, default=HERE.parent.parent / "shared/data/mnist.npz", help="the npz"
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("\n".join(HEADER))
    for recipe in args.recipes:
        for name in args.methods:
            for row in run(recipe, name, args.data, args.seeds):
                print(row, flush=True)
                keep(HERE / "mnist.md", row)


if __name__ == "__main__":
    main()
