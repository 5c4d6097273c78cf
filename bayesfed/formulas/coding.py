"""The coding of a client's columns as numbers, done by each client alone once the coding is agreed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bayesfed.data.columns import check_columns, client_name
from bayesfed.formulas.columns import (
    Level,
    check_complete,
    check_covariate,
    kind_of,
    levels_of,
)
from bayesfed.formulas.terms import NAMESPACE, PROPORTIONS, FormulaError, Group, Terms

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Coding:
    """The agreed coding, which turns any client's rows into its fields.

    Attributes:
        terms: the formula, evaluated by formulae at the agreed levels.
        client: the column that names the client of each row.
        kinds: column to ``"number"``, ``"text"`` or ``"ordered"``.
        levels: column, or a group's factor, to the levels of all clients, sorted.
        within: factor within the clients, such as identifiers, of which each client numbers its own levels from 0, to
            the largest number of levels that a client has.
        own: such a factor to the levels of each client, sorted; of clients that are elsewhere they are not here.
        categories: the outcome is one of several categories, coded by the number of its level.
        parameters: the coding of each predictor of a further parameter.
    """

    terms: Terms
    client: str
    kinds: Mapping[str, str]
    levels: Mapping[str, tuple[Level, ...]]
    within: Mapping[str, int] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, tuple[Level, ...]]] = field(default_factory=dict)
    categories: bool = False
    parameters: Mapping[str, Coding] = field(default_factory=dict)

    def count_levels(self, factor: str) -> int:
        """Return the number of a factor's levels; for the clients' own levels, the most that a client has."""
        return self.within.get(factor, len(self.levels.get(factor, ())))

    def reference(self, column: str) -> Level | None:
        """Return the level with which others are compared in treatment coding, or None if there is no such level."""
        for component in self.terms.components:
            if component.kind == "categoric" and component.var_names - {""} == {column}:
                zero = ~np.asarray(component.contrast_matrix.matrix).any(1)
                if zero.sum() == 1:
                    return list(self.levels[column])[int(zero.argmax())]
        return None

    @property
    def intercept(self) -> bool:
        """The common terms have an intercept."""
        return any(term.kind == "intercept" for term in self.terms.model.common_terms)

    @property
    def offset(self) -> bool:
        """The common terms have offsets."""
        return any(term.kind == "offset" for term in self.terms.model.common_terms)

    @property
    def common(self) -> list[Any]:
        """The common terms of formulae that have columns."""
        kinds = ("intercept", "offset")
        return [term for term in self.terms.model.common_terms if term.kind not in kinds]

    @property
    def outcome(self) -> str:
        """The name of the outcome; for a proportion, the column of its successes."""
        outcome = self.terms.outcome
        return str(outcome.call.args[0] if _is_proportion(outcome) else outcome.name)

    @property
    def keyed_groups(self) -> list[tuple[str, Group]]:
        """The groups with their keys: the factor, or ``g``, ``g.2``, ... if a factor has several groups."""
        found: list[tuple[str, Group]] = []
        for group in self.terms.groups:
            before = sum(other.factor == group.factor for _, other in found)
            found.append((f"{group.factor}.{before + 1}" if before else group.factor, group))
        return found

    def expressions(self, group: Group) -> list[Any]:
        """Return the expressions of a group, as formulae has them."""
        by_name = {term.name: term.expr for term in self.terms.model.group_terms}
        return [by_name[term.name] for term in group.terms]

    def fields(self, name: str, rows: pd.DataFrame) -> dict[str, np.ndarray]:
        """Compute one client's fields from its own rows.

        Args:
            name: the client.
            rows: its rows; the column of the outcome may be absent.

        Returns:
            ``X`` ``(n, P)``, the columns of the common terms; ``offset`` ``(n,)``; for each group ``X|g`` ``(n, K)``
            and, unless its factor is the client, the number of the level, named after the factor; the outcome,
            ``trials``, ``weights``, ``cens`` and ``se``; ``mo(level)`` ``(n, levels - 1)``; a covariate that is not
            known in each row, NaN where it is missing, and its standard error ``z.se``. For the predictors of further
            parameters ``sigma.X``, ...

        Raises:
            FormulaError: a column has missing values or other levels, or is not finite after coding.
            KeyError: a column is absent.
        """
        given, clients = rows, rows.get(self.client)
        rows = self.checked_rows(name, rows)
        found = {}
        with np.errstate(all="ignore"):
            if self.common:
                found["X"] = _stacked(self.common, rows)
            if self.offset:
                offsets = [t for t in self.terms.model.common_terms if t.kind == "offset"]
                found["offset"] = _stacked(offsets, rows).sum(1)
            for key, group in self.keyed_groups:
                exprs = [expr for expr in self.expressions(group) if expr.kind != "intercept"]
                if exprs:
                    found[f"X|{key}"] = _stacked(exprs, rows)
                if group.columns != [self.client]:
                    found[group.factor] = self._index(group, rows, clients)
            for term in self.terms.monotonic:
                found[term.label] = self._steps(term.column, rows)
            found |= self._outcome(name, rows) | self._behind(name, rows)
        for label, values in found.items():
            if not np.isfinite(values).all():
                row = int((~np.isfinite(values.reshape(len(rows), -1)).all(1)).argmax())
                raise FormulaError(
                    f"client {name!r}, row {rows.index[row]}: {self._culprit(label, rows)} is not finite there"
                )
        for parameter, coding in self.parameters.items():
            for label, values in coding.fields(name, given).items():
                predicts = label in ("X", "offset") or label.startswith(("X|", "mo("))
                found[f"{parameter}.{label}" if predicts else label] = values
        for column, term in self.terms.uncertain.items():
            found[column] = rows[column].to_numpy(float)
            if term.error is not None:  # a row without the covariate may have no standard error
                error = rows[term.error].to_numpy(float)
                found[f"{column}.se"] = np.where(np.isnan(found[column]), 1.0, error)
        return found

    def _steps(self, column: str, rows: pd.DataFrame) -> np.ndarray:
        """Return for each step from a level to the next whether a row lies above it, ``(n, levels - 1)``."""
        number = {level: i for i, level in enumerate(self.levels[column])}
        own = rows[column].map(number).to_numpy(int)
        return (own[:, None] > np.arange(len(number) - 1)).astype(float)

    def _culprit(self, label: str, rows: pd.DataFrame) -> str:
        """Return the name of the term of a field that is not finite."""
        groups = [expr for _, group in self.keyed_groups for expr in self.expressions(group)]
        terms = [
            term for term in (*self.terms.model.common_terms, *groups) if term.kind != "intercept"
        ]
        with np.errstate(all="ignore"):
            wrong = (t.name for t in terms if not np.isfinite(_stacked([t], rows)).all())
            return next(wrong, label) if label[0] == "X" or label == "offset" else label

    def checked_rows(self, name: str, rows: pd.DataFrame) -> pd.DataFrame:
        """Return the rows with the needed columns, each of the agreed kind and without missing values."""
        import pandas as pd

        optional = {self.terms.behind.get("weights"), self.terms.behind.get("cens")}
        outcome = (self.terms.model.response.var_names | optional) & set(self.kinds)
        used = {column for component in self.terms.all_components for column in component.var_names}
        idle = (outcome - set(rows.columns)) | ({self.client} - used)
        needed = [column for column in self.kinds if column not in idle]
        check_columns(f"frame of client {name!r}", needed, rows.columns)
        for term in self.terms.uncertain.values():
            check_covariate(name, term, rows)
        kept = {}
        for column in needed:
            values = rows[column]
            if column in self.terms.incomplete:
                kept[column] = pd.to_numeric(values).astype("Float64").astype(float)
                continue
            check_complete(name, column, values)
            if self.kinds[column] != "number" and column not in self.levels:
                kept[column] = values  # names the client or a level within it
                continue
            kind = kind_of(name, column, values)
            if (kind == "number") != (self.kinds[column] == "number"):
                raise FormulaError(
                    f"client {name!r}: {column!r} holds {kind}, where other clients have {self.kinds[column]}"
                )
            if column not in self.levels:
                kept[column] = values.astype(float)
                continue
            agreed = {level: level for level in self.levels[column]}  # 1.0, 1 and True are equal
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

    def _index(self, group: Group, rows: pd.DataFrame, clients: pd.Series | None) -> np.ndarray:
        """Return the number of a factor's level in each row; ``clients`` are the rows' clients."""
        keys: list[Any] = list(levels_of(group, self.client, rows))
        factor, own = group.factor, self.own.get(group.factor)
        if own is None:
            number: dict[Any, int] = {level: i for i, level in enumerate(self.levels[factor])}
        else:
            assert clients is not None
            keys = list(zip(map(client_name, clients), keys, strict=True))
            new = {key for key in keys if key[0] not in own}
            for name in {key[0] for key in new}:  # a new client numbers its own
                levels = sorted(level for client, level in new if client == name)
                own = {**own, name: tuple(levels)}
                if len(levels) > self.within[factor]:
                    raise FormulaError(
                        f"client {name!r} has {len(levels)} levels of {factor!r}, and at most {self.within[factor]} "
                        "were agreed. Leave rows of some out"
                    )
            number = {(c, level): i for c, levels in own.items() for i, level in enumerate(levels)}
        other = next((key for key in keys if key not in number), None)
        if other is not None:
            unknown = f"{factor!r} has the level {other!r}, which no client had"
            if own is not None:
                unknown = f"client {other[0]!r}: {factor!r} has the level {other[1]!r}, which the client did not have"
            raise FormulaError(f"{unknown} when the levels were agreed. Leave such rows out")
        return np.array([number[key] for key in keys], dtype=np.int64)

    def _outcome(self, name: str, rows: pd.DataFrame) -> dict[str, np.ndarray]:
        """Return the outcome, if the rows have it, and the trials of a proportion."""
        outcome, found = self.terms.outcome, {}
        there = set(rows.columns)
        if not hasattr(outcome, "call"):
            if outcome.name not in there:
                return {}
            values = rows[outcome.name]
            if self.categories:
                number = {level: i for i, level in enumerate(self.levels[outcome.name])}
                return {outcome.name: values.map(number).to_numpy(float)}
            if outcome.reference is not None:
                return {outcome.name: (values == outcome.reference).to_numpy(float)}
            if self.kinds[outcome.name] != "number":
                raise FormulaError(
                    f"the outcome {outcome.name!r} is text: name the level that is 1, as in {outcome.name}["
                    f"{str(self.levels[outcome.name][-1])!r}] ~ ..., and use the bernoulli family"
                )
            return {outcome.name: values.to_numpy(float)}
        env = environment()
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

    def _behind(self, name: str, rows: pd.DataFrame) -> dict[str, np.ndarray]:
        """Return weights, 1 for censored rows, and standard errors; without its column no row is censored."""
        found = {}
        for what, column in self.terms.behind.items():
            if column not in rows:  # rows to predict
                found[what] = np.full(len(rows), float(what == "weights"))
                continue
            values = rows[column].map(_CENSORED) if what == "cens" else rows[column]
            if self.kinds[column] != "number" and what != "cens":
                raise FormulaError(f"{what}({column}): {column!r} holds text, not numbers")
            fits = values.notna() if what == "cens" else values > 0
            if not fits.all():
                wrong = rows[column][~fits].tolist()[0]
                raise FormulaError(
                    f"client {name!r}: {what}({column}) is {wrong!r}, not {_BEHIND[what]}"
                )
            found[what] = values.to_numpy(float)
        return found


_CENSORED = {0: 0, 1: 1, "none": 0, "right": 1}
_BEHIND = {
    "cens": "0 or 'none' for a known time, 1 or 'right' for a later one (left- and interval-censored "
    "times are a model in Pyro)",
    "weights": "above 0: leave out rows of weight 0",
    "se": "above 0",
}
"""What the column of a function behind the outcome holds."""


def _vector(*values: float) -> np.ndarray:
    """Return the numbers of ``c(1, 2)``."""
    return np.array(values, dtype=float)


def environment() -> Any:
    """Return the functions that a formula may call, as an environment of formulae."""
    from formulae.environment import Environment
    from formulae.transforms import TRANSFORMS

    return Environment([{**NAMESPACE, "c": _vector, **TRANSFORMS}])


def _stacked(terms: Sequence[Any], rows: pd.DataFrame) -> np.ndarray:
    """Return the columns of terms, ``(n, P)``."""
    parts = [np.asarray(term.eval_new_data(rows), dtype=float) for term in terms]
    return np.column_stack([part.reshape(len(rows), -1) for part in parts])


def _numbers(values: Any, size: int) -> np.ndarray:
    """Return one number per row."""
    return np.broadcast_to(np.asarray(values, dtype=float), (size,)).copy()


def _is_proportion(outcome: Any) -> bool:
    return hasattr(outcome, "call") and outcome.call.callee in PROPORTIONS
