"""Every public name is in the reference, and every method has a section and a paper."""

import inspect
import re
from calendar import month_name
from pathlib import Path

import bayesfed as bf
from bayesfed.algorithms import METHODS

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "".join(
    (ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("api.md", "internals.md")
)
WHOLE = re.findall(r"automodule:: (\S+)\n(?!   :no-members:)", REFERENCE)
"""Modules all of whose public names are in the reference."""


def is_documented(name: str, value: object) -> bool:
    """Return whether a name has an entry of its own, or its module an entry for all of its names."""
    if inspect.ismodule(value):
        return value.__name__ in REFERENCE
    if re.search(rf"auto\w+:: (\S+\.)?{re.escape(name)}\n", REFERENCE):
        return True
    return getattr(value, "__module__", None) in WHOLE


def test_that_public_names_are_documented():
    missing = [
        name
        for name in bf.__all__
        if name not in METHODS and not is_documented(name, getattr(bf, name))
    ]
    for module in (bf.models, bf.guides, bf.rules, bf.steps):
        missing += [
            f"{module.__name__}.{name}"
            for name in module.__all__
            if not is_documented(name, getattr(module, name))
        ]
    assert not missing


def test_that_a_name_without_an_entry_is_found():
    assert not is_documented("Nowhere", test_that_public_names_are_documented)


def test_that_every_method_has_a_section():
    sections = "".join(
        re.findall(r"^### .*$", (ROOT / "docs/algorithms.md").read_text(encoding="utf-8"), re.M)
    )
    assert not [name for name in METHODS if f"`{name}`" not in sections]


def test_that_every_method_has_a_paper_with_a_doi():
    text = (ROOT / "docs/references.md").read_text(encoding="utf-8")
    own = {"Local", "Pooled", "MAML", "MTL"}  # of no paper, or other names
    rows = "".join(row for row in text.split("\n") if "](https://doi.org/10." in row)
    assert not [name for name in METHODS if name not in own and f"`{name}`" not in rows]


def missing_papers(text: str, references: str) -> list[str]:
    """The citations of a page, as "Hesterberg 1995" or "Li et al. (2020)", that the references lack."""
    names = r"((?:[A-Z][\wéÁ'-]+(?:, | & ))*[A-Z][\wéÁ'-]+)(?: et al\.)? \(?((?:19|20)\d\d)\b"
    lines = references.split("\n")
    return [
        f"{authors} {year}"
        for authors, year in re.findall(names, text)
        if authors not in month_name
        and not any(
            f"({year}" in line and all(name in line for name in re.split(", | & ", authors))
            for line in lines
        )
    ]


def test_that_every_paper_that_a_page_names_is_in_the_references():
    references = (ROOT / "docs/references.md").read_text(encoding="utf-8")
    pages = list((ROOT / "docs").glob("*.md"))
    assert len(pages) > 30
    missing = {p.name: missing_papers(p.read_text(encoding="utf-8"), references) for p in pages}
    assert not {name: found for name, found in missing.items() if found}


def test_that_a_paper_without_a_reference_is_found():
    assert missing_papers("As in Nobody & Li (2019).", "- Li (2019). Title.") == [
        "Nobody & Li 2019"
    ]


def test_that_public_docstrings_are_there():
    values = [getattr(bf, name) for name in bf.__all__]
    assert not [value for value in values if callable(value) and not inspect.getdoc(value)]


def test_that_the_version_is_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", citation, re.M)[1] == bf.__version__
    assert re.findall(r"^## \[(\d.*?)\]", changes, re.M)[0] == bf.__version__


def test_that_every_extra_is_in_the_list():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    assert not [extra for extra in project["optional-dependencies"] if f"`{extra}`" not in page]
