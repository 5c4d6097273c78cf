"""Tables of the names and settings for experiment files."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bayesfed.algorithms import METHODS, Method
from bayesfed.algorithms.meaning import meanings, plain
from bayesfed.algorithms.registry import GUIDES
from bayesfed.cli.catalogue import DATASETS, MODELS


def show(what: str | None) -> None:
    """Print tables of the names of one kind, or of all."""
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
        table.show_header = False
        table.add_column(style="cyan", no_wrap=True)
        table.add_column()
        for name, entry in registry.items():
            table.add_row(Text(name), Text(_first_line(entry)))
        console.print(table, "")
        for name, entry in registry.items():
            if isinstance(entry, Method):
                console.print(_method_table(entry), "")
            elif dataclasses.is_dataclass(entry):
                console.print(_settings_table(name, entry), "")


def _first_line(entry: Any) -> str:
    return plain((inspect.getdoc(entry) or "").split("\n\n")[0])


def _method_table(method: Method) -> Table:
    """Return the settings of a method, with the meaning that the fields of its parts have."""
    table = _empty_settings(method.name)
    for key, value in method.values(method.default).items():
        _add_setting(table, key, value, method.meaning(key))
    return table


def _settings_table(name: str, cls: Any) -> Table:
    """Return the settings of a dataclass."""
    table, meaning = _empty_settings(name), meanings(cls)
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING
        default = "required" if required else field.default
        if required and field.default_factory is not dataclasses.MISSING:
            default = "..."
        _add_setting(table, field.name, default, meaning.get(field.name, ""))
    return table


def _empty_settings(name: str) -> Table:
    table = Table(title=f"settings of {name}", title_justify="left", title_style="", box=None)
    table.add_column("key", style="cyan", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("meaning")
    return table


def _add_setting(table: Table, key: str, default: Any, meaning: str) -> None:
    table.add_row(Text(key), Text("not set" if default is None else str(default)), Text(meaning))
