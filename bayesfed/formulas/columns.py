"""The columns of one client's rows: their kinds, their levels and their gaps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bayesfed.data.columns import check_columns
from bayesfed.formulas.settings import FormulaSettings
from bayesfed.formulas.terms import (
    CATEGORIES,
    NAMESPACE,
    FormulaError,
    Group,
    OwnTerm,
    Terms,
    calls,
)

if TYPE_CHECKING:
    import pandas as pd

Level = Any
"""A level of a column; a tuple for a factor made of several columns."""


@dataclass(frozen=True)
class ClientColumns:
    """A client's report on its columns before the agreement.

    Attributes:
        kinds: column to ``"number"``, ``"text"`` or, for an ordered categorical, ``"ordered"``; :func:`private_columns`
            are text, whatever they hold.
        levels: column, or a group's factor, to its levels, without their counts; not of private columns.
        within: factor within the clients to the number of levels.
    """

    kinds: Mapping[str, str]
    levels: Mapping[str, tuple[Level, ...]]
    within: Mapping[str, int]


def columns_of(terms: Terms, settings: FormulaSettings) -> tuple[list[str], set[str]]:
    """Return the columns that a predictor names, sorted, and those that it makes categories of whatever they hold."""
    from formulae.categorical import ENCODINGS

    names = terms.columns
    as_category = {term.column for term in terms.monotonic} | {
        call.args[0].name
        for component in terms.components
        for call in calls(component)
        if call.callee in CATEGORIES
    }
    if settings.kind.categories:
        as_category.add(terms.outcome.name)
    # names in calls that are no columns, such as Treatment in C(x, Treatment)
    return sorted(names - {*ENCODINGS, *NAMESPACE}), as_category


def private_columns(terms: Terms, client: str) -> set[str]:
    """Return the columns that only name the client, or levels within clients: their values need not leave a client."""
    used = {*terms.model.response.var_names, *terms.behind.values()}
    for part in (terms, *terms.parameters.values()):
        used |= {name for component in part.components for name in component.var_names}
    factors = terms.all_groups
    used |= {column for group in factors if client not in group.columns for column in group.columns}
    return {column for group in factors for column in group.columns} - used


def sorted_levels(column: str, sets: Sequence[Sequence[Level]]) -> tuple[Level, ...]:
    """Return the levels of all sets, sorted.

    Raises:
        FormulaError: they have no order.
    """
    union = {level for levels in sets for level in levels}
    try:
        return tuple(sorted(union))
    except TypeError:
        raise FormulaError(
            f"the levels of {column!r} are numbers at some clients and text at others"
        ) from None


def check_complete(client: str, column: str, values: pd.Series) -> None:
    """Raise FormulaError for a missing value."""
    gaps = values.isna().to_numpy()
    if gaps.any():
        raise FormulaError(
            f"client {client!r}, row {values.index[int(gaps.argmax())]}: {column!r} is missing. Leave such rows out "
            f'first, frame.dropna(subset=[{column!r}]), or by missing = "drop" in [data] of an experiment file, or, of '
            f"a covariate of numbers, write mi({column})"
        )


def check_covariate(client: str, term: OwnTerm, rows: pd.DataFrame) -> None:
    """Raise FormulaError for a covariate that is text, or whose standard error is missing or not above 0."""
    if kind_of(client, term.column, rows[term.column]) != "number":
        raise FormulaError(
            f"client {client!r}: {term.label} is of numbers, and {term.column!r} holds text: make what is missing a "
            "level of its own"
        )
    if term.error is None:
        return
    wrong = (rows[term.column].notna() & ~(rows[term.error] > 0)).to_numpy(bool, na_value=True)
    if wrong.any():
        row = int(wrong.argmax())
        raise FormulaError(
            f"client {client!r}, row {rows.index[row]}: the standard error {term.error!r} is "
            f"{rows[term.error].iloc[row]}, not above 0"
        )


def kind_of(client: str, column: str, values: pd.Series) -> str:
    """Return ``"number"``, ``"text"`` or, for an ordered categorical, ``"ordered"``; FormulaError for other columns."""
    import pandas as pd

    if isinstance(values.dtype, pd.CategoricalDtype):
        return "ordered" if values.dtype.ordered else "text"
    if pd.api.types.is_numeric_dtype(values.dtype):
        return "number"
    if all(isinstance(value, str) for value in values):
        return "text"
    raise FormulaError(
        f"client {client!r}: column {column!r} is {values.dtype}, neither numbers nor text: convert it to one of these "
        "first"
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
