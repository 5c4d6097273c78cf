"""How long does a round of training take, against plain PyTorch? Makes rounds.md.

    python experiments/benchmarks/rounds.py                       # half an hour, on a machine that does nothing else
    python experiments/benchmarks/rounds.py "FedAvg" --rounds 5   # rows that begin so

10 clients with 600 images each train an MLP 784-100-10 (or 784-10) for 5 epochs of batches of 50. The loops are those
of loops.py. The loops of FedAvg, FedABML and PFedVEM do what ours do; beside all other methods stands FedAvg's loop,
which does less. Rounds of ours and of the loop take turns in one process; ratios are medians with the least and the
greatest. "In FedAvg loops" divides our time by that of the plain loop's FedAvg round on the same machine and row, which
makes it comparable with the last column: the time of public code for such a round in the same unit.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import loops
import torch
from timing import limits, ratio, runner

import bayesfed as bf
from bayesfed import models
from bayesfed.algorithms import METHODS

CLIENTS, ROWS, BATCH, EPOCHS = 10, 600, 50, 5
SIZES = (784, 100, 10)


def data() -> bf.Federation:
    """Return noise in the place of images: the time is the same."""
    torch.manual_seed(0)
    total = CLIENTS * ROWS
    fields = {"x": torch.rand(total, 784), "y": torch.randint(0, 10, (total,))}
    names = [f"client {i}" for i in range(CLIENTS)]
    return bf.Federation(fields, torch.arange(0, total + 1, ROWS), names)


def network(*sizes: int, **settings: Any) -> models.Network:
    return models.Network(models.mlp(*(sizes or SIZES)), **settings)


@dataclass
class Row:
    """An algorithm and its model, the loop that it is timed against, and public code's time in plain FedAvg loops."""

    algorithm: Any
    model: Any
    loop: Callable[[loops.Clients], Any]
    public: str = ""


def fed_avg(clients: loops.Clients) -> loops.FedAvg:
    return loops.FedAvg(clients, *SIZES)


def _modulated() -> models.Modulated:
    return models.Modulated(models.mlp(*SIZES), models.mlp(784, 100), context=100, film=True)


abml = {"natural": False, "inner_steps": 1, "lr": 0.001, "prior_lr": 0.001}
ROWS_OF_TABLE: dict[str, Callable[[], Row]] = {
    "FedAvg": lambda: Row(
        bf.FedAvg(),
        network(),
        fed_avg,
        "1.4 (pfl-research), 1.85 (PFLlib), 2.5 (Flower simulation)",
    ),
    "FedAvg, logistic 784-10": lambda: Row(
        bf.FedAvg(), network(784, 10), lambda clients: loops.FedAvg(clients, 784, 10)
    ),
    "FedABML, 5 draws": lambda: Row(
        bf.FedABML(**abml), network(spread="learnt", scale=0.05), partial(loops.FedABML, classes=10)
    ),
    "PFedVEM, 5 + 5 epochs, 5 draws": lambda: Row(
        bf.PFedVEM(),
        network(local=["2."], spread="client", scale=0.1),
        partial(loops.PFedVEM, classes=10, lr=0.001),
        "117 (12 per client trained)",
    ),
    "Per-FedAvg, second order": lambda: Row(bf.PerFedAvg(), network(), fed_avg, "3.7"),
    "Ditto, 5 + 5 epochs": lambda: Row(bf.Ditto(), network(), fed_avg, "4.0"),
    "pFedMe, 5 inner steps": lambda: Row(bf.PFedMe(), network(), fed_avg, "9.5"),
    "FOLA, per-sample Fisher": lambda: Row(bf.FOLA(), network(local=()), fed_avg, "4.7"),
    "FOLA, batch Fisher": lambda: Row(bf.FOLA(fisher="batch"), network(local=()), fed_avg, "4.7"),
    "pFedBayes, 5 draws": lambda: Row(
        METHODS["PFedBayes"](**abml), network(spread="learnt", scale=0.05), fed_avg, "22"
    ),
    "CAFeMe, 60 steps through one": lambda: Row(
        bf.CAFeMe(inner_steps=1, outer_steps=60, support_rows=20, lr=0.01),
        _modulated(),
        fed_avg,
        "27",
    ),
}


def timed(row: Row, federation: bf.Federation, rounds: int, compile: bool) -> tuple[Any, ...]:
    """Return seconds of our rounds, of its loop's and of FedAvg's loop, in turn; and what was compiled."""
    clients = [
        (federation["x"][i * ROWS : (i + 1) * ROWS], federation["y"][i * ROWS : (i + 1) * ROWS])
        for i in range(CLIENTS)
    ]
    unit = fed_avg(clients)
    loop = unit if row.loop is fed_avg else row.loop(clients)
    times: dict[str, list[float]] = {"loop": [], "unit": []}

    def others(_: Any) -> None:
        for name, run in (("loop", loop), ("unit", unit)):
            if name == "unit" and loop is unit:
                times["unit"].append(times["loop"][-1])
                continue
            gc.collect()
            start = time.perf_counter()
            run.round(range(CLIENTS))
            times[name].append(time.perf_counter() - start)

    posterior = bf.fit(
        row.model,
        federation,
        row.algorithm,
        rounds=rounds + 1,
        batch_size=BATCH,
        execution=bf.Execution(compile=compile),
        progress=False,
        callbacks=[others],
    )
    ours = posterior.history["seconds"].tolist()[1:]  # the first compiles
    return ours, times["loop"][1:], times["unit"][1:], posterior.compiled


def measure(name: str, rounds: int) -> list[str]:
    """Time a row compiled and eager."""
    federation, make = data(), ROWS_OF_TABLE[name]
    compiled = timed(make(), federation, rounds, True)
    eager = timed(make(), federation, max(3, rounds // 2), False)
    cells = [f"{1000 * statistics.median(t):.0f}" for t in (compiled[0], eager[0], compiled[1])]
    cells += [ratio(loop, ours) for ours, loop, *_ in (compiled, eager)]
    unit = statistics.median(a / b for a, b in zip(compiled[0], compiled[2], strict=True))
    return [*cells, f"{unit:.2f}", make().public or "–", compiled[3].split(", ")[-1]]


def note() -> str:
    flops, bandwidth = limits()
    products = CLIENTS * ROWS * EPOCHS * 2 * (3 * 79400 - 78400)
    return (
        f"The matrix products of a FedAvg round on the MLP take {1000 * products / flops:.0f} ms at "
        f"{flops / 1e9:.0f} GFLOP/s, which a product of 2048 × 2048 reaches here; memory is copied at "
        f"{bandwidth / 1e9:.0f} GB/s."
    )


def main() -> None:
    given = runner.arguments(__doc__, rounds=7)
    columns = (
        "a round of | compiled, ms | eager, ms | its loop, ms | loop / compiled | loop / eager "
        "| compiled, in FedAvg loops | public code, in FedAvg loops | compiling"
    )
    rows = {name: [(name, given.rounds)] for name in ROWS_OF_TABLE}
    runner.table(columns, rows, measure, given, note=note, threads=None)


if __name__ == "__main__":
    main()
