"""A parsed formula: its outcome, its common terms and its groups. The package formulae parses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bayesfed.data.optional import import_optional
from bayesfed.formulas.habits import REMEDIES, parts_of, translate

STATEFUL = ("center", "scale", "standardize", "poly", "bs")
"""Functions of all rows together, computed from sums over the clients."""
BEHIND = ("weights", "cens", "se")
"""Functions of a column behind the outcome, ``y | weights(w) ~``, beside ``trials(n)``."""
CATEGORIES = ("C", "S", "T")
"""Functions that make categories of a column."""
PROPORTIONS = ("p", "prop", "proportion")
_OF_R = {
    name: getattr(np, name) for name in ("exp", "log", "log1p", "log2", "log10", "sqrt", "abs")
}
_OWN = (*STATEFUL, *CATEGORIES, "I", "offset", "c")
NAMESPACE = {"np": np, **_OF_R}
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
class Terms:
    """A parsed formula.

    Attributes:
        text: the formula.
        model: the model of formulae.
        groups: its group-specific terms, grouped as in the text.
        behind: function behind the outcome, one of :data:`BEHIND`, to its column.
        parameters: the predictors of further parameters by their names, as formulas with the same outcome.
    """

    text: str
    model: Any
    groups: tuple[Group, ...]
    behind: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Terms] = field(default_factory=dict)

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


def parse(text: str) -> Terms:
    """Parse a formula, which may have further lines with the predictors of parameters, ``sigma ~ x``.

    Raises:
        FormulaError: it cannot be parsed, or uses something unsupported.
        ImportError: formulae is not installed: ``pip install 'bayesfed[formulas]'``.

    Example:
        >>> from bayesfed.formulas.terms import parse
        >>> terms = parse("y ~ x + (1 + x | g) + (1 | item)")
        >>> [(group.factor, [term.name for term in group.terms], group.correlated) for group in terms.groups]
        [('g', ['1|g', 'x|g'], True), ('item', ['1|item'], False)]
        >>> list(parse("y ~ x; sigma ~ z").parameters)
        ['sigma']
    """
    first, *others = parts_of(text)
    outcome, parameters = first.partition("~")[0], dict[str, Terms]()
    for part in others:
        name, _, predictor = part.partition("~")
        if name.strip() in parameters:
            raise FormulaError(f"{name.strip()} has two predictors: write one")
        parameters[name.strip()] = _parse(f"{outcome}~{predictor}")
    return replace(_parse(first), parameters=parameters)


def _parse(text: str) -> Terms:
    """Parse a formula of one predictor."""
    parse_tokens, resolve, scan = (
        getattr(import_optional(f"formulae.{name.lower()}", "'bayesfed[formulas]'"), name)
        for name in ("Parser", "Resolver", "Scanner")
    )
    if not text.partition("~")[2] or not text.partition("~")[0].strip():
        raise FormulaError(f"formula {text!r}: write outcome ~ predictors, as in 'y ~ x + (1 | g)'")
    try:
        tokens, double = _single_pipes(scan(translate(text)).scan())
        parser = parse_tokens(tokens)
        tree = parser.parse()
        if not parser.at_end():
            where = parser.peek().lexeme
            remedy = ": write a group in parentheses, as in (x | g)" * (where == "|")
            raise FormulaError(f"formula {text!r} cannot be read from {where!r} on{remedy}")
        _check_powers(tree)
        behind = _behind_outcome(tree)
        model = resolve(tree).resolve()
        groups = [group for pipe in _pipes(tree.right) for group in _groups(pipe, double)]
    except FormulaError:
        raise
    except Exception as error:  # formulae's errors have no class in common
        reason = str(error) or type(error).__name__
        if "response term" in reason or "Response" in reason:
            reason = (
                "the outcome is one column, a function of it such as log(y) or I(y / n), or p(y, n)"
            )
        raise FormulaError(f"formula {text!r} cannot be read: {reason}") from None
    terms = Terms(text, model, tuple(groups), behind)
    _check(terms)
    return terms


def _single_pipes(tokens: list[Any]) -> tuple[list[Any], set[int]]:
    """Replace each ``||`` by ``|``, and return the tokens and the ids of the replaced ones."""
    kept: list[Any] = []
    double = set()
    for token in tokens:
        if token.kind == "PIPE" and kept and kept[-1].kind == "PIPE":
            double.add(id(kept[-1]))
        else:
            kept.append(token)
    return kept, double


def _behind_outcome(tree: Any) -> dict[str, str]:
    """Take what is behind the outcome out of a tree, ``y | weights(w) ~``; ``y | trials(n) ~`` becomes ``p(y, n) ~``.

    Returns:
        Function to column.
    """
    from formulae.expr import Binary, Call, Variable
    from formulae.token import Token

    left, found = tree.left, dict[str, str]()
    if not isinstance(left, Binary) or left.operator.kind != "PIPE":
        return found
    tree.left, parts = left.left, [left.right]
    while isinstance(parts[0], Binary) and parts[0].operator.kind == "PLUS":
        parts[:1] = [parts[0].left, parts[0].right]
    for call in parts:
        name = call.callee.name.lexeme if isinstance(call, Call) else ""
        if name == "trials" and len(call.args) == 1:
            tree.left = Call(Variable(Token("IDENTIFIER", "p")), [left.left, call.args[0]])
        elif name in BEHIND and len(call.args) == 1 and isinstance(call.args[0], Variable):
            found[name] = call.args[0].name.lexeme
        elif name in BEHIND:
            raise FormulaError(
                f"{name}() takes a column and nothing else, as in y | {name}(column) ~ x"
                + "; for a sigma beside it add (1 | row), where row numbers the rows"
                * (name == "se")
            )
        else:
            remedy = REMEDIES.get(name, "write an exposure as offset(log(n))")
            raise FormulaError(
                f"behind the outcome there are trials(n), weights(w), cens(c) and se(s): {remedy}"
            )
    return found


def _check_powers(tree: Any) -> None:
    """Raise FormulaError for the power of a column: a power of terms crosses them, and x crossed with x is x."""
    power = getattr(getattr(tree, "operator", None), "kind", None) == "STAR_STAR"
    if power and hasattr(tree.left, "name"):
        name, exponent = tree.left.name.lexeme, tree.right.value
        raise FormulaError(
            f"{name}**{exponent} crosses {name} with itself, which is {name}: write I({name}**{exponent}) for a power"
        )
    for part in ("expression", "left", "right"):
        if hasattr(tree, part):
            _check_powers(getattr(tree, part))


def _pipes(tree: Any) -> Iterator[Any]:
    """Yield each ``( ... | g)`` of a formula, in order."""
    if getattr(getattr(tree, "operator", None), "kind", None) == "PIPE":
        yield tree
        return
    for part in ("expression", "left", "right"):
        if hasattr(tree, part):
            yield from _pipes(getattr(tree, part))


def _groups(pipe: Any, double: set[int]) -> Iterator[Group]:
    """Yield a group for each factor of one ``( ... | g + h)``."""
    from formulae.resolver import Resolver

    found = Resolver(pipe).resolve()
    terms = getattr(found, "group_terms", [found])
    for factor in dict.fromkeys(term.factor.name for term in terms):
        own = tuple(term for term in terms if term.factor.name == factor)
        yield Group(factor, own, correlated=len(own) > 1 and id(pipe.operator) not in double)


def _check(terms: Terms) -> None:
    """Raise FormulaError for terms that need all rows in one place, are unsupported, or appear twice."""
    names = [term.name for group in terms.groups for term in group.terms]
    for name in names:
        if names.count(name) > 1:
            _, factor = name.split("|")
            raise FormulaError(
                f"{name} is there twice: (x | {factor}) has an intercept already. Write (1 + x | {factor}), or for "
                f"independent effects (1 + x || {factor})"
            )
    for call in calls(terms.outcome):
        if call.callee not in PROPORTIONS:
            _check_call(call, terms.outcome.name)
        if call.callee in (*STATEFUL, *CATEGORIES):
            raise FormulaError(
                f"{terms.outcome.name}: write the outcome itself, the model scales it internally"
            )
    for component in terms.components:
        for call in calls(component):
            _check_call(call, component.name)
        if str(component.name).replace(".", "").isdigit():
            raise FormulaError(
                f"{component.name} is a number, not a column: only 0 and 1 can be terms"
            )
    for group in terms.groups:
        for component in group.terms[0].factor.components:
            if hasattr(component, "call"):
                remedy = REMEDIES.get(component.call.callee, "store it as a column first")
                raise FormulaError(f"a group's factor is a column, not {component.name}: {remedy}")


def calls(component: Any) -> Iterator[Any]:
    """Yield the function calls of a component, innermost first."""
    node = getattr(component, "call", component)
    for part in (*getattr(node, "args", ()), *getattr(node, "kwargs", {}).values()):
        yield from calls(part)
    if hasattr(node, "callee"):
        yield node


def _check_call(call: Any, name: str) -> None:
    """Raise FormulaError for a function that is not one of single rows."""
    callee = call.callee
    if callee in CATEGORIES:
        if type(call.args[0]).__name__ != "LazyVariable":
            raise FormulaError(
                f"{name}: {callee}() takes a column; store {call.args[0]} as a column first"
            )
        return
    if callee == "bs" and not {"knots", "lower_bound", "upper_bound"} <= call.kwargs.keys():
        raise FormulaError(f"{name}: {REMEDIES['s']}")
    if not (callee in _OWN or callee in _OF_R or _is_elementwise(callee)):
        remedy = REMEDIES.get(
            callee,
            "store its values as a column first; supported are elementwise functions of numpy (np.log, np.sqrt, ...), "
            "I, C, offset, center and scale",
        )
        raise FormulaError(
            f"{name}: {callee}() is not a supported function of single rows, and no place has all rows: {remedy}"
        )


def _is_elementwise(callee: str) -> bool:
    """Return whether a call is of an elementwise function of numpy."""
    module, _, name = callee.partition(".")
    found = isinstance(getattr(np, name, None), np.ufunc) or name in ("clip", "round", "where")
    return module == "np" and found
