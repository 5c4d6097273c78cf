"""The posterior of one client's variable, in unconstrained coordinates u.

Independent of the globals:     q(u) = N(a, diag(e^{−r}))
Conditioned on the context c:   q(u | c) ∝ p(u | θ) · N(u; a + C^{−⊤} A c, (C C^⊤)^{−1})
                                C = diag(e^{(r + R c)/2}) (I + strictly lower triangle of W)

c stacks the globals, standardised under q(z), and the noise of the client's earlier variables. The Gaussian
factor stands for the client's likelihood and only its parameters (a, r, W, A, R) are learnt. Where the prior
of u is Normal and its likelihood too, this holds the exact conditional posterior, for any prior: as the
hyper-parameters move, what a client has learnt stays right. Where the prior is not Normal the factor stands for
it too.

All are in units of the prior's centre and spread (:class:`Start`), so that one learning rate serves variables
of any scale. The factor starts narrow, e^{−r/2} = 0.14 of the prior's spread: then a moves at once to where the
client's data want it. Starting wide, a first runs far beyond, the factor being too weak to pull, and must come
back; meanwhile the clients look alike and the spread between them collapses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.transforms import ReshapeTransform

FULL_UP_TO = 20
"""The largest variable whose factor has a full covariance; larger ones have W = 0."""
NARROW = 4.0
SMALL = 64
"""Numbers of a matrix whose product with a vector is better taken by hand."""


@dataclass(frozen=True)
class Start:
    """The centre and spread of a site's prior, in unconstrained coordinates: flat tensors ``(P,)``."""

    loc: Tensor
    scale: Tensor


def independent_start(start: Start) -> dict[str, Tensor]:
    """Parameters of :func:`independent`: each ``(P,)``."""
    zeros = torch.zeros_like(start.loc)
    return {"loc": zeros, "log_precision": zeros + NARROW}


def independent(start: Start, loc: Tensor, log_precision: Tensor) -> dist.Normal:
    """q(u), over flat ``(..., P)``."""
    return dist.Normal(start.loc + start.scale * loc, start.scale * (-log_precision / 2).exp())


def conditional_start(start: Start, context: int) -> dict[str, Tensor]:
    """Parameters of :func:`conditional`, for a context of some length C: ``(P,)``, ``(P, P)`` or ``(P, C)``."""
    size = len(start.loc)
    weights = start.loc.new_zeros(size, context)
    full = {"tril": start.loc.new_zeros(size, size)} if 1 < size <= FULL_UP_TO else {}
    return independent_start(start) | full | {"loc_weight": weights, "precision_weight": weights}


def conditional(
    start: Start,
    prior: tuple[Tensor, Tensor] | None,
    c: Tensor,
    loc: Tensor,
    log_precision: Tensor,
    loc_weight: Tensor,
    precision_weight: Tensor,
    tril: Tensor | None = None,
) -> Any:
    """q(u | c), over flat ``(..., P)``: a Normal, or a MultivariateNormal where the factor is full.

    Args:
        start: units of everything below.
        prior: location and scale of a Normal prior ``(..., P)``, see :func:`gaussian`.
        c: the context, ``(..., C)``.
        loc: a, ``(K, 1, P)``.
        log_precision: r, ``(K, 1, P)``.
        loc_weight: A, ``(K, 1, P, C)``.
        precision_weight: R, ``(K, 1, P, C)``.
        tril: W, ``(K, 1, P, P)``.
    """
    shift = _times(loc_weight, c)
    spread = (-log_precision.detach() / 2).exp()
    log_precision = log_precision + _times(precision_weight, c)
    if prior is None:
        prior_loc, prior_precision = torch.zeros_like(loc), torch.zeros_like(loc)
    else:
        prior_loc = (prior[0] - start.loc) / start.scale
        prior_precision = (start.scale / prior[1]).square()
    if tril is None:
        a, factor = loc + spread * shift, log_precision.exp()
        precision = prior_precision + factor
        mean = (prior_precision * prior_loc + factor * a) / precision
        return dist.Normal(start.loc + start.scale * mean, start.scale * precision.rsqrt())
    eye = torch.eye(tril.shape[-1], dtype=tril.dtype, device=tril.device)
    unit = tril.tril(-1) + eye
    still = (unit / spread[..., None]).detach()  # C at c = 0
    a = loc + torch.linalg.solve_triangular(still.mT, shift[..., None], upper=True).squeeze(-1)
    root = (log_precision / 2).exp()[..., None] * unit
    factor = root @ root.mT
    precision = factor + torch.diag_embed(prior_precision)
    natural = prior_precision * prior_loc + _times(factor, a)
    tril = inverse_root(precision)
    mean = _times(tril, _times(tril.mT, natural))
    return dist.MultivariateNormal(
        start.loc + start.scale * mean, scale_tril=start.scale[:, None] * tril
    )


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """A x; of a few numbers without the reshaping that batched products want, which takes longer than they do."""
    if matrix.shape[-2:].numel() <= SMALL:
        return (matrix * vector[..., None, :]).sum(-1)
    return (matrix @ vector[..., None]).squeeze(-1)


def inverse_root(precision: Tensor) -> Tensor:
    """Lower triangular L with L L^⊤ = precision⁻¹; not finite where the precision is not, so that it shows."""
    upper = torch.linalg.cholesky_ex(precision.flip(-2, -1)).L.flip(-2, -1)
    eye = torch.eye(precision.shape[-1], dtype=precision.dtype, device=precision.device)
    return torch.linalg.solve_triangular(upper.mT, eye, upper=False)


def whiten(q: Any, u: Tensor) -> Tensor:
    """The standard normal noise from which q drew u: ``(..., P)``."""
    if isinstance(q, dist.Normal):
        return (u - q.loc) / q.scale
    noise = torch.linalg.solve_triangular(q.scale_tril, (u - q.loc)[..., None], upper=False)
    return noise.squeeze(-1)


def seen(prior: Any, q: Any) -> Any:
    """q, over flat u, as a distribution over the prior's support."""
    transform = biject_to(prior.support)
    shape = transform.inverse_shape(prior.shape())[len(prior.batch_shape) :]
    if isinstance(q, dist.Normal):
        batch = torch.broadcast_shapes(q.loc.shape, q.scale.shape)[:-1]
        loc, scale = (
            x.expand(*batch, x.shape[-1]).reshape((*batch, *shape)) for x in (q.loc, q.scale)
        )
        q = dist.Normal(loc, scale).to_event(len(shape))
    elif shape != q.event_shape:
        q = dist.TransformedDistribution(q, [ReshapeTransform(q.event_shape, shape)])
    support = prior.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return q if support is constraints.real else dist.TransformedDistribution(q, [transform])


def gaussian(prior: Any) -> tuple[Tensor, Tensor] | None:
    """Location and scale of a prior that is Normal in unconstrained coordinates: ``(..., P)``; or None."""
    base = _base(prior)
    if isinstance(base, dist.LogNormal):
        base = _base(base.base_dist)
    if not isinstance(base, dist.Normal):
        return None
    batch, event = prior.batch_shape, prior.event_shape
    loc, scale = (x.expand(*batch, *event).reshape((*batch, -1)) for x in (base.loc, base.scale))
    return loc, scale


def _base(fn: Any) -> Any:
    while isinstance(fn, dist.Independent):
        fn = fn.base_dist
    return fn
