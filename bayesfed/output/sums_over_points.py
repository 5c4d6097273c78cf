"""Clients' evidence and moments given θ_s, by sums over the points that all θ_s share (:mod:`~.shared_points`)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from bayesfed.elbo.program import Params
from bayesfed.guides.family import GLOBAL
from bayesfed.output.conditionals import Conditionals
from bayesfed.output.evidence import ERROR_OF_SUM, evidence_chunks, is_below_precision
from bayesfed.output.fitted import Fitted
from bayesfed.output.polynomials import find_polynomial
from bayesfed.output.shared_points import (
    REACH,
    SPACING,
    SharedPoints,
    keep_points,
    lattice_points,
    point_volumes,
    powers,
    quadratic_priors,
    shared_points,
)
from bayesfed.steps.optimizer import where_active

SomeFitted = TypeVar("SomeFitted", bound=Fitted)
POOR, BEYOND = 0.02, 0.01
"""The difference from the sum over half of the points above which a client needs others; the mass beyond the lattice,
relative to that of its outermost points."""
DISTANCES, STEEPER = (1, 2, 4, 8, 16, 32), 1.5
"""Distances from the mode at which bounds are tried, in units of that of the farthest points; how much more a log
density has fallen at these than at half of their distance, at least, if it goes on falling."""
TOGETHER, DEGREE, ASIDE, NARROW = 500_000, 2, 0.2, 1.5
"""Numbers that are added up at once; the degree of polynomials in θ in place of moments, and the distance of a mean, in
standard deviations, at which they are not used; the precision of a prior along an axis, in units of the distance of
points, above which these give nothing."""


def evidence_by_shared_points(points: SharedPoints, given: Conditionals) -> Tensor:
    """Estimate log p(D_i | θ_s), ``(S, K)`` in double precision; NaN where shared points do not give it.

    That is of clients for whom the points are too few, and at draws of θ too far from the others.

    Args:
        points: those of these clients.
        given: their posteriors.
    """
    prior = quadratic_priors(points, given)
    if prior is None:
        return points.log_densities.new_full((given.size, len(points.mode)), torch.nan)
    white, second, outermost = lattice_points(given.program)
    which = torch.stack([torch.ones_like(white[:, 0]), 2 * second, outermost])
    (total, half, beyond), level = _sums(points, white, prior, which)
    found, difference = total.log() + level, (half / total).log()
    errors = difference.square() / 4 + BEYOND * beyond / total
    errors = errors.where(~_is_narrow(prior, white.shape[1]), torch.inf)
    poor = ~(difference.abs().nanmedian(0).values < POOR)
    poor |= is_below_precision(points.mode, points.root).squeeze(-1)
    limit = ERROR_OF_SUM * len(poor) / given.program.clients
    far = ~(errors[:, ~poor].sum(1) < limit)
    found[:, poor], found[far] = torch.nan, torch.nan
    return found


def evidence_bounds(points: SharedPoints, given: Conditionals) -> Tensor:
    """Return upper bounds of log p(D_i | θ_s), ``(S, K)`` in double precision; infinite where there are none.

    Within a distance of the mode, p(D_i | v) is at most its largest value at the points, and the prior's weight at most
    the volume times its largest density. Beyond, p(D_i | v) has fallen by as much as at the outermost points, and goes
    on falling as steeply if it is log-concave, which points half as far away show. Of several distances the one with
    the least bound counts.

    Args:
        points: those of these clients, whose densities have one mode.
        given: their posteriors.
    """
    prior = quadratic_priors(points, given)
    if prior is None:
        return points.log_densities.new_full((given.size, len(points.mode)), torch.inf)
    white, _, outermost = lattice_points(given.program)
    size, volumes = white.shape[1], point_volumes(points.root)[:, None]
    rows = points.log_densities - volumes
    within, beyond = rows.amax(1, keepdim=True), rows[:, outermost].amax(1, keepdim=True)
    away = white.norm(dim=1)
    halfway = (away > REACH / 2 - SPACING[size]) & (away <= REACH / 2)
    fall = within - beyond
    concave = fall > STEEPER * (within - rows[:, halfway].amax(1, keepdim=True))
    volume, steepest = volumes + math.log(len(white)), prior[:, 1 : 1 + size].norm(dim=1)
    bound = torch.full_like(steepest, torch.inf)
    for factor in DISTANCES:
        weight = volume + size * math.log(factor) + prior[:, 0] + factor * REACH * steepest
        steep = torch.where(concave, factor, 1.0) * fall
        bound = torch.minimum(bound, torch.logaddexp(weight.clamp(max=0.0), -steep))
    bound = bound + within + size * SPACING[size] ** 2 / 8  # the most between points
    return bound.where((fall > 0) & bound.isfinite(), torch.inf).mT


def normals_by_shared_points(
    points: SharedPoints, given: Conditionals
) -> tuple[Tensor, Tensor] | None:
    """Return means ``(S, K, 1, P)`` of u given θ_s and roots of the covariances, ``(S, K, 1, P, P)``, about.

    They are NaN where the points are too few. Of many draws of θ they are computed at a few, and are polynomials in θ
    at the others, if these are close at some of the farthest. None where the prior of u is not Normal.

    Args:
        points: those of these clients.
        given: their posteriors.
    """
    polynomial = find_polynomial(given.z[:, 0, 0], DEGREE)
    some = torch.arange(given.size)
    if polynomial is not None:
        some = torch.cat([polynomial.few, polynomial.tests()])
    if (found := _moments(points, given.at(some))) is None:
        return None
    mean, root = found
    if polynomial is not None:
        count = len(polynomial.few)
        fitted_mean, fitted_root = (polynomial.fitted(x[:count]) for x in found)
        fitted_mean[some], fitted_root[some] = mean, root
        close = torch.linalg.solve_triangular(
            root, (polynomial.fitted(mean[:count])[some] - mean)[..., None], upper=False
        )
        missing = mean.isnan().any(2)
        mean, root = fitted_mean, fitted_root
        everywhere = bool((missing == missing.all(0)).all())
        if not (everywhere and bool((close[count:].nan_to_num(0.0).abs() < ASIDE).all())):
            rest = polynomial.others(some)
            others = _moments(points, given.at(rest))
            assert others is not None
            mean[rest], root[rest] = others
    own = points.root.double()
    offset = ((given.z - points.centre) @ points.moved.mT).double()
    u = points.mode + (own @ mean[:, :, None, :, None]).squeeze(-1) - offset
    return u.to(points.mode), (own @ root[:, :, None]).to(points.mode)


@torch.no_grad()
def with_moments(fitted: SomeFitted, z: Tensor) -> SomeFitted:
    """Return q with clients' factors by which q(w_i | θ) has the moments of their posteriors at the centre of q(θ).

    A posterior with skewness γ makes log weights of a variance of γ² / 6, by Laplace's approximation 5 γ² / 12. Clients
    for whom the points are too few keep what they have; all do where there are none.

    Args:
        fitted: q of the clients.
        z: draws of θ, ``(S, D)``.
    """
    points, guide = shared_points(fitted, z), fitted.program.guide
    if points is None:
        return fitted
    parts: list[Params] = []
    for chunk in evidence_chunks(fitted, points.log_densities.shape[1]):
        params, batch = fitted.params_of(chunk), fitted.federation.batch(chunk)
        prior = guide.block_prior_at_centre(params, batch)
        given = Conditionals(fitted.program, params, {GLOBAL: prior.z[:1, None]}, batch, 1)
        phi = {name: params[name] for name in fitted.local_params}
        normals = normals_by_shared_points(points.of_clients(chunk), given)
        if normals is None:
            return fitted
        moved = guide.with_moments(phi, prior, *(value[0] for value in normals))
        known = torch.cat([v.flatten(1) for v in moved.values()], 1).isfinite().all(1)
        parts.append(where_active(phi, moved, known))
    local_params = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    found = replace(fitted, local_params=local_params)
    keep_points(found, points)
    return found


def _moments(points: SharedPoints, given: Conditionals) -> tuple[Tensor, Tensor] | None:
    """Return the mean ``(S, K, P)`` of x, v = û + H^{−½} x, and a root of its covariance, ``(S, K, P, P)``.

    They are NaN of clients for whom the points are too few at most draws, or do not give a covariance at some, and at
    draws where they are too far apart.
    """
    if (prior := quadratic_priors(points, given)) is None:
        return None
    white, second, _ = lattice_points(given.program)
    sums, _ = _sums(points, white, prior, torch.cat([powers(white).mT, 2.0 * second[None]]))
    half, moments = sums[-1] / sums[0], (sums[1:-1] / sums[0]).movedim(0, -1)
    size = points.mode.shape[-1]
    mean, (row, column) = moments[..., :size], torch.triu_indices(size, size)
    covariance = moments.new_empty(*moments.shape[:2], size, size)
    covariance[..., row, column] = covariance[..., column, row] = moments[..., size:]
    covariance = covariance - mean[..., :, None] * mean[..., None, :]
    root, failed = torch.linalg.cholesky_ex(covariance.nan_to_num())
    poor = ~((half.log().abs().nanmedian(0).values < POOR) & (failed == 0).all(0))
    poor |= ~torch.cat([mean, root.flatten(2)], 2).isfinite().all(2).all(0)
    missing = _is_narrow(prior, size) | poor
    mean[missing], root[missing] = torch.nan, torch.nan
    return mean, root


def _is_narrow(prior: Tensor, size: int) -> Tensor:
    """Return where a prior is narrower along an axis than points are apart, ``(S, K)``, from its coefficients."""
    row, column = torch.triu_indices(size, size)
    squares = prior[:, 1 + size :][:, row == column]
    return ~(-2 * squares * SPACING[size] ** 2 < NARROW).all(1).mT


def _sums(
    points: SharedPoints, white: Tensor, prior: Tensor, which: Tensor
) -> tuple[Tensor, Tensor]:
    """Return sums over the points of p(D_i | v_l, z̄) p(u_sl | θ_s) times some numbers of each point.

    Args:
        points: those of K clients.
        white: the points around 0, ``(L, P)``.
        prior: coefficients of log p(u_s | θ_s), ``(K, F, S)``.
        which: the numbers of each point, ``(R, L)``.

    Returns:
        The sums divided by the largest term, ``(R, S, K)``, and its logarithm, ``(S, K)``, in double precision.
    """
    level = points.log_densities.amax(1, keepdim=True)
    rows = (points.log_densities - level)[..., None]
    features = torch.cat([powers(white).expand(len(rows), -1, -1), rows], -1).float()
    coefficients = torch.cat([prior, torch.ones_like(prior[:, :1])], 1).float()
    which, sums, most = which.float(), [], []
    each = max(1, TOGETHER // (features.shape[1] * prior.shape[2]))
    for some, own in zip(features.split(each), coefficients.split(each), strict=True):
        logs = some @ own
        most.append(logs.amax(1))
        sums.append(which @ logs.sub_(most[-1][:, None]).exp_())
    return torch.cat(sums).double().permute(1, 2, 0), (torch.cat(most).double() + level).mT
