"""How far q is from the posterior: Pareto's k of the importance weights p(D, θ, w) / q(θ, w).

A generalised Pareto distribution is fitted to the largest of them; they have about 1/k moments (Yao, Vehtari, Simpson &
Gelman 2018, *Yes, but did it work?*, section 2).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pyro.ops.stats import fit_generalized_pareto
from torch import Tensor

if TYPE_CHECKING:
    from bayesfed.output.posterior import Posterior

DRAWS, FEWEST = 1000, 200
WORK = 5e7
"""Numbers of clients' rows and variables that are looked at, over all draws."""
EVEN = 1e-2
"""A range of log weights that is round-off."""
LIMIT = 0.7
"""Beyond it q is not near enough to be trusted, or mended by its weights."""


def khat(posterior: Posterior) -> float | None:
    """Pareto's k of the posterior's clients; None where q has no density, is private, or is of too many numbers."""
    draws = min(DRAWS, affordable(posterior, posterior.federation.rows))
    if not has_density(posterior) or draws < FEWEST:
        return None
    return pareto(posterior.elbo(draws).double().cpu())


def has_density(posterior: Posterior) -> bool:
    """Whether q(θ, w) has one, and may be looked at."""
    return (
        bool(posterior.program.random)
        and not posterior.program.weights_draws
        and posterior.epsilon is None
    )


def affordable(posterior: Posterior, rows: int) -> int:
    """How many draws may be weighed, by clients of so many rows together."""
    clients = posterior.federation
    size = rows * clients.numbers_per_row + len(clients) * posterior.program.variables
    return int(WORK / size)


def pareto(log_weights: Tensor) -> float:
    """k of weights ``(S,)``; infinite where a few are all there is."""
    if log_weights.max() - log_weights.min() < EVEN:
        return 0.0
    tail = min(len(log_weights) // 5, math.ceil(3 * len(log_weights) ** 0.5))
    top = (log_weights - log_weights.max()).sort().values[-tail - 1 :].exp()
    above = top[1:] - top[0]
    if not top.isfinite().all() or not above[tail // 4] > 0:
        return math.inf
    return float(fit_generalized_pareto(above)[0])


def caveat(found: float | None) -> str:
    """What is to be said of it, in words; empty where q is near."""
    if found is None or found <= LIMIT:
        return ""
    return (
        f"Pareto k {found:.2f} > {LIMIT}: q(θ, w) is some way from the posterior. Means are usually sound, spreads and "
        "tails may not be: compare with another guide (SFVI(global_guide=Flow())), or with NUTS on fewer clients; "
        "priors that rule out the absurd help"
    )
