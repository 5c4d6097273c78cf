"""``bayesfed doctor`` has a row for everything that may be missing."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from bayesfed.cli import app as cli
from bayesfed.cli import doctor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def broken(monkeypatch):
    """A torch whose compiler finds no C++ compiler."""

    def fail(function):
        raise RuntimeError("No working C++ compiler found\nmore lines")

    monkeypatch.setattr(torch, "compile", fail)


def test_rows(broken, capsys):
    rows = dict(doctor.findings())
    assert rows["torch"] == torch.__version__
    said = "does not work, so that no step is compiled: RuntimeError: No working C++ compiler found"
    assert rows["compiler"] == said
    assert rows["GPU"].startswith("none: ") or "GB free" in rows["GPU"]
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert not [name for name in (*rows, "pyro-ppl", "memory", "cores") if name not in shown]


def test_that_every_extra_has_a_row_with_its_distributions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    expected = {
        name: tuple(re.match(r"[\w-]+", each)[0] for each in extras[name])
        for name in extras
        if name not in ("docs", "test", "dev")
    }
    assert {name: distributions for name, (distributions, _) in doctor.EXTRAS.items()} == expected


def test_what_is_missing_is_named_with_its_command(broken, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "scipy" else "1.0")
    rows = dict(doctor.findings())
    said = "missing scipy, for readers of image data sets: pip install 'bayesfed[images]'"
    assert rows["images"] == said
    assert rows["arrow"] == "pyarrow 1.0: Parquet and Arrow files"


def test_memory(tmp_path):
    file = tmp_path / "meminfo"
    assert doctor.memory(file) == f"unknown: there is no {file}"
    file.write_text("MemTotal: 8000000 kB\nMemFree: 1 kB\nMemAvailable: 6500000 kB\nHugePages: 0\n")
    assert doctor.memory(file) == "6.5 of 8.0 GB free"


@pytest.mark.slow
def test_the_compiler_of_this_machine():
    assert doctor.compiler().startswith("works, ")
