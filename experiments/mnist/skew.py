"""One network for 20 clients who hold a digit or two each: makes extreme_skew.md.

    python experiments/mnist/skew.py                                   # hours on two cores
    python experiments/mnist/skew.py --methods FedAvg FOLA --seeds 3 --jobs 2 --data PATH

The digits are dealt in Dirichlet(0.01) proportions, all 20 clients take part in each of 20 rounds, 5 local epochs,
batches of 50, an MLP 784-100-10, one global model. The grid is run for 10 rounds on seed 0 and judged by the NLL on
images set aside from every client's, the mean of those after 1, 5 and 10 rounds; then these go back to their clients
and the official test images judge the global model after 1, 5, 10 and 20 rounds: accuracy %, mean ± standard error over
the seeds, and the NLL after 20.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recipes
import torch
from run import DATA, HERE, network
from tables import combinations, done, keep

import bayesfed as bf
from bayesfed import metrics

ROUNDS = (1, 5, 10, 20)
TRIED = 10
RATES = (0.03, 0.1, 0.3)


@dataclass(frozen=True)
class Method:
    """How the algorithm is made from a point of the grid."""

    make: Callable[..., Any]
    grid: dict[str, tuple[Any, ...]]


def fola(*, rate: float, weight: float) -> Any:
    """Batch Fisher, about 3 · 10⁻⁶ a row; γ = .006, which is 10⁻⁷ a row: next to no prior."""
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
    """The clients of the first with what the second has of theirs."""
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
    """(accuracy %, NLL) of the global model after each round; no more once the fit has diverged."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    warnings.simplefilter("ignore")
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


def skew_tried(
    data: Path, name: str, point: dict[str, Any], rounds: int
) -> list[tuple[float, float]]:
    task = recipes.extreme_skew(data, 0)
    return curve(name, point, task.train, task.valid, rounds, 0)


def skew_judged(
    data: Path, name: str, point: dict[str, Any], seed: int
) -> list[tuple[float, float]]:
    task = recipes.extreme_skew(data, seed)
    return curve(name, point, merged(task.train, task.valid), task.test, ROUNDS[-1], seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="fits at a time")
    parser.add_argument("--data", type=Path, default=DATA, help="the npz")
    parser.add_argument(
        "--resume", action="store_true", help="take fits that an earlier run of the same code made"
    )
    args = parser.parse_args()
    header = [
        f"| method | {' | '.join(f'{r} rounds' for r in ROUNDS)} | NLL | seeds | chosen of the grid |",
        "| --- |" + " --- |" * (len(ROUNDS) + 3),
    ]
    start = time.perf_counter()
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    trials = [
        (args.data, name, point, TRIED)
        for name in args.methods
        for point in combinations(METHODS[name].grid)
    ]
    for (_, name, point, _), found in done(skew_tried, trials, args.jobs, args.resume):
        accuracy = found[-1][0]
        nll = statistics.mean(found[r - 1][1] for r in ROUNDS if r <= TRIED)
        shown = ", ".join(f"{key} {value:g}" for key, value in point.items())
        print(
            f"{time.perf_counter() - start:5.0f} s  {name}: {shown}: {accuracy:.1f} / {nll:.3f}",
            flush=True,
        )
        if nll < best.get(name, (math.inf,))[0]:
            best[name] = nll, point
    runs = [(args.data, name, best[name][1], seed) for name in best for seed in range(args.seeds)]
    of_seed: dict[str, dict[int, Any]] = {name: {} for name in best}
    for (_, name, _, seed), found in done(skew_judged, runs, args.jobs, args.resume):
        of_seed[name][seed] = found
        if len(of_seed[name]) == args.seeds:
            seeded = [of_seed[name][s] for s in range(args.seeds)]
            values = torch.tensor(seeded, dtype=torch.float64)
            mean, error = values.mean(0), values.std(0) / args.seeds**0.5
            cells = [f"{mean[r - 1, 0]:.1f} ± {error[r - 1, 0]:.1f}" for r in ROUNDS]
            cells.append(f"{mean[-1, 1]:.3f} ± {error[-1, 1]:.3f}")
            chosen = [
                f"{key} {value:g} of {METHODS[name].grid[key]}"
                for key, value in best[name][1].items()
            ]
            row = f"| {name} | {' | '.join(cells)} | {args.seeds} | {'; '.join(chosen)} |"
            print(row, flush=True)
            keep(HERE / "extreme_skew.md", header, row, list(METHODS))


if __name__ == "__main__":
    main()
