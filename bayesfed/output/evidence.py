"""Estimates of log p(D_i | θ_s) at draws of θ, by adaptive quadrature around a Laplace approximation.

    log Σ_l c_l p(u_sl, D_i | θ_s) / N(u_sl; û_s, H_s⁻¹),   u_sl = û_s + H_s^{−½} z_l

u is the block of the client's local variables. q(u | θ) is fitted around the centre of q(θ), with a mean that is linear
in θ; at a draw of θ far from the centre it may be a poor proposal. The Normal used here is the Laplace approximation at
θ_s itself, found by Newton steps from the mean of q. If the likelihood is Gaussian in u, the ratio equals log p(D_i |
θ_s) at every point. Otherwise z_l and c_l are the nodes and weights of Gauss-Hermite quadrature in one or two
dimensions (Liu & Pierce 1994, *A note on Gauss-Hermite quadrature*; ``nAGQ`` of lme4), and beyond these draws of a
standard Normal, in pairs around 0, which each client makes once for all θ_s. Points that are the same at all
draws of θ make an error that is smooth in θ, most of which cancels in importance weights. The errors of points that
are drawn anew at each θ_s add up over clients, and leave the weights of a thousand clients no information.

A draw from N(û_s, H_s⁻¹), chosen among several by its weight, is closer to a draw from the client's posterior given θ_s
than a draw from q.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo import handlers
from bayesfed.elbo.elbo import Noise
from bayesfed.elbo.noise import Draw, fold, uniform, word
from bayesfed.elbo.program import Program
from bayesfed.guides import newton
from bayesfed.guides.family import GLOBAL
from bayesfed.guides.hierarchical import LOCAL
from bayesfed.guides.triangular import inverse_root

EACH = 4
"""Draws of a client's variables for one of θ, in pairs, of which one is chosen; points that are evaluated at once."""
NODES, POINTS = {1: 7, 2: 4}, 16
"""Nodes of quadrature along each of one or two variables; the number of points of more."""
STEPS = 10
"""Largest number of Newton steps; a likelihood that is Gaussian in u needs none from the mean of q."""
TOLERANCE = 0.01
"""A Newton step with twice its predicted gain below this, in nats, is the last one: the draws are weighted."""
LEAST_CURVATURE = 0.05
"""The least curvature along an axis, in units of the precision of a Normal prior, or else of q."""
LOG_TAU = math.log(math.tau)
COST = 8
"""Time relative to a single draw from q, about."""


def has_block(program: Program) -> bool:
    """Return whether all local variables are one Normal vector in the guide, as this estimate needs."""
    return set(program.randomness) - set(program.random) == {LOCAL}


class Candidates(NamedTuple):
    """Draws of a block of local variables, and their log importance weights for S draws of θ and K clients.

    Attributes:
        draws: ``(L, S, K, 1, P)``.
        log_weights: log p(u_sl, D_i | θ_s) / N(u_sl), ``(L, S, K)``.
    """

    draws: Tensor
    log_weights: Tensor

    def evidence(self) -> Tensor:
        """Estimate log p(D_i | θ_s) by the mean of the weights, ``(S, K)``."""
        return self.log_weights.logsumexp(0) - math.log(len(self.log_weights))

    def resample(self, keys: Tensor) -> Tensor:
        """Choose one of the L draws by weight, ``(S, K, 1, P)``; ``keys`` are the clients' noise streams ``(K,)``."""
        below = self.log_weights.softmax(0).cumsum(0)
        size = below.shape[1]
        u = uniform(fold(keys, word("picked")), (size,)).mT
        first = (below < u * below[-1]).sum(0).clamp(max=len(below) - 1)
        return self.draws.gather(0, first[None, ..., None, None].expand_as(self.draws[:1]))[0]


class Conditionals(NamedTuple):
    """The posteriors p(w_i | θ_s, D_i) of K clients' variables at S draws of θ.

    Attributes:
        program: the model and its guide.
        params: parameters of the program and of these clients.
        theta: draws of the guide's global sites, ``(S, 1, 1, *event)``.
        batch: the clients' rows.
        size: S.
    """

    program: Program
    params: Mapping[str, Tensor]
    theta: Mapping[str, Tensor]
    batch: Batch
    size: int

    def at(self, draws: Tensor) -> Conditionals:
        """Return those at some of the draws, by position."""
        some = {name: value[draws] for name, value in self.theta.items()}
        return self._replace(theta=some, size=len(draws))

    @property
    def z(self) -> Tensor:
        """The guide's global vector, ``(S, 1, 1, D)``, D = 0 if it has none."""
        return self.theta.get(GLOBAL, self.batch.scale.new_zeros(self.size, 1, 1, 0))

    @torch.no_grad()
    def block(self) -> Any:
        """Return q(u | θ_s), over ``(S, K, 1, P)``."""
        with handlers.given(self.batch.device, self.params, {}, self.theta, self.size):
            rows = self.batch if self.program.needs_rows else self.batch.head()
            nodes = poutine.trace(self.program.guide).get_trace(rows).nodes
        return nodes[LOCAL]["fn"].detached

    def log_joint(self, u: Tensor) -> Tensor:
        """Compute log p(u, D_i | θ_s) of values of the block ``(R, S, K, 1, P)``: ``(R, S, K)``."""
        z = self.z.repeat(len(u), 1, 1, 1)
        found = self.program.guide.block_log_joint(self.params, self.batch, u.flatten(0, 1), z)
        return torch.as_tensor(found).expand(len(z), len(self.batch)).unflatten(0, u.shape[:2])


def laplace_candidates(given: Conditionals, mode: Tensor, root: Tensor, noise: Noise) -> Candidates:
    """Draw clients' variables from a Laplace approximation at each draw of θ, and compute their log weights.

    Args:
        given: posteriors of a program for which :func:`has_block` is true.
        mode: their modes, from :func:`laplace_approximation`.
        root: roots of the covariances there, from the same function.
        noise: noise of the block, for ``EACH / 2 * S`` draws.
    """
    eps = noise[LOCAL][0].unflatten(0, (-1, given.size))
    away = (root @ eps[..., None]).squeeze(-1)
    draws = torch.cat([mode + away, mode - away])
    with torch.no_grad():
        level = root.diagonal(dim1=-2, dim2=-1).log().sum(-1) + mode.shape[-1] / 2 * LOG_TAU
        density = -eps.square().sum(-1) / 2 - level
        found = given.log_joint(draws).double() - torch.cat([density, density]).squeeze(-1).double()
    return Candidates(draws, found.nan_to_num(-torch.inf))


def laplace_evidence(given: Conditionals, mode: Tensor, root: Tensor, keys: Tensor) -> Tensor:
    """Estimate log p(D_i | θ_s) by quadrature, ``(S, K)`` in double precision.

    Args:
        given: as of :func:`laplace_candidates`, with ``mode`` and ``root``.
        mode: û_s.
        root: a root of H_s⁻¹.
        keys: the clients' noise streams, ``(K,)``.
    """
    z, log_weights = _points(mode.shape[-1], keys)
    level = root.diagonal(dim1=-2, dim2=-1).log().sum(-1) + mode.shape[-1] / 2 * LOG_TAU
    parts = []
    with torch.no_grad():
        for some, weight in zip(z.split(EACH), log_weights.split(EACH), strict=True):
            away = (root @ some.to(root)[..., None]).squeeze(-1)
            density = weight[:, None, None, None] - (-some.square().sum(-1) / 2 - level)
            found = given.log_joint(mode + away).double() + density.squeeze(-1)
            parts.append(found.nan_to_num(-torch.inf).logsumexp(0))
    return torch.stack(parts).logsumexp(0)


def _points(size: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return z ``(L, 1, K or 1, 1, P)`` and log c ``(L,)`` of quadrature over a standard Normal in P dimensions."""
    if size not in NODES:
        half = Draw("normal", (POINTS // 2, size))(fold(keys, word("points")), torch.float64)
        z = torch.cat([half, -half], 1).transpose(0, 1)[:, None, :, None]
        return z, z.new_full((POINTS,), -math.log(POINTS))
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES[size])
    axis, log_weight = keys.new_tensor(nodes, dtype=torch.float64), np.log(weights / weights.sum())
    z = torch.cartesian_prod(*[axis] * size).reshape(-1, 1, 1, 1, size)
    each = torch.cartesian_prod(*[keys.new_tensor(log_weight, dtype=torch.float64)] * size)
    return z, each.reshape(len(z), size).sum(1)


def laplace_approximation(given: Conditionals) -> tuple[Tensor, Tensor]:
    """Return û_s ``(S, K, 1, P)`` and a root of H_s⁻¹ ``(S, K, 1, P, P)``; ``given`` as of :func:`laplace_candidates`.

    Newton steps, with a line search where a whole step makes the density lower, go on for each client and draw of θ
    until they gain less than a tolerance, whichever other clients are there.
    """
    if given.program.guide.structure is not None:  # q is the approximation
        q = given.block()
        return q.mean, q.scale_tril
    start, least = _start(given)
    u, precision = start.clone(), start.new_empty(*start.shape, start.shape[-1])
    reached, step = u.new_full(u.shape[:2], -torch.inf), torch.zeros_like(u)
    ended = torch.zeros_like(reached, dtype=torch.bool)
    moving = torch.arange(given.size, device=u.device)
    for number in range(1 + STEPS):
        active, before = ~ended[moving], reached[moving]
        found = _derivatives(given, u, moving)
        late = active & ~(found[0] >= before) & (number > 0)
        far = late.any(1).nonzero()[:, 0]
        if len(far):
            some = moving[far]
            shorter = newton.line_search(given.at(some).log_joint, u[some] - step[some], step[some])
            u[some] = torch.where(late[far][..., None, None], shorter, u[some])
            for value, new in zip(found, _derivatives(given, u, some), strict=True):
                value[far] = new
        reached[moving], gradient, hessian = found
        here = newton.positive(-hessian, least[moving])
        precision[moving] = torch.where(active[..., None, None, None], here, precision[moving])
        new = torch.linalg.solve_ex(here, gradient[..., None])[0].squeeze(-1).nan_to_num(0.0)
        last = ~((gradient * new).sum((-2, -1)) > TOLERANCE)
        taken = active & last if number == STEPS else active
        step[moving] = torch.where(taken[..., None, None], new, 0.0)
        u[moving] += step[moving]
        ended[moving] |= last
        moving = moving[~ended[moving].all(1)]
        if not len(moving):
            break
    return u, inverse_root(precision)


def _derivatives(given: Conditionals, u: Tensor, draws: Tensor) -> list[Tensor]:
    """Return the log density at u of some draws of θ, its gradient and its curvature."""
    with torch.enable_grad():
        found = newton.value_and_curvature(given.at(draws).log_joint, u[draws])
    return [x.detach() for x in found]


@torch.no_grad()
def _start(given: Conditionals) -> tuple[Tensor, Tensor]:
    """Return where Newton's method starts, and the least curvature, ``(S, K, 1, P)`` each.

    The mean of q is linear in θ, and far from the posterior where θ is far from the centre of q(θ). The location of the
    prior is taken where it has the larger density.
    """
    program, params, _, batch, size = given
    q = given.block()
    with handlers.given(batch.device, params, noise={}, draws=size):
        prior, scale = program.guide.block_prior(given.z, batch.head())
    both = torch.stack([q.mean, prior.expand_as(q.mean)])
    best = given.log_joint(both).nan_to_num(-torch.inf).argmax(0)
    start = both.gather(0, best[None, ..., None, None].expand_as(both[:1]))[0]
    variance = torch.where(scale.isfinite(), scale.square(), q.variance)
    return start, LEAST_CURVATURE / variance
