"""The outcome of a formula: its distribution, the values that the family has, and its unit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from bayesfed.formulas.agreement import Agreement
from bayesfed.formulas.coding import Coding
from bayesfed.formulas.families import Family
from bayesfed.formulas.predictors import to_seven_digits
from bayesfed.formulas.reports import NOT_BINARY
from bayesfed.formulas.terms import FormulaError

RESERVED = ("X", "offset", "trials", "weights", "cens", "se")
"""Names of the predictors' fields, which an outcome may not have."""


@dataclass(frozen=True)
class Outcome:
    """The outcome and its distribution.

    Attributes:
        name: the site.
        likelihood: the code of the distribution.
        parameters: name of a parameter that has no predictor to the code of its default prior, and its unit.
        categories: the number of categories, or 0.
        weighted: rows have weights.
    """

    name: str
    likelihood: str
    parameters: Mapping[str, tuple[str, float]]
    categories: int = 0
    weighted: bool = False


def check_outcome(coding: Coding, kind: Family, agreement: Agreement) -> None:
    """Raise FormulaError for an outcome that the family does not have, as far as the agreement shows it.

    The values of the outcome are checked where they are, by :func:`bayesfed.formulas.reports.sum_fields`.
    """
    name = coding.outcome
    if name in RESERVED:
        raise FormulaError(
            f"the outcome cannot have the name {name!r}, which a field of the predictors has: rename it"
        )
    if agreement.totals.get(NOT_BINARY) == ((0.0,),):
        warnings.warn(
            f"the outcome {name!r} is 0 or 1 in all rows, and the family is 'gaussian': family='bernoulli' has "
            "probabilities and log odds",
            stacklevel=4,
        )
    if kind.categories and len(coding.levels[name]) < 2:
        raise FormulaError(f"the outcome {name!r} is the same in all rows: it has one category")
    if kind.thresholds and coding.kinds[name] == "text":
        raise FormulaError(
            f"the outcome {name!r} is text, which has no order: make it an ordered categorical, "
            "pd.Categorical(..., categories=[...], ordered=True), or numbers"
        )
    if kind.thresholds and not coding.intercept:
        raise FormulaError(
            f"family {kind.name!r} has thresholds in place of the intercept: leave 0 + out"
        )


def location_and_unit(coding: Coding, kind: Family, agreement: Agreement) -> tuple[float, float]:
    """Return the centre of the outcome, on the scale of the predictor, and its unit, from sums."""
    if kind.link == "logit":
        return 0.0, 1.0
    mean, sd = (float(value[0]) for value in agreement.moments(coding.outcome))
    if kind.standardised:
        if not sd > 0:
            raise FormulaError(
                f"the outcome {coding.outcome!r} is the same in all rows, or overflows: a model needs an outcome that "
                "varies"
            )
        return mean, to_seven_digits(sd)
    return 0.0 if mean <= 0 else math.log(mean), 1.0
