"""The parts of a formula, parsed by the package formulae, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bayesfed.data.optional import import_optional
from bayesfed.formulas.habits import REMEDIES, parts_of, translate
from bayesfed.formulas.terms import (
    BEHIND,
    CATEGORIES,
    OF_R,
    OWN_TERMS,
    PROPORTIONS,
    STATEFUL,
    FormulaError,
    Group,
    OwnTerm,
    Terms,
    calls,
)

_OWN = (*STATEFUL, *CATEGORIES, "I", "offset", "c")


def parse(text: str) -> Terms:
    """Parse a formula, which may have further lines with the predictors of parameters, ``sigma ~ x``.

    Raises:
        FormulaError: it cannot be parsed, or uses something unsupported.
        ImportError: formulae is not installed: ``pip install 'bayesfed[formulas]'``.

    Example:
        >>> from bayesfed.formulas.parse import parse
        >>> terms = parse("y ~ x + (1 + x | g) + (1 | item)")
        >>> [(group.factor, [term.name for term in group.terms], group.correlated) for group in terms.groups]
        [('g', ['1|g', 'x|g'], True), ('item', ['1|item'], False)]
        >>> list(parse("y ~ x; sigma ~ z").parameters)
        ['sigma']
        >>> parse("y ~ x + mi(z); z | mi() ~ x").uncertain
        {'z': OwnTerm(label='mi(z)', kind='mi', column='z', error=None)}
    """
    first, *others = parts_of(text)
    outcome, parameters, errors = first.partition("~")[0], dict[str, Terms](), dict[str, str]()
    for part in others:
        left, _, predictor = part.partition("~")
        name, behind, error = left.partition("|")
        name = name.strip()
        if name in parameters:
            raise FormulaError(f"{name} has two predictors: write one")
        parameters[name] = _parse(f"{outcome}~{predictor}")
        if behind:
            errors[name] = error.strip()[len("mi(") : -1].strip()
    main = _parse(first)
    if main.uncertain or errors:
        return _with_covariates(main, outcome, parameters, errors)
    return replace(main, parameters=parameters)


def _with_covariates(
    main: Terms, outcome: str, parameters: Mapping[str, Terms], errors: Mapping[str, str]
) -> Terms:
    """Return the terms with the predictors of covariates, ``z | mi() ~ x``; ``me(x, s)`` has one without terms.

    Args:
        main: the terms of the outcome.
        outcome: what is left of its ``~``.
        parameters: the predictors of the further lines.
        errors: covariate of a line to the column of its standard errors, or an empty text.
    """
    parts, own = dict(parameters), list[OwnTerm]()
    for term in main.own:
        if term.kind == "mi" and term.column not in errors:
            raise FormulaError(
                f"{term.label}: add a line with the predictors of {term.column}, {term.column} | mi() ~ x, or ~ 1"
            )
        if term.kind == "me":
            parts[term.column] = _parse(f"{outcome}~ 1")
        own.append(replace(term, error=errors.get(term.column) or term.error))
    terms = replace(main, parameters=parts, own=tuple(own))
    for name in errors.keys() - {term.column for term in own if term.kind == "mi"}:
        raise FormulaError(f"{name} | mi() ~ ... is a line, and the outcome has no term mi({name})")
    if len(terms.uncertain) > 1:
        found = ", ".join(term.label for term in terms.uncertain.values())
        raise FormulaError(
            f"{found}: one covariate that is not known in each row is integrated out, not {len(terms.uncertain)}: "
            "impute the others first"
        )
    for part in parts.values():
        for term in part.uncertain.values():
            raise FormulaError(f"{term.label} is a term of the outcome's own predictor alone")
    for column, term in terms.uncertain.items():
        others = tuple(other for other in own if other != term)
        if any(column in part.columns for part in (replace(main, own=others), *parts.values())):
            raise FormulaError(
                f"{column!r} is in {term.label} and elsewhere: it is not known in each row, so write it once"
            )
        names = {name for found in parts[column].components for name in found.var_names}
        for name in names & main.model.response.var_names:
            raise FormulaError(
                f"leave {name} out of the predictor of {column!r}: {term.label} relates the two already"
            )
    return terms


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
        own = _own_terms(model)
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
    terms = Terms(text, model, tuple(groups), behind, own=own)
    _check(terms)
    return terms


def _own_terms(model: Any) -> tuple[OwnTerm, ...]:
    """Take the terms ``mi(z)``, ``me(x, s)`` and ``mo(level)`` out of a model of formulae."""
    found = list[OwnTerm]()
    for term in list(model.common_terms):
        (first, *others) = getattr(term, "components", None) or [None]
        call = getattr(first, "call", None)
        if others or call is None or call.callee not in OWN_TERMS:
            continue
        arguments = [*call.args, *call.kwargs.values()]
        names = [str(argument.name) for argument in arguments if hasattr(argument, "name")]
        if (
            len(names) < len(arguments)
            or len(names) != 1 + (call.callee == "me")
            or {*call.kwargs} - {"sdx"}
        ):
            raise FormulaError(f"{term.name}: {_USES[call.callee]}")
        found.append(OwnTerm(term.name, call.callee, *names))
        model.common_terms.remove(term)
    return tuple(found)


_USES = {
    "mi": "mi() takes a column, as in mi(z), and the formula a line z | mi() ~ x",
    "me": "me() takes a column and that of its standard errors, as in me(x, s)",
    "mo": "mo() takes a column of ordered categories or whole numbers, as in mo(level)",
}
"""What the functions of :data:`OWN_TERMS` take."""


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


def _check_call(call: Any, name: str) -> None:
    """Raise FormulaError for a function that is not one of single rows."""
    callee = call.callee
    if callee in OWN_TERMS:
        raise FormulaError(
            f"{name}: {callee}() is a term of its own, without interactions, effects of groups or functions of it"
        )
    if callee in CATEGORIES:
        if type(call.args[0]).__name__ != "LazyVariable":
            raise FormulaError(
                f"{name}: {callee}() takes a column; store {call.args[0]} as a column first"
            )
        return
    if callee == "bs" and not {"knots", "lower_bound", "upper_bound"} <= call.kwargs.keys():
        raise FormulaError(f"{name}: {REMEDIES['s']}")
    if not (callee in _OWN or callee in OF_R or _is_elementwise(callee)):
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
