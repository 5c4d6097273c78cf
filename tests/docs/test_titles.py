"""Each page has a title that no other page has, so that search results and navigation show which page is meant."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def sections_of(page: Path) -> list[str]:
    """The headings of the second and third level of a page, those of the third after their section's."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found, section = [], ""
    for marks, heading in re.findall(r"^(###?) (.+)$", text, re.M):
        section = section if len(marks) == 3 else heading
        found.append(f"{section}: {heading}" if len(marks) == 3 else heading)
    return found


def title_of(page: Path) -> str:
    """The first heading of a page, or of the file that it includes."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    if included := re.search(r"^```\{include\} (\S+)", text, re.M):
        return title_of(page.parent / included[1])
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)  # comments of code are no headings
    headings = re.findall(r"^# (.+)$", text, re.M)
    assert len(headings) == 1, (page.name, headings)
    return headings[0].strip()


def same(titles: list[str]) -> list[str]:
    """The titles that occur twice, whatever their case."""
    return [t for t, n in Counter(title.lower() for title in titles).items() if n > 1]


def test_that_no_two_pages_have_the_same_title():
    pages = [*DOCS.glob("*.md"), *DOCS.glob("*.ipynb")]
    assert len(pages) > 40
    assert not same([title_of(page) for page in pages])


def test_that_a_title_that_is_used_twice_is_found(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("---\nx: y\n---\n# The idea\n```python\n# a comment\n```\n", encoding="utf-8")
    assert same([title_of(page), "the Idea", "Other"]) == ["the idea"]


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_that_no_section_of_a_page_occurs_twice(page):
    assert not same(sections_of(page))


def test_that_a_section_that_occurs_twice_is_found(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("# A\n## B\n### C\n## D\n### C\n## B\n### C\n", encoding="utf-8")
    assert same(sections_of(page)) == ["b", "b: c"]
