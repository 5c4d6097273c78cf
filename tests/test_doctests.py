"""Every example in a docstring runs.

pytest's own ``--doctest-modules`` would import ``models/x.py`` a second time, as ``models.x``: the
installed name is ``bayesfed.models.x``, and two copies of a module have two of each class. So the
examples are found by installed name.
"""

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"bayesfed": "bayesfed", "models": "bayesfed.models", "guides": "bayesfed.guides"}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


def module_names() -> Iterator[str]:
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            elif parts[-1] == "__main__":
                continue
            yield ".".join((package, *parts))


@pytest.mark.parametrize("name", list(module_names()))
def test_examples_in_docstrings(name: str) -> None:
    if name.endswith((".flower", ".flower_server")):
        pytest.importorskip("flwr")  # make test-all installs it
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().is_relative_to(ROOT), "another copy is installed"
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(test, out=report.append)
    if runner.failures:
        pytest.fail("".join(report), pytrace=False)
