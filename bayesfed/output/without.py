"""The posterior without some of the clients, from that of all, whose factors p(D_i | θ) are divided out.

    p(θ | D_-i) ∝ p(θ | D) / p(D_i | θ)

Draws of the posterior are weighted by 1 / p(D_i | θ_s), or draws of q by the density of θ and all other clients over
that of q. If Pareto k-hat shows that the variance of these weights is infinite, or few draws have all the weight, θ is
drawn again, by importance sampling with new proposals (:mod:`bayesfed.output.correction`) or by chains
(:mod:`bayesfed.output.chains`), which start at q. Given θ the others' variables do not depend on the clients that are
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from bayesfed.elbo.elbo import server_pass
from bayesfed.elbo.handlers import on_cpu
from bayesfed.elbo.program import Params
from bayesfed.output import khat
from bayesfed.output.chains import can_sample, sample_chains, takes_seconds
from bayesfed.output.correction import correct
from bayesfed.output.fitted import Correction, Fitted
from bayesfed.output.importance import (
    effective_sample_size,
    pareto_smooth,
    systematic_resample,
)
from bayesfed.output.khat import FINITE_VARIANCE
from bayesfed.output.log_densities import log_evidence_of_clients, sum_log_weights

DRAWS, FEWEST = 4000, 200
"""Draws of a q(θ) that needed no correction, and the effective number of weighted draws that are enough."""
_OF_ALL = "leave clients out of the posterior of all"
F = TypeVar("F", bound=Fitted)


@torch.no_grad()
@on_cpu()
def leave_out(fitted: F, clients: Sequence[str]) -> F:
    """Return the posterior that the fit would have had without some of the clients.

    Their factors p(D_i | θ) are divided out, by importance weights of the draws of θ; where these are too uneven, θ is
    drawn again given the other clients' rows, with new proposals or chains. ``khat`` of the result (of chains
    ``correction.rhat``) and ``correction.ess``, the effective number of draws, say how exact it is. Constants that a
    formula or the user has computed from all rows, and the estimates of ``pyro.param``, stay as they are.

    Args:
        fitted: a posterior of all clients of the fit.
        clients: names of those to leave out.

    Raises:
        KeyError: a client took no part in the fit.
        ValueError: this is not the posterior of all clients; the fit has no importance weights; the posterior is too
            far from that of all clients.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools())
        >>> others = posterior.without("A")
        >>> others.khat < 0.7, bool(others.sample()["mu"].mean() < posterior.sample()["mu"].mean())
        (True, True)
    """
    fitted.check_is_of_all(_OF_ALL)
    check_weights(fitted)
    fitted.check_known(clients)
    others = [name for name in fitted.federation.names if name not in set(clients)]
    if not others:
        raise ValueError(
            "without: there are no other clients; the posterior without any is the prior"
        )
    few = fitted.select(others)
    theta, log_weights = _weighted_draws(fitted, few, clients)
    smooth, k = pareto_smooth(log_weights)
    weights = smooth.softmax(0)
    size = effective_sample_size(weights)
    if fitted.correction is not None and fitted.correction.ess is not None:
        size *= min(1.0, fitted.correction.ess / len(weights))
    chosen = systematic_resample(weights, len(weights))
    theta = {name: value[chosen] for name, value in theta.items()}
    by_weights = replace(few, correction=Correction(theta, k, fitted.laplace, ess=size))
    if k <= FINITE_VARIANCE and size >= FEWEST:
        return by_weights
    plain = replace(few, correction=None, correctable=True)
    found = correct(plain)
    drawn, k_hat = replace(plain, correction=found.correction), 0.0
    if found.correction is not None:
        k_hat = found.correction.khat or 0.0
    if found.reliable and k_hat <= FINITE_VARIANCE:
        return drawn
    if takes_seconds(plain) or (can_sample(plain) and not found.reliable):
        chains = sample_chains(plain).correction()
        if chains is not None:
            return replace(plain, correction=chains)
    if found.reliable:
        return drawn
    if k <= khat.limit(len(weights)) and size >= FEWEST:
        return by_weights
    names = ", ".join(map(repr, clients))
    raise ValueError(
        f"without {names} the posterior is too far from that of all clients (Pareto k {k:.2f}) for importance "
        "sampling, and chains do not apply or have not mixed: fit the others, "
        "bf.fit(model, federation.select(others))"
    )


def check_weights(fitted: Fitted) -> None:
    """Raise a ValueError unless draws of θ can be weighted by what the clients say: see :func:`draw_weighted`."""
    if fitted.correction is not None:
        return
    fitted.check_is_of_all(_OF_ALL)
    if not khat.has_density(fitted):
        raise ValueError(
            f"a fit by {fitted.algorithm} has no importance weights by which a client could be left out: θ has no "
            "density (point estimates, particles), or the run was private. Fit the others, "
            "bf.fit(model, federation.select(others)), or all by bf.SFVI()"
        )


def draw_weighted(fitted: Fitted, count: int, seed: int) -> tuple[Params, Tensor | None]:
    """Draw θ, ``(S, 1, 1, *event)``; of a q without a correction also return log p(θ_s) − log q(θ_s), ``(S,)``."""
    key = fitted.key(seed, "without")
    if fitted.correction is not None:
        return fitted.correction.sample(count, key), None
    supplied = fitted.program.noise(key, count, local=False)
    at_server = server_pass(fitted.program, fitted.params, supplied, count)
    return at_server.theta, at_server.term.double()


def _weighted_draws(
    fitted: Fitted, others: Fitted, clients: Sequence[str]
) -> tuple[Params, Tensor]:
    """Return draws of θ and their log weights towards the posterior of the others alone, ``(S,)``."""
    key = fitted.key(0, "left out")
    if fitted.correction is not None:
        theta, count = fitted.correction.theta, fitted.correction.count
        return theta, -log_evidence_of_clients(fitted.select(clients), theta, count, key).sum(1)
    theta, at_server = draw_weighted(fitted, DRAWS, 0)
    assert at_server is not None
    return theta, at_server + sum_log_weights(others, theta, DRAWS, key)
