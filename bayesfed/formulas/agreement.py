"""The agreement on a coding: clients report kinds and levels of their columns, and sums.

At the start a client sends, for each column that the formula names, whether it holds numbers or text; for text and for
factors the set of levels; and sums. The codes of a level (the reference level, the interactions that span the
intercept) are those of formulae, evaluated on a table that has every agreed level and no client's rows.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bayesfed.data.columns import check_columns
from bayesfed.formulas.coding import Coding, environment
from bayesfed.formulas.columns import (
    Level,
    check_complete,
    kind_of,
    levels_of,
    without_decimals,
)
from bayesfed.formulas.terms import CATEGORIES, NAMESPACE, STATEFUL, FormulaError, Terms, calls

if TYPE_CHECKING:
    import pandas as pd

MANY_LEVELS = 20
"""Columns of text with more levels are suspected of holding dates or identifiers."""


@dataclass(frozen=True)
class ClientColumns:
    """A client's report on its columns before the agreement.

    Attributes:
        kinds: column to ``"number"``, ``"text"`` or, for an ordered categorical, ``"ordered"``.
        levels: column, or a group's factor, to its levels, without their counts.
    """

    kinds: Mapping[str, str]
    levels: Mapping[str, tuple[Level, ...]]


def agree(
    terms: Terms, clients: Mapping[str, pd.DataFrame], client: str, *, categories: bool = False
) -> Coding:
    """Make the coding that all clients use, from the reports of each on its columns, and from sums.

    Args:
        terms: the formula.
        clients: client's name to rows.
        client: the column that names the client of each row.
        categories: the outcome is one of several categories.

    Raises:
        FormulaError: a column differs in kind between clients, or cannot be coded.
        KeyError: a column does not exist.

    Example:
        >>> import pandas as pd
        >>> from bayesfed.formulas.agreement import agree
        >>> from bayesfed.formulas.terms import parse
        >>> rows = {"A": pd.DataFrame({"y": [1.0], "kind": ["b"]}), "B": pd.DataFrame({"y": [2.0], "kind": ["a"]})}
        >>> coding = agree(parse("y ~ kind"), rows, "hospital")
        >>> coding.levels["kind"], coding.fields("A", rows["A"])["X"].tolist()
        (('a', 'b'), [[1.0]])
    """
    outcome = [terms.outcome.name] * categories
    reports = {n: describe_columns(terms, n, rows, client, outcome) for n, rows in clients.items()}
    first = next(iter(reports.values()))
    for name, report in reports.items():
        for column, kind in report.kinds.items():
            if kind != first.kinds[column]:
                raise FormulaError(
                    f"client {name!r}: {column!r} holds {kind}, where client {next(iter(reports))!r} has "
                    f"{first.kinds[column]}"
                )
    levels = {}
    for column in first.levels:
        merge = _same_order if first.kinds.get(column) == "ordered" else _sorted_union
        levels[column] = merge(column, [report.levels[column] for report in reports.values()])
    _warn_of_levels(levels, reports)
    own = _own_levels(terms, client, levels, reports)
    coding = Coding(terms, client, first.kinds, levels, own, categories)
    _evaluate(coding)
    for component, call in _stateful_calls(coding):
        parts = [
            np.asarray(call.args[0].eval(coding.checked_rows(n, rows), component.env), dtype=float)
            for n, rows in clients.items()
        ]
        mean, sd = _moments(parts)
        if not sd > 0:
            raise FormulaError(f"{call}: {call.args[0]} is the same in all rows")
        if call.callee == "poly":
            _agree_on_polynomial(call.stateful_transform, parts)
        elif call.callee == "bs":
            _agree_on_spline(call.stateful_transform, parts)
        else:
            call.stateful_transform.mean, call.stateful_transform.std = mean, sd
    parameters = {
        name: agree(part, clients, client, categories=categories)
        for name, part in terms.parameters.items()
    }
    return replace(
        coding,
        kinds={k: v for part in (*parameters.values(), coding) for k, v in part.kinds.items()},
        levels={k: v for part in (*parameters.values(), coding) for k, v in part.levels.items()},
        own={k: v for part in (*parameters.values(), coding) for k, v in part.own.items()},
        parameters=parameters,
    )


def _agree_on_polynomial(transform: Any, parts: Sequence[np.ndarray]) -> None:
    """Set the constants of orthogonal polynomials, from sums of P_k² and x P_k² over the clients.

    ::

        P_0 = 1,   P_(k+1) = (x − α_k) P_k − (n_k / n_(k−1)) P_(k−1),   n_k = Σ P_k²,   α_k = Σ x P_k² / n_k
    """
    before = [np.zeros_like(x) for x in parts]
    now, norm = [np.ones_like(x) for x in parts], 1.0
    for k in range(transform.degree + 1):
        squares = sum(float((p * p).sum()) for p in now)
        transform.norms2[k] = squares
        transform.alpha[k] = (
            sum(float((x * p * p).sum()) for x, p in zip(parts, now, strict=True)) / squares
        )
        following = [
            (x - transform.alpha[k]) * p - squares / norm * b
            for x, p, b in zip(parts, now, before, strict=True)
        ]
        before, now, norm = now, following, squares


def _agree_on_spline(transform: Any, parts: Sequence[np.ndarray]) -> None:
    """Set the constants that centre a spline's columns, from sums of the columns over the clients."""
    from formulae.utils import get_centering_matrix

    if transform._center:
        sums = np.sum([transform._eval_basis(x).sum(0) for x in parts], axis=0, keepdims=True)
        transform._centering_matrix = get_centering_matrix(sums)


def describe_columns(
    terms: Terms, name: str, rows: pd.DataFrame, client: str, categories: Sequence[str] = ()
) -> ClientColumns:
    """Describe one client's columns: nothing else leaves the client before the sums.

    The columns ``categories`` have levels, whatever they hold.
    """
    import pandas as pd

    names = {str(variable) for variable in terms.model.var_names} - {""} | {*terms.behind.values()}
    columns = sorted(names - _names_of_functions())
    check_columns("frame", columns, rows.columns)
    for column in columns:
        check_complete(name, column, rows[column])
    kinds = {column: kind_of(column, rows[column]) for column in columns}
    as_category = {
        call.args[0].name
        for component in terms.components
        for call in calls(component)
        if call.callee in CATEGORIES
    } | {*categories}
    levels: dict[str, tuple[Level, ...]] = {}
    for column in columns:
        values = rows[column]
        if kinds[column] == "ordered":
            levels[column] = tuple(values.dtype.categories)
        elif kinds[column] == "text" or column in as_category:
            levels[column] = tuple(map(without_decimals, pd.unique(values).tolist()))
        broken = [level for level in levels.get(column, ()) if isinstance(level, float)]
        if column in categories and broken:
            raise FormulaError(
                f"client {name!r}: the outcome {column!r} is {broken[0]:.4g}, but categories are text or whole numbers"
            )
    for group in terms.groups:
        if group.columns != [client]:
            levels[group.factor] = tuple(dict.fromkeys(levels_of(group, client, rows)))
    return ClientColumns(kinds, levels)


def _names_of_functions() -> set[str]:
    """Return the names in calls that are no columns, such as ``Treatment`` in ``C(x, Treatment)``."""
    from formulae.categorical import ENCODINGS

    return {*ENCODINGS, *NAMESPACE}


def _warn_of_levels(
    levels: Mapping[str, tuple[Level, ...]], reports: Mapping[str, ClientColumns]
) -> None:
    """Warn of text with many levels, most of which one client has alone: it may be an identifier or a date."""
    for column in levels.keys() & next(iter(reports.values())).kinds.keys():
        counts = Counter(level for report in reports.values() for level in report.levels[column])
        alone = sum(count == 1 for count in counts.values())
        if len(counts) > MANY_LEVELS and len(reports) > 1 and 2 * alone > len(counts):
            warnings.warn(
                f"column {column!r} has {len(counts)} levels, each of which has an effect of its own, and {alone} of "
                "them occur at one client only. Levels leave the clients when the coding is agreed: if they are dates, "
                "identifiers or numbers stored as text, convert the column first",
                stacklevel=4,
            )


def _own_levels(
    terms: Terms,
    client: str,
    levels: Mapping[str, tuple[Level, ...]],
    reports: Mapping[str, ClientColumns],
) -> dict[str, dict[str, tuple[Level, ...]]]:
    """Return each client's levels of the factors within it of which every client has at most half."""
    found = {}
    for group in terms.groups:
        factor = group.factor
        if client in group.columns and group.columns != [client]:
            own = {n: _sorted_union(factor, [r.levels[factor]]) for n, r in reports.items()}
            if 2 * max(map(len, own.values())) <= len(levels[factor]):
                found[factor] = own
    return found


def _sorted_union(column: str, sets: Sequence[tuple[Level, ...]]) -> tuple[Level, ...]:
    """Return the levels of all clients, sorted."""
    union = {level for levels in sets for level in levels}
    try:
        return tuple(sorted(union))
    except TypeError:
        raise FormulaError(
            f"the levels of {column!r} are numbers at some clients and text at others"
        ) from None


def _same_order(column: str, orders: Sequence[tuple[Level, ...]]) -> tuple[Level, ...]:
    """Return the categories of an ordered categorical, which must be the same for all clients."""
    if any(order != orders[0] for order in orders):
        raise FormulaError(
            f"column {column!r} is an ordered categorical with other categories at some clients: give all of them "
            "the same categories"
        )
    return orders[0]


def _evaluate(coding: Coding) -> None:
    """Let formulae code the terms, on a table that has every agreed level and no client's rows."""
    import pandas as pd

    levels, model = coding.levels, coding.terms.model
    size = max([1, *(len(levels[column]) for column in coding.kinds if column in levels)])
    witness = {}
    for column, kind in coding.kinds.items():
        if kind == "number":
            witness[column] = np.resize(np.array(levels.get(column, (1.0,))), size)
        else:
            values = [levels[column][i % len(levels[column])] for i in range(size)]
            witness[column] = pd.Categorical(values, categories=list(levels[column]), ordered=True)
    with np.errstate(all="ignore"):
        try:
            model.eval(pd.DataFrame(witness), environment())
        except Exception as error:  # formulae's errors have no class in common
            raise FormulaError(f"formula {coding.terms.text!r} cannot be coded: {error}") from None


def _stateful_calls(coding: Coding) -> Iterator[tuple[Any, Any]]:
    """Yield the calls whose constants depend on all rows together, with their components, innermost first."""
    for component in coding.terms.components:
        for call in calls(component):
            if call.callee in STATEFUL:
                yield component, call


def _moments(parts: Iterable[Any]) -> tuple[float, float]:
    """Return mean and standard deviation (divisor n) from n_i, Σ_j x_ij and Σ_j x_ij² of each client."""
    arrays = [np.asarray(part, dtype=float) for part in parts]
    n, total, squares = np.sum([[len(x), x.sum(), (x * x).sum()] for x in arrays], axis=0)
    mean = total / n
    return float(mean), float(np.sqrt(max(squares / n - mean * mean, 0.0)))
