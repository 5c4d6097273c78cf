"""What clients say of a draw of θ, log p(D_i | θ_s), by draws of their variables from Normals made for that draw.

    log 1/L Σ_l p(u_sl, D_i | θ_s) / r(u_sl),   u_sl ~ r = ½ q(u_i | θ_s) + ½ N(û_s, H_s⁻¹)

q(w_i | θ) is made where q(θ) lies and follows θ in a line from there; at a draw of θ far from there it may miss what it
stands for. N is Laplace's approximation at θ_s itself, by Newton steps from the middle of q. As many draws are of one
as of the other, and each is weighed against both (Veach & Guibas 1995, *Optimally combining sampling techniques*), so
one of them has to be right. The exponential is right in the mean with any number of draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo import laplace
from bayesfed.elbo.program import Program
from bayesfed.elbo.terms import Noise, log_ratio, run
from bayesfed.guides.hierarchical import LOCAL
from bayesfed.guides.local import inverse_root

EACH = 4
"""Draws of a client's variables for one of θ, half of them of q."""
STEPS = 2
"""Newton steps; of a likelihood that is Gaussian in u one is enough."""
WIDEST = 0.05
"""The least curvature along an axis, in units of q's precision."""
COST = 6
"""How many times as long as with a single draw of q it takes, about."""


def has_block(program: Program) -> bool:
    """Whether all local variables are one Normal vector in the guide."""
    return set(program.randomness) - set(program.random) == {LOCAL}


def evidence(
    program: Program,
    params: Mapping[str, Tensor],
    theta: Mapping[str, Tensor],
    batch: Batch,
    noise: Noise,
    count: int,
) -> Tensor:
    """An estimate of log p(D_i | θ_s), ``(S, K)``.

    Args:
        program: one that :func:`has_block`.
        params: of the program and of these clients.
        theta: draws of the guide's global sites, ``(S, 1, 1, *event)``.
        batch: the clients' rows.
        noise: of the block, for ``EACH * S`` draws.
        count: S.
    """
    eps = noise[LOCAL][0].unflatten(0, (EACH, count))

    def log_joint(u: Tensor) -> Tensor:
        """log p(u, D_i | θ_s) of ``(R, S, K, 1, P)``: ``(R, S, K)``."""
        values = {name: v.repeat(len(u), *[1] * (v.ndim - 1)) for name, v in theta.items()}
        values[LOCAL] = u.flatten(0, 1)
        guide, model = run(program, params, values, batch, {}, len(u) * count)
        ratio = log_ratio(guide, model, local=True, skip=(LOCAL,))
        return torch.as_tensor(ratio).expand(len(u) * count, len(batch)).unflatten(0, (-1, count))

    with torch.no_grad():
        guide, _ = run(program, params, theta, batch, {LOCAL: [eps[0]]}, count)
        q = _full(guide.nodes[LOCAL]["fn"].weighed)
    least = WIDEST * q.precision_matrix.diagonal(dim1=-2, dim2=-1)
    u = q.loc
    with torch.enable_grad():
        for _ in range(STEPS):
            gradient, hessian = laplace.curvature(log_joint, u)
            precision = laplace.positive(-hessian.detach(), least)
            step = torch.linalg.solve_ex(precision, gradient.detach()[..., None])[0].squeeze(-1)
            u = u + step.nan_to_num(0.0)
    at_theta = dist.MultivariateNormal(u, scale_tril=inverse_root(precision), validate_args=False)
    with torch.no_grad():
        draws = torch.cat([_drawn(q, eps[::2]), _drawn(at_theta, eps[1::2])])
        against = torch.logaddexp(q.log_prob(draws), at_theta.log_prob(draws)) - math.log(2)
        found = log_joint(draws).double() - against.squeeze(-1).double()
    return found.nan_to_num(-torch.inf).logsumexp(0) - math.log(EACH)


def _full(q: Any) -> Any:
    """A Normal over vectors, as one with a covariance."""
    if isinstance(q, dist.Independent):
        q = q.base_dist
    if isinstance(q, dist.Normal):
        return dist.MultivariateNormal(q.loc, scale_tril=q.scale.diag_embed(), validate_args=False)
    return q


def _drawn(q: Any, eps: Tensor) -> Tensor:
    return q.loc + (q.scale_tril @ eps[..., None]).squeeze(-1)
