"""The rows at which an effect is computed, with some of their variables set to other values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bayesfed.data.columns import UnknownName
from bayesfed.data.federation import Federation
from bayesfed.data.frames import to_pandas
from bayesfed.data.plural import plural
from bayesfed.elbo.sites import InspectedModel
from bayesfed.formulas.formula import Formula
from bayesfed.output.fitted import Fitted
from bayesfed.vmap.one_client import OneClient

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Shift:
    """An amount that is added to each row's own value."""

    amount: float


Setting = Mapping[str, Any]
"""Variable to the value, or the :class:`Shift`, that all rows get."""


@dataclass(frozen=True)
class FieldRows:
    """Rows of a federation, whose variables are its fields; ``x[1]`` is entry 1 of the vector ``x``."""

    federation: Federation
    text: str

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.federation.rows

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.federation)

    def at(self, setting: Setting) -> Federation:
        """Return the rows with some fields set to other values.

        Raises:
            KeyError: there is no such field.
            ValueError: the value does not fit the field.
        """
        fields: dict[str, Any] = dict(self.federation.fields)
        for name, value in setting.items():
            field, entry = self._parts(name)
            shift = isinstance(value, Shift)
            amount = value.amount if shift else value
            old = torch.as_tensor(self.federation[field] if field == name else fields[field])
            if isinstance(amount, str) or not (old.is_floating_point() or amount == int(amount)):
                raise ValueError(
                    f"field {field!r} holds {old.dtype}: it cannot be set to {amount!r}"
                )
            new = old.clone()
            new[entry] = (old[entry] if shift else 0) + amount
            fields[field] = new
        return replace(self.federation, fields=fields)

    def column(self, name: str) -> np.ndarray:
        """Return the values of a variable by row, or the clients' names."""
        if name == self.federation.client_dim:
            return np.array(self.federation.names, dtype=object)[self.federation.owner.cpu()]
        field, entry = self._parts(name)
        values = self.federation[field][entry]
        if values.ndim > 1:
            raise ValueError(f"field {name!r} is a vector: name an entry, as in {name}[0]")
        return values.cpu().numpy()

    def levels(self, name: str) -> list[Any] | None:
        """Return 0 and 1 if a field has no other values."""
        return _binary(self.column(name))

    def _parts(self, name: str) -> tuple[str, tuple[Any, ...]]:
        found = re.fullmatch(r"(.+)\[(\d+)\]", name)
        if found is None or name in self.federation.fields:
            self.federation.event_shape(name)  # raises KeyError
            return name, (...,)
        self.federation.event_shape(found[1])
        return found[1], (..., int(found[2]))


@dataclass(frozen=True)
class FormulaRows:
    """Rows of frames, whose variables are the columns of a formula."""

    formula: Formula
    frames: Mapping[str, pd.DataFrame]
    text: str

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(map(len, self.frames.values()))

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.frames)

    def at(self, setting: Setting) -> Federation:
        """Return the encoded rows with some columns set to other values.

        Raises:
            KeyError: the formula has no such column.
            FormulaError: a value is not one of the column's levels.
        """
        check_columns(self.formula, setting)
        return self.formula.encode(
            {client: _assigned(rows, setting) for client, rows in self.frames.items()}
        )

    def column(self, name: str) -> np.ndarray:
        """Return the values of a column by row."""
        for client, rows in self.frames.items():
            if name not in rows:
                found = ", ".join(map(str, rows.columns))
                raise UnknownName(f"the frame of client {client!r} has no column {name!r}: {found}")
        return np.concatenate([rows[name].to_numpy() for rows in self.frames.values()])

    def levels(self, name: str) -> list[Any] | None:
        """Return the agreed levels of a column, its reference first, or 0 and 1 if it has no other numbers."""
        agreed = self.formula.coding.levels.get(name)
        if agreed is None:
            return _binary(self.column(name))
        reference = self.formula.coding.reference(name)
        return sorted(agreed, key=lambda level: level != reference)


Rows = FieldRows | FormulaRows


def check_columns(formula: Formula, setting: Setting) -> None:
    """Check that the columns of a setting are those of predictors, and that their values are of the agreed kind.

    Raises:
        KeyError: the formula has no such column.
        ValueError: a value is not one of the column's levels, or is text in place of a number.
    """
    coding = formula.coding
    own = [name for name in coding.kinds if name not in (coding.outcome, coding.client)]
    for name, value in setting.items():
        if name not in own:
            raise UnknownName(
                f"{name!r} is no column of the formula's predictors: {', '.join(own)}"
            )
        if isinstance(value, Shift):
            continue
        levels = coding.levels.get(name)
        if levels is not None and value not in levels:
            known = ", ".join(map(str, levels[:8]))
            raise ValueError(f"{name!r} has the level {value!r}, which no client had: {known}")
        if levels is None and isinstance(value, str):
            raise ValueError(f"{name!r} is a column of numbers, not {value!r}")


def rows_of(fitted: Fitted, rows: Any, level: str) -> Rows:
    """Return the rows that a user asks for.

    Args:
        fitted: a posterior.
        rows: None for the rows of the posterior's clients; ``"balanced"`` for all combinations of the levels of a
            formula's columns, with numbers at their means; a frame for a formula, or a federation.
        level: see :mod:`bayesfed.effects`.

    Raises:
        ValueError: the formula's frames are not there, or ``rows`` is of another kind.
    """
    formula = formula_of(fitted.program.model)
    if isinstance(rows, Federation) or (rows is None and formula is None):
        federation = fitted.federation if rows is None else rows
        return FieldRows(federation, plural(federation.rows, "row"))
    if formula is None:
        raise ValueError(
            f"rows is {rows!r}: of a model that is not a formula, rows is a Federation, or None for those of the fit"
        )
    coding, names = formula.coding, fitted.federation.names
    own = formula.frames or {}
    if rows is None or isinstance(rows, str):
        if rows not in (None, "balanced"):
            raise ValueError(
                f'rows is {rows!r}: "balanced", a frame, or None for the rows of the fit'
            )
        if not own.keys() >= set(names):
            raise ValueError("pass the clients' frame, rows=frame: the formula does not have it")
        own = {name: own[name] for name in names}
    if rows is None:
        return FormulaRows(formula, own, plural(sum(map(len, own.values())), "row"))
    grid = _balanced(formula, own) if isinstance(rows, str) else to_pandas(rows)
    count = plural(len(grid), "row")
    text = f"a balanced grid of {count}" if isinstance(rows, str) else f"{count} given"
    if coding.client in grid.columns and not isinstance(rows, str):
        found = grid.groupby(coding.client, sort=False, observed=True)
        return FormulaRows(formula, {str(name): part for name, part in found}, text)
    if level == "clients":
        return FormulaRows(
            formula,
            {n: grid.assign(**{coding.client: n}) for n in names},
            f"{text} for each client",
        )
    return FormulaRows(formula, {names[0]: grid.assign(**{coding.client: names[0]})}, text)


def formula_of(model: Any) -> Formula | None:
    """Return the formula that a model is, or None."""
    while isinstance(model, OneClient | InspectedModel):
        model = model.model
    return model if isinstance(model, Formula) else None


def _assigned(rows: pd.DataFrame, setting: Setting) -> pd.DataFrame:
    """Return the rows with some columns set to other values."""
    values = {
        name: rows[name] + value.amount if isinstance(value, Shift) else value
        for name, value in setting.items()
    }
    return rows.assign(**values)


def _balanced(formula: Formula, clients: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return all combinations of the levels of a formula's columns, numbers at their means over all rows.

    A column of 0 and 1 has both. A factor within the clients, whose effects do not matter at the average client, has
    its first level; trials are 1.
    """
    import pandas as pd

    coding, terms = formula.coding, formula.coding.terms
    response = terms.model.response.var_names | {*terms.behind.values()}
    predictors = {name for part in coding.terms.all_components for name in part.var_names}
    predictors |= terms.incomplete
    within = {c for g in coding.terms.all_groups if coding.client in g.columns for c in g.columns}
    first, values = next(iter(clients.values())), dict[str, Any]()
    for name in coding.kinds:
        if name == coding.client or (name in response and name == coding.outcome):
            continue
        if name in response:
            values[name] = [1.0] if "trials" in formula.federation.fields else [first[name].iloc[0]]
        elif name in predictors and name not in coding.levels:
            numbers = np.concatenate([f[name].to_numpy(float) for f in clients.values()])
            values[name] = _binary(numbers) or [float(np.nanmean(numbers))]
        elif name in within and name not in predictors:
            values[name] = [first[name].iloc[0]]
        elif name in coding.levels:
            values[name] = list(coding.levels[name])
        else:
            raise ValueError(f'rows="balanced" has no levels of {name!r}: pass a frame')
    return pd.DataFrame(itertools.product(*values.values()), columns=list(values))


def _binary(values: np.ndarray) -> list[Any] | None:
    """Return 0 and 1 if there are no other values."""
    return [0, 1] if np.isin(values, (0, 1)).all() else None
