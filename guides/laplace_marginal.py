"""The log density of a model at given values, unconstrained; of a client also with its own variables integrated out.

    log p(θ),   log p(w | θ),   log p(D | w, θ)                    of K clients at S values each
    log p(D | θ) ≈ log p(D, û | θ) + P / 2 log 2π − ½ log |H|      Laplace's method (Tierney & Kadane 1986)
        û = argmax_w log p(D, w | θ),   H = −∇²_w log p(D, û | θ)

û comes from Newton steps of which the last two can be differentiated through: an error of order δ in a mode is one of
order δ⁴ after them, so that gradients and Hessians in θ are those of the true mode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Model
from bayesfed.elbo import handlers
from bayesfed.elbo.log_density import log_density
from bayesfed.elbo.moments import Moments, moments
from bayesfed.guides import client_factor

ATTACHED = 2
"""Newton steps that are differentiated through."""


class Joint(Messenger):
    """Give latent sites their unconstrained values and add up log densities, those of changes of variables included.

    Local sites that are given nothing stand at their centre. What is found:

    Attributes:
        likelihood: log p(D | w, θ), ``(S, K)``.
        local: log p(w | θ) of the sites given, ``(S, K)``.
        prior: log p(θ), ``(S, K or 1)``.
        centres: where the priors of the sites that were given nothing lie.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values
        self.likelihood: Any = 0.0
        self.local: Any = 0.0
        self.prior: Any = 0.0
        self.centres: dict[str, Moments] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        msg["stop"] = True
        if handlers.is_plate(msg):
            return
        if msg["is_observed"]:
            self.likelihood = self.likelihood + log_density(msg).sum(-1)
            return
        if name in self.values:
            transform = biject_to(fn.support)
            batch, shape = self.values[name].shape[:-1], transform.inverse_shape(fn.shape())
            u = self.values[name].reshape((*batch, *shape[len(fn.batch_shape) :]))
            msg["value"] = transform(u)
            log_prob = fn.log_prob(msg["value"])
            change = transform.log_abs_det_jacobian(u, msg["value"])
            log_prob = log_prob + change.reshape((*batch, -1)).sum(-1)
            if handlers.is_local(msg):
                self.local = self.local + log_prob.sum(-1)
            else:
                self.prior = self.prior + log_prob.sum(-1)
        else:
            self.centres[name] = moments(fn)
            msg["value"] = biject_to(fn.support)(self.centres[name].loc)
        msg["done"] = True


def split(vectors: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Sites' values from stacked ones, ``(..., D)``."""
    return dict(zip(sizes, vectors.split(list(sizes.values()), -1), strict=True))


def log_prior(model: Model, sizes: Mapping[str, int], z: Tensor, batch: Batch) -> Tensor:
    """log p(θ) at θ = z ``(S, D)``, unconstrained: ``(S,)``."""
    joint = Joint(split(z[:, None, None], sizes))
    with handlers.given(batch.device, draws=len(z)), joint, handlers.Until(sizes):
        model(batch)
    return joint.prior.expand(len(z), 1).squeeze(1)


def evaluated(model: Model, values: Mapping[str, Tensor], batch: Batch) -> Joint:
    """What :class:`Joint` finds of clients at values of some sites, ``(S, K or 1, 1, size)`` each."""
    first = next(iter(values.values()))
    joint = Joint(values)
    with handlers.given(batch.device, draws=len(first)), joint:
        model(batch)
    joint.likelihood = joint.likelihood.expand(len(first), len(batch))
    return joint


def marginal(
    model: Model,
    sizes: tuple[Mapping[str, int], Mapping[str, int]],
    z: Tensor,
    batch: Batch,
    start: Tensor,
    least: Tensor,
    steps: int = client_factor.NEWTON_STEPS,
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(D_i | θ) by Laplace's method, at θ = z, differentiable twice in z.

    Args:
        model: the Pyro model.
        sizes: how many numbers each global, and each local site has.
        z: unconstrained, ``(S, K, 1, D)``.
        batch: the clients' rows.
        start: where to look for û, ``(S, K, 1, P)``.
        least: a curvature of log p(D, w | θ) for Newton's method where there is less, ``(P,)``.
        steps: Newton steps from there, before those that are differentiated through.

    Returns:
        The value ``(S, K)``, û ``(S, K, 1, P)`` and H ``(S, K, 1, P, P)``.
    """

    def log_joint(w: Tensor) -> Tensor:
        """Of w ``(T, S, K, 1, P)``: ``(T, S, K)``."""
        lead = w.shape[:2]
        at = z.expand(len(w), *z.shape).flatten(0, 1)
        found = evaluated(model, split(at, sizes[0]) | split(w.flatten(0, 1), sizes[1]), batch)
        return (found.local + found.likelihood).unflatten(0, lead)

    fixed, attached = z, z.requires_grad and torch.is_grad_enabled()
    z = fixed.detach()
    eps = 8 * torch.finfo(z.dtype).eps
    with torch.enable_grad():
        w = client_factor.newton(
            log_joint, least.expand_as(start), start.detach(), steps, eps
        ).detach()
        z = fixed if attached else z
        for _ in range(ATTACHED):
            grad, hessian = client_factor.slope(log_joint, w.requires_grad_() if w.is_leaf else w)
            w = w + torch.linalg.solve_ex(-hessian, grad[..., None])[0].squeeze(-1)
            w = w if attached else w.detach()
        _, hessian = client_factor.slope(log_joint, w.requires_grad_() if w.is_leaf else w)
        value = log_joint(w[None])[0] - torch.linalg.slogdet(-hessian)[1].squeeze(-1) / 2
        value = value + w.shape[-1] / 2 * math.log(2 * math.pi)
    if attached:
        return value, w, -hessian
    return value.detach(), w.detach(), -hessian.detach()
