"""Data frames of any kind, the names of their columns, and those of clients."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import pandas as pd


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


def to_pandas(frame: Any) -> pd.DataFrame:
    """Convert a frame of polars, an Arrow table or a mapping from column to values to pandas, and check its labels.

    Raises:
        TypeError: it is nothing of the kind.
        ValueError: its columns have labels of several levels.

    Example:
        >>> from bayesfed.data.columns import to_pandas
        >>> to_pandas({"hospital": ["A", "B"], "y": [1.0, 2.0]}).columns.tolist()
        ['hospital', 'y']
    """
    if hasattr(frame, "collect_schema") and hasattr(frame, "collect"):  # lazy
        frame = frame.collect()
    if isinstance(frame, Mapping) and frame:
        if any(isinstance(values, pd.DataFrame) for values in frame.values()):
            raise TypeError(
                "a mapping from client to frame is given: use Federation.from_arrays, or pandas.concat with a column "
                "that names the client"
            )
        frame = pd.DataFrame(dict(frame))
    elif hasattr(frame, "to_dicts"):  # polars
        frame = pd.DataFrame(frame.to_dict(as_series=False))
    elif hasattr(frame, "to_pandas"):
        frame = frame.to_pandas()
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(
            f"a data frame is needed, not a {type(frame).__name__}: of pandas or polars, an Arrow table, or a mapping "
            "from column to values; read files by pandas.read_csv or read_parquet"
        )
    if isinstance(frame.columns, pd.MultiIndex):
        raise ValueError(
            "the frame's columns have labels of several levels: give each one name, "
            "frame.columns = ['_'.join(map(str, label)) for label in frame.columns]"
        )
    return frame


def client_name(value: Hashable) -> str:
    """Return the name of a client: 1.0, which 1 becomes in a column with gaps, is the client ``"1"``.

    Example:
        >>> from bayesfed.data.columns import client_name
        >>> client_name(1), client_name(1.0), client_name("1"), client_name("1.0")
        ('1', '1', '1', '1.0')
    """
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
