"""A client's half of the agreement on a coding: its report on its columns, and its part of the sums.

Nothing else leaves a client before the first round. :mod:`bayesfed.formulas.agreement` is the server's half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bayesfed.data.columns import check_columns
from bayesfed.data.federation import Federation
from bayesfed.data.standardise import client_sums
from bayesfed.formulas.agreement import FIELD, Agreement, Call, open_calls
from bayesfed.formulas.coding import Coding
from bayesfed.formulas.columns import (
    ClientColumns,
    Level,
    check_complete,
    check_covariate,
    columns_of,
    kind_of,
    levels_of,
    private_columns,
    sorted_levels,
    without_decimals,
)
from bayesfed.formulas.families import VALUES, Family
from bayesfed.formulas.settings import FormulaSettings
from bayesfed.formulas.terms import FormulaError, Terms

if TYPE_CHECKING:
    import pandas as pd

Frames = Mapping[str, "pd.DataFrame"]
"""Client's name to its rows."""
NOT_BINARY = FIELD + "0 or 1"
"""The name of the number of outcomes that are neither 0 nor 1."""


def report_columns(settings: FormulaSettings, name: str, rows: pd.DataFrame) -> ClientColumns:
    """Describe the columns of one client.

    Args:
        settings: the formula.
        name: the client.
        rows: its rows.

    Raises:
        FormulaError: a column is neither numbers nor text, or has missing values.
        KeyError: a column does not exist.

    Example:
        >>> import pandas as pd
        >>> from bayesfed.formulas.reports import report_columns
        >>> from bayesfed.formulas.settings import FormulaSettings
        >>> settings = FormulaSettings("y ~ arm + (1 | ward/bed)", "gaussian", "ward")
        >>> rows = pd.DataFrame({"y": [1.0, 2.0], "arm": ["new", "old"], "bed": [7, 9], "ward": "A"})
        >>> found = report_columns(settings, "A", rows)
        >>> found.kinds
        {'arm': 'text', 'bed': 'text', 'ward': 'text', 'y': 'number'}
        >>> found.levels, found.within
        ({'arm': ('new', 'old')}, {'ward:bed': 2})
    """
    import pandas as pd

    terms = settings.terms
    parts = [columns_of(part, settings) for part in (terms, *terms.parameters.values())]
    columns = list(dict.fromkeys(column for names, _ in parts for column in names))
    as_category = {column for _, found in parts for column in found}
    check_columns("frame", columns, rows.columns)
    for column in [column for column in columns if column not in terms.incomplete]:
        check_complete(name, column, rows[column])
    for term in terms.uncertain.values():
        check_covariate(name, term, rows)
    private = private_columns(terms, settings.client)
    kinds = {
        column: "text" if column in private else kind_of(name, column, rows[column])
        for column in columns
    }
    levels: dict[str, tuple[Level, ...]] = {}
    for column in [column for column in columns if column not in private]:
        values = rows[column]
        if kinds[column] == "ordered":
            levels[column] = tuple(values.dtype.categories)
        elif kinds[column] == "text" or column in as_category:
            levels[column] = tuple(map(without_decimals, pd.unique(values).tolist()))
    if settings.kind.categories:
        _check_categories(name, terms, levels)
    for group in terms.all_groups:
        if settings.client not in group.columns:
            levels[group.factor] = tuple(dict.fromkeys(levels_of(group, settings.client, rows)))
    within = {factor: len(own) for factor, own in levels_within(settings, rows).items()}
    return ClientColumns(kinds, levels, within)


def levels_within(settings: FormulaSettings, rows: pd.DataFrame) -> dict[str, tuple[Level, ...]]:
    """Return a client's levels of the factors within the clients, sorted, by factor."""
    found = {}
    for group in settings.terms.all_groups:
        if settings.client in group.columns and group.columns != [settings.client]:
            own = list(levels_of(group, settings.client, rows))
            found[group.factor] = sorted_levels(group.factor, [own])
    return found


def own_levels(
    settings: FormulaSettings, clients: Frames
) -> dict[str, dict[str, tuple[Level, ...]]]:
    """Return the levels of factors within the clients: factor to client to levels."""
    parts = {name: levels_within(settings, rows) for name, rows in clients.items()}
    factors = dict.fromkeys(factor for part in parts.values() for factor in part)
    return {factor: {name: part[factor] for name, part in parts.items()} for factor in factors}


def sum_calls(coding: Coding, agreement: Agreement, clients: Frames) -> dict[str, np.ndarray]:
    """Return the sums over some clients that calls such as ``center(x)`` need next, by name; none if all have theirs.

    Args:
        coding: the coding as far as it is agreed.
        agreement: so far.
        clients: the clients' rows.
    """
    return {
        one.name: np.sum(
            [
                _sums_of_call(one, agreement.totals.get(one.name, ()), name, rows)
                for name, rows in clients.items()
            ],
            axis=0,
        )
        for one in open_calls(coding, agreement.totals)
    }


def _sums_of_call(
    one: Call, totals: Sequence[Sequence[float]], name: str, rows: pd.DataFrame
) -> np.ndarray:
    """Return one client's part of the next sums of a call."""
    call, checked = one.call, one.coding.checked_rows(name, rows)
    x = np.asarray(call.args[0].eval(checked, one.component.env), dtype=float)
    if not totals:
        return np.array([len(x), x.sum(), (x * x).sum()])
    if call.callee == "bs":
        return np.asarray(call.stateful_transform._eval_basis(x).sum(0), dtype=float)
    p = polynomial(x, totals[1:])
    return np.array([(p * p).sum(), (x * p * p).sum()])


def polynomial(x: np.ndarray, totals: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the values of the orthogonal polynomial P_k, where ``totals`` has Σ P_j² and Σ x P_j² for j < k.

    ::

        P_0 = 1,   P_(k+1) = (x − α_k) P_k − (n_k / n_(k−1)) P_(k−1),   n_k = Σ P_k²,   α_k = Σ x P_k² / n_k
    """
    before, now, norm = np.zeros_like(x), np.ones_like(x), 1.0
    for squares, moment in totals:
        following = (x - moment / squares) * now - squares / norm * before
        before, now, norm = now, following, squares
    return now


def sum_fields(coding: Coding, kind: Family, federation: Federation) -> dict[str, np.ndarray]:
    """Return the sums over some clients of their coded columns, by name.

    Args:
        coding: the coding, with the constants of its calls.
        kind: the family.
        federation: the coded clients.

    Returns:
        n, Σ x and Σ x² of the columns of each predictor, of a covariate in the rows that have it, and of an outcome
        that the program standardises or that has a logarithm as its link.

    Raises:
        FormulaError: the family does not have an outcome; the message names the client.
    """
    name = coding.outcome
    _check_values(name, kind, federation)
    predictors = [field for field in federation.fields if _is_of_predictor(field, coding)]
    found = {FIELD + field: _sums(federation, field) for field in predictors}
    for column in coding.terms.uncertain:
        seen = federation[column].double()
        seen = seen[seen.isfinite()]
        found[FIELD + column] = np.array([len(seen), float(seen.sum()), float(seen.square().sum())])
    if kind.link != "logit":
        logs = replace(federation, fields={name: federation[name].log()}) if kind.of_log else None
        found[FIELD + name] = _sums(federation if logs is None else logs, name)
    if kind.name == "gaussian":
        found[NOT_BINARY] = np.array([float((~_is_binary(federation[name])).sum())])
    return found


def _is_of_predictor(field: str, coding: Coding) -> bool:
    """Return whether a field has columns of a predictor."""
    name = next(
        (field[len(p) + 1 :] for p in coding.parameters if field.startswith(f"{p}.")), field
    )
    return name in ("X", "offset") or name.startswith(("X|", "mo("))


def _sums(federation: Federation, field: str) -> np.ndarray:
    n, total, squares = client_sums(federation, field)
    return np.concatenate([[float(n)], total.sum(0).flatten(), squares.sum(0).flatten()])


def _check_categories(name: str, terms: Terms, levels: Mapping[str, Sequence[Level]]) -> None:
    """Raise FormulaError for an outcome that is no category."""
    outcome = terms.outcome.name
    broken = [level for level in levels[outcome] if isinstance(level, float)]
    if broken:
        raise FormulaError(
            f"client {name!r}: the outcome {outcome!r} is {broken[0]:.4g}, but categories are text or whole numbers"
        )


def _check_values(name: str, kind: Family, federation: Federation) -> None:
    """Raise FormulaError for an outcome that the family does not have."""
    values = federation[name]
    if ("trials" in federation.fields) != kind.trials:
        binary = bool(_is_binary(values).all())
        remedy = "; for outcomes of 0 and 1 take 'bernoulli'" if binary else ""
        raise FormulaError(
            f"family {kind.name!r}: the binomial families, and only they, have an outcome p(y, n), successes y of n "
            f"trials{remedy}"
        )
    wrong = ~VALUES[kind.values](values)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise FormulaError(
            f"family {kind.name!r} has outcomes that are {kind.values}: client "
            f"{federation.names[int(federation.owner[row])]!r} has {name} = {float(values[row]):.4g}"
        )


def _is_binary(values: Any) -> Any:
    return (values == 0) | (values == 1)
