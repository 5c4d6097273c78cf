"""First lines of docstrings before and after a revision, drawn at random: makes docstrings.md.

    python experiments/docstrings.py 52dbb86 > experiments/docstrings.md

A function of the old revision is compared with that function of the present one whose code is most like it.
"""

from __future__ import annotations

import ast
import difflib
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("bayesfed/", "models/", "guides/")
COUNT = 20


class Function(NamedTuple):
    """A function: where it is, the first line of its docstring, and its code."""

    place: str
    line: str
    code: list[str]


def functions(file: str, source: str) -> Iterator[Function]:
    """Yield the functions of a file that have a docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            code = [ast.unparse(line) for line in node.body[1:]]
            yield Function(f"{file} `{node.name}`", text.split("\n")[0], code)


def of_revision(revision: str) -> list[Function]:
    """Return all functions of a revision."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    names = git("ls-tree", "-r", "--name-only", revision).splitlines()
    files = [n for n in names if n.startswith(FOLDERS) and n.endswith(".py")]
    return [one for file in files for one in functions(file, git("show", f"{revision}:{file}"))]


def main() -> None:
    """Print the table."""
    old, new = of_revision(sys.argv[1]), of_revision("HEAD")
    print("| before | first line | after | first line |\n| --- | --- | --- | --- |")
    for one in random.Random(0).sample([f for f in old if len(f.code) > 1], COUNT):
        like = [(difflib.SequenceMatcher(None, one.code, f.code).ratio(), f) for f in new]
        ratio, best = max(like, key=lambda pair: pair[0])
        cells = (one.place, one.line, *((best.place, best.line) if ratio > 0.3 else ("gone", "")))
        print(f"| {' | '.join(cell.replace('|', '｜') for cell in cells)} |")


if __name__ == "__main__":
    main()
