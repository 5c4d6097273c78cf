"""Links between pages lead somewhere, and every page is in the table of contents."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "experiments").rglob("*.md"),
    ]
)


def links(text: str) -> Iterator[str]:
    """The targets of a page's links within the repository."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = path.read_text(encoding="utf-8")
    if included := re.fullmatch(r"```\{include\} (\S+)\n```\n", text):
        return anchors(path.parent / included[1])
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead(path: Path, text: str) -> list[str]:
    found = []
    for target in links(text):
        place, _, anchor = target.partition("#")
        other = (path.parent / place).resolve() if place else path
        known = other.is_file() and (not anchor or anchor in anchors(other))
        if not (known or (other.is_dir() and not anchor)):
            found.append(target)
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_that_no_link_is_dead(path):
    assert not dead(path, path.read_text(encoding="utf-8"))


def test_that_dead_links_are_found():
    page = ROOT / "docs/idea.md"
    text = "[a](idea.md) [b](gone.md) [c](#symbols) [d](#gone) [e](https://pyro.ai) `[f](no.md)`"
    assert dead(page, text) == ["gone.md", "#gone"]


def test_that_every_page_is_in_the_table_of_contents():
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    pages |= {path.stem for path in (ROOT / "docs").glob("*.ipynb")}
    listed, new = set(), {"index"}
    while new:
        listed |= new
        texts = [(ROOT / "docs" / f"{page}.md") for page in new]
        text = "".join(path.read_text(encoding="utf-8") for path in texts if path.is_file())
        blocks = re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
        new = {line for block in blocks for line in block.split() if line[0] != ":"} - listed
    assert pages == listed & pages, sorted(pages - listed)
