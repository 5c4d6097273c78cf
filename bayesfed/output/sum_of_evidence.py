"""Sums over clients of Laplace's estimates of log p(D_i | θ_s), without estimates where they cannot matter.

A sum over many clients is nearly quadratic in θ where their posterior is, so that a polynomial gives it at most draws,
one of a higher degree if clients are few and have many variables.
Far from the posterior, points that all draws share give no estimate, but an upper bound. Other estimates take long
there, and are left out where the bound shows that a draw has no weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bayesfed.elbo.elbo import log_prior
from bayesfed.elbo.program import Params
from bayesfed.guides.family import GLOBAL
from bayesfed.output.conditionals import Conditionals
from bayesfed.output.evidence import ERROR_OF_SUM, evidence_chunks
from bayesfed.output.fitted import Fitted
from bayesfed.output.locals_given_theta import evidence_around_modes, evidence_where
from bayesfed.output.polynomials import NEGLIGIBLE, interpolate
from bayesfed.output.shared_points import SharedPoints, shared_points
from bayesfed.output.sums_over_points import evidence_bounds, evidence_by_shared_points

DEGREE, WORTH = 3, 1e6
"""The degree of a polynomial in θ that sums over many clients are near the posterior; the size of estimates at all
draws below which they are not interpolated."""
Sum = Callable[[Fitted, Params, int, Tensor], Tensor]
"""An estimate of the sum at all draws of θ: a function of q, the draws, their number and a noise key."""


def sum_of_evidence(
    fitted: Fitted, theta: Params, count: int, key: Tensor, sum_at_all: Sum
) -> Tensor:
    """Estimate Σ_i log p(D_i | θ_s) by a polynomial in θ at most draws, where there is one: ``(S,)``.

    Args:
        fitted: q of the clients.
        theta: draws of the guide's global random sites, ``(S, 1, 1, *event)``.
        count: S.
        key: noise key.
        sum_at_all: estimates the sum at all of some draws, such as :func:`sum_by_laplace`.
    """

    def at(draws: Tensor) -> Tensor:
        some = {name: value[draws] for name, value in theta.items()}
        return sum_at_all(fitted, some, len(draws), key)

    if GLOBAL not in theta or size_of_evidence(fitted) * count < WORTH:
        return at(torch.arange(count))
    share, prior = len(fitted.federation) / fitted.program.clients, None
    if share == 1:
        prior = log_prior(fitted.program, fitted.params, theta, count)
    return interpolate(theta[GLOBAL][:, 0, 0], at, prior, share * ERROR_OF_SUM)


def size_of_evidence(fitted: Fitted) -> int:
    """Return the size of all clients' estimates at one draw of θ, in numbers: that of their second derivatives."""
    federation, variables = fitted.federation, fitted.program.variables
    return variables * (federation.rows + len(federation) * variables)


def sum_by_laplace(fitted: Fitted, theta: Params, count: int, key: Tensor) -> Tensor:
    """Estimate the sum at all draws by shared points or Laplace's approximations, ``(S,)``.

    Arguments as of :func:`sum_of_evidence`.
    """
    points = shared_points(fitted, theta[GLOBAL][:, 0, 0]) if GLOBAL in theta else None
    if points is not None:
        return _sum_by_shared_points(fitted, points, theta, count, key)
    total = torch.zeros(count, dtype=torch.float64, device=fitted.federation.device)
    for chunk in evidence_chunks(fitted, count):
        total += evidence_around_modes(fitted, theta, count, chunk, key).sum(1)
    return total


def _sum_by_shared_points(
    fitted: Fitted, points: SharedPoints, theta: Params, count: int, key: Tensor
) -> Tensor:
    """Estimate the sum by points that all draws share, and around modes where these give nothing.

    At draws that have no weight it may be an upper bound. Other arguments as of :func:`sum_of_evidence`.
    """
    total = torch.zeros(count, dtype=torch.float64, device=fitted.federation.device)
    bounds, far, gaps = total.clone(), torch.zeros_like(total, dtype=torch.bool), []
    for chunk in evidence_chunks(fitted, count):
        params, batch = fitted.params_of(chunk), fitted.federation.batch(chunk)
        given = Conditionals(fitted.program, params, theta, batch, count)
        own = points.of_clients(chunk)
        evidence = evidence_by_shared_points(own, given)
        missing = evidence.isnan()
        of_clients = missing & missing.all(0)
        total += evidence.nansum(1) + evidence_where(of_clients, fitted, theta, chunk, key).sum(1)
        missing &= ~of_clients
        draws = missing.any(1).nonzero()[:, 0]
        if len(draws):
            found = evidence_bounds(own, given.at(draws))
            bounds[draws] += found.where(missing[draws], 0.0).sum(1)
            far[draws] = True
            gaps.append((chunk, missing))
    negligible = _negligible(fitted, theta, total + bounds, far) if gaps else far
    total[negligible] += bounds[negligible]
    for chunk, missing in gaps:
        wanted = missing & ~negligible[:, None]
        total += evidence_where(wanted, fitted, theta, chunk, key).sum(1)
    return total


def _negligible(fitted: Fitted, theta: Params, bounds: Tensor, far: Tensor) -> Tensor:
    """Return which draws have no weight, as upper bounds of the sum ``(S,)`` show; none of a part of the clients.

    The bounds are estimates, but at draws that are ``far`` from the points, ``(S,)``.
    """
    if len(fitted.federation) < fitted.program.clients:
        return torch.zeros_like(far)
    log_target = bounds + log_prior(fitted.program, fitted.params, theta, len(bounds))
    return far & (log_target < log_target.where(~far, -torch.inf).max() - NEGLIGIBLE)
