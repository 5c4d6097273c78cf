"""How long does a round of small hierarchies take eager, traced and compiled? Makes tiers.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/benchmarks/tiers.py            # on a machine that does nothing else, ten minutes
    python experiments/benchmarks/tiers.py count      # one problem

SFVI's round with all clients on the problems of experiments/problems.py, under the three settings of
``bf.Execution(compile=...)``: False, "auto" (which traces them) and True. Rounds of the three take turns in one process
after four that are not timed; milliseconds are medians with the least and the greatest, operations those of torch in a
round, counted below autograd. "making graphs" is the time of tracing and compiling, first calls included, with nothing
in Inductor's cache.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from timing import runner
from torch.utils._python_dispatch import TorchDispatchMode

import bayesfed as bf

MODES = {"eager": False, "traced": "auto", "compiled": True}
WARM, REPEATS = 4, 15


class Operations(TorchDispatchMode):
    """A count of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def measure(name: str) -> list[str]:
    """Time the three in turn."""
    from problems import PROBLEMS

    problem, federation = PROBLEMS[name], PROBLEMS[name].data()
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
    cells = []
    for mode, run in runs.items():
        with Operations() as counted:
            bf.step(run)
        found = times[mode]
        cells.append(f"{statistics.median(found):.0f} ({min(found):.0f} to {max(found):.0f})")
        cells.append(f"{counted.count:,}")
    cells += [f"{runs[mode].compiler.seconds:.1f}" for mode in ("traced", "compiled")]
    return cells


def main() -> None:
    from problems import SMALL

    columns = (
        "problem | eager, ms | operations | traced, ms | operations | compiled, ms | operations "
        "| making graphs, s: traced | compiled"
    )
    runner.table(columns, SMALL, measure, runner.arguments(__doc__), alone=True, threads=None)


if __name__ == "__main__":
    main()
