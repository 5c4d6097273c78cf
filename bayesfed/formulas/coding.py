"""How the clients' columns become numbers: agreed from sets of levels and from sums, then done by each client alone.

What leaves a client at the start: of each column that the formula names whether it holds numbers or text, of text and
of factors the set of levels, and sums. The codes of a level (which is the reference, which interactions span the
intercept) are formulae's, worked out on a table that holds every agreed level and nobody's rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from bayesfed.data.columns import check_columns
from bayesfed.formulas.terms import (
    CATEGORIES,
    NAMESPACE,
    PROPORTIONS,
    STATEFUL,
    FormulaError,
    Group,
    Terms,
    calls,
)

Level = Any
"""A level of a column; of a factor made of several columns a tuple."""


@dataclass(frozen=True)
class Seen:
    """What a client says of its rows before anything is agreed.

    Attributes:
        kinds: column to ``"number"``, ``"text"`` or, of an ordered categorical, ``"ordered"``.
        levels: column, or a group's factor, to its levels; no count of any.
    """

    kinds: Mapping[str, str]
    levels: Mapping[str, tuple[Level, ...]]


@dataclass(frozen=True)
class Coding:
    """The agreed coding: from any client's rows to its fields.

    Attributes:
        terms: the formula, evaluated by formulae at the agreed levels.
        client: the column that says whose row it is.
        kinds: see :class:`Seen`.
        levels: column, or a group's factor, to the levels of all clients, sorted.
    """

    terms: Terms
    client: str
    kinds: Mapping[str, str]
    levels: Mapping[str, tuple[Level, ...]]

    @property
    def intercept(self) -> bool:
        """Whether the common terms have an intercept."""
        return any(term.kind == "intercept" for term in self.terms.model.common_terms)

    @property
    def offset(self) -> bool:
        """Whether there are offsets."""
        return any(term.kind == "offset" for term in self.terms.model.common_terms)

    @property
    def common(self) -> list[Any]:
        """formulae's common terms that have columns."""
        kinds = ("intercept", "offset")
        return [term for term in self.terms.model.common_terms if term.kind not in kinds]

    @property
    def outcome(self) -> str:
        """What the outcome is called: of a proportion the column of its successes."""
        outcome = self.terms.outcome
        return str(outcome.call.args[0] if _is_proportion(outcome) else outcome.name)

    @property
    def keyed(self) -> list[tuple[str, Group]]:
        """The groups, each with its factor, or where a factor has several ``g``, ``g.2``, ..."""
        found: list[tuple[str, Group]] = []
        for group in self.terms.groups:
            before = sum(other.factor == group.factor for _, other in found)
            found.append((f"{group.factor}.{before + 1}" if before else group.factor, group))
        return found

    def of_group(self, group: Group) -> list[Any]:
        """formulae's expressions of a group."""
        by_name = {term.name: term.expr for term in self.terms.model.group_terms}
        return [by_name[term.name] for term in group.terms]

    def fields(self, name: str, rows: pd.DataFrame) -> dict[str, np.ndarray]:
        """One client's fields: its own columns, which no other client is needed for.

        Args:
            name: the client.
            rows: its rows; the outcome may be missing altogether.

        Returns:
            ``X`` ``(n, P)``, the columns of the common terms; ``offset`` ``(n,)``; for each group ``X|g`` ``(n, K)``
            and, where its factor is not the client, the number of the level, named as the factor; the outcome and
            ``trials``.

        Raises:
            FormulaError: a column is missing, holds other levels or nothing, or is not finite once coded.
        """
        rows = self._checked(name, rows)
        found = {}
        with np.errstate(all="ignore"):
            if self.common:
                found["X"] = _stacked(self.common, rows)
            if self.offset:
                offsets = [t for t in self.terms.model.common_terms if t.kind == "offset"]
                found["offset"] = _stacked(offsets, rows).sum(1)
            for key, group in self.keyed:
                exprs = [expr for expr in self.of_group(group) if expr.kind != "intercept"]
                if exprs:
                    found[f"X|{key}"] = _stacked(exprs, rows)
                if group.columns != [self.client]:
                    found[group.factor] = self._index(group, rows)
            found |= self._outcome(name, rows)
        for label, values in found.items():
            if not np.isfinite(values).all():
                row = int((~np.isfinite(values.reshape(len(rows), -1)).all(1)).argmax())
                raise FormulaError(
                    f"client {name!r}, row {rows.index[row]}: {self._culprit(label, rows)} is not finite there"
                )
        return found

    def _culprit(self, label: str, rows: pd.DataFrame) -> str:
        """The term of a field that is not finite."""
        groups = [expr for _, group in self.keyed for expr in self.of_group(group)]
        terms = [
            term for term in (*self.terms.model.common_terms, *groups) if term.kind != "intercept"
        ]
        with np.errstate(all="ignore"):
            wrong = (t.name for t in terms if not np.isfinite(_stacked([t], rows)).all())
            return next(wrong, label) if label[0] == "X" or label == "offset" else label

    def _checked(self, name: str, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows with the columns that are needed, each of the agreed kind and without gaps."""
        outcome = self.terms.model.response.var_names & set(self.kinds)
        used = {column for component in self.terms.components for column in component.var_names}
        idle = (outcome - set(rows.columns)) | ({self.client} - used)
        needed = [column for column in self.kinds if column not in idle]
        check_columns(f"frame of client {name!r}", needed, rows.columns)
        kept = {}
        for column in needed:
            values = rows[column]
            _check_whole(name, column, values)
            kind = _kind(column, values)
            if (kind == "number") != (self.kinds[column] == "number"):
                raise FormulaError(
                    f"client {name!r}: {column!r} holds {kind}, where other clients have {self.kinds[column]}"
                )
            if column not in self.levels:
                kept[column] = values.astype(float)
                continue
            agreed = {level: level for level in self.levels[column]}  # 1.0 is 1 and True, as agreed
            new = next((level for level in values.tolist() if level not in agreed), None)
            if new is not None:
                known = ", ".join(map(str, self.levels[column][:8]))
                raise FormulaError(
                    f"client {name!r}: {column!r} has the level {new!r}, which no client had when the levels "
                    f"were agreed ({known}{', ...' if len(agreed) > 8 else ''}). Leave such rows out"
                )
            levels = [agreed[level] for level in values.tolist()]
            kept[column] = pd.Series(levels, values.index, None if kind == "number" else object)
        return pd.DataFrame(kept, index=rows.index)

    def _index(self, group: Group, rows: pd.DataFrame) -> np.ndarray:
        """Which of a factor's levels each row has."""
        number = {level: i for i, level in enumerate(self.levels[group.factor])}
        keys = list(_levels(group, self.client, rows))
        new = next((key for key in keys if key not in number), None)
        if new is not None:
            raise FormulaError(
                f"{group.factor!r} has the level {new!r}, which no client had when the levels were agreed. Leave such "
                "rows out"
            )
        return np.array([number[key] for key in keys], dtype=np.int64)

    def _outcome(self, name: str, rows: pd.DataFrame) -> dict[str, np.ndarray]:
        """The outcome, where there is one, and the trials of a proportion."""
        outcome, found = self.terms.outcome, {}
        there = set(rows.columns)
        if not hasattr(outcome, "call"):
            if outcome.name not in there:
                return {}
            values = rows[outcome.name]
            if outcome.reference is not None:
                return {outcome.name: (values == outcome.reference).to_numpy(float)}
            if self.kinds[outcome.name] != "number":
                raise FormulaError(
                    f"the outcome {outcome.name!r} is text: say which level is 1, as in {outcome.name}["
                    f"{str(self.levels[outcome.name][-1])!r}] ~ ..., of the bernoulli family"
                )
            return {outcome.name: values.to_numpy(float)}
        env = _environment()
        if not _is_proportion(outcome):
            needed = outcome.var_names & set(self.kinds)
            return (
                {outcome.name: _numbers(outcome.call.eval(rows, env), len(rows))}
                if needed <= there
                else {}
            )
        successes, trials = outcome.call.args
        if str(trials) in there or hasattr(trials, "value"):
            found["trials"] = _numbers(trials.eval(rows, env), len(rows))
        if str(successes) in there:
            found[str(successes)] = _numbers(successes.eval(rows, env), len(rows))
        if len(found) == 2 and (found["trials"] < found[str(successes)]).any():
            raise FormulaError(f"client {name!r}: {successes} is larger than {trials}")
        return found


def agree(terms: Terms, clients: Mapping[str, pd.DataFrame], client: str) -> Coding:
    """The coding that all clients use, from what each says of its rows.

    Args:
        terms: the formula.
        clients: the rows by client's name.
        client: the column that says whose row it is.

    Raises:
        FormulaError: clients hold different things under one name, or what cannot be coded.
        KeyError: a column is not there.

    Example:
        >>> import pandas as pd
        >>> from bayesfed.formulas.coding import agree
        >>> from bayesfed.formulas.terms import parse
        >>> rows = {"A": pd.DataFrame({"y": [1.0], "kind": ["b"]}), "B": pd.DataFrame({"y": [2.0], "kind": ["a"]})}
        >>> coding = agree(parse("y ~ kind"), rows, "hospital")
        >>> coding.levels["kind"], coding.fields("A", rows["A"])["X"].tolist()
        (('a', 'b'), [[1.0]])
    """
    said = {name: seen(terms, name, rows, client) for name, rows in clients.items()}
    first = next(iter(said.values()))
    for name, one in said.items():
        for column, kind in one.kinds.items():
            if kind != first.kinds[column]:
                raise FormulaError(
                    f"client {name!r}: {column!r} holds {kind}, where client {next(iter(said))!r} has "
                    f"{first.kinds[column]}"
                )
    ordered = {
        column: _in_order(column, [one.levels[column] for one in said.values()])
        for column, kind in first.kinds.items()
        if kind == "ordered"
    }
    levels = {
        column: ordered.get(column)
        or _sorted(column, (one.levels[column] for one in said.values()))
        for column in first.levels
    }
    coding = Coding(terms, client, first.kinds, levels)
    _evaluate(coding)
    for component, call in _stateful(coding):
        parts = [
            call.args[0].eval(coding._checked(n, rows), component.env)
            for n, rows in clients.items()
        ]
        mean, sd = _moments(parts)
        if not sd > 0:
            raise FormulaError(f"{call}: {call.args[0]} is the same in all rows")
        call.stateful_transform.mean, call.stateful_transform.std = mean, sd
    return coding


def seen(terms: Terms, name: str, rows: pd.DataFrame, client: str) -> Seen:
    """What one client says of its rows: all that leaves it before the sums."""
    names = {str(variable) for variable in terms.model.var_names} - {""}
    columns = sorted(names - _known())
    check_columns("frame", columns, rows.columns)
    for column in columns:
        _check_whole(name, column, rows[column])
    kinds = {column: _kind(column, rows[column]) for column in columns}
    as_category = {
        call.args[0].name
        for component in terms.components
        for call in calls(component)
        if call.callee in CATEGORIES
    }
    levels: dict[str, tuple[Level, ...]] = {}
    for column in columns:
        values = rows[column]
        if kinds[column] == "ordered":
            levels[column] = tuple(values.dtype.categories)
        elif kinds[column] == "text" or column in as_category:
            levels[column] = tuple(map(_whole, pd.unique(values).tolist()))
    for group in terms.groups:
        if group.columns != [client]:
            levels[group.factor] = tuple(dict.fromkeys(_levels(group, client, rows)))
    return Seen(kinds, levels)


def _known() -> set[str]:
    """Names in calls that are no columns, such as ``Treatment`` in ``C(x, Treatment)``."""
    from formulae.categorical import ENCODINGS

    return {*ENCODINGS, *NAMESPACE}


def _check_whole(client: str, column: str, values: pd.Series) -> None:
    """Fail on a gap."""
    gaps = values.isna().to_numpy()
    if gaps.any():
        raise FormulaError(
            f"client {client!r}, row {values.index[int(gaps.argmax())]}: {column!r} is missing. Leave such rows out "
            f"first, frame.dropna(subset=[{column!r}])"
        )


def _kind(column: str, values: pd.Series) -> str:
    if isinstance(values.dtype, pd.CategoricalDtype):
        return "ordered" if values.dtype.ordered else "text"
    if is_numeric_dtype(values.dtype):
        return "number"
    if all(isinstance(value, str) for value in values):
        return "text"
    raise FormulaError(
        f"column {column!r} is {values.dtype}, neither numbers nor text: make one of these of it first"
    )


def _levels(group: Group, client: str, rows: pd.DataFrame) -> Iterator[Level]:
    """The level of a factor in each row; within a client, of what is beside the client."""
    columns = [column for column in group.columns if column != client]
    check_columns("frame", columns, rows.columns)
    if len(columns) == 1:
        return map(_whole, rows[columns[0]].tolist())
    return zip(*(map(_whole, rows[column].tolist()) for column in columns), strict=True)


def _whole(level: Level) -> Level:
    """A level without decimals, which a client's file may or may not have."""
    return int(level) if isinstance(level, float) and level.is_integer() else level


def _sorted(column: str, sets: Iterable[tuple[Level, ...]]) -> tuple[Level, ...]:
    union = {level for levels in sets for level in levels}
    try:
        return tuple(sorted(union))
    except TypeError:
        raise FormulaError(
            f"the levels of {column!r} are numbers at some clients and text at others"
        ) from None


def _in_order(column: str, orders: Sequence[tuple[Level, ...]]) -> tuple[Level, ...]:
    if any(order != orders[0] for order in orders):
        raise FormulaError(
            f"column {column!r} is an ordered categorical with other categories at some clients: give all the same"
        )
    return orders[0]


def _evaluate(coding: Coding) -> None:
    """Let formulae code the terms, on a table that has every agreed level and nobody's rows."""
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
            model.eval(pd.DataFrame(witness), _environment())
        except Exception as error:  # formulae's errors have no class in common
            raise FormulaError(f"formula {coding.terms.text!r} cannot be coded: {error}") from None


def _environment() -> Any:
    from formulae.environment import Environment
    from formulae.transforms import TRANSFORMS

    return Environment([{**NAMESPACE, **TRANSFORMS}])


def _stateful(coding: Coding) -> Iterator[tuple[Any, Any]]:
    """The calls of all terms whose constants are of all rows together, innermost first."""
    for component in coding.terms.components:
        for call in calls(component):
            if call.callee in STATEFUL:
                yield component, call


def _moments(parts: Iterable[Any]) -> tuple[float, float]:
    """Mean and standard deviation (divisor n) from n_i, Σ_j x_ij and Σ_j x_ij² of each client."""
    arrays = [np.asarray(part, dtype=float) for part in parts]
    n, total, squares = np.sum([[len(x), x.sum(), (x * x).sum()] for x in arrays], axis=0)
    mean = total / n
    return float(mean), float(np.sqrt(max(squares / n - mean * mean, 0.0)))


def _stacked(terms: Sequence[Any], rows: pd.DataFrame) -> np.ndarray:
    """The columns of terms, ``(n, P)``."""
    parts = [np.asarray(term.eval_new_data(rows), dtype=float) for term in terms]
    return np.column_stack([part.reshape(len(rows), -1) for part in parts])


def _numbers(values: Any, size: int) -> np.ndarray:
    return np.broadcast_to(np.asarray(values, dtype=float), (size,)).copy()


def _is_proportion(outcome: Any) -> bool:
    return hasattr(outcome, "call") and outcome.call.callee in PROPORTIONS
