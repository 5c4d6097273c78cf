"""Every example in a docstring runs.

pytest's own ``--doctest-modules`` would import ``models/x.py`` a second time, as ``models.x``: the
installed name is ``bayesfed.models.x``, and two copies of a module have two of each class. So the
examples are found by installed name. The flags are those of ``doctest_optionflags`` in pyproject.toml, so that ``pytest
--doctest-modules`` on a file of the package has the same examples pass.
"""

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"bayesfed": "bayesfed", "models": "bayesfed.models", "guides": "bayesfed.guides"}


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
def test_examples_in_docstrings(name: str, pytestconfig: pytest.Config) -> None:
    if name.endswith((".flower", ".flower_server")):
        pytest.importorskip("flwr")  # make test-all installs it
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().is_relative_to(ROOT), "another copy is installed"
    report: list[str] = []
    flags = [
        doctest.OPTIONFLAGS_BY_NAME[flag] for flag in pytestconfig.getini("doctest_optionflags")
    ]
    runner = doctest.DocTestRunner(optionflags=sum(flags))
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(test, out=report.append)
    if runner.failures:
        pytest.fail("".join(report), pytrace=False)
