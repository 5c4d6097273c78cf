"""Tables of what an experiment file can name."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bayesfed.algorithms import METHODS, Method
from bayesfed.algorithms.method import get
from bayesfed.algorithms.registry import GUIDES
from bayesfed.cli.names import DATASETS, MODELS


def show(what: str | None) -> None:
    """Print tables of what there is, of one kind or of all."""
    console = Console(highlight=False)
    registries: dict[str, Mapping[str, Any]] = {
        "models": MODELS,
        "datasets": DATASETS,
        "algorithms": METHODS,
        "guides": GUIDES,
    }
    for kind, registry in registries.items():
        if what is not None and what != kind:
            continue
        table = Table(title=kind, title_justify="left", title_style="bold", box=None)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        table.show_header = False
        for name, entry in registry.items():
            table.add_row(Text(name), Text(_first_line(entry)))
        console.print(table, "")
        for name, entry in registry.items():
            if isinstance(entry, Method):
                console.print(_method_table(entry), "")
            elif dataclasses.is_dataclass(entry):
                console.print(_settings_table(name, entry), "")


def _first_line(entry: Any) -> str:
    return _plain((inspect.getdoc(entry) or "").split("\n\n")[0])


def _plain(text: str) -> str:
    """Docstring text on one line, without Sphinx markup."""
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", " ".join(text.split())).replace("``", "")


def _method_table(method: Method) -> Table:
    """Return the settings of a method, with the meaning that the fields of its parts have."""
    table = _table(f"settings of {method.name}")
    for key, value in method.values(method.default).items():
        path = method.settings[key].paths[0]
        owner, _, field = path.rpartition(".")
        part = get(method.default, owner) if owner else method.default
        meaning = _meaning(type(part)).get(field, "")
        table.add_row(Text(key), Text("not set" if value is None else str(value)), Text(meaning))
    return table


def _table(title: str) -> Table:
    """Return an empty table of settings."""
    table = Table(title=title, title_justify="left", title_style="", box=None)
    table.add_column("key", style="cyan", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("meaning")
    return table


def _meaning(cls: type[Any]) -> dict[str, str]:
    """Return the documentation of a class's attributes, inherited ones where they are defined."""
    meaning: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        meaning |= _attributes(inspect.getdoc(base) or "")
    return meaning


def _settings_table(name: str, cls: Any) -> Table:
    table, meaning = _table(f"settings of {name}"), _meaning(cls)
    for field in dataclasses.fields(cls):
        default = field.default
        if default is dataclasses.MISSING:
            shown = "required" if field.default_factory is dataclasses.MISSING else "..."
        else:
            shown = "not set" if default is None else str(default)
        table.add_row(Text(field.name), Text(shown), Text(meaning.get(field.name, "")))
    return table


def _attributes(doc: str) -> dict[str, str]:
    """The entries of a Google-style ``Attributes:`` section."""
    _, _, section = doc.partition("Attributes:\n")
    section = section.split("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, flags=re.MULTILINE)
    return {name: _plain(text) for name, text in entries}
