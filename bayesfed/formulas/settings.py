"""A formula before its coding is agreed: its text, its family and the column of the clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from bayesfed.formulas.families import FAMILIES, PARAMETERS, Family, Parameter, family_of
from bayesfed.formulas.habits import parts_of
from bayesfed.formulas.parse import parse
from bayesfed.formulas.terms import FormulaError, Terms


@dataclass(frozen=True)
class FormulaSettings:
    """A formula whose levels, means and scales are not agreed yet, so that it is no program.

    Attributes:
        text: the formula.
        family: the name of its family.
        client: the column that names the client.

    Example:
        >>> from bayesfed.formulas.settings import FormulaSettings
        >>> FormulaSettings("y ~ x + (1 | site)", "normal", "site")
        FormulaSettings(text='y ~ x + (1 | site)', family='gaussian', client='site')
    """

    text: str
    family: str
    client: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", "; ".join(parts_of(self.text)))
        object.__setattr__(self, "family", family_of(self.family).name)

    def __call__(self, federation: Any) -> None:
        """Fail: a program needs the agreement.

        Raises:
            FormulaError: always.
        """
        raise FormulaError(
            f"levels, means and scales of {self.text!r} are not agreed: bf.formula(text, frame) agrees on them in one "
            "process, bayesfed run between machines"
        )

    @property
    def kind(self) -> Family:
        """The family."""
        return FAMILIES[self.family]

    @property
    def description(self) -> dict[str, str]:
        """The settings as plain data."""
        return asdict(self)

    @cached_property
    def terms(self) -> Terms:
        """The terms, to be read only: formulae evaluates others, of :meth:`parse`."""
        return self.parse()

    def parse(self) -> Terms:
        """Return the terms, which formulae has not evaluated yet.

        Raises:
            FormulaError: the formula cannot be parsed, or has what the family does not have.
        """
        terms = parse(self.text)
        return with_own_names(
            terms, self.kind, self.kind.parameters_of(likelihood_of(terms, self.kind))
        )


def likelihood_of(terms: Terms, kind: Family) -> str:
    """Return the code of the likelihood with what is behind the outcome.

    Raises:
        FormulaError: the family does not have it.
    """
    found = kind.likelihood
    for name in terms.behind:
        if name != "weights" and name not in kind.behind:
            others = " and ".join(n for n, family in FAMILIES.items() if name in family.behind)
            raise FormulaError(f"family {kind.name!r} has no {name}(): {others} have")
        found = kind.behind.get(name, found)
    return found


def with_own_names(terms: Terms, kind: Family, parameters: Mapping[str, Parameter]) -> Terms:
    """Return the terms with this package's names of parameters; raise FormulaError for those of other families."""
    found = {}
    for name, part in terms.parameters.items():
        if name in terms.uncertain:
            if name in {*parameters, *PARAMETERS}:
                raise FormulaError(
                    f"{name!r} is a parameter of the {kind.name} family: rename the column"
                )
            found[name] = part
            continue
        own = name if name in parameters else PARAMETERS.get(name, name)
        if own not in parameters:
            has = ", ".join(parameters) or "no parameter"
            raise FormulaError(f"{name} ~ ...: the {kind.name} family has {has} beside the mean")
        for group in part.groups:
            if [term.name for term in group.terms] != [f"1|{group.factor}"]:
                raise FormulaError(
                    f"{name} ~ ... has random intercepts alone, (1 | {group.factor}): with further effects fits seldom "
                    "converge; write the model in Pyro"
                )
        found[own] = part
    if kind.categories and (hasattr(terms.outcome, "call") or terms.outcome.reference is not None):
        raise FormulaError(
            f"family {kind.name!r}: the outcome is a column whose levels are the categories, not {terms.outcome.name}"
        )
    return replace(terms, parameters=found)
