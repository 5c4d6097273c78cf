"""A client's Gaussian factor in closed form, from the curvature of its likelihood at the centre of q(θ).

    û = argmax log p(D_i | u, z̄) + log p(u | z̄)          a few Newton steps (Tierney & Kadane 1986)
    H = −∇²_u log p(D_i | û, z̄) = C Cᵀ                   the factor's precision
    a = û + H⁻¹ ∇_u log p(D_i | û, z̄)                    its location
    Cᵀ da / dz, d log diag H / dz                        how both change with the globals (A and R)

The last two are total derivatives: û moves with z, by (H + Λ)⁻¹ ∂/∂z ∇_u (log p(D_i | û, z) + log p(û | z)), Λ the
precision of the prior. The posterior of a client with many rows, given θ, is so narrow that q(θ) reaches many of its
standard deviations; where its rows depend on the sum of u and z, say, H does not change at all.

It is exact where the likelihood is Gaussian in u. A client takes it at each visit as the origin of its parameters φ_i:
they move by the change of this factor since the last visit, so that gradient steps learn a correction to it. So neither
a first visit nor a change of q(θ) between two visits leaves φ_i far from its optimum.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bayesfed.elbo.program import Params
from bayesfed.guides.newton import (
    NEWTON_STEPS,
    attached_gradient,
    eigen,
    highest,
    is_going,
    jacobian,
    jacobians,
    line_search,
    newton_step,
)
from bayesfed.guides.triangular import root_of_precision
from bayesfed.tracing.compiler import traceable

FACTOR = ("loc", "log_precision", "tril")
"""The parameters of a factor at the centre of q(θ)."""
MOST_STEPS = 50
"""Most Newton steps of a visit on a CPU: where a Poisson rate is far too large, each divides it by e."""
WEAKEST = 1e-2
"""The smallest eigenvalue of a factor's precision, in units of the prior's."""
FURTHEST = 3.0
"""The largest distance of a from û along an axis of H, in units of the prior's spread. A flat likelihood with a slope
would put a anywhere, so H is raised until the distance is no larger."""
STEEPEST = 3.0
"""The largest change of the logarithm of a factor's precision over a standard deviation of q(θ). Where the posterior of
a client has two modes, the precision at one of them may change far faster with the globals than it lasts."""


class BlockPrior(NamedTuple):
    """The Normal prior of K clients' variables u at the centre of q(θ), in units of its scaling.

    Attributes:
        loc: ``(K, 1, P)``.
        precision: ``(K, 1, P)``, zero where the prior is not Normal; of correlated variables ``(K, 1, P, P)``.
        z: the centre of q(θ), ``(K, 1, D)``.
        unit: that of the globals in the context, ``(K, 1, D)``.
    """

    loc: Tensor
    precision: Tensor
    z: Tensor
    unit: Tensor


class BlockGuide(Protocol):
    """A guide whose clients have one vector u of local variables each, with a Gaussian factor."""

    def block_prior_at_centre(self, params: Params, batch: Any) -> BlockPrior:
        """The prior of u at the centre of q(θ)."""

    def block_prior_at(self, params: Params, batch: Any, z: Tensor) -> tuple[Tensor, Tensor]:
        """Location and precision of the prior of u at z, as in :class:`BlockPrior`."""

    def block_log_likelihood(self, params: Params, batch: Any, u: Tensor, z: Tensor) -> Tensor:
        """log p(D_i | u, z) at S values of u, ``(S, K)``, with the priors that are not Normal."""


def closed_form(
    guide: BlockGuide, params: Params, earlier: Mapping[str, Tensor], batch: Any
) -> dict[str, Tensor]:
    """The parameters of K clients' factors, in units of the context.

    Each client stops at its own convergence. On a CPU the loop ends once all have. Elsewhere it has ``NEWTON_STEPS``
    steps, since reading whether all have converged would wait for the device.

    Args:
        guide: the guide that the factors belong to.
        params: its global and local parameters.
        earlier: ``loc``, ``log_precision`` and ``tril`` of the factors at the last visit, ``(K, 1, ...)``.
        batch: the clients' rows.
    """
    prior = guide.block_prior_at_centre(params, batch)
    u = _start(guide, params, batch, prior, dict(earlier))
    active = batch.scale.new_ones(len(batch))
    on_cpu = active.device.type == "cpu"
    for _ in range(MOST_STEPS if on_cpu else NEWTON_STEPS):
        u, active = _climb(guide, params, batch, prior, u, active)
        if on_cpu and not bool(active.any()):
            break
    return _scaled_factor(guide, params, batch, prior, u)


@traceable
def _start(
    guide: BlockGuide, params: Params, batch: Any, prior: BlockPrior, earlier: Params
) -> Tensor:
    """Return where Newton's method starts: the likeliest of three values of u for each client, ``(K, 1, P)``.

    They are the mode of the prior times the factor of the last visit, which is û where the likelihood is Gaussian; the
    centre of the prior; and the location of that factor, which may be far from û.
    """
    loc, root = earlier["loc"], (earlier["log_precision"] / 2).exp()
    centre = torch.where(_diagonal(prior.precision) > 0, prior.loc, loc)
    if (tril := earlier.get("tril")) is None:
        precision = root.square()
        mode = (prior.precision * centre + precision * loc) / (prior.precision + precision)
    else:
        matrix = root_of_precision(root, tril)
        pull = _pull(prior.precision, centre - loc)[..., None]
        precision = matrix @ matrix.mT + _matrix(prior.precision)
        mode = loc + torch.linalg.solve_ex(precision, pull)[0].squeeze(-1)
    tried = torch.stack([mode, centre, loc])
    return highest(tried, _log_joint(guide, params, batch, prior, tried))


def _log_joint(
    guide: BlockGuide, params: Params, batch: Any, prior: BlockPrior, u: Tensor
) -> Tensor:
    """Return log p(D_i | u, z̄) + log p(u | z̄) of S values of u, but for a constant, ``(S, K)``."""
    away = u - prior.loc
    distance = (_pull(prior.precision, away) * away).sum((-2, -1))
    return guide.block_log_likelihood(params, batch, u, prior.z) - distance / 2


@traceable
def _climb(
    guide: BlockGuide, params: Params, batch: Any, prior: BlockPrior, u: Tensor, active: Tensor
) -> tuple[Tensor, Tensor]:
    """Take a Newton step with the clients that are active, 1; return u, and the clients that are active after it."""
    log_joint = partial(_log_joint, guide, params, batch, prior)
    diagonal = _diagonal(prior.precision)
    least = diagonal.where(diagonal > 0, 1.0)
    step, gain = newton_step(log_joint, least, u)
    moved = line_search(log_joint, u, step)
    there = torch.where(active.reshape(-1, 1, 1) > 0, moved, u)
    return there, active * is_going(gain, u, moved)


@traceable
def _scaled_factor(
    guide: BlockGuide, params: Params, batch: Any, prior: BlockPrior, mode: Tensor
) -> dict[str, Tensor]:
    """Return :func:`factor` with its weights in units of the context, those of the precision bounded."""
    found = factor(
        partial(guide.block_log_likelihood, params, batch),
        partial(guide.block_prior_at, params, batch),
        mode,
        prior.z,
    )
    unit = prior.unit[..., None, :]  # the standard deviation of a context in its own units, too
    steepness = (found["precision_weight"] * unit.square()).norm(dim=-1, keepdim=True)
    bounded = (STEEPEST / steepness).clamp(max=1.0)
    return found | {
        "loc_weight": found["loc_weight"] * unit,
        "precision_weight": found["precision_weight"] * unit * bounded,
    }


def factor(
    log_likelihood: Callable[[Tensor, Tensor], Tensor],
    prior: Callable[[Tensor], tuple[Tensor, Tensor]],
    mode: Tensor,
    z: Tensor,
) -> dict[str, Tensor]:
    """The parameters of :func:`~bayesfed.guides.local.conditional` for K clients, with z as the context.

    Args:
        log_likelihood: a function of u ``(S, K, 1, P)`` and z ``(K, 1, D)`` that returns ``(S, K)``.
        prior: a function of z that returns the location and precision of the Normal prior of u, as in
            :class:`BlockPrior`.
        mode: û, ``(K, 1, P)``.
        z: the centre of q(θ), ``(K, 1, D)``.
    """
    u, z = (x.detach().requires_grad_() for x in (mode, z))
    grad = attached_gradient(log_likelihood(u[None], z), u)
    hessian, by_z = jacobians(grad, u, z)
    values, vectors = eigen(-hessian.detach())
    pull = (vectors.mT @ grad.detach()[..., None]).squeeze(-1).abs()
    least = (pull / FURTHEST).clamp(min=WEAKEST)  # bounds the distance of a from û
    precision = (vectors * values.maximum(least)[..., None, :]) @ vectors.mT
    root = torch.linalg.cholesky_ex(precision).L
    offset = torch.cholesky_solve(grad.detach()[..., None], root)
    loc, prior_precision = prior(z)
    pulled = by_z + jacobian(_pull(prior_precision, loc - mode), z)
    joint = precision + _matrix(prior_precision)
    moved = torch.linalg.solve_ex(joint.detach(), pulled.detach())[0]  # ∂û/∂z

    def slopes(values: Tensor) -> Tensor:
        """Return the total derivatives of values in z, ``(K, 1, P, D)``."""
        if not 0 < z.shape[-1] < u.shape[-1] or not values.requires_grad:
            in_u, in_z = jacobians(values, u, z)
            return (in_z + in_u @ moved).detach()
        # of more values than directions, by the derivatives of a weighted sum in its weights
        weights = torch.ones_like(values, requires_grad=True)
        of_sum = {"create_graph": True, "materialize_grads": True}
        in_u, in_z = torch.autograd.grad(values, (u, z), weights, **of_sum)
        return jacobian(in_z + (in_u[..., None] * moved).sum(-2), weights).mT.detach()

    bend = (hessian @ offset).squeeze(-1)  # to second order, ∇ log p at a is that at û and this
    diagonal = root.diagonal(dim1=-2, dim2=-1)
    loc_weight = torch.linalg.solve_triangular(root, by_z.detach() + slopes(bend), upper=False)
    of_diagonal = slopes(-hessian.diagonal(dim1=-2, dim2=-1))
    return {
        "loc": mode + offset.squeeze(-1),
        "log_precision": 2 * diagonal.log(),
        "tril": (root / diagonal[..., None]).tril(-1),
        "loc_weight": loc_weight,
        "precision_weight": of_diagonal / precision.diagonal(dim1=-2, dim2=-1).unsqueeze(-1),
    }


def with_moments(
    earlier: Mapping[str, Tensor], prior: BlockPrior, mean: Tensor, root: Tensor
) -> dict[str, Tensor]:
    """The parameters of K clients' factors with which q(u | z̄) has given moments; it follows z as it did before.

    Args:
        earlier: the parameters, ``(K, 1, ...)``.
        prior: the prior of u at z̄.
        mean: the mean, in units of the scaling, ``(K, 1, P)``.
        root: a root of the covariance, likewise, ``(K, 1, P, P)``.
    """
    both, of_prior = torch.cholesky_inverse(root), _matrix(prior.precision)
    values, vectors = torch.linalg.eigh(both - of_prior)
    precision = (vectors * values.clamp(min=WEAKEST)[..., None, :]) @ vectors.mT
    new = torch.linalg.cholesky_ex(precision).L
    natural = both @ mean[..., None] - _pull(prior.precision, prior.loc)[..., None]
    diagonal = new.diagonal(dim1=-2, dim2=-1)
    old, weight = (earlier["log_precision"] / 2).exp(), earlier["loc_weight"]
    if (tril := earlier.get("tril")) is None:
        weight = diagonal[..., None] * weight / old[..., None]
    else:
        before = root_of_precision(old, tril)
        weight = new.mT @ torch.linalg.solve_triangular(before.mT, weight, upper=True)
    found = {
        "loc": torch.cholesky_solve(natural, new).squeeze(-1),
        "log_precision": 2 * diagonal.log(),
        "tril": (new / diagonal[..., None]).tril(-1),
        "loc_weight": weight,
        "precision_weight": earlier["precision_weight"],
    }
    return {name: found[name] for name in earlier}


def _pull(precision: Tensor, u: Tensor) -> Tensor:
    """Return Λ u of u ``(..., K, 1, P)`` and a precision that is a diagonal or a matrix."""
    return precision * u if _is_diagonal(precision) else (precision @ u[..., None]).squeeze(-1)


def _matrix(precision: Tensor) -> Tensor:
    """Return the precision as a matrix, ``(K, 1, P, P)``."""
    return torch.diag_embed(precision) if _is_diagonal(precision) else precision


def _diagonal(precision: Tensor) -> Tensor:
    """Return the diagonal of the precision, ``(K, 1, P)``."""
    return precision if _is_diagonal(precision) else precision.diagonal(dim1=-2, dim2=-1)


def _is_diagonal(precision: Tensor) -> bool:
    """Return whether a precision is given as a diagonal, see :class:`BlockPrior`."""
    return precision.ndim == 3
