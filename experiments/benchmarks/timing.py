"""Timing of contenders in turn, in one process, and tables of the ratios."""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    repeats: int,
    at_least: float = 0.05,
) -> dict[str, list[float]]:
    """Seconds a call of each contender, ``repeats`` of each, taken in turn.

    A time is the mean over as many calls as take about ``at_least`` seconds, after one that is not timed: what the
    others left in caches and memory is not charged to it.
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
    """The median of the rounds' ratios, with the least and the greatest, as a cell of a table."""
    found = [a / b for a, b in zip(of, to, strict=True)]
    middle, low, high = statistics.median(found), min(found), max(found)
    return f"{middle:{digits}} ({low:{digits}} to {high:{digits}})"


def command(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the script's docstring, as it stands."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def machine() -> str:
    """The processor, its cores, and the version of torch."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = names[0].split(":")[1].strip() if names else name
    return (
        f"{name}, {os.cpu_count()} cores, "
        f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
        + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "")
    )


def limits(size: int = 2048, finish: Callable[[], object] = lambda: None) -> tuple[float, float]:
    """What the machine reaches: float32 matrix products in FLOP a second, copies in bytes a second.

    Products are of matrices of that size; ``finish`` waits for a device.
    """
    a = torch.randn(size, size)
    big = torch.randn(64_000_000)
    copy = torch.empty_like(big)
    runs = {"matmul": lambda: (a @ a, finish()), "copy": lambda: (copy.copy_(big), finish())}
    times = interleaved(runs, 9, 0.2)
    return 2 * size**3 / min(times["matmul"]), 2 * big.nbytes / min(times["copy"])


def write(path: Path, rows: Sequence[str]) -> None:
    """Print a table and keep it beside the script, with the machine that made it."""
    text = "\n".join(rows)
    print(text)
    path.with_suffix(".md").write_text(f"{text}\n\nMachine: {machine()}.\n")
