"""Tables of the names and settings for experiment files."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bayesfed.algorithms import FAMILY
from bayesfed.algorithms.registry import ALGORITHMS, GUIDES
from bayesfed.cli.catalogue import DATASETS, MODELS


def show(what: str | None) -> None:
    """Print tables of the names of one kind, or of all."""
    console = Console(highlight=False)
    registries: dict[str, Mapping[str, Any]] = {
        "models": MODELS,
        "datasets": DATASETS,
        "algorithms": ALGORITHMS,
        "guides": GUIDES,
    }
    for kind, registry in registries.items():
        if what is not None and what != kind:
            continue
        table = _table(kind, 2)
        for name, entry in registry.items():
            table.add_row(Text(name), Text(_first_line(entry)))
        console.print(table, "")
        if kind == "algorithms":
            console.print(_family_table(), "")
        for name, entry in registry.items():
            if dataclasses.is_dataclass(entry):
                console.print(_settings_table(name, entry), "")


def _table(title: str, columns: int) -> Table:
    """Return a table without a header, the first column of which has names."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.add_column(style="cyan", no_wrap=True)
    for _ in range(columns - 1):
        table.add_column()
    table.show_header = False
    return table


def _family_table() -> Table:
    """Return the table of methods that are settings of another algorithm."""
    table = _table("special cases", 3)
    for name, make in FAMILY.items():
        algorithm = make()
        plain = type(algorithm)()
        parts = [
            f"{field.name}={getattr(algorithm, field.name)!r}"
            for field in dataclasses.fields(algorithm)
            if getattr(algorithm, field.name) != getattr(plain, field.name)
        ]
        table.add_row(
            Text(name), Text(f"{type(plain).__name__}({', '.join(parts)})"), Text(_first_line(make))
        )
    return table


def _first_line(entry: Any) -> str:
    return _plain((inspect.getdoc(entry) or "").split("\n\n")[0])


def _plain(text: str) -> str:
    """Return docstring text on one line, without Sphinx markup."""
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", " ".join(text.split())).replace("``", "")


def _settings_table(name: str, cls: Any) -> Table:
    table = Table(title=f"settings of {name}", title_justify="left", title_style="", box=None)
    table.add_column("key", style="cyan", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("meaning")
    meaning: dict[str, str] = {}
    for base in reversed(cls.__mro__):  # inherited settings are explained in their class
        meaning |= _attributes(inspect.getdoc(base) or "")
    for field in dataclasses.fields(cls):
        default = field.default
        if default is dataclasses.MISSING:
            shown = "required" if field.default_factory is dataclasses.MISSING else "..."
        else:
            shown = "not set" if default is None else str(default)
        table.add_row(Text(field.name), Text(shown), Text(meaning.get(field.name, "")))
    return table


def _attributes(doc: str) -> dict[str, str]:
    """Return the entries of a Google-style ``Attributes:`` section."""
    _, _, section = doc.partition("Attributes:\n")
    section = section.split("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, flags=re.MULTILINE)
    return {name: _plain(text) for name, text in entries}
