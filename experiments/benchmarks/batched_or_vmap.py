"""Does the batched form of a program pay beside vmap alone? Makes batched_or_vmap.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/benchmarks/batched_or_vmap.py      # on a machine that does nothing else, ten minutes

A program that is right with draws and clients as dimensions in front runs as it is, every other one for one client and
one draw under ``torch.vmap``. All shipped models are of the first kind. Here each is fitted in both forms, but
for Modulated, whose encoder of a context takes a batch of clients. Each runs in a new process, in turn, one thread:
"cold" is the first whole fit of the process, "warm" the lesser of the next two. Hierarchies are fitted by SFVI until
they have converged, the others by the algorithm that they are made for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from timing import ratio, runner

# isort: split
from problems import PROBLEMS

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.vmap import choose

COLUMNS = (
    "model | batched: cold, s | warm, s | vmap: cold, s | warm, s | vmap ÷ batched: cold | warm"
)
PASSES = 3


def network() -> models.Network:
    """Return a network with ten hidden units."""
    return models.Network(models.mlp(64, 10, 10), spread="learnt")


FITS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "eight_schools": lambda: (models.eight_schools, datasets.eight_schools(), bf.SFVI(), None),
    "varying_slope": lambda: (models.varying_slope, datasets.grunfeld(), bf.SFVI(), None),
    "varying_intercept": lambda: (models.varying_intercept, datasets.grunfeld(), bf.SFVI(), None),
    "hierarchical_logistic": lambda: (
        models.hierarchical_logistic,
        datasets.china_smoking(),
        bf.SFVI(),
        None,
    ),
    "hierarchical_count": lambda: (
        models.hierarchical_count,
        PROBLEMS["count"].data(),
        bf.SFVI(),
        None,
    ),
    "OrderedLogistic": lambda: (models.OrderedLogistic(7), datasets.anes96(), bf.SFVI(), None),
    "weibull_survival": lambda: (models.weibull_survival, datasets.kidney(), bf.SFVI(), None),
    "Cox": lambda: (models.Cox([0.5, 1.0, 5.0]), datasets.kidney(), bf.SFVI(), None),
    "Network, FedAvg": lambda: (network(), datasets.digits(clients=8)[0], bf.FedAvg(), 20),
    "Network, FedABML": lambda: (network(), datasets.digits(clients=8)[0], bf.FedABML(), 5),
}


def measure(name: str, vmap: bool, _: int) -> list[float] | str:
    """Return the seconds of a first fit and of later ones."""
    if vmap:
        choose._runs_batched = lambda *_: False
    model, federation, algorithm, rounds = FITS[name]()
    how = {"progress": False, "execution": bf.Execution(compile="auto")}
    how |= {} if rounds is None else {"rounds": rounds}
    seconds = []
    for seed in range(3):
        start = time.perf_counter()
        try:
            bf.fit(model, federation, algorithm, seed=seed, **how)
        except ValueError as error:
            return f"refused: {error}"
        seconds.append(time.perf_counter() - start)
    return [seconds[0], min(seconds[1:])]


def cells(_: Any, found: list[Any]) -> list[str]:
    """Return seconds and ratios; a program that vmap does not run has none."""
    batched, vmap = found[::2], found[1::2]
    refused = next((result for result in vmap if isinstance(result, str)), None)
    made = [f"{statistics.median(run[i] for run in batched):.2f}" for i in range(2)]
    if refused:
        return [*made, refused, "", "", ""]
    made += [f"{statistics.median(run[i] for run in vmap):.2f}" for i in range(2)]
    return made + [ratio([v[i] for v in vmap], [b[i] for b in batched], ".2f") for i in range(2)]


def main() -> None:
    given = runner.arguments(__doc__)
    rows = {
        name: [(name, vmap, turn) for turn in range(PASSES) for vmap in (False, True)]
        for name in FITS
    }
    runner.table(COLUMNS, rows, measure, given, cells, alone=True)


if __name__ == "__main__":
    main()
