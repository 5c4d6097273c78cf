"""Names of columns, fields and clients."""

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


class UnknownName(KeyError):
    """A client, field or column that does not exist; unlike KeyError it prints its message without quotes."""

    def __str__(self) -> str:
        return str(self.args[0])


def check_columns(what: str, wanted: Iterable[Any], there: Iterable[Any]) -> None:
    """Raise UnknownName for a column that does not exist, ValueError for one that is there twice."""
    columns = list(there)
    for column in wanted:
        if column not in columns:
            raise UnknownName(
                f"the {what} has no column {column!r}; it has {', '.join(map(str, columns))}"
            )
        if columns.count(column) > 1:
            raise ValueError(f"the {what} has two columns with the name {column!r}: rename one")


def client_name(value: Any) -> str:
    """Return the name of a client: 1.0, which 1 becomes in a column with gaps, is the client ``"1"``.

    Example:
        >>> from bayesfed.data.columns import client_name
        >>> client_name(1), client_name(1.0), client_name("1"), client_name("1.0")
        ('1', '1', '1', '1.0')
    """
    fractional = isinstance(value, Real) and not isinstance(value, Integral)
    return str(int(value)) if fractional and float(value).is_integer() else str(value)
