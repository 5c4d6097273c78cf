"""How long do whole runs on MNIST recipes take, against plain PyTorch? Makes whole_runs.md.

    python experiments/benchmarks/whole_runs.py               # on a machine that does nothing else, half an hour
    python experiments/benchmarks/whole_runs.py FedAvg --recipes few_images
    python experiments/benchmarks/whole_runs.py FedABML --recipes few_images --rounds 10 --out some.md

A run is a fit of 100 rounds, 50 personal steps of every client, and the class probabilities of all test rows (20 draws
of a posterior, one of a point estimate). The loop of loops.py does the same with the same numbers of clients, epochs
and minibatches; in *new_clients* new clients personalise and predict. Each runs in a new process; "cold" is the first
run of a process, imports apart, without Inductor's cache, "warm" the second.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import loops
import torch
from timing import runner

import bayesfed as bf
from bayesfed.models import Network, mlp

sys.path.append(str(Path(__file__).parents[1] / "mnist"))

COLUMNS = (
    "method | recipe | ours cold, s: fit + personalise + predict | warm | loop, first | second "
    "| cold ÷ loop | warm ÷ loop"
)
RECIPES = ("few_images", "small_shards", "new_clients")
METHODS = ("FedAvg", "FedABML", "PFedVEM")
ROUNDS, FRACTION, STEPS, DRAWS = 100, 0.1, 50, 20


def ours(method: str, task: Any, rounds: int) -> list[float]:
    """Return the times at the start, after the fit, after personalising and after predicting."""
    net, steps = mlp(784, 100, task.classes), {"personal_steps": STEPS}
    algorithm, model = {
        "FedAvg": lambda: (bf.FedAvg(lr=0.1, **steps), Network(net)),
        "FedABML": lambda: (
            bf.FedABML(lr=0.1, prior_lr=0.5, draws=loops.DRAWS, **steps),
            Network(net, spread="learnt", scale=0.1),
        ),
        "PFedVEM": lambda: (
            bf.PFedVEM(lr=0.01, body_lr=0.1),
            Network(net, local=["2."], spread="client", scale=0.1),
        ),
    }[method]()
    marks = [time.perf_counter()]
    how = {"clients_per_round": FRACTION, "batch_size": loops.BATCH, "progress": False}
    posterior = bf.fit(model, task.train, algorithm, rounds=rounds, **how)
    marks.append(time.perf_counter())
    if task.new is not None:
        posterior = posterior.personalize(task.new[0], batch_size=loops.BATCH)
    len(posterior.local_params)  # computes them
    marks.append(time.perf_counter())
    posterior.probabilities(task.test if task.new is None else task.new[1], DRAWS)
    return [*marks, time.perf_counter()]


def loop(method: str, task: Any, rounds: int) -> list[float]:
    """Return the same of a plain loop."""

    def apart(federation: Any) -> loops.Clients:
        ends = federation.offsets.tolist()
        return [(federation["x"][a:b], federation["y"][a:b]) for a, b in itertools.pairwise(ends)]

    clients, new = apart(task.train), task.new is not None
    later = apart(task.new[0]) if new else clients
    tests = [x for x, _ in apart(task.new[1] if new else task.test)]
    marks = [time.perf_counter()]
    sizes = (784, 100, task.classes) if method == "FedAvg" else (task.classes,)
    made = getattr(loops, method)(clients, *sizes)
    for _ in range(rounds):
        made.round(torch.randperm(len(clients))[: round(FRACTION * len(clients))].tolist())
    marks.append(time.perf_counter())
    made.personalize(later, STEPS, new=new)
    marks.append(time.perf_counter())
    with torch.no_grad():
        made.predict(tests, DRAWS)
    return [*marks, time.perf_counter()]


def measure(method: str, recipe: str, who: str, rounds: int, data: str) -> list[list[float]]:
    """Return the seconds of the parts of a cold and of a warm run in this process."""
    import recipes

    task, run = getattr(recipes, recipe)(data, 0), {"ours": ours, "loop": loop}[who]
    marks = [run(method, task, rounds) for _ in range(2)]
    return [[b - a for a, b in itertools.pairwise(each)] for each in marks]


def cells(_: Any, found: list[list[list[float]]]) -> list[str]:
    """Return the cells of a method; both runs are compared with the loop's second."""
    parts = [" + ".join(f"{part:.1f}" for part in run) for who in found for run in who]
    return [*parts, *(f"{sum(run) / sum(found[1][1]):.2f}" for run in found[0])]


def main() -> None:
    given = runner.arguments(__doc__, recipes=list(RECIPES), rounds=ROUNDS, data=runner.MNIST)
    how = (given.rounds, str(given.data))
    rows = {
        (method, recipe): [(method, recipe, who, *how) for who in ("ours", "loop")]
        for method in METHODS
        for recipe in given.recipes
    }
    runner.table(COLUMNS, rows, measure, given, cells, alone=True, threads=None)


if __name__ == "__main__":
    main()
