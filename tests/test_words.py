"""Tests of the vocabulary: forbidden words, and docstrings that open with a subordinate clause.

``python tests/test_words.py`` prints the number of findings in each folder, ``python tests/test_words.py FOLDER ...``
each finding in some of them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = {
    r"law|laws": "distribution (of a variable), invariant (of the design)",
    r"weigh|weighs|weighed|weighing": "importance weights, weighted",
    r"settle|settles|settled|settling|moves no more|at rest": "converge, converged, convergence",
    r"still": "converged, unchanged; or leave it out",
    r"told|tells": "given, passed; names, shows, distinguishes",
    r"begun": "started; start_... as the name of a function",
    r"knows|knew": "has, is given, can compute",
    r"stands? for|stood for": "represents, replaces, is",
    r"can tell": "shows, distinguishes",
    r"no more than": "at most",
}
"""Regular expression to the words to write instead. Identifiers are split into words before they are searched."""
EXCEPTIONS = (
    "law of large numbers",  # the theorem's name
    "law school",  # a data set
)
OPENINGS = ("What", "Whether", "How", "Of", "Where", "Which", "By", "Those", "That")
"""First words of docstrings that are no sentences and no noun phrases."""
MOST_OPENINGS = 0.03

PAGES = ("README.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
FOLDERS = ("bayesfed", "models", "guides", "docs", *PAGES)
"""Where the rules are enforced."""
HISTORY = {
    r"of before|earlier state|at hand|point \d+": "the present state; the project's own history belongs in commits",
    r"anew|seldom|fares?": "again, rarely, does",
    r"law \d": "invariant",
}
"""Words that are not used in pages, beside :data:`WORDS`."""

_FORBIDDEN = {re.compile(rf"\b({w})\b", re.IGNORECASE): instead for w, instead in WORDS.items()} | {
    re.compile(r"(?<![\w.,)\]}:%/*\"'\\])\.\d+"): "a zero before the decimal point"
}
_HISTORY = {re.compile(rf"\b({w})\b", re.IGNORECASE): instead for w, instead in HISTORY.items()}
_INSIDE = re.compile(r"_|(?<=[a-z])(?=[A-Z])")


def files(folder: str) -> list[Path]:
    """The Python and Markdown files of a folder, or the file of that name; of ``docs`` the pages at its top."""
    place = ROOT / folder
    if place.is_file():
        return [place]
    return sorted(place.glob("*.md") if folder == "docs" else place.rglob("*.py"))


def forbidden_words(text: str, *, page: bool = False) -> Iterator[tuple[int, str, str]]:
    """The number of a line, a forbidden word in it and what to write instead."""
    patterns = _FORBIDDEN | _HISTORY if page else _FORBIDDEN
    for number, line in enumerate(text.splitlines(), 1):
        words = _INSIDE.sub(" ", line)
        for exception in EXCEPTIONS:
            words = words.replace(exception, "")
        for pattern, instead in patterns.items():
            for found in pattern.finditer(words):
                yield number, found[0], instead


def openings(text: str) -> Iterator[tuple[int, str]]:
    """The line and the first line of each docstring of a Python file."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring.splitlines()[0]


def is_clause(line: str) -> bool:
    """Return whether the first line of a docstring opens with one of :data:`OPENINGS`."""
    return re.match(r"\w*", line)[0] in OPENINGS  # type: ignore[index]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("def _weighed(x): ...", ["weighed"]),
        ("class AtRest:", ["At Rest"]),
        ("# The law of large numbers.", []),
        ("outlaw = lawn", []),
        ("from .5 to 0.5: {x:.3f} x[..., 1] a.py", [".5"]),
    ],
)
def test_that_identifiers_are_split_and_exceptions_are_left_out(line, found):
    assert [word for _, word, _ in forbidden_words(line)] == found


def test_that_pages_have_no_history():
    assert not list(forbidden_words("the row of before"))
    assert [word for _, word, _ in forbidden_words("the row of before", page=True)] == ["of before"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_that_no_forbidden_word_is_used(folder):
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {word!r}; write {instead}"
        for path in files(folder)
        for line, word, instead in forbidden_words(
            path.read_text(encoding="utf-8"), page=path.suffix == ".md"
        )
    ]
    assert not wrong, "\n".join(wrong)


def test_that_docstrings_open_with_a_sentence_or_a_noun_phrase():
    paths = [path for folder in FOLDERS for path in files(folder) if path.suffix == ".py"]
    lines = [
        (path.relative_to(ROOT), number, line)
        for path in paths
        for number, line in openings(path.read_text(encoding="utf-8"))
    ]
    clauses = [f"{path}:{number}: {line}" for path, number, line in lines if is_clause(line)]
    assert len(clauses) <= MOST_OPENINGS * len(lines), "\n".join(clauses)


def _main(chosen: list[str]) -> None:
    """Print each finding in the chosen folders, or without any the number of findings in every folder."""
    inner = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "bayesfed").iterdir())
    for folder in chosen or [*inner, *FOLDERS[1:]]:
        texts = {path: path.read_text(encoding="utf-8") for path in files(folder)}
        words = [(path, *one) for path, text in texts.items() for one in forbidden_words(text)]
        code = [(path, text) for path, text in texts.items() if path.suffix == ".py"]
        lines = [(path, *one) for path, text in code for one in openings(text)]
        clauses = [one for one in lines if is_clause(one[2])]
        if chosen:
            for path, line, *found in [*words, *clauses]:
                print(f"{path.relative_to(ROOT)}:{line}: {found}")
        elif lines or words:
            print(f"{folder:22}{len(words):5} words{len(clauses):5} of {len(lines)} docstrings")


if __name__ == "__main__":
    _main(sys.argv[1:])
