"""Pareto k-hat of the importance weights p(D, θ, w) / q(θ, w): a measure of how well q approximates the posterior."""

from __future__ import annotations

from bayesfed.output.fitted import Fitted
from bayesfed.output.importance import pareto_k
from bayesfed.output.log_densities import elbo

DRAWS, FEWEST = 1000, 200
"""Number of draws, and the number below which k-hat is not estimated."""
WORK = 5e7
"""The largest size of clients' rows and variables, in numbers, over all draws."""
LIMIT = 0.7
"""The largest k-hat at which q is close enough to the posterior to be used, or to be corrected by its weights."""


def khat(fitted: Fitted) -> float | None:
    """Return Pareto k-hat of q; None if q has no density, under privacy, or if the data are too large."""
    draws = min(DRAWS, affordable_draws(fitted, fitted.federation.rows))
    if not has_density(fitted) or draws < FEWEST:
        return None
    return pareto_k(elbo(fitted, draws, 0).double().cpu())


def has_density(fitted: Fitted) -> bool:
    """Return whether q(θ, w) has a density that may be evaluated on the clients' data after the fit."""
    program = fitted.program
    return bool(program.random) and not program.weights_draws and fitted.epsilon is None


def affordable_draws(fitted: Fitted, rows: int) -> int:
    """Return the number of draws whose densities can be evaluated for clients with ``rows`` rows altogether."""
    clients = fitted.federation
    size = rows * clients.numbers_per_row + len(clients) * fitted.program.variables
    return int(WORK / size)


def caveat(found: float | None) -> str:
    """Return a warning for the user if k-hat is above its limit, else an empty string."""
    if found is None or found <= LIMIT:
        return ""
    return (
        f"Pareto k {found:.2f} > {LIMIT}: q(θ, w) is not a good approximation of the posterior. Means are usually "
        "accurate, standard deviations and tails may not be: compare with another guide "
        "(SFVI(global_guide=Flow())), or with NUTS on fewer clients; narrower priors may help"
    )
