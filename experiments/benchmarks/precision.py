"""What do products in bf16 change in accuracy and time? Makes precision.md.

    python experiments/benchmarks/precision.py          # two minutes

Digits on 20 clients. Means over seeds of the accuracy, NLL and calibration error on the clients' test rows, the mean
difference to full precision with the standard error of that difference over seeds, and the ratio of the seconds a
round, on this machine: a CPU without bf16 units has nothing to gain. TF32, which no CPU has, is timed by gpu.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from timing import runner

import bayesfed as bf
from bayesfed import datasets, metrics, models

ROUNDS = 40
FIGURES = ("accuracy", "nll", "ece")
METHODS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "FedAvg": lambda: (bf.FedAvg(), models.Network(models.mlp(64, 50, 10))),
    "FedABML": lambda: (
        bf.FedABML(),
        models.Network(models.mlp(64, 10), spread="learnt", scale=0.5),
    ),
    "PFedVEM": lambda: (
        bf.PFedVEM(),
        models.Network(models.mlp(64, 50, 10), spread="client", scale=0.1),
    ),
    "FOLA": lambda: (bf.FOLA(), models.Network(models.mlp(64, 50, 10))),
}


def measure(name: str, seed: int, precision: Any) -> list[float]:
    """Return the figures of one run, and its seconds a round."""
    train, test = datasets.digits(seed=seed)
    torch.manual_seed(seed)
    algorithm, model = METHODS[name]()
    posterior = bf.fit(
        model,
        train,
        algorithm,
        rounds=ROUNDS,
        clients_per_round=10,
        batch_size=10,
        seed=seed,
        execution=bf.Execution(precision=precision, compile=False),
        progress=False,
    )
    probabilities = posterior.probabilities(test)["y"]
    report = metrics.classification(probabilities, test["y"].long(), test.owner, test.names)
    found = report.overall
    seconds = statistics.median(posterior.history["seconds"].tolist()[2:])
    return [*(float(found[figure]) for figure in FIGURES), seconds]


def cells(_: Any, found: list[list[float]]) -> list[str]:
    """Return the cells of a method from its runs in full, then in lowered precision."""
    half, made = len(found) // 2, []
    pairs = list(zip(found[:half], found[half:], strict=True))
    for i in range(len(FIGURES)):
        full = statistics.mean(run[i] for run in found[:half])
        made += [f"{full:.4f}", runner.plus_minus([b[i] - a[i] for a, b in pairs], "+.5f", ".5f")]
    return [*made, f"{statistics.median(b[-1] / a[-1] for a, b in pairs):.2f}"]


def main() -> None:
    given = runner.arguments(__doc__, seeds=5)
    heads = " | ".join(f"{figure}, full | bf16 less full" for figure in FIGURES)
    rows = {
        name: [(name, seed, kind) for kind in ("full", "bf16") for seed in range(given.seeds)]
        for name in METHODS
    }
    runner.table(f"method | {heads} | seconds, bf16 / full", rows, measure, given, cells)


if __name__ == "__main__":
    main()
