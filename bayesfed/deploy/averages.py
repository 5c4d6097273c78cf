"""The server's side of effects: it asks the institutions for sums of means, adds them up, and makes the results."""

from __future__ import annotations

import torch

from bayesfed.deploy.global_posterior import GlobalPosterior
from bayesfed.deploy.institutions import Institutions
from bayesfed.deploy.messages import Average, Averages, MessageError, Tensors
from bayesfed.deploy.sums import request_sum
from bayesfed.effects.agreed import (
    effect_of_sums,
    number_of_groups,
    settings_of,
    with_hypotheses,
)
from bayesfed.effects.means import Sums
from bayesfed.effects.result import Effects
from bayesfed.settings import EffectSettings

MOST_CATEGORIES = 10_000
"""The largest number of categories of an outcome."""


def compute_effects(
    institutions: Institutions, run: str, found: GlobalPosterior
) -> tuple[Effects | None, ...]:
    """Return the effects of the plan, each followed by its hypotheses; one that cannot be computed is reported."""
    results: list[Effects | None] = []
    for number, agreed in enumerate(institutions.plan.effects):
        try:
            sums = _ask(institutions, run, number, agreed)
            program = found.posterior.program
            one = effect_of_sums(program, found, agreed, sums)
            results += with_hypotheses(
                one, agreed, lambda count: _variables(found, count), institutions.report
            )
        except (ValueError, TimeoutError) as error:
            institutions.report(f"effect {number + 1} is left out: {error}")
            results.append(None)
    return tuple(results)


def _variables(found: GlobalPosterior, count: int) -> dict[str, torch.Tensor]:
    return found.sample(count) | found.derived(count)


def _ask(institutions: Institutions, run: str, number: int, agreed: EffectSettings) -> Sums:
    """Return the sums of an effect over the clients of all institutions.

    Raises:
        MessageError: an institution refuses, or answers with tensors of another form.
        TimeoutError: an institution does not answer.
    """
    shape = agreed.num_samples, len(settings_of(agreed)), number_of_groups(agreed)

    def form(first: Tensors) -> Tensors:
        categories = first.get("total", torch.zeros(0)).shape[-1:]
        if not categories or not 0 < categories[0] <= MOST_CATEGORIES:
            raise MessageError("the sums of an effect have no categories")
        return {
            "total": torch.zeros(*shape, *categories, dtype=torch.float64),
            "weight": torch.zeros(shape[1:], dtype=torch.float64),
        }

    message, what = Average(run=run, effect=number), f"sums of effect {number + 1}"
    return _checked(request_sum(institutions, message, Averages, form, what, what))


def _checked(sums: Tensors) -> Sums:
    """Return the sums, if they are finite and their weights not negative."""
    if not all(bool(value.isfinite().all()) for value in sums.values()):
        raise MessageError("the sums of an effect are not finite")
    if bool((sums["weight"] < 0).any()):
        raise MessageError("the weights of an effect are negative")
    return Sums(sums["total"], sums["weight"])
