"""Convergence and the quality of the approximation, in words."""

from __future__ import annotations

from typing import NamedTuple

from bayesfed.data.plural import plural
from bayesfed.report.facts import Study


class Verdict(NamedTuple):
    """An assessment of a fit.

    Attributes:
        good: nothing speaks against the results; None if the approximation was not assessed.
        headline: in a few words.
        reasons: sentences.
    """

    good: bool | None
    headline: str
    reasons: list[str]


def assess(study: Study) -> Verdict:
    """Say whether a fit converged, and how close its draws are to the posterior, with what to do if they are not."""
    reasons = [_convergence(study), *_approximation(study)]
    if study.caveat:
        return Verdict(False, "Read this before the numbers", [f"{study.caveat}.", *reasons])
    if study.converged is False or (study.khat or 0.0) > study.khat_limit:
        return Verdict(False, "Read this before the numbers", reasons)
    if study.khat is None and study.rhat is None:
        return Verdict(None, "Not assessed", reasons)
    return Verdict(True, "No warnings", reasons)


def _convergence(study: Study) -> str:
    rounds = plural(study.rounds, "round")
    if study.converged is None:
        return f"The number of rounds was given: {rounds}."
    if study.converged:
        return f"The fit stopped by itself after {rounds}, when its convergence criterion was met."
    return f"The fit had not converged when it reached the largest number of rounds, {rounds}."


def _approximation(study: Study) -> list[str]:
    found = []
    if study.corrected:
        found.append(f"{study.corrected[0].upper()}{study.corrected[1:]}.")
    if study.rhat is not None and study.ess is not None:
        found.append(
            f"The chains agree: the largest R-hat is {study.rhat:.3f}, and the smallest effective number of draws "
            f"{study.ess:,.0f}."
            if study.rhat <= 1.05
            else f"The chains do not agree: the largest R-hat is {study.rhat:.3f}. Take other priors or another guide."
        )
    elif study.khat is None:
        found.append(
            "There is no Pareto k̂, which measures how close the draws are to the posterior: it needs a q(θ) with a "
            "density, data that are not too large, and no privacy. Compare with another guide, or with NUTS on fewer "
            "clients."
        )
    else:
        below = study.khat <= study.khat_limit
        found.append(
            f"Pareto k̂ of the importance weights is {study.khat:.2f}, "
            + (
                f"within its limit of {study.khat_limit:.2f}: the draws are close to the posterior."
                if below
                else f"above its limit of {study.khat_limit:.2f}: standard deviations and tails may be wrong. "
                "Compare with another guide, or with NUTS on fewer clients; narrower priors may help."
            )
        )
    if study.effective < 0.9 * study.draws:
        found.append(
            f"Of {plural(study.draws, 'draw')} of θ, some of which are repeated, {study.effective:,.0f} count."
        )
    return found
