"""Errors for names that do not exist: of columns, fields and clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class UnknownName(KeyError):
    """A client, field or column that does not exist; unlike KeyError it prints its message without quotes."""

    def __str__(self) -> str:
        return str(self.args[0])


def check_columns(what: str, wanted: Iterable[str], there: Iterable[Any]) -> None:
    """Raise UnknownName for a column that does not exist, and list those that do."""
    columns = list(there)
    for column in wanted:
        if column not in columns:
            raise UnknownName(
                f"the {what} has no column {column!r}; it has {', '.join(map(str, columns))}"
            )
