"""The log density of a model at unconstrained values, and with a client's own variables integrated out.

    log p(θ),   log p(w | θ),   log p(D | w, θ)                    of K clients at S values each
    log p(D | θ) ≈ log p(D, û | θ) + P / 2 log 2π − ½ log |H|      Laplace's method (Tierney & Kadane 1986)
        û = argmax_w log p(D, w | θ),   H = −∇²_w log p(D, û | θ)

û comes from Newton steps, of which the last two are differentiated through. An error of order δ in the mode is of order
δ⁴ after them, so that gradients and Hessians in θ are those at the true mode.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Model
from bayesfed.elbo import handlers
from bayesfed.elbo.moments import moments
from bayesfed.guides.newton import NEWTON_STEPS, attached_curvature, newton
from bayesfed.guides.unconstrained import ModelAt, split

DIFFERENTIATED = 2
"""The number of Newton steps that are differentiated through."""


def _centre(prior: Any) -> Tensor:
    """Return the value at the centre of a prior."""
    return biject_to(prior.support)(moments(prior).loc)


def log_prior(model: Model, sizes: Mapping[str, int], z: Tensor, batch: Batch) -> Tensor:
    """log p(θ) at θ = z ``(S, D)``, unconstrained: ``(S,)``."""
    run = ModelAt(split(z[:, None, None], sizes), _centre)
    with handlers.given(batch.device, draws=len(z)), run, handlers.Until(sizes):
        model(batch)
    return run.log_prob(sizes).expand(len(z), 1).squeeze(1)


def evaluate(model: Model, values: Mapping[str, Tensor], batch: Batch) -> ModelAt:
    """Run a model at values ``(S, K or 1, 1, size)`` of some sites, with the others at the centre of their prior."""
    run = ModelAt(values, _centre)
    draws = len(next(iter(values.values())))
    with handlers.given(batch.device, draws=draws), run:
        model(batch)
    return run


def marginal(
    model: Model,
    sizes: tuple[Mapping[str, int], Mapping[str, int]],
    z: Tensor,
    batch: Batch,
    start: Tensor,
    least: Tensor,
    steps: int = NEWTON_STEPS,
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(D_i | θ) by Laplace's method at θ = z, twice differentiable in z.

    Args:
        model: the Pyro model.
        sizes: the number of dimensions of each global, and of each local site.
        z: unconstrained, ``(S, K, 1, D)``.
        batch: the clients' rows.
        start: where the search for û starts, ``(S, K, 1, P)``.
        least: the smallest negative curvature of log p(D, w | θ) that Newton's method assumes, ``(P,)``.
        steps: Newton steps before those that are differentiated through.

    Returns:
        The value ``(S, K)``, û ``(S, K, 1, P)`` and H ``(S, K, 1, P, P)``.
    """

    def log_joint(w: Tensor) -> Tensor:
        """log p(D, w | θ) at ``(T, S, K, 1, P)``: ``(T, S, K)``."""
        theta = z.expand(len(w), *z.shape).flatten(0, 1)
        values = split(theta, sizes[0]) | split(w.flatten(0, 1), sizes[1])
        run = evaluate(model, values, batch)
        return (run.log_prob(sizes[1]) + run.log_prob(run.observed)).unflatten(0, w.shape[:2])

    def leaf(w: Tensor) -> Tensor:
        return w.requires_grad_() if w.is_leaf else w

    given, attached = z, z.requires_grad and torch.is_grad_enabled()
    z = given.detach()
    tolerance = 8 * torch.finfo(z.dtype).eps
    with torch.enable_grad():
        w = newton(log_joint, least.expand_as(start), start.detach(), steps, tolerance).detach()
        z = given if attached else z
        for _ in range(DIFFERENTIATED):
            grad, hessian = attached_curvature(log_joint, leaf(w))
            w = w + torch.linalg.solve_ex(-hessian, grad[..., None])[0].squeeze(-1)
            w = w if attached else w.detach()
        _, hessian = attached_curvature(log_joint, leaf(w))
        value = log_joint(w[None])[0] - torch.linalg.slogdet(-hessian)[1].squeeze(-1) / 2
        value = value + w.shape[-1] / 2 * math.log(2 * math.pi)
    if attached:
        return value, w, -hessian
    return value.detach(), w.detach(), -hessian.detach()
