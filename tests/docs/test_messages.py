"""Each message that a page quotes is one of the package."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("errors.md", "checking.md")


def texts_of(path: Path) -> list[str]:
    """The strings of a module; a formatted one with … for each value."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@pytest.fixture(scope="module")
def source() -> str:
    paths = (path for f in ("bayesfed", "models", "guides") for path in (ROOT / f).rglob("*.py"))
    return "\n".join(text for path in paths for text in texts_of(path))


def quoted(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [one.strip() for one in re.findall(r"```text\n(.*?)```", text, re.DOTALL)]


def fragments(message: str) -> list[str]:
    """What stands between the places of names and numbers, sentence by sentence, as a message may be put together."""
    parts = re.split(r"…|(?<=[.:;]) ", message)
    return [part.strip(" ,.:;()") for part in parts if len(part.split()) > 2]


@pytest.mark.parametrize("page", PAGES)
def test_that_quoted_messages_are_in_the_source(page, source):
    messages = quoted(page)
    assert len(messages) > 5
    wrong = [(m, part) for m in messages for part in fragments(m) if part not in source]
    assert not wrong


def test_that_another_text_is_found(source):
    assert any(part not in source for part in fragments("the ELBO rose from … to …: use it"))
