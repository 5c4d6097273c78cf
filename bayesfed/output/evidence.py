"""Estimates of log p(D_i | θ_s) at draws of θ, by importance sampling with a Laplace approximation as proposal.

    log 1/L Σ_l p(u_sl, D_i | θ_s) / N(u_sl; û_s, H_s⁻¹),   u_sl ~ N(û_s, H_s⁻¹), in pairs around û_s

u is the block of the client's local variables. q(u | θ) is fitted around the centre of q(θ), with a mean that is linear
in θ; at a draw of θ far from the centre it may be a poor proposal. The Normal used here is the Laplace approximation at
θ_s itself, found by Newton steps from the mean of q. If the likelihood is Gaussian in u, the ratio equals log p(D_i |
θ_s) for every draw. Otherwise the exponential of the estimate is unbiased for any L (Burda, Grosse & Salakhutdinov
2016, *Importance weighted autoencoders*, theorem 1), and pairs reduce its variance. One of the draws, chosen by its
weight, is closer to a draw from the client's posterior given θ_s than a draw from q.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.elbo import Noise, log_ratio, run
from bayesfed.elbo.noise import fold, uniform, word
from bayesfed.elbo.program import Program
from bayesfed.guides import newton
from bayesfed.guides.hierarchical import LOCAL
from bayesfed.guides.local import inverse_root

EACH = 4
"""L, draws of a client's variables for one of θ, in pairs."""
STEPS = 3
"""Largest number of Newton steps; one is enough for a likelihood that is Gaussian in u, and a CPU stops after it."""
LEAST_CURVATURE = 0.05
"""The least curvature along an axis, in units of q's precision."""
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
        """Return the estimate of log p(D_i | θ_s), ``(S, K)``."""
        return self.log_weights.logsumexp(0) - math.log(len(self.log_weights))

    def resample(self, keys: Tensor) -> Tensor:
        """Choose one of the L draws by weight, ``(S, K, 1, P)``; ``keys`` are the clients' noise streams ``(K,)``."""
        below = self.log_weights.softmax(0).cumsum(0)
        size = below.shape[1]
        u = uniform(fold(keys, word("picked")), (size,)).mT
        first = (below < u * below[-1]).sum(0).clamp(max=len(below) - 1)
        return self.draws.gather(0, first[None, ..., None, None].expand_as(self.draws[:1]))[0]


def laplace_candidates(
    program: Program,
    params: Mapping[str, Tensor],
    theta: Mapping[str, Tensor],
    batch: Batch,
    noise: Noise,
    count: int,
) -> Candidates:
    """Draw clients' variables from a Laplace approximation at each draw of θ, and compute their log weights.

    Args:
        program: a program for which :func:`has_block` is true.
        params: parameters of the program and of these clients.
        theta: draws of the guide's global sites, ``(S, 1, 1, *event)``.
        batch: the clients' rows.
        noise: noise of the block, for ``EACH / 2 * S`` draws.
        count: S.
    """
    eps = noise[LOCAL][0].unflatten(0, (-1, count))

    def log_joint(u: Tensor) -> Tensor:
        """Compute log p(u, D_i | θ_s) of ``(R, S, K, 1, P)``: ``(R, S, K)``."""
        values = {name: v.repeat(len(u), *[1] * (v.ndim - 1)) for name, v in theta.items()}
        values[LOCAL] = u.flatten(0, 1)
        guide, model = run(program, params, values, batch, {}, len(u) * count)
        ratio = log_ratio(guide, model, local=True, skip=(LOCAL,))
        return torch.as_tensor(ratio).expand(len(u) * count, len(batch)).unflatten(0, (-1, count))

    with torch.no_grad():
        guide, _ = run(program, params, theta, batch, {LOCAL: [eps[0]]}, count)
        q = guide.nodes[LOCAL]["fn"].detached
    least = LEAST_CURVATURE / q.variance
    u = q.mean
    with torch.enable_grad():
        for _ in range(STEPS):
            gradient, hessian = newton.curvature(log_joint, u)
            precision = newton.positive(-hessian.detach(), least)
            gradient = gradient.detach()
            step = torch.linalg.solve_ex(precision, gradient[..., None])[0].squeeze(-1)
            u = u + step.nan_to_num(0.0)
            if u.device.type == "cpu" and float((gradient * step).sum(-1).max()) < newton.TOLERANCE:
                break
    root = inverse_root(precision)
    away = (root @ eps[..., None]).squeeze(-1)
    draws = torch.cat([u + away, u - away])
    with torch.no_grad():
        level = root.diagonal(dim1=-2, dim2=-1).log().sum(-1) + u.shape[-1] / 2 * math.log(math.tau)
        density = -eps.square().sum(-1) / 2 - level
        found = log_joint(draws).double() - torch.cat([density, density]).squeeze(-1).double()
    return Candidates(draws, found.nan_to_num(-torch.inf))
