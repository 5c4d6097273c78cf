"""A parsed formula: its outcome, its common terms and its groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

STATEFUL = ("center", "scale", "standardize", "poly", "bs")
"""Functions of all rows together, computed from sums over the clients."""
BEHIND = ("weights", "cens", "se")
"""Functions of a column behind the outcome, ``y | weights(w) ~``, beside ``trials(n)``."""
CATEGORIES = ("C", "S", "T")
"""Functions that make categories of a column."""
PROPORTIONS = ("p", "prop", "proportion")
OWN_TERMS = ("mi", "me", "mo")
"""Functions that are terms of their own: a covariate that is not known in each row, and monotonic effects."""
OF_R = {name: getattr(np, name) for name in ("exp", "log", "log1p", "log2", "log10", "sqrt", "abs")}
"""Functions of single rows that have names of R."""
NAMESPACE = {"np": np, **OF_R}
"""The names that a formula may use in addition to formulae's own functions."""


class FormulaError(ValueError):
    """A formula that cannot be parsed or does not fit the data; the message is one line with a remedy."""


@dataclass(frozen=True)
class Group:
    """``(1 + x | g)``: effects that differ between the levels of a factor.

    Attributes:
        factor: the factor as written, ``"g"`` or ``"g:h"``.
        terms: the group-specific terms of formulae.
        correlated: the effects of a level are correlated, as with ``|`` and not with ``||``.
    """

    factor: str
    terms: tuple[Any, ...]
    correlated: bool

    @property
    def columns(self) -> list[str]:
        """The columns of the data that form the factor."""
        return [component.name for component in self.terms[0].factor.components]


@dataclass(frozen=True)
class OwnTerm:
    """``mi(z)``, ``me(x, s)`` or ``mo(level)``.

    Attributes:
        label: the term as written.
        kind: the function.
        column: its first argument.
        error: the column of the standard errors with which the first is measured, or None.
    """

    label: str
    kind: str
    column: str
    error: str | None = None


@dataclass(frozen=True)
class Terms:
    """A parsed formula.

    Attributes:
        text: the formula.
        model: the model of formulae.
        groups: its group-specific terms, grouped as in the text.
        behind: function behind the outcome, one of :data:`BEHIND`, to its column.
        parameters: the predictors of further parameters, and of the covariates of ``mi`` and ``me``, by their names, as
            formulas with the same outcome.
        own: the terms that formulae does not code.
    """

    text: str
    model: Any
    groups: tuple[Group, ...]
    behind: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Terms] = field(default_factory=dict)
    own: tuple[OwnTerm, ...] = ()

    @property
    def uncertain(self) -> dict[str, OwnTerm]:
        """The covariates that are not known in each row: column to term."""
        return {term.column: term for term in self.own if term.kind != "mo"}

    @property
    def incomplete(self) -> set[str]:
        """The columns that may have missing values: these covariates and their standard errors."""
        found = {term.error for term in self.uncertain.values() if term.error}
        return found | self.uncertain.keys()

    @property
    def monotonic(self) -> list[OwnTerm]:
        """The terms ``mo(level)``."""
        return [term for term in self.own if term.kind == "mo"]

    @property
    def columns(self) -> set[str]:
        """The columns that the terms name, the outcome's among them."""
        names = {str(variable) for variable in self.model.var_names} | {*self.behind.values()}
        for term in self.own:
            names |= {term.column} | ({term.error} if term.error else set())
        return names - {""}

    @property
    def all_groups(self) -> list[Group]:
        """The groups of all predictors."""
        return [group for part in (self, *self.parameters.values()) for group in part.groups]

    @property
    def outcome(self) -> Any:
        """The outcome: a variable or call of formulae."""
        return self.model.response.term.components[0]

    @property
    def components(self) -> list[Any]:
        """The variables and calls of all terms, except the outcome and the groups' factors."""
        exprs = [term.expr for term in self.model.group_terms]
        found = (getattr(term, "components", []) for term in (*self.model.common_terms, *exprs))
        return [component for components in found for component in components]

    @property
    def all_components(self) -> list[Any]:
        """The components of all predictors."""
        return [c for part in (self, *self.parameters.values()) for c in part.components]


def calls(component: Any) -> Iterator[Any]:
    """Yield the function calls of a component, innermost first."""
    node = getattr(component, "call", component)
    for part in (*getattr(node, "args", ()), *getattr(node, "kwargs", {}).values()):
        yield from calls(part)
    if hasattr(node, "callee"):
        yield node
