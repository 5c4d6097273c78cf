"""Columns and other things that have names, and what is said where one is not there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class UnknownName(KeyError):
    """A client, field or column that is not there; unlike KeyError it prints its message as it is."""

    def __str__(self) -> str:
        return str(self.args[0])


def check_columns(what: str, wanted: Iterable[str], there: Iterable[Any]) -> None:
    """Fail on a column that is not there, saying which are."""
    columns = list(there)
    for column in wanted:
        if column not in columns:
            raise UnknownName(
                f"the {what} has no column {column!r}; it has {', '.join(map(str, columns))}"
            )
