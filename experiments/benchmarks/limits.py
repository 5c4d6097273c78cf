"""How near a round comes to what the machine allows. Makes limits.md.

    python experiments/benchmarks/limits.py             # five minutes, on a machine that does nothing else
    python experiments/benchmarks/limits.py FedABML     # rows of rounds.py that begin so

A round has matrix products, counted by torch's FlopCounterMode in an eager round, and its steps read what they are
given and write what they give at least once, counted in a traced round, in which every step is one graph. The least
time is that of the products at the rate of a product of 2048 × 2048 and of these bytes at the rate of a copy, one after
the other: nothing is said of noise, which is drawn between the steps' reading and writing.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rounds import BATCH, ROWS_OF_TABLE, Row, data
from timing import command, limits, write
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import bayesfed as bf
from bayesfed.tracing.compiler import Compiler, tracing
from bayesfed.tracing.structure import flatten

ROWS = ("FedAvg", "FedABML", "PFedVEM", "Per-FedAvg", "CAFeMe")


class Counting(Compiler):
    """Adds up the bytes of what steps are given and give."""

    moved = 0

    def __call__(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """The function's result."""
        found = super().__call__(function, args)
        if not tracing():
            tensors: list[Tensor] = []
            flatten((tuple(args), found), tensors)
            self.moved += sum(tensor.nbytes for tensor in tensors)
        return found


def run(row: Row, federation: bf.Federation, compile: bool, rounds: int) -> Any:
    """A run before its first round."""
    execution = bf.Execution(compile=compile)
    return bf.start(
        row.model, federation, row.algorithm, rounds=rounds, batch_size=BATCH, execution=execution
    )


def measured(row: Row, federation: bf.Federation) -> tuple[float, float, float]:
    """Of a round: floating-point operations of its products, bytes of its steps, and seconds, compiled."""
    eager = run(row, federation, False, 1)
    with FlopCounterMode(display=False) as counter:
        bf.step(eager)
    counting = run(row, federation, True, 1)
    counting.compiler = Counting(True)
    bf.step(counting)
    compiled = run(row, federation, True, 6)
    seconds = [bf.step(compiled).seconds for _ in range(6)]
    return counter.get_total_flops(), counting.compiler.moved, statistics.median(seconds[1:])


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("rows", nargs="*", default=ROWS, help="beginnings of their names")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    federation, (rate, bandwidth) = data(), limits()
    lines = [
        "| a round of | products, GFLOP | at the machine's rate, ms | steps read and write, GB "
        "| at the rate of a copy, ms | compiled, ms | of which the machine needs |",
        "| --- |" + " --- |" * 6,
    ]
    for name, make in ROWS_OF_TABLE.items():
        if not name.startswith(tuple(args.rows)):
            continue
        flops, moved, seconds = measured(make(), federation)
        least = [1000 * flops / rate, 1000 * moved / bandwidth]
        cells = [f"{flops / 1e9:.1f}", f"{least[0]:.0f}", f"{moved / 1e9:.1f}", f"{least[1]:.0f}"]
        cells += [f"{1000 * seconds:.0f}", f"{sum(least) / seconds / 10:.0f} %"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    lines.append(f"\n{rate / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.0f} GB/s.")
    write(Path(__file__), lines)


if __name__ == "__main__":
    main()
