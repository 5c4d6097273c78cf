"""How near does a round come to what the machine allows? Makes limits.md.

    python experiments/benchmarks/limits.py             # five minutes, on a machine that does nothing else
    python experiments/benchmarks/limits.py FedABML     # rows of rounds.py that begin so

A round's matrix products are counted by torch's FlopCounterMode in an eager round. Its steps read their arguments and
write their results at least once: these bytes are counted in a traced round, in which every step is one graph. The
least time is that of the products at the rate of a product of 2048 × 2048 and of the bytes at the rate of a copy, one
after the other. It leaves out noise, which is drawn between the steps' reading and writing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rounds import BATCH, ROWS_OF_TABLE, Row, data
from timing import limits, runner
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import bayesfed as bf
from bayesfed.tracing.compiler import Compiler, tracing
from bayesfed.tracing.structure import flatten

ROWS = ("FedAvg", "FedABML", "PFedVEM", "Per-FedAvg", "CAFeMe")


class Counting(Compiler):
    """A compiler that adds up the bytes of steps' arguments and results."""

    moved = 0

    def __call__(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Return the function's result."""
        found = super().__call__(function, args)
        if not tracing():
            tensors: list[Tensor] = []
            flatten((tuple(args), found), tensors)
            self.moved += sum(tensor.nbytes for tensor in tensors)
        return found


def run(row: Row, federation: bf.Federation, compile: bool, rounds: int) -> Any:
    """Return a run before its first round."""
    execution = bf.Execution(compile=compile)
    return bf.start(
        row.model, federation, row.algorithm, rounds=rounds, batch_size=BATCH, execution=execution
    )


def measure(name: str) -> list[str]:
    """Count a round's products and bytes, and time it compiled."""
    row, federation, (rate, bandwidth) = ROWS_OF_TABLE[name](), data(), limits()
    eager = run(row, federation, False, 1)
    with FlopCounterMode(display=False) as counter:
        bf.step(eager)
    counting = run(row, federation, True, 1)
    counting.compiler = Counting(True)
    bf.step(counting)
    compiled = run(row, federation, True, 6)
    seconds = statistics.median([bf.step(compiled).seconds for _ in range(6)][1:])
    flops, moved = counter.get_total_flops(), counting.compiler.moved
    least = [1000 * flops / rate, 1000 * moved / bandwidth]
    cells = [f"{flops / 1e9:.1f}", f"{least[0]:.0f}", f"{moved / 1e9:.1f}", f"{least[1]:.0f}"]
    return [*cells, f"{1000 * seconds:.0f}", f"{sum(least) / seconds / 10:.0f} %"]


def main() -> None:
    columns = (
        "a round of | products, GFLOP | at the machine's rate, ms | steps read and write, GB "
        "| at the rate of a copy, ms | compiled, ms | of which the machine needs"
    )
    rows = [name for name in ROWS_OF_TABLE if name.startswith(ROWS)]

    def note() -> str:
        rate, bandwidth = limits()
        return f"{rate / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.0f} GB/s."

    runner.table(columns, rows, measure, runner.arguments(__doc__), note=note, threads=None)


if __name__ == "__main__":
    main()
