"""Do the tests find faults? Small changes of the code, and how many the tests notice. Makes mutation.md.

    pip install mutmut pytest-cov
    python experiments/mutation.py --measure        # first: the suite with coverage, half an hour on two cores
    python experiments/mutation.py                  # hours on two cores
    python experiments/mutation.py bounds --sample 40 --out bounds.md

The changes are mutmut's: an operator for another, a number plus one, an argument dropped, an assignment of None, a
condition forced. Strings, annotations, and the words of errors and warnings are not changed. Mutants are drawn at
random from all of a folder's. The tests that run a mutant's line, its module's own first, run in a fork of a process
that has imported everything but bayesfed, until one fails. A mutant survives when all those pass that fit into
``LIMIT`` seconds.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.machinery
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
import runner

ROOT = runner.ROOT
STORE = ROOT / "runs/mutation"
LIMIT = 90.0
APART = (
    "invariants/test_processes",
    "invariants/test_resume",
    "tracing/test_compiler",
    "cli/test_app",
    "cli/test_resumed_runs",
)
"""Tests that start processes or compilers of their own, which is impossible in a fork."""
FOLDERS = {
    "privacy": ["bayesfed/engine/privacy.py"],
    "bounds": ["bayesfed/output/bounds.py"],
    "partition": ["bayesfed/elbo/elbo.py", "bayesfed/engine/cohort.py"],
    "rules": ["bayesfed/rules/*.py"],
    "steps": ["bayesfed/steps/*.py"],
    "algorithms": ["bayesfed/algorithms/*.py"],
    "guides": ["guides/*.py"],
}


def files(folder: str) -> list[str]:
    """Return the modules of a folder."""
    found = [path for pattern in FOLDERS[folder] for path in sorted(ROOT.glob(pattern))]
    return [str(path.relative_to(ROOT)) for path in found if path.name != "__init__.py"]


def mutants(name: str) -> Iterator[tuple[int, Callable[[], str]]]:
    """Yield line numbers of a module, and functions that make its changed sources."""
    import libcst as cst
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation.mutators import mutation_operators, operator_string

    skipped = cst.Annotation | cst.Raise | cst.Decorator | cst.Import | cst.ImportFrom
    wrapper = MetadataWrapper(cst.parse_module((ROOT / name).read_text()))
    lines = wrapper.resolve(PositionProvider)

    class Visitor(cst.CSTVisitor):
        def __init__(self) -> None:
            self.found: list[tuple[int, cst.CSTNode, cst.CSTNode]] = []

        def on_visit(self, node: cst.CSTNode) -> bool:
            warned = isinstance(node, cst.Call) and cst.Module([]).code_for_node(
                node.func
            ).endswith("warn")
            if isinstance(node, skipped) or warned or _names_a_type(node):
                return False
            for kind, operator in mutation_operators:
                if isinstance(node, kind) and operator is not operator_string:
                    line = lines[node].start.line
                    self.found.extend((line, node, new) for new in operator(node))
            return True

    visitor = Visitor()
    wrapper.module.visit(visitor)
    for line, node, new in visitor.found:
        yield line, partial(_source, wrapper.module, node, new)


def _names_a_type(node: Any) -> bool:
    """Return whether a node is like ``Upload = dict[str, Tensor]``."""
    import libcst.matchers as m

    name = m.Name(value=m.MatchRegex("[A-Z][a-z]+[A-Za-z]*"))
    return m.matches(node, m.Assign(targets=[m.AssignTarget(name)], value=m.Subscript()))


def _source(module: Any, node: Any, new: Any) -> str:
    return str(module.deep_replace(node, new).code)


def faults() -> Iterator[tuple[str, tuple[str, int, str]]]:
    """Yield the deliberate faults, as mutants.

    Raises:
        ValueError: the code has changed.
    """
    stored = tomllib.loads((ROOT / "experiments/mutation_faults.toml").read_text())
    for what, fault in stored.items():
        name, old, new = fault["file"], fault["code"], fault["faulty"]
        source = (ROOT / name).read_text()
        if old not in source:
            raise ValueError(f"{name} has no {old!r} any more: write the fault {what!r} anew")
        yield what, (name, source[: source.index(old)].count("\n") + 1, source.replace(old, new))


def measure_coverage(tests: list[str]) -> None:
    """Store which test runs which line, and how long each test takes: of all tests, or in addition of some."""
    STORE.mkdir(parents=True, exist_ok=True)
    if not tests:
        for old in STORE.glob("times*.xml"):
            old.unlink()
    number = len([*STORE.glob("times*.xml")])
    where = {"COVERAGE_FILE": str(STORE / "coverage"), "OMP_NUM_THREADS": "1"}
    quick = ["-m", "pytest", "-q", "--numprocesses", "2", "--dist", "loadfile", "-m", "not slow"]
    cover = ["--cov=bayesfed", "--cov=guides", "--cov-context=test", "--cov-report="]
    times = ["--junitxml", str(STORE / f"times{number}.xml"), "--ignore=tests/test_packaging.py"]
    more = ["--cov-append", *tests] if tests else []
    command = [sys.executable, *quick, *cover, *times, *more]
    subprocess.run(command, cwd=ROOT, env=os.environ | where, check=True)


def times() -> dict[str, float]:
    """Return the seconds of each test, by its node id as coverage writes it."""
    found = {}
    for file in sorted(STORE.glob("times*.xml")):
        for case in ElementTree.parse(file).iter("testcase"):
            path = case.attrib["classname"].replace(".", "/") + ".py"
            found[f"{path}::{case.attrib['name']}"] = float(case.attrib["time"])
    return found


class Runs:
    """The tests that run each line."""

    def __init__(self) -> None:
        from coverage import CoverageData

        self.data = CoverageData(str(STORE / "coverage"))
        self.data.read()
        self.times = times()
        self.lines: dict[str, dict[int, list[str]]] = {}

    def of(self, name: str, line: int) -> tuple[list[str], float]:
        """Return the tests of a line, its module's own first, quickest first, and their seconds.

        Where only the import runs the line, those of the whole module.
        """
        if name not in self.lines:
            self.lines[name] = self.data.contexts_by_lineno(str(ROOT / name))
        contexts = set(self.lines[name].get(line, []))
        if not contexts - {""}:
            contexts = {context for each in self.lines[name].values() for context in each}
        tests = {context.split("|")[0] for context in contexts} & self.times.keys()
        tests = {test for test in tests if not any(part in test for part in APART)}
        own, found, seconds = f"/test_{Path(name).stem}.py::", [], 0.0
        for test in sorted(tests, key=lambda test: (own not in test, self.times[test])):
            if not found or seconds + self.times[test] < LIMIT:
                found.append(test)
                seconds += self.times[test]
        return found, seconds


def child(name: str, source: str, tests: list[str]) -> int:
    """Import the changed module in place of the one on disk, and run tests until one fails; for the fork."""
    import pytest

    path = str(ROOT / name)
    loader = importlib.machinery.SourceFileLoader
    get_code = loader.get_code

    def changed(self: Any, fullname: str) -> Any:
        if self.get_filename(fullname) == path:
            return compile(source, path, "exec", dont_inherit=True)
        return get_code(self, fullname)

    loader.get_code = changed  # type: ignore[method-assign]
    quiet = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov", "--no-header"]
    return int(pytest.main([*quiet, *tests]))


def fork(name: str, source: str, tests: list[str]) -> int:
    """Start the process of a mutant; it ends with another status than 0 if a test fails."""
    pid = os.fork()
    if pid == 0:
        code = 70
        with contextlib.suppress(BaseException):
            os.setsid()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            code = child(name, source, tests)
        os._exit(code)
    return pid


def verdicts(chosen: list[Any], runs: Runs, jobs: int) -> Iterator[tuple[Any, str]]:
    """Yield mutants as they end: killed, survived, or of a line that no test runs."""
    waiting, running = list(chosen), {}
    while waiting or running:
        if waiting and len(running) < jobs:
            name, line, source = mutant = waiting.pop()
            tests, seconds = runs.of(name, line)
            if not tests:
                yield mutant, "no test"
                continue
            running[fork(name, source, tests)] = mutant, time.monotonic() + 60 + 3 * seconds
        for pid, (mutant, end) in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done and time.monotonic() > end:  # a loop without an end
                os.killpg(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, 0)
            if done:
                del running[pid]
                yield mutant, "survived" if status == 0 else "killed"
        time.sleep(0.05)


def difference(name: str, source: str) -> str:
    """Return the changed lines of a mutant."""
    lines = difflib.unified_diff(
        (ROOT / name).read_text().splitlines(), source.splitlines(), n=0, lineterm=""
    )
    return "\n".join(line for line in list(lines)[3:])


def check_unchanged(names: set[str], runs: Runs) -> None:
    """Run the tests of modules as they are, in a fork.

    Raises:
        RuntimeError: one fails.
    """
    whole = [(name, 1, (ROOT / name).read_text()) for name in sorted(names)]
    for (name, *_), verdict in verdicts(whole, runs, 1):
        if verdict == "killed":
            raise RuntimeError(f"the tests of {name} fail on the code as it is, in a fork")


def measure(folder: str, sample: int, seed: int, jobs: int) -> dict[str, Any]:
    """Draw mutants of a folder, and count those that are killed and those that survive."""
    os.environ["OMP_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import arviz  # noqa: F401
    import gpytorch  # noqa: F401
    import pandas  # noqa: F401
    import pydantic  # noqa: F401
    import pyro  # noqa: F401
    import xarray  # noqa: F401

    runs = Runs()
    if folder == "deliberate faults":
        every = [mutant for _, mutant in faults()]
        chosen = every
    else:
        every = [(name, *mutant) for name in files(folder) for mutant in mutants(name)]
        drawn = random.Random(seed).sample(every, min(sample, len(every)))
        chosen = [(name, line, source()) for name, line, source in drawn]
    check_unchanged({name for name, *_ in chosen}, runs)
    found = [
        {"file": name, "line": line, "verdict": verdict, "change": difference(name, source)}
        for (name, line, source), verdict in verdicts(chosen, runs, jobs)
    ]
    return {"every": len(every), "found": found}


def cells(_: Any, found: list[dict[str, Any]]) -> list[Any]:
    """Return the counts of a folder."""
    count = Counter(mutant["verdict"] for mutant in found[0]["found"])
    killed = f"{count['killed']} ({count['killed'] / count.total():.0%})"
    return [found[0]["every"], count.total(), killed, count["survived"], count["no test"]]


def main() -> None:
    given = runner.arguments(__doc__, jobs=2, sample=100, seed=0, measure=False)
    if given.measure:
        measure_coverage(given.rows)
        return
    columns = "folder | mutants | drawn | killed | survived | in a line that no test runs"
    how = (given.sample, given.seed, given.jobs)
    rows = {folder: [(folder, *how)] for folder in ("deliberate faults", *FOLDERS)}
    given.jobs = 1  # a row forks processes of its own
    runner.table(columns, rows, measure, given, cells)


if __name__ == "__main__":
    main()
