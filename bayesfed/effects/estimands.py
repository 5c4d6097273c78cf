"""Predictions, marginal means, comparisons and slopes: functions of means over rows."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Unpack

import numpy as np
import torch

from bayesfed.effects.question import Question, Settings, make_question
from bayesfed.effects.result import Comparison, Effects, compare, comparison_of, text_of
from bayesfed.effects.rows import Rows, Setting, Shift
from bayesfed.output.posterior import Posterior

Variables = str | Sequence[str] | Mapping[str, Any]
STEP = 0.01
"""The step of a slope, in standard deviations of the variable."""


def predictions(
    posterior: Posterior,
    variables: Variables | None = None,
    **settings: Unpack[Settings],
) -> Effects:
    """Compute means of the expected outcome over rows, with some variables set to values.

    These are standardised means (g-computation): a variable is set to one value in all rows, the outcome is expected
    given each draw of the posterior, and averaged over the rows.

    Args:
        posterior: of a formula or of any Pyro program.
        variables: variable to values, ``{"treatment": ["drug", "placebo"], "age": [50, 60]}``, all combinations; the
            name of a variable for all its levels; by default the rows as they are.
        **settings: the level, the rows and others, see :class:`Settings`.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.varying_intercept, datasets.grunfeld(), rounds=20)
        >>> found = bf.effects.predictions(posterior, {"x[0]": [0.0, 1.0]}, level="average")
        >>> found.level
        'at the average client, whose variables are at the centre of their prior given θ; mean of 220 rows'
        >>> found.labels["x[0]"].tolist()
        [0.0, 1.0]
    """
    asked = make_question(posterior, **settings)
    return predict(asked, variables)


def predict(asked: Question, variables: Variables | None) -> Effects:
    """Return the answer to a question for predictions."""
    points = points_of(asked.rows, variables)
    if points and (twice := points[0].keys() & asked.groups[0].keys()):
        raise ValueError(f"by: {min(twice)!r} is set to values already, which are shown each")
    return asked.effects(points, asked.means(points), asked.quantity)


def marginal_means(
    posterior: Posterior,
    variables: Variables,
    **settings: Unpack[Settings],
) -> Effects:
    """Compute the marginal means of a formula, as emmeans does: over a balanced grid, at the average client.

    The grid has all combinations of the levels of the formula's columns, and of columns of 0 and 1; each other number
    is at its mean over all rows.
    ``marginal_means(...).pairs()`` are all pairwise contrasts. With ``scale="link"`` means are of the linear predictor.

    Args:
        posterior: of a formula.
        variables: names of columns, or column to values.
        **settings: the level, the rows and others, see :class:`Settings`.

    Example:
        >>> import bayesfed as bf, pandas as pd
        >>> frame = pd.DataFrame({"y": [1.0, 3.0, 2.0, 5.0], "kind": list("abab"), "site": list("AABB")})
        >>> model = bf.formula("y ~ kind + (1 | site)", frame)
        >>> means = bf.effects.marginal_means(bf.fit(model, model.federation, rounds=5), "kind")
        >>> means.labels["kind"].tolist(), means.pairs().labels["contrast"].tolist()
        (['a', 'b'], ['b - a'])
    """
    defaults: Settings = {"level": "average", "rows": "balanced"}
    return predictions(posterior, variables, **(defaults | settings))


def comparisons(
    posterior: Posterior,
    variables: Variables,
    *,
    comparison: Comparison = "difference",
    **settings: Unpack[Settings],
) -> Effects:
    """Compare means of the expected outcome at two values of a variable: risk differences, ratios, odds ratios.

    Means are those of :func:`predictions`, so that a ratio is one of means over the rows, not a mean of ratios. For
    each variable all other variables keep the values that they have in the rows.

    Args:
        posterior: of a formula, whose columns are the variables, or of any Pyro program, whose fields are; ``x[1]`` is
            entry 1 of a vector field.
        variables: variable to values, each compared with the first; or to a number, which is added to each row's own
            value. The name of a variable compares each level with the first, 1 with 0, or a row's value plus 1 with
            the row's value.
        comparison: ``"difference"``; ``"ratio"``; or ``"odds_ratio"`` of probabilities. On the scale of the link
            ``"ratio"`` is the exponential of the difference: the odds ratio for the logit link, the rate ratio for the
            log link.
        **settings: the level, the rows and others, see :class:`Settings`.

    Returns:
        A row for each variable, pair of values, group and category.

    Raises:
        ValueError: the outcome has no expectation, or an argument does not apply to the model.
        KeyError: a variable does not exist, or a client took no part in the fit.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.varying_intercept, datasets.grunfeld(), rounds=20)
        >>> found = bf.effects.comparisons(posterior, {"x[0]": [0.0, 1.0, 3.0]})
        >>> found.labels["contrast"].tolist()
        ['1 - 0', '3 - 0']
    """
    asked = make_question(posterior, **settings)
    return compare_means(asked, variables, comparison)


def compare_means(asked: Question, variables: Variables, comparison: Comparison) -> Effects:
    """Return the answer to a question for comparisons."""
    pairs = pairs_of(asked.rows, variables)
    points = distinct_points(pairs)
    means = asked.means(points)
    at_point = {_key(one): means[:, q] for q, one in enumerate(points)}
    labels, values = [], []
    for name, high, low in pairs:
        both = at_point[_key(high)], at_point[_key(low)]
        if torch.equal(*both):
            warnings.warn(
                f"{name!r} changes the outcome in no row: does the model read it?", stacklevel=3
            )
        value, contrast = compare(*both, comparison, asked.link)
        labels.append({"term": name, "contrast": contrast.format(_text(high), _text(low))})
        values.append(value)
    null = 0.0 if comparison == "difference" else 1.0
    estimand = comparison_of(asked.quantity, comparison, asked.link)
    return asked.effects(labels, torch.stack(values, 1), estimand, null)


def slopes(
    posterior: Posterior,
    variables: str | Sequence[str] | Mapping[str, float],
    **settings: Unpack[Settings],
) -> Effects:
    """Compute average marginal effects: means over rows of the derivative of the expected outcome.

    The derivative with respect to a variable that holds numbers is a central difference, whose step is a hundredth of
    the variable's standard deviation, unless it is given.

    Args:
        posterior: of a formula or of any Pyro program.
        variables: names of variables, or variable to step.
        **settings: the level, the rows and others, see :class:`Settings`.

    Raises:
        ValueError: a variable holds text, or the same number in all rows.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.varying_intercept, datasets.grunfeld(), rounds=20)
        >>> slope = bf.effects.slopes(posterior, "x[0]").draws[:, 0]
        >>> bool((slope - posterior.sample()["beta"][:, 0]).abs().max() < 1e-3)
        True
    """
    asked = make_question(posterior, **settings)
    if isinstance(variables, Mapping):
        return slopes_at(asked, variables)
    names = [variables] if isinstance(variables, str) else list(variables)
    assert asked.rows is not None
    return slopes_at(asked, {name: _step(asked.rows, name) for name in names})


def shifts_of(steps: Mapping[str, float]) -> list[Setting]:
    """Return the settings of slopes: one step up and one down, of each variable."""
    return [{name: Shift(sign * step)} for name, step in steps.items() for sign in (1, -1)]


def slopes_at(asked: Question, steps: Mapping[str, float]) -> Effects:
    """Return the answer to a question for slopes, given the steps of the derivatives."""
    means = asked.means(shifts_of(steps)).unflatten(1, (len(steps), 2))
    apart = 2 * torch.tensor(list(steps.values()), dtype=torch.float64)
    values = (means[:, :, 0] - means[:, :, 1]) / apart[:, None, None]
    labels = [{"term": name} for name in steps]
    return asked.effects(labels, values, f"Slope of {asked.quantity}", 0.0)


def _named(variables: Variables | None) -> Iterable[tuple[str, Any]]:
    """Yield the names of variables with what is given for each, None by default."""
    if isinstance(variables, Mapping):
        return variables.items()
    names = [variables] if isinstance(variables, str) else list(variables or ())
    return [(name, None) for name in names]


def points_of(rows: Rows | None, variables: Variables | None) -> list[Setting]:
    """Return the settings of predictions: all combinations of values."""
    found = {}
    for name, given in _named(variables):
        values = _levels(rows, name) if given is None else given
        if values is None:
            raise ValueError(f"{name!r} holds numbers: give values, {{{name!r}: [1.0, 2.0]}}")
        found[name] = [values] if isinstance(values, str | Real) else list(values)
    return [dict(zip(found, one, strict=True)) for one in itertools.product(*found.values())]


Pair = tuple[str, Setting, Setting]


def pairs_of(rows: Rows | None, variables: Variables) -> list[Pair]:
    """Return the pairs of settings of comparisons, each with its variable."""
    found: list[Pair] = []
    for name, values in _named(variables):
        given: Any = (_levels(rows, name) or 1.0) if values is None else values
        if isinstance(given, Real):
            found.append((name, {name: Shift(float(given))}, {name: Shift(0.0)}))
            continue
        first, *others = [given] if isinstance(given, str) else given
        if not others:
            raise ValueError(
                f"{name!r} has a single value, {first!r}: give two, or a number to add"
            )
        found += [(name, {name: other}, {name: first}) for other in others]
    return found


def distinct_points(pairs: Iterable[Pair]) -> list[Setting]:
    """Return the settings of pairs, each once."""
    return list({_key(one): one for _, high, low in pairs for one in (high, low)}.values())


def _levels(rows: Rows | None, name: str) -> list[Any] | None:
    return None if rows is None else rows.levels(name)


def _key(setting: Setting) -> tuple[Any, ...]:
    """Return a hashable form of a setting."""
    return tuple(setting.items())


def _text(setting: Setting) -> str:
    ((name, value),) = setting.items()
    if not isinstance(value, Shift):
        return text_of(value)
    return f"({name} + {value.amount:g})" if value.amount else name


def _step(rows: Rows, name: str) -> float:
    """Return the step of a slope."""
    values = rows.column(name)
    spread = float(np.nanstd(values)) if values.dtype.kind in "fiu" else 0.0
    if not spread > 0:
        raise ValueError(f"{name!r} holds text, or one number in all rows: use comparisons")
    return STEP * spread
