"""Pareto k-hat of the importance weights p(D, θ, w) / q(θ, w): a measure of how well q approximates the posterior."""

from __future__ import annotations

import math

from torch import Tensor

from bayesfed.data.absent import are_absent
from bayesfed.output.conditionals import has_block
from bayesfed.output.fitted import Correction, Fitted
from bayesfed.output.log_densities import elbo

DRAWS, FEWEST = 1000, 200
"""Number of draws, and the number below which k-hat is not estimated."""
WORK = 5e7
"""The largest size of clients' rows and variables, in numbers, over all draws."""
WORKSPACE = 10
"""Numbers of what a guide computes q(w_i | θ) from that take the time of one."""
LIMIT = 0.7
"""The largest k-hat at which q is close enough to the posterior to be used, or to be corrected by its weights."""
REMEDY = (
    "Means are usually accurate, standard deviations and tails may not be: compare with another guide "
    "(SFVI(global_guide=Flow())), or with NUTS on fewer clients; narrower priors may help"
)
"""What to expect, and to do, if q is a poor approximation."""
FINITE_VARIANCE, FEW = 0.5, 1000
"""The k-hat above which weights have no finite variance, and the effective sample size below which that matters."""
UNCORRECTABLE = (
    "q(θ) is not a good approximation of the posterior, importance weights are too uneven to correct it by, and chains "
    "do not apply, have not mixed or were not tried (posterior.with_chains() tries them, or says why not). "
    f"{REMEDY}"
)


def log_weights(fitted: Fitted) -> Tensor | None:
    """Return log p(D, θ_s, w_s) − log q(θ_s, w_s) of draws from q, ``(S,)``.

    None if q has no density, under privacy, or if the data are too large or not here.
    """
    if are_absent(fitted.federation.sufficient.fields):
        return None
    draws = min(DRAWS, affordable_draws(fitted, fitted.federation.sufficient.rows))
    if not has_density(fitted) or draws < FEWEST:
        return None
    return elbo(fitted, draws, 0).double().cpu()


def limit(draws: int) -> float:
    """Return the largest k-hat at which weights of this number of draws are reliable.

    Vehtari, Simpson, Gelman, Yao & Gabry 2024, *Pareto smoothed importance sampling*, section 3.2.4.

    Example:
        >>> from bayesfed.output.khat import limit
        >>> round(limit(1000), 3), limit(4000)
        (0.667, 0.7)
    """
    return min(LIMIT, 1 - 1 / math.log10(draws))


def has_density(fitted: Fitted) -> bool:
    """Return whether q(θ, w) has a density that may be evaluated on the clients' data after the fit."""
    program = fitted.program
    return bool(program.random) and not program.weights_draws and fitted.epsilon is None


def affordable_draws(fitted: Fitted, rows: int) -> int:
    """Return the number of draws whose densities can be evaluated for clients with ``rows`` rows altogether."""
    clients = fitted.federation
    program = fitted.program
    own = program.variables + program.workspace // WORKSPACE
    if has_block(program) and program.learns_locals:
        own += program.variables * (program.variables - 1)  # of the Gaussian factor
    return int(WORK / (rows * clients.numbers_per_row + len(clients) * own))


def draws_of(fitted: Fitted, weights: Tensor | None) -> int:
    """Return the number of draws that k-hat was estimated from, those of the correction or of weights of q's own."""
    if fitted.correction is not None:
        return fitted.correction.count
    return DRAWS if weights is None else len(weights)


def weights_caveat(correction: Correction | None) -> str:
    """Return a warning if weights of a correction have no finite variance, and few effective draws."""
    k, size = (None, None) if correction is None else (correction.khat, correction.ess)
    if k is None or k <= FINITE_VARIANCE or size is None or size >= FEW:
        return ""
    return (
        f"Pareto k {k:.2f} > {FINITE_VARIANCE:g}: the importance weights by which q(θ) was corrected have no finite "
        f"variance, and an effective sample size of {size:.0f}, so that standard deviations and tails may be off"
    )


def caveat(found: float | None, draws: int = DRAWS) -> str:
    """Return a warning for the user if k-hat of ``draws`` draws is above its limit, else an empty string."""
    if found is None or found <= limit(draws):
        return ""
    return f"Pareto k {found:.2f} > {limit(draws):.2g}: q(θ, w) is not a good approximation of the posterior. {REMEDY}"
