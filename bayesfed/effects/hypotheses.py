"""Hypotheses about global variables or effects, with their posterior probabilities."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesfed.data.columns import UnknownName
from bayesfed.effects.result import Effects
from bayesfed.output.posterior import Posterior

_OPERATIONS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name) for name in ("exp", "log", "sqrt", "abs", "sigmoid")
}


def hypotheses(
    source: Posterior | Effects,
    *texts: str,
    prob: float = 0.94,
    num_samples: int = 1000,
    seed: int = 0,
) -> Effects:
    """Compute posterior probabilities of hypotheses, or the posterior of functions of variables.

    A hypothesis is an inequality, ``"beta[0] > 0"``, ``"exp(treatment) < 0.8"``, ``"abs(b1 - b2) < 0.1"``. Its mean
    and interval are of the left side minus the right side. ``probability`` is the share of the draws in which it is
    true, and ``evidence_ratio`` that divided by the share in which it is false. A text without ``<`` or ``>`` is a
    function, with its mean and interval.

    Args:
        source: a posterior, whose variables are those of ``posterior.sample()`` and ``posterior.derived()``; or a
            result of this module, whose rows are ``b1``, ``b2``, and so on.
        *texts: hypotheses. A name that is not an identifier is in backticks, such as ``x:kind[b]``. ``beta[0]`` is
            the first entry of a vector, ``a['north']`` the client's own number (``a[0]`` is the first client's, also
            where clients are called 1, 2, ...). Allowed are numbers, names, entries, ``+ - * / **``, ``exp``, ``log``,
            ``sqrt``, ``abs`` and ``sigmoid``.
        prob: the probability of the intervals.
        num_samples: number of draws of a posterior.
        seed: seed of the draws.

    Raises:
        ValueError: a text is no hypothesis, or is an equality.
        KeyError: there is no such variable.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=20)
        >>> found = bf.effects.hypotheses(posterior, "mu > 0", "theta['A'] > theta['C']", "exp(mu / 10)")
        >>> found.to_frame().columns.tolist()
        ['hypothesis', 'mean', 'sd', '3%', '97%', 'probability', 'evidence_ratio']
    """
    if isinstance(source, Effects):
        variables = numbered(source)
        clients, level, caveat = dict[str, int](), source.level, source.caveat
    else:
        variables = variables_of(source, num_samples, seed)
        clients = {name: i for i, name in enumerate(source.federation.names)}
        level, caveat = "of the variables that are named", source.caveat
    return evaluate_all(texts, variables, clients, level, caveat, prob)


def evaluate_all(
    texts: Sequence[str],
    variables: Mapping[str, Tensor],
    clients: Mapping[str, int],
    level: str,
    caveat: str,
    prob: float,
) -> Effects:
    """Return the result for hypotheses about draws of variables; see :func:`evaluate`."""
    import pandas as pd

    draws, truths = [], []
    for text in texts:
        value, truth = evaluate(text, variables, clients)
        draws.append(value.double())
        truths.append(torch.full_like(draws[-1], torch.nan) if truth is None else truth.double())
    shares = torch.stack(truths).mean(1)
    tests = pd.DataFrame(
        {"probability": shares, "evidence_ratio": shares / (1 - shares)}, dtype=float
    )
    labels = pd.DataFrame({"hypothesis": list(texts)})
    values = torch.stack(draws, 1)
    return Effects(labels, values, "Hypotheses", level, prob=prob, tests=tests, caveat=caveat)


def numbered(found: Effects) -> dict[str, Tensor]:
    """Return the draws of a result's rows as ``b1``, ``b2``, and so on."""
    return {f"b{i + 1}": column for i, column in enumerate(found.draws.unbind(1))}


def variables_of(posterior: Posterior, num_samples: int, seed: int) -> dict[str, Tensor]:
    """Return draws of the variables, and of the derived values but those of rows."""
    derived = posterior.derived(num_samples=num_samples, seed=seed)
    dims = posterior.program.derived
    found = posterior.sample(num_samples, seed=seed) | {
        name: value for name, value in derived.items() if "observation" not in dims[name]
    }
    return {name: value.cpu() for name, value in found.items()}


def evaluate(
    text: str, variables: Mapping[str, Tensor], clients: Mapping[str, int]
) -> tuple[Tensor, Tensor | None]:
    """Return the left side minus the right side at each draw, ``(S,)``, and whether the hypothesis is true.

    Args:
        text: a hypothesis or a function, see :func:`hypotheses`.
        variables: draws by name, ``(S, *event)`` or ``(S, N, *event)``.
        clients: name to position.

    Raises:
        ValueError: the text cannot be read, or is not of one number.
        KeyError: there is no such variable.
    """
    quoted: list[str] = []

    def number(match: re.Match[str]) -> str:
        quoted.append(match[1])
        return f"quoted_{len(quoted) - 1}_"

    plain = re.sub("`([^`]+)`", number, text)
    try:
        tree = ast.parse(plain.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(
            f"{text!r} cannot be read: write an inequality, names that are no identifiers in backticks. "
            'An equality has posterior probability 0: write "abs(a - b) < 0.1"'
        ) from None
    names = {f"quoted_{i}_": name for i, name in enumerate(quoted)}

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() | str()):
                return node.value
            case ast.Name(id=name):
                name = names.get(name, name)
                if name not in variables:
                    raise UnknownName(f"no variable {name!r} in {text!r}: {', '.join(variables)}")
                return variables[name]
            case ast.Subscript(value=inner, slice=index):
                entry, found = value(index), value(inner)
                at = clients.get(entry, entry)
                if found.ndim < 2 or at not in range(found.shape[1]):
                    raise UnknownName(
                        f"{text!r}: {ast.unparse(inner)} has no entry or client {entry!r}"
                    )
                return found[:, at]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](value(operand))
            case ast.Call(func=ast.Name(id=name), args=[argument]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](torch.as_tensor(value(argument)))
        raise ValueError(
            f"{text!r} has {ast.unparse(node)!r}, which is not supported. There are numbers, names of variables and "
            f"entries, + - * / **, {', '.join(_FUNCTIONS)}, and one < or >"
        )

    found, truth = None, None
    if not isinstance(tree, ast.Compare):
        found = value(tree)
    elif len(tree.ops) == 1 and isinstance(tree.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        found = value(tree.left) - value(tree.comparators[0])
        truth = found < 0 if isinstance(tree.ops[0], ast.Lt | ast.LtE) else found > 0
    else:
        raise ValueError(f'{text!r} is not one < or >. Of an equality write "abs(a - b) < 0.1"')
    if not isinstance(found, Tensor) or found.ndim != 1:
        raise ValueError(f"{text!r} is not of one number at each draw: name entries, as in beta[0]")
    return found, truth
