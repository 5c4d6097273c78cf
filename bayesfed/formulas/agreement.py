"""The agreement on a coding: what is agreed, and how it follows from the clients' reports and from sums over them.

It has three steps. :mod:`bayesfed.formulas.reports` is the clients' half of each, this module the server's::

    kinds and levels of the columns     each client's report               agree_on_columns
    constants of center(x), poly, ...   sums of x, x², ... over clients    add_totals, as often as a call needs sums
    means and scales of coded columns   n, Σ x and Σ x² over clients       add_totals

In one process and between machines the same functions are called, so that both have the same coding. It follows from
the :class:`Agreement` alone, which is plain data. The codes of a level (the reference level, the interactions that span
the intercept) are those of formulae, evaluated on a table that has every agreed level and no client's rows.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from bayesfed.data.plural import plural
from bayesfed.formulas.coding import Coding, environment
from bayesfed.formulas.columns import ClientColumns, Level, columns_of, sorted_levels
from bayesfed.formulas.settings import FormulaSettings
from bayesfed.formulas.terms import STATEFUL, FormulaError, Terms, calls

MANY_LEVELS = 20
"""Columns of text with more levels are suspected of holding dates or identifiers."""
FIELD = "field "
"""The start of the name of a coded column's sums; those of calls begin with ``"call "``."""
Totals = Mapping[str, Sequence[Sequence[float]]]
"""Name to sums over all clients, in the order in which they were asked."""
WithinClients = Mapping[str, Mapping[str, tuple[Level, ...]]]
"""Factor within the clients to client to its levels."""


@dataclass(frozen=True)
class Agreement:
    """What is agreed: plain data, from which every client makes the same coding and the same program.

    Attributes:
        kinds: column to ``"number"``, ``"text"`` or ``"ordered"``.
        levels: column, or a group's factor, to the levels of all clients, sorted.
        within: factor within the clients to the largest number of levels that a client has.
        totals: sums over all clients: of each call, in order, then of each coded column.
    """

    kinds: Mapping[str, str]
    levels: Mapping[str, tuple[Level, ...]]
    within: Mapping[str, int]
    totals: Totals = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """The sums of the coded columns are there."""
        return any(name.startswith(FIELD) for name in self.totals)

    def moments(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return means and standard deviations (divisor n) of the columns of a field, ``(P,)`` each.

        A standard deviation is NaN where it cannot be computed from sums, see :func:`bayesfed.datasets.standardise`.
        """
        n, *rest = self.totals[FIELD + name][0]
        total, squares = np.split(np.array(rest), 2)
        loc, mean_square = total / n, squares / n
        variance = mean_square - np.square(loc)
        # below this threshold rounding is no longer negligible; a comparison with NaN is False
        sound = variance > 1e-12 * mean_square
        return loc, np.sqrt(np.where(sound, variance, np.nan))


def merge_columns(reports: Mapping[str, ClientColumns], what: str) -> ClientColumns:
    """Merge the reports of clients into that of their institution, or those of institutions into that of all.

    Args:
        reports: by client, or by institution.
        what: ``"client"`` or ``"institution"``, for messages.

    Raises:
        FormulaError: a column differs in kind, or in the order of its categories.

    Example:
        >>> from bayesfed.formulas.agreement import merge_columns
        >>> from bayesfed.formulas.columns import ClientColumns
        >>> one, other = (ClientColumns({"arm": "text"}, {"arm": (arm,)}, {}) for arm in ("new", "control"))
        >>> merge_columns({"north": one, "south": other}, "client").levels
        {'arm': ('control', 'new')}
    """
    (name, first), *others = reports.items()
    for other, report in others:
        for column, kind in first.kinds.items():
            if report.kinds.get(column) != kind:
                raise FormulaError(_other_kind(what, column, other, report, name, first))
    levels = {}
    for column in first.levels:
        merge = _same_order if first.kinds.get(column) == "ordered" else sorted_levels
        levels[column] = merge(column, [report.levels[column] for report in reports.values()])
    within = {f: max(report.within[f] for report in reports.values()) for f in first.within}
    return ClientColumns(first.kinds, levels, within)


def agree_on_columns(reports: Mapping[str, ClientColumns], what: str) -> Agreement:
    """Begin an agreement with the kinds and levels of the columns; arguments as for :func:`merge_columns`."""
    found = merge_columns(reports, what)
    _warn_of_levels(found.levels, reports, what)
    return Agreement(found.kinds, found.levels, found.within)


def add_totals(agreement: Agreement, totals: Mapping[str, np.ndarray]) -> Agreement:
    """Return the agreement with further sums over all clients, in the order of their names.

    Raises:
        FormulaError: sums are not finite.
    """
    found = dict(agreement.totals)
    for name, total in sorted(totals.items()):
        if not np.isfinite(total).all():
            raise FormulaError(f"the sums of {name.partition(' ')[2]} are not finite")
        found[name] = (*found.get(name, ()), tuple(total.tolist()))
    return replace(agreement, totals=found)


def make_coding(
    settings: FormulaSettings, agreement: Agreement, own: WithinClients | None = None
) -> Coding:
    """Make the coding that follows from an agreement.

    Args:
        settings: the formula.
        agreement: what is agreed so far; calls without their sums do not have their constants yet.
        own: the levels of factors within the clients, of the clients whose rows are to be coded.

    Raises:
        FormulaError: formulae cannot code a term, or the argument of a call is the same in all rows.

    Example:
        >>> import pandas as pd
        >>> from bayesfed.formulas.agreement import agree_on_columns, make_coding
        >>> from bayesfed.formulas.reports import report_columns
        >>> from bayesfed.formulas.settings import FormulaSettings
        >>> settings = FormulaSettings("y ~ kind", "gaussian", "hospital")
        >>> rows = {"A": pd.DataFrame({"y": [1.0], "kind": ["b"]}), "B": pd.DataFrame({"y": [2.0], "kind": ["a"]})}
        >>> reports = {name: report_columns(settings, name, own) for name, own in rows.items()}
        >>> coding = make_coding(settings, agree_on_columns(reports, "client"))
        >>> coding.levels["kind"], coding.fields("A", rows["A"])["X"].tolist()
        (('a', 'b'), [[1.0]])
    """
    coding = _make(settings.parse(), settings, agreement, own or {})
    for one in calls_of(coding):
        if totals := agreement.totals.get(one.name):
            _set_constants(one.call, totals)
    return coding


class Call(NamedTuple):
    """A call whose constants depend on all rows together.

    Attributes:
        name: of its sums.
        coding: of the predictor that it is in.
        component: of formulae, that it is in.
        call: of formulae.
    """

    name: str
    coding: Coding
    component: Any
    call: Any


def calls_of(coding: Coding) -> Iterator[Call]:
    """Yield the calls whose constants depend on all rows together; of a component the innermost first."""
    for predictor, part in {"": coding, **coding.parameters}.items():
        for i, component in enumerate(part.terms.components):
            found = [call for call in calls(component) if call.callee in STATEFUL]
            for j, call in enumerate(found):
                yield Call(f"call {predictor}{i}.{j}", part, component, call)


def open_calls(coding: Coding, totals: Totals) -> list[Call]:
    """Return the calls for which sums are to be asked now: of each component the first that lacks some."""
    found: dict[int, Call] = {}
    for one in calls_of(coding):
        if len(totals.get(one.name, ())) < _number_of_sums(one.call):
            found.setdefault(id(one.component), one)
    return list(found.values())


def _number_of_sums(call: Any) -> int:
    """Return how often sums are asked for a call."""
    transform = call.stateful_transform
    if call.callee == "poly":
        return 2 + int(transform.degree)
    return 1 + bool(call.callee == "bs" and transform._center)


def _set_constants(call: Any, totals: Sequence[Sequence[float]]) -> None:
    """Set the constants of a call, from the moments of its argument and, if there are any, from further sums.

    - of orthogonal polynomials, Σ P_k² and Σ x P_k², see :func:`bayesfed.formulas.reports.polynomial`;
    - of a spline, the sums of its columns, which centre them.
    """
    (n, total, squares), *others = totals
    mean = total / n
    sd = float(np.sqrt(max(squares / n - mean * mean, 0.0)))
    if not sd > 0:
        raise FormulaError(f"{call}: {call.args[0]} is the same in all rows")
    transform = call.stateful_transform
    if call.callee == "poly":
        for k, (norm, moment) in enumerate(others):
            transform.norms2[k], transform.alpha[k] = norm, moment / norm
    elif call.callee == "bs":
        from formulae.utils import get_centering_matrix

        for sums in others:
            transform._centering_matrix = get_centering_matrix(np.array([sums]))
    else:
        transform.mean, transform.std = mean, sd


def _make(
    terms: Terms, settings: FormulaSettings, agreement: Agreement, own: WithinClients
) -> Coding:
    """Make the coding of a predictor and of those of parameters."""
    columns, as_category = columns_of(terms, settings)
    factors = [group.factor for group in terms.groups]
    kinds = {column: agreement.kinds[column] for column in columns}
    levels = {
        name: found
        for name, found in agreement.levels.items()
        if (name in columns and (kinds[name] != "number" or name in as_category)) or name in factors
    }
    within = {f: agreement.within[f] for f in factors if f in agreement.within and f not in levels}
    coding = Coding(
        terms=terms,
        client=settings.client,
        kinds=kinds,
        levels=levels,
        within=within,
        own={factor: own[factor] for factor in within if factor in own},
        categories=settings.kind.categories,
    )
    _evaluate(coding)
    parameters = {
        name: _make(part, settings, agreement, own) for name, part in terms.parameters.items()
    }
    parts = (*parameters.values(), coding)
    coding = replace(
        coding,
        kinds={k: v for part in parts for k, v in part.kinds.items()},
        levels={k: v for part in parts for k, v in part.levels.items()},
        within={k: v for part in parts for k, v in part.within.items()},
        own={k: v for part in parts for k, v in part.own.items()},
        parameters=parameters,
    )
    return coding


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
            own = levels.get(column, ("a",))  # names the client or a level within it
            values = [own[i % len(own)] for i in range(size)]
            witness[column] = pd.Categorical(values, categories=list(own), ordered=True)
    with np.errstate(all="ignore"):
        try:
            model.eval(pd.DataFrame(witness), environment())
        except Exception as error:  # formulae's errors have no class in common
            raise FormulaError(f"formula {coding.terms.text!r} cannot be coded: {error}") from None


def share_levels(
    agreement: Agreement, own: WithinClients
) -> tuple[Agreement, dict[str, Mapping[str, tuple[Level, ...]]]]:
    """Let clients number the levels of a factor within them alike, if one client has more than half of all levels.

    This is for one process, where the levels of all clients are there. Between machines, and for factors such as
    identifiers, each client numbers its own.

    Returns:
        The agreement with the levels of such factors, and the clients' own levels of the other factors.
    """
    shared, kept = {}, dict[str, Mapping[str, tuple[Level, ...]]]()
    for factor, levels in own.items():
        union = sorted_levels(factor, list(levels.values()))
        if 2 * agreement.within[factor] <= len(union):
            kept[factor] = levels
        else:
            shared[factor] = union
    return replace(agreement, levels={**agreement.levels, **shared}), kept


def _other_kind(
    what: str, column: str, name: str, report: ClientColumns, other: str, first: ClientColumns
) -> str:
    kind, expected = report.kinds.get(column, "nothing"), first.kinds[column]
    text = f"{what} {name!r}: {column!r} holds {kind}, where {what} {other!r} has {expected}"
    if {kind, expected} == {"number", "text"}:
        whose = name if kind == "number" else other
        return (
            f"{text}: write the values as text at all of them, such as 'grade 1' for 1 at {what} {whose!r}, or as "
            "numbers"
        )
    return text


def _warn_of_levels(
    levels: Mapping[str, tuple[Level, ...]], reports: Mapping[str, ClientColumns], what: str
) -> None:
    """Warn of text with many levels, most of which one client has alone: it may be an identifier or a date."""
    for column in levels.keys() & next(iter(reports.values())).kinds.keys():
        counts = Counter(level for report in reports.values() for level in report.levels[column])
        alone = sum(count == 1 for count in counts.values())
        if len(counts) > MANY_LEVELS and len(reports) > 1 and 2 * alone > len(counts):
            warnings.warn(
                f"column {column!r} has {plural(len(counts), 'level')}, each of which has an effect of its own, and "
                f"{alone} of them occur at one {what} only. Levels leave the {what}s when the coding is agreed: if "
                "they are dates, identifiers or numbers stored as text, convert the column first",
                stacklevel=4,
            )


def _same_order(column: str, orders: Sequence[tuple[Level, ...]]) -> tuple[Level, ...]:
    """Return the categories of an ordered categorical, which must be the same for all clients."""
    if any(order != orders[0] for order in orders):
        raise FormulaError(
            f"column {column!r} is an ordered categorical with other categories at some clients: give all of them "
            "the same categories"
        )
    return orders[0]
