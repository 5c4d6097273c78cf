"""The distribution of one client's variable, in unconstrained coordinates u.

Independent of the globals:     q(u) = N(a, diag(e^{−r}))
Conditioned on the context c:   q(u | c) ∝ p(u | θ) · N(u; a + C^{−⊤} A c, (C C^⊤)^{−1})
                                C = diag(e^{(r + R c)/2}) (I + strictly lower triangle of W)

c stacks the globals, as differences from the mean of q(z) in units of √(its scale), and the noise of the client's
earlier variables. The Gaussian factor approximates the client's likelihood, and only its parameters (a, r, W, A, R) are
learnt. Where both the prior of u and its likelihood are Normal, q is the exact conditional posterior under any prior:
it stays exact while the hyper-parameters change, the correlations of a multivariate Normal prior among them. Where the
prior is not Normal the factor approximates the prior as well.

All are in units of the prior's centre and spread (:class:`Scaling`), so that one learning rate serves variables of any
scale. The factor starts narrow, e^{−r/2} = 0.14 of the prior's spread: then a quickly moves to where the client's data
want it. With a wide start a overshoots, since the factor is too weak to pull, and must come back. Meanwhile the clients
look alike, and the spread between them collapses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.distributions.util import broadcast_shape
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.transforms import ReshapeTransform

from bayesfed.elbo.moments import base_support, unconstrained_shape
from bayesfed.guides.precision_normal import PrecisionNormal
from bayesfed.guides.triangular import (
    TriangularNormal,
    log_det,
    product_of_normals,
    product_with_root,
    root_of_precision,
    solve_lower,
    times,
)

FULL_UP_TO = 64
"""The largest number of dimensions for which the factor has a full covariance; else W = 0."""
START_LOG_PRECISION = 4.0
"""r at the start."""


@dataclass(frozen=True)
class Scaling:
    """The centre and spread of a site's prior, in unconstrained coordinates: flat tensors ``(P,)``.

    A site's scaled coordinates are (u − loc) / scale.
    """

    loc: Tensor
    scale: Tensor


def init_independent(scaling: Scaling) -> dict[str, Tensor]:
    """The parameters of :func:`independent` at the start, ``(P,)`` each."""
    zeros = torch.zeros_like(scaling.loc)
    return {"loc": zeros, "log_precision": zeros + START_LOG_PRECISION}


def independent(scaling: Scaling, loc: Tensor, log_precision: Tensor) -> dist.Normal:
    """q(u), over flat ``(..., P)``."""
    scale = scaling.scale * (-log_precision / 2).exp()
    return dist.Normal(scaling.loc + scaling.scale * loc, scale)


def init_conditional(scaling: Scaling, context: int) -> dict[str, Tensor]:
    """Parameters of :func:`conditional` at the start, for a context of length C: ``(P,)``, ``(P, P)`` or ``(P, C)``."""
    size = len(scaling.loc)
    weights = scaling.loc.new_zeros(size, context)
    full = {"tril": scaling.loc.new_zeros(size, size)} if 1 < size <= FULL_UP_TO else {}
    return init_independent(scaling) | full | {"loc_weight": weights, "precision_weight": weights}


class NormalPrior(NamedTuple):
    """The joint Normal prior of a client's variables, in unconstrained coordinates.

    Attributes:
        loc: ``(..., P)``.
        scale: standard deviations, ``(..., P)``; infinite of variables whose prior is not Normal.
        root: M, lower triangular, M Mᵀ the covariance, ``(..., P, P)``; None of independent variables.
    """

    loc: Tensor
    scale: Tensor
    root: Tensor | None = None


def flat_prior(scaling: Scaling) -> NormalPrior:
    """The infinitely wide prior of variables whose prior is not Normal."""
    return NormalPrior(scaling.loc, torch.full_like(scaling.loc, torch.inf))


def conditional(
    scaling: Scaling,
    prior: NormalPrior | None,
    c: Tensor,
    loc: Tensor,
    log_precision: Tensor,
    loc_weight: Tensor,
    precision_weight: Tensor,
    tril: Tensor | None = None,
) -> Any:
    """q(u | c), over flat ``(..., P)``: a Normal, or a MultivariateNormal where the factor is full.

    Args:
        scaling: the units of all arguments below but ``prior``.
        prior: a Normal prior, of independent variables unless the factor is full; None if it is not Normal.
        c: the context, ``(..., C)``.
        loc: a, ``(K, 1, P)``.
        log_precision: r, ``(K, 1, P)``.
        loc_weight: A, ``(K, 1, P, C)``.
        precision_weight: R, ``(K, 1, P, C)``.
        tril: W, ``(K, 1, P, P)``.
    """
    prior = prior or flat_prior(scaling)
    shift = _of_context(loc_weight, c)
    spread = (-log_precision.detach() / 2).exp()
    changed = _of_context(precision_weight, c)
    if tril is None:
        prior_loc = (prior.loc - scaling.loc) / scaling.scale
        prior_precision = (scaling.scale / prior.scale).square()
        a, factor = loc + spread * shift, (log_precision + changed).exp()
        precision = prior_precision + factor
        mean = (prior_precision * prior_loc + factor * a) / precision
        return dist.Normal(scaling.loc + scaling.scale * mean, scaling.scale * precision.rsqrt())
    # u − loc is not scaled: operations of (P,) with (..., P) take long
    shift = solve_lower(tril.detach(), shift[..., None], transposed=True, unit=True).squeeze(-1)
    a = scaling.scale * loc + scaling.scale * spread * shift
    diagonal = (log_precision / 2).exp() / scaling.scale * (changed / 2).exp()
    centre = prior.loc - scaling.loc
    if prior.root is None:
        relative = centre, prior.scale.square().reciprocal()
        mean, root = product_of_normals(relative, a, diagonal, tril)
    else:
        mean, root = product_with_root((centre, prior.root), a, diagonal, tril)
    return TriangularNormal(scaling.loc + mean, scale_tril=root)


def _of_context(weight: Tensor, c: Tensor) -> Tensor:
    """Return A c of A ``(K, 1, P, C)`` and contexts ``(..., C)``, which may be those of all K clients."""
    if c.shape[-3:-1] != (1, 1):
        return times(weight, c)
    found = c.flatten(0, -2) @ weight.flatten(0, -2).mT
    return found.reshape(*c.shape[:-3], *weight.shape[:-1])


def unit_root(log_precision: Tensor, tril: Tensor | None = None) -> Tensor:
    """C of the factor, ``(K, 1, P)`` or ``(K, 1, P, P)``, whose units C^{−⊤} are no longer than the prior's spread."""
    diagonal = (log_precision / 2).exp().clamp(min=1.0)
    return diagonal if tril is None else root_of_precision(diagonal, tril)


def whiten(q: Any, u: Tensor) -> Tensor:
    """The standard Normal noise from which q drew u, ``(..., P)``."""
    if isinstance(q, dist.Normal):
        return (u - q.loc) / q.scale
    return solve_lower(q.scale_tril, (u - q.loc)[..., None]).squeeze(-1)


def unwhiten(q: Any, noise: Tensor) -> tuple[Tensor, Tensor]:
    """What q draws from standard Normal noise ``(..., P)``, and log |det| of this map ``(...)``."""
    if isinstance(q, PrecisionNormal):
        return q.at(noise), -q.root.log_det()
    if isinstance(q, dist.Independent):
        q = q.base_dist
        return q.loc + q.scale * noise, q.scale.log().sum(-1)
    return q.loc + times(q.scale_tril, noise), log_det(q.scale_tril)


def as_vector(q: Any) -> Any:
    """Return q with one event of P dimensions."""
    return q.to_event(1) if isinstance(q, dist.Normal) else q


def on_support(prior: Any, q: Any) -> Any:
    """The distribution over the prior's support of which q, over flat u, is the unconstrained one."""
    transform = biject_to(prior.support)
    shape = unconstrained_shape(prior.support, prior.shape())[len(prior.batch_shape) :]
    if isinstance(q, dist.Normal):
        batch = broadcast_shape(q.loc.shape, q.scale.shape)[:-1]
        loc, scale = (
            x.expand(*batch, x.shape[-1]).reshape((*batch, *shape)) for x in (q.loc, q.scale)
        )
        q = dist.Normal(loc, scale).to_event(len(shape))
    elif shape != q.event_shape:
        q = dist.TransformedDistribution(q, [ReshapeTransform(q.event_shape, shape)])
    real = base_support(prior.support) is constraints.real
    return q if real else dist.TransformedDistribution(q, [transform])


def normal_prior(prior: Any) -> NormalPrior | None:
    """A prior that is Normal in unconstrained coordinates, of independent variables; None if it is not."""
    base = _base(prior)
    if isinstance(base, dist.LogNormal):
        base = _base(base.base_dist)
    if not isinstance(base, dist.Normal):
        return None
    batch, event = prior.batch_shape, prior.event_shape
    loc, scale = (x.expand(*batch, *event).reshape((*batch, -1)) for x in (base.loc, base.scale))
    return NormalPrior(loc, scale)


def correlated_prior(prior: Any) -> NormalPrior | None:
    """A multivariate Normal prior, or several by ``to_event``; None of another distribution.

    Example:
        >>> import pyro.distributions as dist
        >>> import torch
        >>> from bayesfed.guides.local import correlated_prior
        >>> prior = dist.MultivariateNormal(torch.zeros(2), torch.tensor([[4.0, 2.0], [2.0, 2.0]]))
        >>> correlated_prior(prior).scale, correlated_prior(prior.expand([2]).to_event(1)).root.shape
        (tensor([2.0000, 1.4142]), torch.Size([4, 4]))
    """
    base = _base(prior)
    if not isinstance(base, torch.distributions.MultivariateNormal):
        return None
    lead, event = prior.batch_shape, prior.event_shape
    loc, size = base.loc.expand(*lead, *event).reshape((*lead, -1)), event[-1]
    each = base.scale_tril.expand(*lead, *event[:-1], size, size)
    root = block_diagonal(each.reshape(*lead, math.prod(event[:-1]), size, size).unbind(-3))
    return NormalPrior(loc, root.square().sum(-1).sqrt(), root)


def joint_prior(prior: Any) -> NormalPrior | None:
    """A prior that is Normal in unconstrained coordinates, of independent variables or not; None if it is not."""
    return normal_prior(prior) or correlated_prior(prior)


def join_priors(parts: Sequence[NormalPrior]) -> NormalPrior:
    """The prior of the variables of all parts together, independent of each other."""
    loc, scale = (concatenate([getattr(part, name) for part in parts]) for name in ("loc", "scale"))
    if all(part.root is None for part in parts):
        return NormalPrior(loc, scale)
    roots = [part.scale.diag_embed() if part.root is None else part.root for part in parts]
    return NormalPrior(loc, scale, block_diagonal(roots))


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate vectors ``(..., P)`` along their last dimension, the leading ones broadcast."""
    batch = broadcast_shape(*(p.shape[:-1] for p in parts))
    return torch.cat([p.expand(*batch, p.shape[-1]) for p in parts], -1)


def block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """Return the matrix with these blocks ``(..., P, P)`` on its diagonal, the leading dimensions broadcast."""
    lead = broadcast_shape(*(block.shape[:-2] for block in blocks))
    total, start, rows = sum(block.shape[-1] for block in blocks), 0, []
    for block in blocks:
        size = block.shape[-1]
        whole = block.expand(*lead, size, size)
        rows.append(torch.nn.functional.pad(whole, (start, total - start - size)))
        start += size
    return torch.cat(rows, -2)


def _base(fn: Any) -> Any:
    """Return the distribution without ``to_event``."""
    while isinstance(fn, dist.Independent):
        fn = fn.base_dist
    return fn
