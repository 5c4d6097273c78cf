"""The runner of all experiments: raw results that survive a kill, and tables under one header."""

import sys

import pytest

from tests.scripts import ROOT, load

runner = load("experiments/runner.py")


DOC = """Does it add up? Makes made.md.

    python experiments/made.py

Cells are sums of ``seed`` and more.
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script with two rows of two seeds; returns the seeds that it has measured and its table."""
    monkeypatch.setattr(runner, "RAW", tmp_path / "raw")
    monkeypatch.setattr(runner, "COMMITS", set())
    monkeypatch.setattr(sys.modules["__main__"], "__doc__", DOC)
    path = tmp_path / "made.md"

    def script(*words, factor=1):
        monkeypatch.setattr(sys, "argv", [str(ROOT / "experiments" / "made.py"), *words])
        measured = []

        def measure(name, seed):
            measured.append((name, seed))
            return factor * (seed + len(name))

        given = runner.arguments("A question?", scale=1.0)
        rows = {name: [(name, seed) for seed in range(2)] for name in ("one", "three")}
        runner.table("name | sum", rows, measure, given, lambda _, found: [sum(found)], path=path)
        return measured, path.read_text().splitlines() if path.exists() else []

    return script


def test_a_table_says_how_it_was_made(run):
    _, lines = run()
    assert lines[0].startswith("Made by `python experiments/made.py`, 20")
    assert "bayesfed" in lines[0] and "torch" in lines[0] and "commit" in lines[0]
    assert lines[1:6] == ["", "**Does it add up?**", "", "Cells are sums of `seed` and more.", ""]
    assert lines[6:] == ["| name | sum |", "| --- | --- |", "| one | 7 |", "| three | 11 |"]


def test_rows_replace_their_predecessors(run):
    run()
    measured, lines = run("th", factor=2)
    assert measured == [("three", 0), ("three", 1)]
    assert lines[0].endswith(" 1 of 2 rows are older.")
    assert lines[8:] == ["| one | 7 |", "| three | 22 |"]


def test_a_killed_run_goes_on(run):
    run("one")
    (store,) = runner.RAW.glob("*.jsonl")
    first, second = store.read_text().splitlines()
    store.write_text(f"{first}\n{second[:20]}")  # cut off by the kill
    measured, lines = run("--resume")
    assert measured == [("one", 1), ("three", 0), ("three", 1)]
    assert lines[8:] == ["| one | 7 |", "| three | 11 |"]


def test_stored_results_keep_the_commit_that_made_them(run, monkeypatch):
    monkeypatch.setattr(runner, "_commit", lambda: "1234567")
    run("one")
    monkeypatch.setattr(runner, "_commit", lambda: "abcdef0")
    runner.COMMITS.clear()
    measured, lines = run("--resume")
    assert measured == [("three", 0), ("three", 1)]
    assert ", commits 1234567 and abcdef0, bayesfed" in lines[0]
    runner.COMMITS.clear()
    _, lines = run()
    assert ", commit abcdef0, bayesfed" in lines[0]


def test_other_settings_leave_the_table(run, tmp_path):
    _, before = run()
    assert run("--scale", "2.0", factor=2)[1] == before
    out = tmp_path / "other.md"
    run("--scale", "2.0", "--out", str(out), factor=2)
    made = out.read_text()
    assert "| one | 14 |" in made
    assert str(tmp_path) not in made
