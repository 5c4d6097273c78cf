"""An institution's rows that a formula codes, the node's half of the agreement, and what of it is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bayesfed.deploy.coding_messages import AgreedCoding, Columns
from bayesfed.deploy.messages import MessageError, Tensors
from bayesfed.formulas.agreement import Agreement, WithinClients, make_coding, merge_columns
from bayesfed.formulas.clients import code_clients
from bayesfed.formulas.coding import Coding
from bayesfed.formulas.columns import ClientColumns
from bayesfed.formulas.formula import Formula, check_predictors, write_formula
from bayesfed.formulas.reports import own_levels, report_columns, sum_calls, sum_fields
from bayesfed.formulas.settings import FormulaSettings
from bayesfed.formulas.terms import FormulaError

if TYPE_CHECKING:
    import pandas as pd

_LARGE, _SMALL = 2.0**30, 2.0**-40


@dataclass(frozen=True)
class RowsToCode:
    """The rows of an institution's clients, with the columns of a formula.

    Attributes:
        settings: the formula.
        frames: client's name to rows.
        columns: the institution's report on its columns.
        own: the clients' levels of factors within them.
    """

    settings: FormulaSettings
    frames: Mapping[str, pd.DataFrame]
    columns: ClientColumns
    own: WithinClients

    @classmethod
    def read(cls, settings: FormulaSettings, frames: Mapping[str, pd.DataFrame]) -> RowsToCode:
        """Describe the rows of clients.

        Raises:
            FormulaError: a column is neither numbers nor text, has missing values, or has levels that cannot be sent.
            KeyError: a column does not exist.
        """
        reports = {name: report_columns(settings, name, rows) for name, rows in frames.items()}
        columns = merge_columns(reports, "client")
        for column, levels in columns.levels.items():
            for level in levels:
                if not all(isinstance(part, bool | int | float | str) for part in _parts(level)):
                    raise FormulaError(
                        f"column {column!r} has levels that are {type(level).__name__}: between machines levels are "
                        "text or numbers, so store them as text"
                    )
        return cls(settings, frames, columns, own_levels(settings, frames))

    def report(self, run: str, key: str | None) -> Columns:
        """Return the kinds and levels of the columns, as a message."""
        found = self.columns
        return Columns(
            run=run,
            kinds=dict(found.kinds),  # type: ignore[arg-type]
            levels=dict(found.levels),
            within=dict(found.within),
            key=key,
        )

    def sums(self, agreement: Agreement) -> dict[str, np.ndarray]:
        """Return the sums that come next in an agreement."""
        coding = self._coding(agreement)
        sums = sum_calls(coding, agreement, self.frames)
        return sums or sum_fields(coding, self.settings.kind, code_clients(coding, self.frames))

    def code(self, agreement: Agreement) -> Formula:
        """Return the program of a complete agreement, with the coded clients."""
        coding = self._coding(agreement)
        federation = code_clients(coding, self.frames)
        return write_formula(self.settings, agreement, coding, federation, self.frames)

    def _coding(self, agreement: Agreement) -> Coding:
        self._check(agreement)
        coding = make_coding(self.settings, agreement, self.own)
        check_predictors(self.settings, coding)
        return coding

    def _check(self, agreement: Agreement) -> None:
        """Fail on an agreement that is not one of the institution's columns.

        Raises:
            MessageError: names the column; it says what the report on the columns has said.
        """
        own = self.columns
        for column, kind in own.kinds.items():
            if agreement.kinds.get(column) != kind:
                other = agreement.kinds.get(column, "nothing")
                raise MessageError(f"{column!r} holds {kind}, where {other} was agreed")
        for column, levels in own.levels.items():
            agreed = agreement.levels.get(column, ())
            new = next((level for level in levels if level not in agreed), None)
            if new is not None:
                raise MessageError(
                    f"{column!r} has the level {new!r}, which was not among those that were agreed: leave such rows out"
                )
        for factor, most in own.within.items():
            if most > agreement.within.get(factor, 0):
                raise MessageError(
                    f"a client has {most} levels of {factor!r}, and at most {agreement.within.get(factor, 0)} were "
                    "agreed: leave the rows of some out"
                )


def read_columns(message: Columns) -> ClientColumns:
    """Return the report in a message."""
    return ClientColumns(message.kinds, message.levels, message.within)


def write_agreement(agreement: Agreement) -> AgreedCoding:
    """Return an agreement as a part of a message."""
    return AgreedCoding(
        kinds=dict(agreement.kinds),  # type: ignore[arg-type]
        levels=dict(agreement.levels),
        within=dict(agreement.within),
        totals={name: tuple(map(tuple, sums)) for name, sums in agreement.totals.items()},
    )


def read_agreement(message: AgreedCoding | None) -> Agreement:
    """Return the agreement in a message.

    Raises:
        MessageError: there is none.
    """
    if message is None:
        raise MessageError("a formula is fitted once its coding is agreed: the message has none")
    return Agreement(message.kinds, message.levels, message.within, message.totals)


def coding_digest(formula: Formula) -> str:
    """Return SHA-256 of a formula's program and its agreed coding, in hexadecimal: of all machines it is the same."""
    plain = write_agreement(formula.agreement).model_dump()
    text = json.dumps([formula.source, plain], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def split(sums: Mapping[str, np.ndarray]) -> Tensors:
    """Return sums ``(n,)`` as tensors ``(3, n)``, float64: x = 2³⁰ a + b + 2⁻⁴⁰ c.

    Secure sums are of fixed point, in steps of 2⁻⁵⁷ up to 2⁴⁰. So these are exact from 2⁻⁴⁰ in size, and keep the size
    of numbers from 10⁻²⁹ to 10²¹.

    Example:
        >>> import numpy as np
        >>> from bayesfed.deploy.coded import join, split
        >>> x = {"x": np.array([1e15 + 0.125, 3.0e-12])}
        >>> bool((join(split(x))["x"] == x["x"]).all())
        True
    """
    found: Tensors = {}
    for name, values in sums.items():
        x = torch.as_tensor(np.asarray(values, dtype=float))
        large = (x / _LARGE).round()
        rest = x - large * _LARGE
        middle = (rest / _SMALL).round() * _SMALL
        found[name] = torch.stack([large, middle, (rest - middle) / _SMALL])
    return found


def join(parts: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Invert :func:`split`."""
    scale = torch.tensor([_LARGE, 1.0, _SMALL], dtype=torch.float64)
    return {name: (part.T * scale).sum(-1).numpy() for name, part in parts.items()}


def _parts(level: Any) -> tuple[Any, ...]:
    return level if isinstance(level, tuple) else (level,)
