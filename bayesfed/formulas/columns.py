"""The columns of one client's rows: their kinds, their levels and their gaps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bayesfed.data.columns import check_columns
from bayesfed.formulas.terms import FormulaError, Group

if TYPE_CHECKING:
    import pandas as pd

Level = Any
"""A level of a column; a tuple for a factor made of several columns."""


def check_complete(client: str, column: str, values: pd.Series) -> None:
    """Raise FormulaError for a missing value."""
    gaps = values.isna().to_numpy()
    if gaps.any():
        raise FormulaError(
            f"client {client!r}, row {values.index[int(gaps.argmax())]}: {column!r} is missing. Leave such rows out "
            f"first, frame.dropna(subset=[{column!r}])"
        )


def kind_of(column: str, values: pd.Series) -> str:
    """Return ``"number"``, ``"text"`` or, for an ordered categorical, ``"ordered"``; FormulaError for other columns."""
    import pandas as pd

    if isinstance(values.dtype, pd.CategoricalDtype):
        return "ordered" if values.dtype.ordered else "text"
    if pd.api.types.is_numeric_dtype(values.dtype):
        return "number"
    if all(isinstance(value, str) for value in values):
        return "text"
    raise FormulaError(
        f"column {column!r} is {values.dtype}, neither numbers nor text: convert it to one of these first"
    )


def levels_of(group: Group, client: str, rows: pd.DataFrame) -> Iterator[Level]:
    """Yield the level of a factor in each row; for a factor within a client, of the columns other than the client."""
    columns = [column for column in group.columns if column != client]
    check_columns("frame", columns, rows.columns)
    if len(columns) == 1:
        return map(without_decimals, rows[columns[0]].tolist())
    return zip(*(map(without_decimals, rows[column].tolist()) for column in columns), strict=True)


def without_decimals(level: Level) -> Level:
    """Convert a whole number to an int: a level may have decimals in one client's file and none in another's."""
    return int(level) if isinstance(level, float) and level.is_integer() else level
