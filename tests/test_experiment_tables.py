"""Every table of the experiments is in their index, and tables older than their code are found."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.scripts import load

ROOT = Path(__file__).parents[1]


stale, runner = load("experiments/stale.py"), load("experiments/runner.py")


def test_that_every_table_is_in_the_index():
    index = (ROOT / "experiments/README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\]\(([\w/]+\.md)\)|`([\w/]+\.md)`", index))
    named = {link or code for link, code in named}
    tables = {p.relative_to(ROOT / "experiments").as_posix() for p in stale.tables(ROOT)}
    assert len(tables) > 50 and "mnist/few_images.md" in tables
    assert not sorted(tables - named)


@pytest.mark.parametrize("path", stale.tables(ROOT), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_that_every_table_says_what_made_it_and_how_to_read_it(path):
    first, blank, title, *rest = path.read_text(encoding="utf-8").splitlines()
    assert re.match(r"Made by (`python experiments/\S+\.py.*`|hand)", first)
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", first) and "bayesfed 0." in first
    assert stale.commits(first)
    assert not blank and re.match(r"\*\*[^*]+[.?]\*\*", title)
    before = [line for line in rest[: next((i for i, x in enumerate(rest) if x[:1] == "|"), -1)]]
    assert len(" ".join([title, *before]).split()) > 10


@pytest.mark.parametrize("path", stale.tables(ROOT), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_that_a_table_is_explained_in_the_words_of_its_script(path):
    text = path.read_text(encoding="utf-8")
    if made := re.search(r"^Made by `python (experiments/\S+\.py)", text):
        code = (ROOT / made[1]).read_text(encoding="utf-8")
        words = runner.legend(ast.get_docstring(ast.parse(code), clean=False))
        assert "\n".join(words).rstrip("\n") in text


def test_that_every_row_of_the_index_has_a_script_a_question_and_a_time():
    index = (ROOT / "experiments/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+\.py)[^`]*` \| (.*) \| (.*) \| (.*) \|$", index, re.MULTILINE)
    assert len(rows) == len([row for row in index.split("\n") if row.startswith("| `")]) > 40
    assert not [row for row in rows if not (ROOT / "experiments" / row[0]).exists()]
    assert not [row for row in rows if not all(cell.strip() for cell in row)]


@pytest.fixture
def project(tmp_path):
    """A repository with code and a table; returns its folder, and a function that commits a file."""

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def commit(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        git("add", "-A")
        git("commit", "-q", "-m", name)
        return git("rev-parse", "--short", "HEAD")

    git("init", "-q")
    return tmp_path, commit


def state(folder):
    ((_, found, said),) = stale.states(folder)
    return found, said


def test_a_table_is_as_old_as_its_code(project):
    folder, commit = project
    made = commit("bayesfed/fit.py", "1")
    header = f"Made by `python experiments/a.py`, 2026-01-01, commit {made}, bayesfed 0.1.0."
    commit("experiments/a.md", header)
    commit("docs/a.md", "words")
    assert state(folder) == ("current", f"{made}, files changed since: 0")
    commit("bayesfed/fit.py", '"""Words."""\n1  # more words')
    assert state(folder) == ("current", f"{made}, files changed since: 0")
    commit("models/b.py", "1")
    assert state(folder) == ("older", f"{made}, files changed since: 1")
    commit("experiments/a.py", "1")
    assert state(folder) == ("older", f"{made}, files changed since: 2")


def test_a_table_depends_on_what_its_script_imports(project):
    folder, commit = project
    commit("bayesfed/fit.py", "1")
    commit("tests/data.py", "x = 1")
    commit("experiments/shared.py", "from tests.data import x")
    made = commit("experiments/few/a.py", "def run():\n    import shared")
    header = f"Made by `python experiments/few/a.py`, 2026-01-01, commit {made}, bayesfed 0.1.0."
    commit("experiments/few/a.md", header)
    commit("experiments/few/b.py", "1")
    assert state(folder) == ("current", f"{made}, files changed since: 0")
    commit("experiments/shared.py", "from tests.data import x as y")
    commit("tests/data.py", "x = 2")
    assert state(folder) == ("older", f"{made}, files changed since: 2")


def test_the_oldest_commit_counts(project):
    folder, commit = project
    first = commit("bayesfed/fit.py", "1")
    second = commit("bayesfed/fit.py", "2")
    text = f"Made by `a`, commits {second} and {first}. 3 of 5 rows are older."
    commit("experiments/a.md", text)
    assert state(folder) == ("older", f"{first}, files changed since: 1, 3 of 5 rows are older")


def test_code_that_was_not_committed(project):
    folder, commit = project
    made = commit("bayesfed/fit.py", "1")
    commit("experiments/a.md", f"Made by `a`, commit {made}-dirty, bayesfed 0.1.0.")
    assert state(folder) == ("uncommitted", f"{made}-dirty, files changed since: 0")


@pytest.mark.parametrize("text", ["| a |\n| --- |\n", "Made by `a`, commit 1234567.\n"])
def test_a_table_that_names_no_commit_of_the_repository(project, text):
    folder, commit = project
    commit("experiments/a.md", text)
    assert state(folder)[0] == "without header"
