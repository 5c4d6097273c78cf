"""HTML as a tree of elements: texts and attributes are escaped as it is written, so that no name becomes markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from bayesfed.report.style import STYLE

Content = Element | str | None | Sequence["Content"]
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The browser loads nothing and runs no script, whatever the file contains."""


def tag(kind: str, /, *children: Content, **attributes: str) -> Element:
    """Return an element with children and attributes; underscores in the names of attributes become hyphens.

    Example:
        >>> from xml.etree.ElementTree import tostring
        >>> from bayesfed.report.html import tag
        >>> tostring(tag("p", "a < b, ", tag("b", "<script>"), class_="note"), encoding="unicode")
        '<p class="note">a &lt; b, <b>&lt;script&gt;</b></p>'
    """
    found = Element(kind, {n.rstrip("_").replace("_", "-"): v for n, v in attributes.items()})
    for child in children:
        _append(found, child)
    return found


def soft(*children: Content) -> Element:
    """Return a paragraph of explanation."""
    return tag("p", *children, class_="soft")


def _append(parent: Element, child: Content) -> None:
    if child is None:
        return
    if isinstance(child, Element):
        parent.append(child)
    elif not isinstance(child, str):
        for one in child:
            _append(parent, one)
    elif len(parent):
        parent[-1].tail = (parent[-1].tail or "") + child
    else:
        parent.text = (parent.text or "") + child


def table(head: Iterable[str], rows: Iterable[Sequence[Content]], *, text: int = 1) -> Element:
    """Return a table that scrolls if it is too wide; the first cell of a row is its heading.

    Args:
        head: the names of the columns.
        rows: the cells.
        text: the number of columns in front that are text, the others are numbers.
    """

    def cell(kind: str, number: int, content: Content) -> Element:
        found = tag(kind, content)
        if number >= text:
            found.set("class", "number")
        return found

    found = Element("table")
    line = SubElement(SubElement(found, "thead"), "tr")
    line.extend(cell("th", number, name) for number, name in enumerate(head))
    body = SubElement(found, "tbody")
    for row in rows:
        line = SubElement(body, "tr")
        line.extend(cell("td" if number else "th", number, c) for number, c in enumerate(row))
    return tag("div", found, class_="scroll")


def document(title: str, *body: Content) -> str:
    """Return a whole page, which needs nothing but itself."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", STYLE),
    )
    page = tag("html", head, tag("body", tag("main", *body)), lang="en")
    return "<!DOCTYPE html>\n" + tostring(page, encoding="unicode", method="html") + "\n"
