"""A round of small hierarchies, eager, traced and compiled. Makes tiers.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/benchmarks/tiers.py            # on a machine that does nothing else, ten minutes
    python experiments/benchmarks/tiers.py count      # one problem

SFVI's round with all clients on the problems of experiments/problems.py, under the three settings of
``bf.Execution(compile=...)``: False, "auto" (which traces them) and True. Rounds of the three take turns in one process
after four that are not timed; milliseconds are medians with the least and the greatest, operations what torch is asked
for in a round, counted below autograd. "making graphs" is what tracing and compiling took, first calls included, with
nothing in Inductor's cache.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from timing import command, write
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).parents[1]))
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()

import bayesfed as bf

MODES = {"eager": False, "traced": "auto", "compiled": True}
WARM, REPEATS = 4, 15


class Operations(TorchDispatchMode):
    """How many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def row(name: str, problem: Any, federation: bf.Federation) -> str:
    """The three in turn."""
    runs = {}
    for mode, setting in MODES.items():
        runs[mode] = bf.start(
            problem.model,
            federation,
            rounds=WARM + REPEATS + 1,
            execution=bf.Execution(compile=setting),
        )
        for _ in range(WARM):
            bf.step(runs[mode])
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(REPEATS):
        for mode, run in runs.items():
            start = time.perf_counter()
            bf.step(run)
            times[mode].append(1e3 * (time.perf_counter() - start))
    cells = [name]
    for mode, run in runs.items():
        with Operations() as counted:
            bf.step(run)
        found = times[mode]
        cells.append(f"{statistics.median(found):.0f} ({min(found):.0f} to {max(found):.0f})")
        cells.append(f"{counted.count:,}")
    cells += [f"{runs[mode].compiler.seconds:.1f}" for mode in ("traced", "compiled")]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("problems", nargs="*", metavar="problem")
    data = Path(__file__).parents[3] / "shared/data/radon_mn.json"
    parser.add_argument("--radon", type=Path, default=data)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    from problems import PROBLEMS

    small = [name for name in PROBLEMS if name != "10,000 clients"]
    rows = [
        "| problem | eager, ms | operations | traced, ms | operations | compiled, ms | operations "
        "| making graphs, s: traced | compiled |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in args.problems or small:
        rows.append(row(name, PROBLEMS[name], PROBLEMS[name].data(args.radon)))
        print(rows[-1], flush=True)
    write(Path(__file__), rows)


if __name__ == "__main__":
    main()
