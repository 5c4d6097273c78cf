"""Which tables are older than the code that they depend on?

    python experiments/stale.py

Of every table: the oldest commit that its lines "Made by" name, how many files of the package (bayesfed, models,
guides), of its script and of what that imports of the repository have other code since then, and how many of its rows
are older still. Comments and docstrings are no code. A table is

    current         none has
    older           some have
    uncommitted     made from code with changes that were not committed (-dirty)
    without header  it does not say which commit made it
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("bayesfed", "models", "guides")


def tables(root: Path) -> list[Path]:
    """Return the Markdown files under ``experiments`` that are results, in order."""
    files = (root / "experiments").rglob("*.md")
    return sorted(path for path in files if path.name != "README.md")


def commits(text: str) -> list[str]:
    """Return the commits that made a table, as its lines "Made by" name them."""
    heads = " ".join(re.findall(r"^Made by .*$", text, re.MULTILINE))
    return re.findall(r"(?:commits?|and) ([0-9a-f]{7,40}(?:-dirty)?)\b", heads)


def scripts(root: Path, text: str) -> set[Path]:
    """Return the script that a table names, and what that imports of the repository outside the package."""
    named = re.search(r"Made by `python (experiments/\S+\.py)", text)
    waiting, found = [root / named[1]] if named else [], set[Path]()
    while waiting:
        path = waiting.pop()
        if path not in found and path.exists():
            found.add(path)
            waiting += imported(root, path)
    return found


@cache
def imported(root: Path, path: Path) -> list[Path]:
    """Return the files of experiments and tests that a script may import, beside it or from ``experiments``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({node.module, *(f"{node.module}.{each.name}" for each in node.names)})
    places = [path.parent, root / "experiments", root]
    files = [place / name.replace(".", "/") for place in places for name in names]
    return [
        file
        for stem in files
        for file in (stem.with_suffix(".py"), stem / "__init__.py")
        if file.is_relative_to(root / "experiments") or file.is_relative_to(root / "tests")
    ]


def changes(root: Path, commit: str, text: str) -> int | None:
    """Return how many files of the code of a table have changed since a commit, or None if git has no such commit."""
    used = [path.relative_to(root).as_posix() for path in sorted(scripts(root, text))]
    done = git(
        root, "diff", "--raw", "--no-renames", "--no-abbrev", commit, "HEAD", "--", *CODE, *used
    )
    if done.returncode:
        return None
    files = [line.split("\t") for line in done.stdout.splitlines()]
    blobs = [found.split()[2:4] for found, name in files if name.endswith((".py", ".pyi"))]
    return sum(code(root, old) != code(root, new) for old, new in blobs)


@cache
def code(root: Path, blob: str) -> str:
    """Return a stored file's syntax tree without its docstrings; nothing where there was no file."""
    done = git(root, "cat-file", "blob", blob)
    tree = ast.parse(done.stdout if not done.returncode else "")
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [each for each in body if not is_text(each)]
    return ast.dump(tree)


def is_text(node: ast.AST) -> bool:
    """Return whether a statement is only a string, as docstrings are."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run git."""
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)


def states(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield path, state and explanation of every table."""
    for path in tables(root):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        named = commits(text)
        since = {each: changes(root, each.removesuffix("-dirty"), text) for each in named}
        counted = {each: count for each, count in since.items() if count is not None}
        if not counted:
            yield name, "without header", f"names {', '.join(named)}, not here" if named else ""
            continue
        oldest = max(counted, key=lambda each: counted[each])
        said = f"{oldest}, files changed since: {counted[oldest]}"
        said += "".join(f", {rows}" for rows in re.findall(r"\d+ of \d+ rows are older", text))
        dirty = any(each.endswith("-dirty") for each in named)
        state = "older" if counted[oldest] else "uncommitted" if dirty else "current"
        yield name, state, said


def main() -> None:
    found = list(states(ROOT))
    for state in ("current", "uncommitted", "older", "without header"):
        chosen = [(name, said) for name, other, said in found if other == state]
        print(f"{state}: {len(chosen)} of {len(found)} tables")
        for name, said in chosen:
            print(f"    {name}{': ' * bool(said)}{said}")


if __name__ == "__main__":
    main()
