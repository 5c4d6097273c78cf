"""Time and memory of a round against the number of clients and against the cohort. Makes growth.md.

    python experiments/benchmarks/growth.py             # some minutes, on a machine that does nothing else

Every line is a run in a process of its own; lines of one table take turns, and a time is the median over rounds of the
median over turns. Data lie in an Arrow file, what clients keep in mapped files, both in a temporary folder. Memory is
what the process must have of its own at the end of a round (on Linux, ``RssAnon``; pages of mapped files the system
takes back when it needs them), less what it had before the fit. "Before and after" is what is no round: reading names,
checking data, first states. PFedVEM keeps a posterior for every client, FedAvg nothing until the end. The last line is
100,000 clients of 9,993 weights each (100-97-2).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from timing import command, write

import bayesfed as bf
from bayesfed import models

ROWS, INPUTS, COHORT, ROUNDS = 10, 8, 50, 30
CLIENTS = (100, 1_000, 10_000, 100_000)
COHORTS = (10, 50, 250, 1250)


def stored(folder: Path, clients: int, inputs: int) -> Path:
    """An Arrow file of that many clients, written once, ten thousand of them at a time."""
    path = folder / f"{clients}x{inputs}.arrow"
    if path.exists():
        return path
    generator = np.random.default_rng(0)
    schema = pa.schema(
        [("client", pa.int32()), ("x", pa.list_(pa.float32(), inputs)), ("y", pa.int8())]
    )
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for some in np.array_split(np.arange(clients), max(1, clients // 10_000)):
            rows = len(some) * ROWS
            x = generator.standard_normal(rows * inputs, dtype=np.float32)
            columns = [
                pa.array(np.repeat(some, ROWS).astype(np.int32)),
                pa.FixedSizeListArray.from_arrays(pa.array(x), inputs),
                pa.array(generator.integers(0, 2, rows).astype(np.int8)),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    return path


def owned() -> float:
    """Memory of this process that is no file's, MB."""
    return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def one(name: str, path: str, cohort: int, hidden: list[int], rounds: int) -> dict[str, float]:
    """The figures of one run."""
    torch.manual_seed(0)
    started = time.perf_counter()
    data = bf.Federation.from_arrow(path, client="client")
    network = models.mlp(data.event_shape("x")[0], *hidden, 2)
    if name == "PFedVEM":
        algorithm: Any = bf.PFedVEM(head_steps=10, draws=5)
        model = models.Network(network, spread="client", scale=0.1)
    else:
        algorithm = bf.FedAvg(local_steps=10, personal_steps=1)
        model = models.Network(network)
    peaks: list[float] = []
    with tempfile.TemporaryDirectory(dir=Path(path).parent) as states:
        before = owned()
        posterior = bf.fit(
            model,
            data,
            algorithm,
            rounds=rounds,
            clients_per_round=cohort,
            execution=bf.Execution(states=states),
            progress=False,
            callbacks=[lambda done: peaks.append(owned() - before)],
        )
        seconds = posterior.history["seconds"].tolist()
        return {
            "ms": 1000 * statistics.median(seconds[2:]),
            "MB": max(peaks),
            "start": time.perf_counter() - started - sum(seconds),
            "disk": sum(f.stat().st_blocks * 512 for f in Path(states).iterdir()) / 2**20,
        }


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.one:
        print(json.dumps(one(*json.loads(args.one))))
        return
    lines = [
        "| algorithm | clients | cohort | ms a round | to the first line | memory, MB | before and after, s "
        "| states, MB |",
        "| --- |" + " --- |" * 7,
    ]
    grid: list[tuple[int, int, int, list[int]]] = [(n, COHORT, INPUTS, []) for n in CLIENTS]
    grid += [(10_000, cohort, INPUTS, []) for cohort in COHORTS]
    with tempfile.TemporaryDirectory() as folder:

        def run(name: str, clients: int, cohort: int, inputs: int, hidden: list[int]) -> Any:
            path = str(stored(Path(folder), clients, inputs))
            task = json.dumps([name, path, cohort, hidden, ROUNDS])
            command = [sys.executable, __file__, "--one", task]
            return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)

        for name, turns, points in (
            ("PFedVEM", args.turns, grid),
            ("FedAvg", args.turns, grid),
            ("PFedVEM", 1, [(100_000, COHORT, 100, [97])]),
        ):
            found: list[list[dict[str, float]]] = [[] for _ in points]
            for _ in range(turns):
                for runs, point in zip(found, points, strict=True):
                    runs.append(run(name, *point))
            middle = [
                {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                for runs in found
            ]
            for (clients, cohort, _, hidden), figures in zip(points, middle, strict=True):
                what = f"{name}, 9,993 weights" if hidden else name
                lines.append(
                    f"| {what} | {clients:,} | {cohort:,} | {figures['ms']:.1f} | "
                    f"{figures['ms'] / middle[0]['ms']:.2f} | {figures['MB']:.0f} | "
                    f"{figures['start']:.1f} | {figures['disk']:.0f} |"
                )
                print(lines[-1], flush=True)
    write(Path(__file__), lines)


if __name__ == "__main__":
    main()
