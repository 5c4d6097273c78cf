"""Time and memory of a round against the number of clients and against the cohort. Makes growth.md.

    python experiments/benchmarks/growth.py             # some minutes, on a machine that does nothing else

Logistic regressions 8-2 on 10 rows a client, PFedVEM, which keeps a posterior for every client, and FedAvg. Times:
federations of all sizes take turns in one process, the median over rounds, after some that compile. Memory: the peak
resident size of a process that fits one federation, less what it held when the data lay in memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from timing import write

import bayesfed as bf
from bayesfed import models
from bayesfed.algorithms import family

ROWS, COHORT = 10, 50
CLIENTS = (100, 1_000, 10_000, 100_000)
COHORTS = (10, 50, 250, 1250)


def federation(clients: int) -> bf.Federation:
    torch.manual_seed(0)
    total = clients * ROWS
    fields = {"x": torch.randn(total, 8), "y": torch.randint(0, 2, (total,))}
    offsets = torch.arange(0, total + 1, ROWS)
    return bf.Federation(fields, offsets, [f"{i}" for i in range(clients)])


def settings(name: str) -> tuple[Any, Any]:
    if name == "PFedVEM":
        algorithm = bf.PFedVEM(head_steps=10, particles=5)
        return algorithm, models.Network(models.mlp(8, 2), spread="client", scale=0.1)
    return family.fed_avg(local_steps=10, personal_steps=1), models.Network(models.mlp(8, 2))


def rounds(name: str, data: bf.Federation, cohort: int, count: int) -> list[float]:
    """Seconds of the rounds but for the first two."""
    algorithm, model = settings(name)
    posterior = bf.fit(
        model,
        data,
        algorithm,
        rounds=count,
        clients_per_round=cohort,
        compile=True,
        progress=False,
    )
    return posterior.history["seconds"].tolist()[2:]


def peak(name: str, clients: int, cohort: int) -> float:
    """MB, in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps([name, clients, cohort])]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def one(name: str, clients: int, cohort: int) -> None:
    rounds(name, federation(cohort), cohort, 3)  # what compiling takes is not a round's
    data = federation(clients)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rounds(name, data, cohort, 5)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=42)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.one:
        one(*json.loads(args.one))
        return
    lines = [
        "| algorithm | clients | cohort | ms a round | to the first line | peak memory of a fit, MB |",
        "| --- |" + " --- |" * 5,
    ]
    grid = [(clients, COHORT) for clients in CLIENTS]
    grid += [(10_000, cohort) for cohort in COHORTS]
    for name in ("PFedVEM", "FedAvg"):
        times: dict[tuple[int, int], list[float]] = {point: [] for point in grid}
        federations = {clients: federation(clients) for clients in CLIENTS}
        for _ in range(args.repeats):
            for clients, cohort in times:
                times[clients, cohort] += rounds(name, federations[clients], cohort, args.rounds)
        first = statistics.median(times[grid[0]])
        for clients, cohort in grid:
            middle = statistics.median(times[clients, cohort])
            lines.append(
                f"| {name} | {clients:,} | {cohort:,} | {1000 * middle:.2f} | {middle / first:.2f} | "
                f"{peak(name, clients, cohort):.0f} |"
            )
            print(lines[-1], flush=True)
    write(Path(__file__), lines)


if __name__ == "__main__":
    main()
