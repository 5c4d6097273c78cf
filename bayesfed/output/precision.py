"""Monte Carlo error: how many draws of θ a fit needs, and whether it has them."""

from __future__ import annotations

from bayesfed.output.fitted import Fitted
from bayesfed.settings import Schedule, validated


def checked_precision(fitted: Fitted, precision: float) -> float:
    """Return a precision that draws of this posterior may have.

    Raises:
        ValueError: it is out of range, or the fit was private.
    """
    validated(Schedule, {"precision": precision})
    if fitted.epsilon is not None:
        raise ValueError("precision: importance weights would show the rows without noise")
    return precision


HERE = "posterior.with_chains() may draw more, and narrower priors may help"


def caveat(fitted: Fitted, remedy: str = HERE) -> str:
    """Return a warning if the draws of θ are fewer than the precision of the fit needs, else an empty string."""
    if fitted.precision is None:
        return ""
    error = fitted.monte_carlo_error
    if error is None:
        return (
            f"precision {fitted.precision:g} was not reached: there are no importance weights (the clients' rows are "
            "too many, or q(θ) is no family of one vector) and chains do not apply"
        )
    if error <= fitted.precision:
        return ""
    return (
        f"precision {fitted.precision:g} was not reached: the Monte Carlo error of a global variable's mean is "
        f"{error:.2g} of its standard deviations: {remedy}"
    )
