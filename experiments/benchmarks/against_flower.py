"""How long does a FedAvg round take in Flower's simulation, and here? Makes against_flower.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/benchmarks/against_flower.py       # some minutes, on a machine that does nothing else

10 clients with 600 images train an MLP 784-100-10 for 5 epochs of batches of 50, 1000 clients with 10 rows a logistic
regression 8-2 for one epoch. Flower's simulation engine runs its clients in Ray's workers, as many as there are cores,
each with one thread; a client's data are made once in a worker. After each round of Flower two of ours run in the same
process, compiled, and the second is timed.
"""

from __future__ import annotations

import logging
import os
import statistics
import time

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import flwr
import torch
from flower_clients import client_app, rows_of
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from timing import ratio, runner

import bayesfed as bf
from bayesfed import models

SETTINGS = {
    "MLP 784-100-10, 10 clients × 600": (10, 600, (784, 100, 10), 5, 50),
    "logistic 8-2, 1000 clients × 10": (1000, 10, (8, 2), 1, 10),
}


def our_run(clients: int, rows: int, sizes: tuple[int, ...], epochs: int, batch: int) -> bf.Run:
    """Start a run with the same rows."""
    parts = [rows_of(i, rows, sizes[0], sizes[-1]) for i in range(clients)]
    fields = {"x": torch.cat([x for x, _ in parts]), "y": torch.cat([y for _, y in parts])}
    offsets = torch.arange(0, clients * rows + 1, rows)
    federation = bf.Federation(fields, offsets, [f"{i}" for i in range(clients)])
    how = {"rounds": 1000, "batch_size": batch, "execution": bf.Execution(compile=True)}
    model, algorithm = models.Network(models.mlp(*sizes)), bf.FedAvg(local_epochs=epochs)
    return bf.start(model, federation, algorithm, **how)


def compared(
    clients: int, rows: int, sizes: tuple[int, ...], epochs: int, batch: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Return seconds of Flower's rounds and of ours; without the first, in which workers load torch."""
    threads = 1 if clients > 100 else os.cpu_count() or 1
    ours = our_run(clients, rows, sizes, epochs, batch)
    theirs: list[float] = []
    own: list[float] = []
    sums: set[float] = set()
    started = 0.0

    def between(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        nonlocal started
        now = time.perf_counter()
        if server_round > 0:
            sums.add(sum(float(v.sum()) for v in arrays.to_torch_state_dict().values()))
            theirs.append(now - started)
            time.sleep(0.5)  # until Ray's workers are idle
            torch.set_num_threads(threads)  # of this thread, which is Flower's server
            bf.step(ours)
            begin = time.perf_counter()
            bf.step(ours)
            own.append(time.perf_counter() - begin)
        started = time.perf_counter()
        return MetricRecord({"round": server_round})

    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        FedAvg(fraction_evaluate=0.0, min_available_nodes=clients).start(
            grid=grid,
            initial_arrays=ArrayRecord(models.mlp(*sizes).state_dict()),
            num_rounds=rounds,
            evaluate_fn=between,
        )

    run_simulation(
        server_app=server,
        client_app=client_app(rows, sizes, epochs, batch),
        num_supernodes=clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    if len(sums) < rounds:
        raise RuntimeError("Flower's clients failed: its rounds changed nothing")
    return theirs[1:], own[1:]


def measure(name: str, rounds: int) -> list[str]:
    """Time a setting."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # the main thread's OpenMP workers would slow those of Flower's server
    theirs, own = compared(*SETTINGS[name], rounds)
    ms = [1000 * statistics.median(times) for times in (theirs, own)]
    return [f"{ms[0]:.0f}", f"{ms[1]:.1f}", ratio(theirs, own)]


def main() -> None:
    given = runner.arguments(__doc__, rounds=6)
    rows = {name: [(name, given.rounds)] for name in SETTINGS}
    columns = "a FedAvg round of | Flower's simulation, ms | ours, ms | Flower / ours"
    note = f"Flower {flwr.__version__}."
    runner.table(columns, rows, measure, given, note=lambda: note, threads=None)


if __name__ == "__main__":
    main()
