"""Which method makes one network for 20 clients with a digit or two each? Makes extreme_skew.md.

    python experiments/mnist/skew.py                                   # hours on two cores
    python experiments/mnist/skew.py FedAvg FOLA --data PATH

The digits are dealt in Dirichlet(0.01) proportions, all 20 clients take part in each of 20 rounds, 5 local epochs,
batches of 50, an MLP 784-100-10, one global model. The grid is run for 10 rounds on seed 0 and judged by the NLL on
images set aside from every client's, the mean of those after 1, 5 and 10 rounds; then these go back to their clients
and the official test images judge the global model after 1, 5, 10 and 20 rounds: accuracy %, mean ± standard error over
the seeds, and the NLL after 20.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import recipes
import torch
from run import HERE, network, runner

import bayesfed as bf
from bayesfed import metrics

ROUNDS = (1, 5, 10, 20)
TRIED = 10
RATES = (0.03, 0.1, 0.3)


@dataclass(frozen=True)
class Method:
    """An algorithm made from a point of the grid."""

    make: Callable[..., Any]
    grid: dict[str, tuple[Any, ...]]


def fola(*, rate: float, weight: float) -> Any:
    """Return FOLA with batch Fisher, about 3 · 10⁻⁶ a row; γ = 0.006, which is 10⁻⁷ a row: next to no prior."""
    return bf.FOLA(lr=rate, prior_weight=weight, fisher="batch", gamma=0.006)


METHODS = {
    "FedAvg": Method(lambda rate: bf.FedAvg(lr=rate), {"rate": RATES}),
    "FedProx": Method(
        lambda rate, mu: bf.FedAvg(lr=rate, proximal=mu), {"rate": RATES, "mu": (0.01, 0.1)}
    ),
    "FedCurv": Method(
        lambda rate, lam: bf.FedCurv(lr=rate, lam=lam), {"rate": RATES, "lam": (0.1, 10.0)}
    ),
    "FOLA": Method(fola, {"rate": RATES, "weight": (10.0, 100.0)}),
}


def merged(first: bf.Federation, second: bf.Federation) -> bf.Federation:
    """Return the clients of the first with the rows that the second has of them."""
    arrays = {}
    for name in first.names:
        parts = [f.select([name]) for f in (first, second) if name in f.names]
        arrays[name] = {field: torch.cat([p[field] for p in parts]) for field in first.fields}
    return bf.Federation.from_arrays(arrays)


def curve(
    name: str,
    point: dict[str, Any],
    train: bf.Federation,
    rows: bf.Federation,
    rounds: int,
    seed: int,
) -> list[tuple[float, float]]:
    """Return (accuracy %, NLL) of the global model after each round; no more once the fit has diverged."""
    torch.manual_seed(seed)
    found = []
    with contextlib.suppress(FloatingPointError, ValueError):  # the second: not finite any more
        run = bf.start(
            network(10, local=()),  # no weights of a client's own
            train,
            METHODS[name].make(**point),
            rounds=rounds,
            batch_size=50,
            seed=seed,
            execution=bf.Execution(chunk_size=5),
        )
        for _ in range(rounds):
            bf.step(run)
            everyone = bf.finish(run).personalize(rows, steps=0)
            probabilities = everyone.probabilities(rows, centre=True)["y"].clamp(min=1e-30)
            report = metrics.classification(probabilities, rows["y"], rows.owner, rows.names)
            found.append((100 * report.overall["accuracy"], report.overall["nll"]))
    return found + [(math.nan, math.inf)] * (rounds - len(found))


def tune(data: str, name: str, point: dict[str, Any]) -> list[tuple[float, float]]:
    task = recipes.extreme_skew(data, 0)
    return curve(name, point, task.train, task.valid, TRIED, 0)


def measure(data: str, name: str, point: dict[str, Any], seed: int) -> list[tuple[float, float]]:
    task = recipes.extreme_skew(data, seed)
    return curve(name, point, merged(task.train, task.valid), task.test, ROUNDS[-1], seed)


def main() -> None:
    given = runner.arguments(__doc__, jobs=2, seeds=3, data=runner.MNIST)
    trials = {
        name: [(str(given.data), name, point) for point in runner.combinations(method.grid)]
        for name, method in METHODS.items()
        if not given.rows or name in given.rows
    }

    def nll(found: list[tuple[float, float]]) -> float:
        return statistics.mean(found[r - 1][1] for r in ROUNDS if r <= TRIED)

    best = runner.best(tune, trials, nll, given)
    rows = {
        name: [(*call, seed) for seed in range(given.seeds)] for name, (call, _) in best.items()
    }

    def cells(key: tuple[str], found: list[list[tuple[float, float]]]) -> list[Any]:
        made = [runner.plus_minus([run[r - 1][0] for run in found], ".1f") for r in ROUNDS]
        chosen = runner.chosen_of(best[key[0]][0][2], METHODS[key[0]].grid)
        return [*made, runner.plus_minus([run[-1][1] for run in found]), given.seeds, chosen]

    heads = " | ".join(f"{r} rounds" for r in ROUNDS)
    columns = f"method | {heads} | NLL | seeds | chosen of the grid"
    runner.table(columns, rows, measure, given, cells, path=HERE / "extreme_skew.md")


if __name__ == "__main__":
    main()
