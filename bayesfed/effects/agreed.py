"""Effects that are agreed on before a fit: sums at the clients, and results from the sums of all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from bayesfed.data.federation import Federation, Model
from bayesfed.data.plural import plural
from bayesfed.effects.estimands import (
    compare_means,
    comparisons,
    distinct_points,
    pairs_of,
    points_of,
    predict,
    predictions,
    shifts_of,
    slopes,
    slopes_at,
)
from bayesfed.effects.hypotheses import evaluate_all, numbered, variables_of
from bayesfed.effects.means import Sums
from bayesfed.effects.question import (
    Question,
    caveat_of,
    level_text,
    make_question,
    outcome_of,
    quantity_of,
)
from bayesfed.effects.result import Effects
from bayesfed.effects.rows import (
    FieldRows,
    FormulaRows,
    Rows,
    Setting,
    check_columns,
    formula_of,
)
from bayesfed.elbo.program import Program
from bayesfed.output.posterior import Posterior
from bayesfed.settings import EffectSettings


def check_effect(model: Model, federation: Federation, agreed: EffectSettings) -> None:
    """Check before a fit that the variables of an effect exist and take their values.

    Raises:
        KeyError: a variable does not exist.
        ValueError: a value does not fit its variable, or a variable of comparisons has a single one.
    """
    formula = formula_of(model)
    if formula is not None and formula.frames is None:  # the rows are elsewhere
        for setting in settings_of(agreed):
            check_columns(formula, {**agreed.at, **setting})
        return
    rows: Rows = FieldRows(federation, "")
    if formula is not None and formula.frames is not None:
        rows = FormulaRows(formula, formula.frames, "")
    for setting in settings_of(agreed):
        rows.at({**agreed.at, **setting})
    for name in (*agreed.by, *([] if agreed.weights is None else [agreed.weights])):
        rows.column(name)


def effect(posterior: Posterior, agreed: EffectSettings) -> Effects:
    """Compute an effect over the rows of a posterior.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.effects.agreed import effect
        >>> from bayesfed.settings import EffectSettings
        >>> posterior = bf.fit(models.varying_intercept, datasets.grunfeld(), rounds=20)
        >>> effect(posterior, EffectSettings(variables={"x[0]": 1.0})).labels["contrast"].tolist()
        ['(x[0] + 1) - x[0]']
    """
    if agreed.kind == "predictions":
        return predictions(posterior, agreed.variables, **_settings(agreed))
    if agreed.kind == "slopes":
        return slopes(posterior, _steps(agreed), **_settings(agreed))
    return comparisons(
        posterior, agreed.variables, comparison=agreed.comparison, **_settings(agreed)
    )


def sums_of_clients(posterior: Posterior, agreed: EffectSettings) -> Sums:
    """Compute the sums over the rows of a posterior's clients from which the effect follows."""
    return make_question(posterior, **_settings(agreed)).sums(settings_of(agreed))


def settings_of(agreed: EffectSettings) -> list[Setting]:
    """Return the settings of the variables at which sums are needed."""
    if agreed.kind == "predictions":
        return points_of(None, agreed.variables)
    if agreed.kind == "slopes":
        return shifts_of(_steps(agreed))
    return distinct_points(pairs_of(None, agreed.variables))


def number_of_groups(agreed: EffectSettings) -> int:
    """Return G."""
    return len(list(itertools.product(*agreed.by.values())))


def effect_of_sums(program: Program, posterior: Any, agreed: EffectSettings, sums: Sums) -> Effects:
    """Compute an effect from the sums over all clients.

    Args:
        program: the model and its guide.
        posterior: q(θ), with a caveat.
        agreed: the effect.
        sums: the sums over all clients, at :func:`settings_of`.
    """
    outcome = outcome_of(program, agreed.outcome)
    groups = [
        dict(zip(agreed.by, key, strict=True)) for key in itertools.product(*agreed.by.values())
    ]
    level = level_text(agreed.level, program.clients, plural(program.rows, "row"), agreed.at)
    asked = Question(
        quantity=quantity_of(program, outcome, None),
        level=level,
        link=None,
        groups=groups,
        prob=agreed.prob,
        rows=None,
        sums=lambda _: sums,
        caveat=lambda: caveat_of(program, posterior),
    )
    if agreed.kind == "predictions":
        return predict(asked, agreed.variables)
    if agreed.kind == "slopes":
        return slopes_at(asked, _steps(agreed))
    return compare_means(asked, agreed.variables, agreed.comparison)


def with_hypotheses(
    found: Effects,
    agreed: EffectSettings,
    variables: Callable[[int], Mapping[str, Tensor]],
    report: Callable[[str], None],
) -> list[Effects]:
    """Return an effect, followed by its hypotheses, if it has any.

    Args:
        found: the effect.
        agreed: its settings.
        variables: returns draws of the global variables, as many as it is asked for.
        report: is called with a line about hypotheses that cannot be read or name no variable.
    """
    if not agreed.hypotheses:
        return [found]
    draws = {**variables(agreed.num_samples), **numbered(found)}
    level = f"of the variables that are named; b1, b2, ...: {found.estimand}, {found.level}"
    try:
        tested = evaluate_all(agreed.hypotheses, draws, {}, level, found.caveat, agreed.prob)
    except (ValueError, KeyError) as error:
        report(f"hypotheses are left out: {error}")
        return [found]
    return [found, tested]


def effects_of(
    posterior: Posterior, agreed: Sequence[EffectSettings], report: Callable[[str], None]
) -> list[Effects]:
    """Compute effects over the rows of a posterior, each followed by its hypotheses."""

    def variables(count: int) -> Mapping[str, Tensor]:
        return variables_of(posterior, count, 0)

    found = list[Effects]()
    for each in agreed:
        found += with_hypotheses(effect(posterior, each), each, variables, report)
    return found


def _steps(agreed: EffectSettings) -> dict[str, float]:
    return {name: float(step) for name, step in agreed.variables.items()}  # type: ignore[arg-type]


def _settings(agreed: EffectSettings) -> dict[str, Any]:
    own = {"kind", "variables", "comparison", "hypotheses"}
    return agreed.model_dump(exclude=own) | {"by": agreed.by or None}
