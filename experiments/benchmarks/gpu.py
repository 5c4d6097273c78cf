"""How long does one step of a cohort take on a GPU? Makes gpu.md.

    python experiments/benchmarks/gpu.py

As steps.py, with ours compiled into a CUDA graph, 100 clients for the MLP, everything on the GPU, and times until it
has finished. The last columns are our compiled step with its products in lower precision.
"""

from __future__ import annotations

import statistics
import sys

import torch
from steps import cells, cnn, measured, mlp, radon
from timing import limits, runner

from bayesfed.tracing.precision import products

PROBLEMS = {
    "MLP 784-100-10, 100 clients × 50": lambda: mlp(100, 50, 784, 100, 10),
    "logistic 784-10, 200 × 50": lambda: mlp(200, 50, 784, 10),
    "logistic 8-2, 1000 × 10": lambda: mlp(1000, 10, 8, 2),
    "CNN 8-16-32, 20 × 20": lambda: cnn(20, 20),
    "radon, 1000 × 10, 8 draws": lambda: radon(1000, 10),
}


def measure(name: str, repeats: int) -> list[str]:
    """Time a problem in full precision, then in lower ones."""
    torch.set_default_device("cuda")
    problem = PROBLEMS[name]()
    times, _, difference = measured(problem, repeats, torch.cuda.synchronize)
    found = [*cells(times, problem, *limits(8192, torch.cuda.synchronize)), f"{difference:.0e}"]
    for precision in ("tf32", "bf16"):
        torch.manual_seed(0)
        with products(precision, torch.device("cuda")):
            times, _, _ = measured(PROBLEMS[name](), repeats, torch.cuda.synchronize)
        found.append(f"{1000 * statistics.median(times['compiled']):.3g}")
    return found


def note() -> str:
    flops, bandwidth = limits(8192, torch.cuda.synchronize)
    return (
        f"Limit: matrix products at {flops / 1e12:.0f} TFLOP/s and memory at {bandwidth / 1e12:.2f} TB/s, as "
        "measured here, one after the other."
    )


def main() -> None:
    given = runner.arguments(__doc__, repeats=15)
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU: torch.cuda.is_available() is False")
    columns = (
        "one step of | compiled, ms | eager, ms | hand, ms | loop, ms | compiled / hand | eager / hand "
        "| loop / compiled | of the GPU's limit | differ by | compiled, ms: tf32 | bf16"
    )
    rows = {name: [(name, given.repeats)] for name in PROBLEMS}
    runner.table(columns, rows, measure, given, note=note, threads=None)


if __name__ == "__main__":
    main()
