"""Timing of contenders in turn in one process, ratios of their times, and the limits of the machine."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
import runner

__all__ = ["interleaved", "limits", "ratio", "runner"]


def interleaved(
    contenders: Mapping[str, Callable[[], object]], repeats: int, at_least: float = 0.05
) -> dict[str, list[float]]:
    """Return seconds a call of each contender, ``repeats`` of each, taken in turn.

    A time is the mean over as many calls as take about ``at_least`` seconds, after one that is not timed, so that what
    the others left in caches and memory does not count.
    """
    calls = {}
    for name, run in contenders.items():
        run()
        start = time.perf_counter()
        run()
        spent = time.perf_counter() - start
        calls[name] = max(1, round(at_least / spent))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            gc.collect()
            run()
            start = time.perf_counter()
            for _ in range(calls[name]):
                run()
            times[name].append((time.perf_counter() - start) / calls[name])
    return times


def ratio(of: Sequence[float], to: Sequence[float], digits: str = ".1f") -> str:
    """Return the median ratio of two series, with the least and the greatest, as a cell of a table."""
    found = [a / b for a, b in zip(of, to, strict=True)]
    middle, low, high = statistics.median(found), min(found), max(found)
    return f"{middle:{digits}} ({low:{digits}} to {high:{digits}})"


@cache
def limits(size: int = 2048, finish: Callable[[], object] = lambda: None) -> tuple[float, float]:
    """Return the machine's float32 matrix products in FLOP a second, and copies in bytes a second.

    Matrices have that size; ``finish`` waits for a device.
    """
    a = torch.randn(size, size)
    big = torch.randn(64_000_000)
    copy = torch.empty_like(big)
    runs = {"matmul": lambda: (a @ a, finish()), "copy": lambda: (copy.copy_(big), finish())}
    times = interleaved(runs, 9, 0.2)
    return 2 * size**3 / min(times["matmul"]), 2 * big.nbytes / min(times["copy"])
