"""How do time and memory of a round grow with the number of clients and with the cohort? Makes growth.md.

    python experiments/benchmarks/growth.py             # some minutes, on a machine that does nothing else

Every run has a process of its own; a figure is the median over the turns of a row. Data lie in an Arrow file, clients'
states in mapped files, both in a temporary folder. Memory is the process' own at the end of a round (on Linux,
``RssAnon``; the system takes back pages of mapped files when it needs them), less what it had before the fit. "Before
and after" is all that is not a round: reading names, checking data, first states. PFedVEM is stateful, FedAvg keeps
nothing until the end. The last row is 100,000 clients of 9,993 weights each (100-97-2).
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from timing import runner

import bayesfed as bf
from bayesfed import models

ROWS, INPUTS, COHORT, ROUNDS = 10, 8, 50, 30
CLIENTS = (100, 1_000, 10_000, 100_000)
COHORTS = (10, 50, 250, 1250)


def stored(folder: Path, clients: int, inputs: int) -> Path:
    """Write an Arrow file of that many clients once, ten thousand of them at a time; its path."""
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
    """Return the memory of this process that is no file's, MB."""
    return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) / 1024


def measure(
    folder: str, name: str, clients: int, cohort: int, hidden: int, turn: int
) -> dict[str, float]:
    """Fit once and return the figures."""
    inputs, layers = (100, [hidden]) if hidden else (INPUTS, [])
    path = stored(Path(folder), clients, inputs)
    started = time.perf_counter()
    data = bf.Federation.from_arrow(path, client="client")
    network = models.mlp(inputs, *layers, 2)
    if name == "PFedVEM":
        algorithm: Any = bf.PFedVEM(head_steps=10, draws=5)
        model = models.Network(network, spread="client", scale=0.1)
    else:
        algorithm = bf.FedAvg(local_steps=10, personal_steps=1)
        model = models.Network(network)
    peaks: list[float] = []
    with tempfile.TemporaryDirectory(dir=folder) as states:
        before = owned()
        posterior = bf.fit(
            model,
            data,
            algorithm,
            rounds=ROUNDS,
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


def cells(_: Any, found: list[dict[str, float]]) -> list[str]:
    """Return medians over the turns; a row's figures come before those of the first row, to compare with."""
    half = len(found) // 2
    middle, first = (
        {key: statistics.median(run[key] for run in runs) for key in found[0]}
        for runs in (found[:half], found[half:])
    )
    ms, mb, start, disk = (middle[key] for key in ("ms", "MB", "start", "disk"))
    return [f"{ms:.1f}", f"{ms / first['ms']:.2f}", f"{mb:.0f}", f"{start:.1f}", f"{disk:.0f}"]


def main() -> None:
    given = runner.arguments(__doc__, turns=3)
    points = [(n, COHORT, 0) for n in CLIENTS] + [(10_000, cohort, 0) for cohort in COHORTS]
    large, rows = (100_000, COHORT, 97), {}
    with tempfile.TemporaryDirectory() as folder:

        def calls(name: str, point: tuple[int, int, int], turns: int) -> list[tuple[object, ...]]:
            return [(folder, name, *point, turn) for turn in range(turns)]

        for name, several in (("PFedVEM", points), ("FedAvg", points), ("PFedVEM", [large])):
            turns = 1 if several == [large] else given.turns
            for point in several:
                key = (
                    f"{name}, 9,993 weights" if point[2] else name,
                    f"{point[0]:,}",
                    f"{point[1]:,}",
                )
                rows[key] = calls(name, point, turns) + calls(name, several[0], turns)
        columns = (
            "algorithm | clients | cohort | ms a round | to the first line | memory, MB "
            "| before and after, s | states, MB"
        )
        runner.table(columns, rows, measure, given, cells, alone=True, threads=None)


if __name__ == "__main__":
    main()
