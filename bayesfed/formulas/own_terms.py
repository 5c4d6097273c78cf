"""Terms that formulae does not code, as code: monotonic effects, and covariates that are not known in each row.

Monotonic effects (Bürkner & Charpentier 2020) of level k of 0, ..., D, with increments ζ of a simplex::

    mo(level) = b D Σ_{j ≤ k} ζ_j = b D Σ_j ζ_j 1[k ≥ j]

b is the mean difference between two levels that follow each other. The field has the D indicators.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from bayesfed.formulas.agreement import Agreement
from bayesfed.formulas.statements import EXACT, named, number, quoted, sample, tensor
from bayesfed.formulas.terms import FormulaError, OwnTerm


@dataclass(frozen=True)
class TermCode:
    """A term with one coefficient, as code.

    Attributes:
        label: the name of its coefficient.
        sd: the unit of the coefficient.
        prior_sd: the prior standard deviation of the standardised coefficient.
        lines: lines outside the clients plate that come before.
        value: the standardised value in a row.
        shift: its mean in standard deviations, which is subtracted from the intercept; empty if it is not centred.
    """

    label: str
    sd: float
    prior_sd: float
    lines: tuple[str, ...]
    value: str
    shift: str


def monotonic_code(
    term: OwnTerm,
    agreement: Agreement,
    fields: str,
    prefix: str,
    *,
    centred: bool,
    narrow: bool,
) -> TermCode:
    """Write a term ``mo(level)``.

    Args:
        term: the term.
        agreement: with the sums of its field.
        fields: the start of the names of the predictor's fields.
        prefix: the start of its names in the results.
        centred: the predictor has an intercept.
        narrow: the prior standard deviation is 1 for a standard deviation of the number of the level, not 2.5.

    Raises:
        FormulaError: all rows have one level, or a level's order is not known.
    """
    column, label = term.column, f"{prefix}{term.label}"
    if agreement.kinds[column] == "text":
        raise FormulaError(
            f"{term.label}: {column!r} is text, which has no order: make it an ordered categorical, "
            "pd.Categorical(..., categories=[...], ordered=True), or numbers"
        )
    levels = agreement.levels[column]
    above = agreement.moments(fields + term.label)[0] if len(levels) > 1 else np.zeros(1)
    size, mean = len(above), float(above.sum())
    variance = (
        float(((2 * np.arange(size) + 1) * above).sum()) - mean * mean
    )  # of the level's number
    if not variance > 1e-12:
        raise FormulaError(f"{term.label}: {column!r} is the same in all rows: leave it out")
    sd = float(f"{math.sqrt(variance):.7g}")
    simplex = _variable("simplex", label)
    means = np.round(above, 7).tolist() if centred else []
    indicators = f"obs[{quoted(fields + term.label)}]"
    steps = f"({indicators} - {tensor(means)})" if centred else indicators
    draw = sample(f"_simplex|{label}", f"dist.Dirichlet(torch.ones({size}))")
    scale = number(size / sd)
    return TermCode(
        label=label,
        sd=sd,
        prior_sd=1.0 if narrow else 2.5,
        lines=(f"{simplex} = {draw}", named(f"{label}_simplex", simplex)),
        value=f"{scale} * ({simplex} * {steps}).sum(-1)",
        shift=f"{scale} * ({simplex} * {tensor(means)}).sum(-1)" if centred else "",
    )


def covariate_code(
    term: OwnTerm,
    agreement: Agreement,
    prefix: str,
    *,
    centred: bool,
    narrow: bool,
) -> TermCode:
    """Write a term ``mi(z)`` or ``me(x, s)``; arguments as for :func:`monotonic_code`."""
    mean, sd = moments_of(term, agreement)
    value = _variable("covariate", term.column)
    shifted = f"({value} - {number(mean, EXACT)})" if centred and mean else value
    return TermCode(
        label=f"{prefix}{term.label}",
        sd=sd,
        prior_sd=1.0 if narrow else 2.5,
        lines=(),
        value=f"{shifted} / {number(sd)}",
        shift=number(mean / sd) if centred and mean else "",
    )


def moments_of(term: OwnTerm, agreement: Agreement) -> tuple[float, float]:
    """Return mean and standard deviation of a covariate over the rows that have it.

    Raises:
        FormulaError: fewer than two rows have it, or all have the same.
    """
    counts = agreement.totals[f"field {term.column}"][0]
    mean, sd = (
        (float(value[0]) for value in agreement.moments(term.column)) if counts[0] else (0.0, 0.0)
    )
    if not sd > 0:
        raise FormulaError(f"{term.label}: {term.column!r} is missing or the same in all rows")
    return round(mean, 6 - math.floor(math.log10(sd))), float(f"{sd:.7g}")


def covariate_lines(term: OwnTerm, sd: float, mean: str, prior: str) -> tuple[list[str], list[str]]:
    """Write the distribution of a covariate that is not known in each row.

    Args:
        term: the term.
        sd: the covariate's standard deviation, which is the unit of ``z_sigma``.
        mean: the variable with its linear predictor.
        prior: the code of a user's prior of ``z_sigma``, or an empty text.

    Returns:
        Lines outside the clients plate, and lines inside that of the observations.
    """
    column, sigma = term.column, _variable("sigma", term.column)
    value, name = _variable("covariate", column), f"{column}_sigma"
    half_student = "dist.FoldedDistribution(dist.StudentT(4.0, 0.0, 1.0))"
    if prior:
        outside = [f"{sigma} = {named(name, sample(f'_prior|{name}', prior))}"]
    else:
        drawn = sample(f"_sigma|{column}", half_student)
        outside = [f"{sigma} = {number(sd)} * {drawn}", named(name, sigma)]
    normal, data = f"dist.Normal({mean}, {sigma})", f"obs=obs[{quoted(column)}]"
    if term.error is None:
        return outside, [f"{value} = {sample(column, f'{normal}, {data}')}"]
    measured = f"dist.Normal({value}, obs[{quoted(column + '.se')}]), {data}"
    return outside, [f"{value} = {sample(f'_true|{column}', normal)}", sample(column, measured)]


def _variable(name: str, of: str) -> str:
    return re.sub(r"\W", "_", f"{name}_{of}")
