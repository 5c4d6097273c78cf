"""Arguments, raw results and tables of all experiments.

An experiment is a function from a row's settings to plain data (numbers, words, lists and dicts of them), and a list of
rows. A script looks like this:

    def main() -> None:
        given = runner.arguments(__doc__, rounds=100)
        runner.table("algorithm | accuracy | seconds", ["FedAvg", "FOLA"], measure, given)

Each result is a line of ``runs/raw/SCRIPT.jsonl`` as soon as it is there: a run that was killed goes on with
``--resume``. A row stands in the Markdown table beside the script as soon as its results are complete. The table begins
with the command that made it, the date, the commit, the machine and the versions, and the script's docstring, which
says how to read it.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import bayesfed

ROOT = Path(__file__).resolve().parents[1]
RADON, MNIST = ROOT / "shared/data/radon_mn.json", ROOT / "shared/data/mnist.npz"
RAW = ROOT / "runs/raw"
COMMITS = set[str]()
"""The commits whose results this process has used."""
Call = tuple[Any, ...]


# -- arguments -------------------------------------------------------------------------------------


def arguments(doc: str | None, *, jobs: int = 1, **options: Any) -> argparse.Namespace:
    """Parse the command line: the arguments that all scripts share, and a script's own.

    Args:
        doc: the script's docstring, which ``--help`` shows.
        jobs: processes at a time, unless the command line says otherwise.
        options: the script's own options and their defaults. A list takes several values, ``False`` is a flag.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", help="first cells of rows, or their beginnings; all")
    parser.add_argument("--jobs", type=int, default=jobs, help="processes at a time")
    parser.add_argument("--resume", action="store_true", help="take the raw results in runs/raw")
    parser.add_argument("--out", type=Path, help="the file of the table")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    for name, default in options.items():
        how: dict[str, Any] = {"default": default, "type": type(default)}
        if isinstance(default, list):
            how |= {"nargs": "+", "type": type(default[0])}
            how |= {"choices": default} if isinstance(default[0], str) else {}
        elif isinstance(default, bool):
            how = {"action": "store_true"}
        parser.add_argument(f"--{name.replace('_', '-')}", **how)
    given = parser.parse_args()
    numbers = [name for name, default in options.items() if type(default) in (int, float, bool)]
    given.usual = all(getattr(given, name) == options[name] for name in numbers)
    return given


def combinations(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every point of a grid."""
    return [dict(zip(grid, v, strict=True)) for v in itertools.product(*grid.values())]


# -- results ---------------------------------------------------------------------------------------


def results(
    measure: Callable[..., Any],
    calls: Sequence[Call],
    given: argparse.Namespace,
    *,
    threads: int | None = 1,
    alone: bool = False,
) -> Iterator[tuple[Call, Any]]:
    """Yield calls and their results as they are done; each is stored.

    Args:
        measure: gives plain data.
        calls: its arguments, plain data as well.
        given: the parsed command line. With ``resume`` stored results are taken: settings are the key, not the code.
        threads: of torch; None leaves them.
        alone: measure each call in a new process that has no compiled graphs of others in its cache.
    """
    if given.one:
        print(json.dumps(_measured(measure, json.loads(given.one), threads)))
        raise SystemExit
    script = Path(sys.argv[0]).resolve()
    store = RAW / f"{script.parent.name}_{script.stem}.jsonl"
    store.parent.mkdir(parents=True, exist_ok=True)
    stored = _stored(store) if given.resume else {}
    begin, missing = time.perf_counter(), []
    for call in calls:
        if entry := stored.get(_key(measure, call)):
            COMMITS.add(entry["commit"])
            yield call, entry["result"]
        else:
            missing.append(call)
    for number, (call, result) in enumerate(_fresh(measure, missing, given.jobs, threads, alone)):
        COMMITS.add(commit := _commit())
        with store.open("a") as out:
            line = {"call": _key(measure, call), "result": result, "commit": commit}
            out.write(json.dumps(line) + "\n")
        seconds = time.perf_counter() - begin
        print(f"{seconds:6.0f} s  {number + 1} of {len(missing)}: {call}", file=sys.stderr)
        yield call, result


def _fresh(
    measure: Callable[..., Any], calls: Sequence[Call], jobs: int, threads: int | None, alone: bool
) -> Iterator[tuple[Call, Any]]:
    """Yield calls and results; with several jobs in the order in which they end."""
    if alone or jobs == 1:
        for call in calls:
            yield call, _alone(call) if alone else _measured(measure, call, threads)
        return
    with ProcessPoolExecutor(jobs) as pool:
        running = {pool.submit(_measured, measure, call, threads): call for call in calls}
        for future in as_completed(running):
            yield running[future], future.result()


def _measured(measure: Callable[..., Any], call: Call, threads: int | None) -> Any:
    """Return the result as JSON would give it back, so that stored and fresh ones are alike."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return json.loads(json.dumps(measure(*call)))


def _alone(call: Call) -> Any:
    """Return the result of the same script in a new process, given by its last line.

    Raises:
        RuntimeError: the process failed.
    """
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, *sys.argv, "--one", json.dumps(call)],
            capture_output=True,
            text=True,
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
        )
    if done.returncode:
        raise RuntimeError(f"{call}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _key(measure: Callable[..., Any], call: Call) -> str:
    return json.dumps([measure.__name__, *call])


def _stored(path: Path) -> dict[str, Any]:
    """Return the stored lines by call; one that was cut off by a kill is left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        if line.endswith("}"):
            entry = json.loads(line)
            found[entry["call"]] = entry
    return found


def best(
    measure: Callable[..., Any],
    trials: Mapping[str, Sequence[Call]],
    score: Callable[[Any], float],
    given: argparse.Namespace,
) -> dict[str, tuple[Call, Any]]:
    """Return for each name the trial with the lowest score, and its result; a name of which all fail is left out."""
    found: dict[str, tuple[float, Call, Any]] = {}
    names = {json.dumps(call): name for name, calls in trials.items() for call in calls}
    for call, result in results(measure, [c for calls in trials.values() for c in calls], given):
        name, value = names[json.dumps(call)], score(result)
        if value < found.get(name, (math.inf,))[0]:
            found[name] = value, call, result
    return {name: found[name][1:] for name in trials if name in found}


def descend(
    loss: Callable[[dict[str, Any]], float], values: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Return the settings whose loss is below that of all neighbours, from the middle of each setting's values."""
    losses: dict[tuple[int, ...], float] = {}

    def at(place: tuple[int, ...]) -> float:
        if place not in losses:
            point = {name: values[name][i] for name, i in zip(values, place, strict=True)}
            losses[place] = loss(point)
        return losses[place]

    place, before = tuple(len(each) // 2 for each in values.values()), None
    while place != before:
        before = place
        for axis, each in enumerate(values.values()):
            for step in (-1, 1):
                while 0 <= place[axis] + step < len(each):
                    other = (*place[:axis], place[axis] + step, *place[axis + 1 :])
                    if at(other) >= at(place):
                        break
                    place = other
    return {name: values[name][i] for name, i in zip(values, place, strict=True)}


# -- tables ----------------------------------------------------------------------------------------


def table(
    columns: str,
    rows: Mapping[Any, Sequence[Call]] | Sequence[Any],
    measure: Callable[..., Any],
    given: argparse.Namespace,
    cells: Callable[[Any, list[Any]], Any] = lambda _, found: found[0],
    *,
    path: Path | None = None,
    note: Callable[[], str] = str,
    **how: Any,
) -> None:
    """Measure rows, print them, and put each into the table in place of the one that it repeats.

    The table is not written where a number on the command line differs from the usual one, unless ``--out`` names it.

    Args:
        columns: the heads, joined by `` | ``.
        rows: by their first cells in the order of the table, the calls that each needs; a list where the first cells
            are the call.
        measure: the experiment.
        given: the parsed command line.
        cells: from a row's first cells and results its other cells, or a list of several rows of them.
        path: of the table; by default beside the script.
        note: makes a text below the table.
        how: see :func:`results`.
    """
    every = {_first(key): calls for key, calls in _calls(rows).items()}
    chosen = {key: calls for key, calls in every.items() if _asked(key, given.rows, every)}
    calls = list({json.dumps(call): call for needed in chosen.values() for call in needed}.values())
    usual = path or Path(sys.argv[0]).resolve().with_suffix(".md")
    stored = _Table(given.out or (usual if given.usual else None), columns, list(every))
    found: dict[str, Any] = {}
    for call, result in results(measure, calls, given, **how):
        if not found:
            print("\n".join(stored.heads))
        found[json.dumps(call)] = result
        for key, needed in list(chosen.items()):
            keys = [json.dumps(call) for call in needed]
            if all(each in found for each in keys):
                del chosen[key]
                rest = cells(key, [found[each] for each in keys])
                several = rest if rest and isinstance(rest[0], list) else [rest]
                block = [f"| {' | '.join(map(str, [*key, *each]))} |" for each in several]
                print("\n".join(block), flush=True)
                stored.put(key, block)
    if found and (text := note()):
        print(f"\n{text}")
        stored.put(None, [], text)


def _calls(rows: Any) -> dict[Any, Sequence[Call]]:
    return dict(rows) if isinstance(rows, Mapping) else {key: [_first(key)] for key in rows}


def _first(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _asked(key: tuple[Any, ...], names: Sequence[str], every: Mapping[Any, Any]) -> bool:
    """Return whether a row is named, in full or, where no row has that name, by its beginning."""
    whole = {str(other[0]) for other in every if other}
    first = str(key[0]) if key else ""
    return not names or any(
        first == name if name in whole else first.startswith(name) for name in names
    )


@dataclass
class _Table:
    """A Markdown table in a file.

    Attributes:
        path: the file; None writes nothing.
        columns: its heads.
        order: the keys, which are first cells of rows.
        made: the rows that this command has made.
    """

    path: Path | None
    columns: str
    order: list[tuple[Any, ...]]
    made: set[str] = field(default_factory=set)

    @property
    def heads(self) -> list[str]:
        return [f"| {self.columns} |", "| --- " * len(self.columns.split(" | ")) + "|"]

    def put(self, key: tuple[Any, ...] | None, block: list[str], note: str = "") -> None:
        """Put the rows of a key in place of those that it has in the file, and a note below all."""
        if self.path is None:
            return
        self.made.update(block)
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        old = lines[lines.index(self.heads[0]) + 2 :] if self.heads[0] in lines else []
        rows = [
            row for row in old if row.startswith("|") and (key is None or not _begins(row, key))
        ]
        rows = sorted([*rows, *block], key=self._place)
        older = len(rows) - sum(row in self.made for row in rows)
        said = f" {older} of {len(rows)} rows are older." if older else ""
        write(self.path, [*self.heads, *rows, *(["", note] if note else [])], said)

    def _place(self, row: str) -> int:
        """Return the number of the row's key, else of the first key with the same first cell."""
        keys = [*self.order, *(key[:1] for key in self.order)]
        found = (number for number, key in enumerate(keys) if _begins(row, key))
        return next(found, len(keys)) % len(self.order)


def _begins(row: str, key: tuple[Any, ...]) -> bool:
    return row.startswith("".join(f"| {cell} " for cell in key) + "|")


def write(path: Path, lines: Sequence[str], said: str = "") -> None:
    """Write a file under the header of all tables and the question and legend of the script, atomically."""
    fresh = path.with_suffix(".tmp")
    text = legend(sys.modules["__main__"].__doc__)
    fresh.write_text("\n".join([header() + said, "", *text, *lines]) + "\n", encoding="utf-8")
    fresh.replace(path)


def legend(doc: str | None) -> list[str]:
    """Return the lines by which a table explains itself: the docstring of its script, without commands.

    Args:
        doc: the docstring. Its first sentence is the title; blocks of commands and "Makes x.md." are left out.
    """
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", (doc or "").strip().replace("``", "`"))
    text = re.sub(r"(; makes|[.:?] Makes|: makes) [^.]*(\.(md|png)\b[^.]*)+\.", _end, text, count=1)
    text = text.replace(" Makes the tables of four recipes in this folder.", "")
    first, _, rest = text.partition("\n\n")
    title, *more = re.split(r"(?<=[.?]) ", " ".join(first.split()), maxsplit=1)
    found = [f"**{title}**{' '.join(['', *more])}", ""]
    for block in rest.split("\n\n"):
        if COMMANDS.match(block):
            continue
        found += ["```text", *block.split("\n"), "```", ""] if block[:1] == " " else [block, ""]
    return found


COMMANDS = re.compile(r" +(python|pip|apt-get|git) ?")


def _end(found: re.Match[str]) -> str:
    """Return the end of a sentence before "Makes x.md"."""
    return found[0][0] if found[0][0] in ".?" else "."


def header() -> str:
    """Return the line that a table begins with; it has neither names of hosts nor absolute paths."""
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = " ".join(["python", str(script), *(f'"{w}"' if " " in w else w for w in words)])
    commits = sorted(COMMITS or {_commit()})
    named = f"commit{'s' * (len(commits) > 1)} {' and '.join(commits)}"
    return (
        f"Made by `{command}`, {datetime.date.today()}, {named}, bayesfed {bayesfed.__version__}, "
        f"torch {torch.__version__}, {machine()}."
    )


def _commit() -> str:
    """Return the commit, with "-dirty" if code differs from it; tables that are being made do not count."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    commit = git("rev-parse", "--short", "HEAD").stdout.strip() or "unknown"
    changed = git("diff", "--quiet", "HEAD", "--", ":!*.md", ":!*.png").returncode == 1
    return f"{commit}-dirty" if changed else commit


def machine() -> str:
    """Return the processor, its cores and the GPU, if there is one."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = names[0].split(":")[1].strip() if names else name
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}{gpu}"


# -- cells -----------------------------------------------------------------------------------------


def plus_minus(values: Sequence[float], digits: str = ".3f", error: str = "") -> str:
    """Return the mean of some seeds ± its standard error; "diverged" if a number is not finite."""
    if not all(map(math.isfinite, values)):
        return "diverged"
    mean = f"{statistics.mean(values):{digits}}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:{error or digits}}"


def chosen_of(point: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]) -> str:
    """Return which of its values each setting of a grid has."""
    return "; ".join(f"{name} {value} of {tuple(grid[name])}" for name, value in point.items())


def rounds_of(posterior: Any) -> str:
    """Return after how many rounds a fit stopped by itself, or that it had not converged."""
    rounds = len(posterior.history["elbo"])
    return f"{rounds}" if posterior.converged else f"{rounds}, not converged"
