"""What experiments share: fits that run in several processes and are kept, and tables that grow row by row."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

STORE = Path(__file__).parents[1] / "runs/fits"


def combinations(grid: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Every point of a grid."""
    return [dict(zip(grid, v, strict=True)) for v in itertools.product(*grid.values())]


def done(
    what: Callable[..., Any], calls: Sequence[tuple[Any, ...]], jobs: int, resume: bool
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Calls and their results as they come; all are stored.

    Args:
        what: the function; its results are plain data.
        calls: its arguments.
        jobs: processes at a time.
        resume: take the results that an earlier run has stored. Settings are the key, not the code.
    """
    STORE.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs) as pool:
        missing = {}
        for call in calls:
            key = repr((what.__name__, *call))
            path = STORE / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
            if resume and path.exists():
                yield call, json.loads(path.read_text())["found"]
            else:
                missing[pool.submit(what, *call)] = key, path, call
        for future in as_completed(missing):
            key, path, call = missing[future]
            fresh = path.with_suffix(".tmp")
            fresh.write_text(json.dumps({"call": key, "found": future.result()}))
            fresh.replace(path)
            yield call, future.result()


def alone(script: str, *arguments: str) -> Any:
    """What a script prints in its last line, as JSON, in a process of its own without Inductor's cache of others."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, script, *arguments],
            capture_output=True,
            text=True,
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def rounds_of(posterior: Any) -> str:
    """After how many rounds a fit stopped by itself, or that it did not."""
    rounds = len(posterior.history["elbo"])
    return f"{rounds}" if posterior.settled else f"{rounds}, not settled"


def keep(
    path: Path, header: Sequence[str], row: str, order: Sequence[str], columns: int = 1
) -> None:
    """Put a row into a table in place of the one that it repeats, atomically.

    Args:
        path: the table.
        header: its first lines.
        row: ``"| name | ... |"``.
        order: of the first cells.
        columns: how many of the first cells make two rows the same.
    """
    old = path.read_text().splitlines()[len(header) :] if path.exists() else []
    same = row.split(" | ")[:columns]
    rows = [line for line in old if line.split(" | ")[:columns] != same]
    rows = sorted([*rows, row], key=lambda line: order.index(line.split(" | ")[0][2:]))
    fresh = path.with_suffix(".tmp")
    fresh.write_text("\n".join([*header, *rows]) + "\n")
    fresh.replace(path)


def grown(
    path: Path, header: Sequence[str], rows: Iterable[str], order: Sequence[str], columns: int = 1
) -> None:
    """Print rows as they come and :func:`keep` them."""
    print("\n".join(header))
    for row in rows:
        print(row, flush=True)
        keep(path, header, row, order, columns)
