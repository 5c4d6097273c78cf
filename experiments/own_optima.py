"""The optimum of each method's own objective on a hierarchy, computed without the package's algorithms.

Pyro's own trace gives log p(θ), log p(w_i | θ) and log p(D_i | w_i, θ) of the program as it is written, on all clients'
rows, in float64; θ and w_i are in unconstrained coordinates, in which a point estimate maximises the density. L-BFGS
finds the optimum, and expectations over a client's variables are adaptive Gauss–Hermite quadrature. With n_i a client's
number of rows, and v_i = 1 where the server weights clients by rows, n̄ / n_i where it counts clients:

    centred       log p(θ) + Σ v_i log p(D_i | c_i(θ), θ), c_i the centre of p(w_i | θ): FedAvg, FedProx, FedNova,
                  FedCurv, Pooled; Scaffold counts clients
    own           log p(θ) + Σ log p(D_i | w_i, θ), over w_i too: FedPer, FedRep, Local
    body          the same over the part of θ that the likelihood reads, w_i at the centre of the first prior: FedBABU
    pulled        Ditto: θ as FedAvg's; w_i of log p(D_i | w_i, θ) / n_i − λ/2 ‖(w_i − c_i(θ)) / unit‖². pFedMe: the
                  same, over θ and w_i together, with log p(θ) / Σ n_i
    adapted       Per-FedAvg, MAML: log p(θ) + Σ v_i log p(D_i | φ_i(θ), θ), φ_i one gradient step from c_i(θ)
    joint         pFedMAP, MTL: log p(θ) + Σ log p(D_i | w_i, θ) + log N(w_i; m, ρ²), ρ as it is at the start
    factorised    pFedVEM: the ELBO, q(w_i) independent Normals; FedABML counts clients; pFedBayes with KL times 0.05
    marginal      pFedGP: Σ log p(D_i | θ), w_i integrated out; FedPop: log p(θ) + Σ log p(D_i | θ)
    Laplace       FOLA: the mode of log p(θ) + Σ log p(D_i | θ), w_i integrated out by Laplace's method, and the
                  Hessian there
                  FedBE: the same mode, beside the centre of its ensemble
    Gaussian      SFVIAvg: the Gaussian q(θ) of the largest ELBO where q(w_i | θ) is p(w_i | θ, D_i)
    posterior     SFVI and PVI, whose fits end with importance weights, and PACPFL, whose hyper-posterior with τ = 1 is
                  the posterior: NUTS

What a method does not move counts as given. FedAvg, FedProx, FedNova, FedCurv and pFedMe have no objective whose
stationary point they reach with several local steps at a fixed rate, where clients differ (client drift: Karimireddy et
al. 2020, section 3), and neither has FedABML: they are compared with the objective all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

sys.path.append(str(Path(__file__).parent))
from integrated_optima import NODES, Marginal, gaussian, grid, laplace
from program_densities import Hierarchy, hierarchy_of, maximum

__all__ = ["Hierarchy", "Marginal", "hierarchy_of", "laplace", "own_optimum"]

Values = dict[str, np.ndarray]


def centred(hierarchy: Hierarchy, weights: Tensor) -> Tensor:
    """Return the θ of clients at the centre of their priors."""

    def value(theta: Tensor) -> Tensor:
        prior, _, likelihood = hierarchy(theta[None])
        return (weights * (likelihood + prior[:, None] / len(weights))).sum()

    return maximum(value, hierarchy.start)


def joint(
    hierarchy: Hierarchy,
    fixed: Tensor,
    given: Tensor,
    density: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return θ and w_i of the largest joint value; of θ ``fixed`` (bool) is as it is ``given``."""
    free, size = ~fixed, int((~fixed).sum())

    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        theta = given.clone()
        theta[free] = x[:size]
        return theta, given_w + hierarchy.unit * x[size:].reshape(given_w.shape)

    given_w = hierarchy.centres(given[None])[0].detach()
    start = torch.cat([given[free], torch.zeros(given_w.numel(), dtype=given.dtype)])
    theta, w = parts(maximum(lambda x: density(*parts(x)), start))
    return theta, w


def factorised(
    hierarchy: Hierarchy, weights: Tensor, kl_weight: float, fitted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return θ, and the means and standard deviations of q(w_i), of the largest weighted ELBO.

    It has several local maxima where a scale may be next to 0: the larger of those above the start and above the θ of a
    fit counts.
    """
    points, mass = grid(hierarchy.width)
    clients, start = len(hierarchy.rows), hierarchy.start
    centre, unit = hierarchy.centres(start[None])[0].detach(), hierarchy.unit

    def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        theta, loc, scale = x.split([hierarchy.size, centre.numel(), centre.numel()])
        loc, log_scale = loc.reshape(clients, -1), scale.reshape(clients, -1)
        return theta, centre + unit * loc, unit * log_scale.exp()

    def value(x: Tensor) -> Tensor:
        theta, loc, scale = parts(x)
        log_prior, prior, likelihood = hierarchy(theta[None], loc + scale * points[:, None])
        expected = (mass[:, None] * (likelihood + kl_weight * prior)).sum(0)
        expected = expected + kl_weight * scale.log().sum(-1) + log_prior / clients
        return (weights * expected).sum()

    first = torch.cat([start, torch.zeros(centre.numel()), torch.full([centre.numel()], -1.0)])
    near = maximum(lambda q: value(torch.cat([fitted, q])), first[hierarchy.size :])
    found = [maximum(value, x) for x in (first, torch.cat([fitted, near]))]
    return parts(max(found, key=lambda x: float(value(x))))


def adapted(hierarchy: Hierarchy, weights: Tensor, lr: float, most: float) -> Tensor:
    """Return the θ that is best after one step of each client's, bounded as the package bounds it."""

    def value(theta: Tensor) -> Tensor:
        w = hierarchy.centres(theta[None])
        likelihood = hierarchy(theta[None], w)[2]
        (grad,) = torch.autograd.grad(likelihood.sum(), w, create_graph=True)
        grad = grad / hierarchy.rows[:, None] * hierarchy.unit
        size = grad.square().mean(-1, keepdim=True).sqrt() / most
        over = (size - 0.25) / 0.75
        bounded = torch.where(over > 0, 0.25 + 0.75 * over / (1 + over.square()).sqrt(), size)
        w = w + lr * hierarchy.unit * grad * bounded / size
        prior, _, likelihood = hierarchy(theta[None], w)
        return (weights * (likelihood + prior[:, None] / len(weights))).sum()

    return maximum(value, centred(hierarchy, weights))


def own_optimum(name: str, hierarchy: Hierarchy, fitted: Mapping[str, Any]) -> Values | None:
    """Return the values of the variables that a method moves to its own optimum; None where NUTS is the measure.

    Args:
        name: of the method.
        hierarchy: in float64.
        fitted: a fit's means, for what the method leaves as it was at the start.
    """
    rows = hierarchy.rows
    by_rows, by_clients = torch.ones_like(rows), rows.mean() / rows
    clients = len(rows)
    nothing = torch.zeros(hierarchy.size, dtype=torch.bool)
    given = hierarchy.unconstrained(fitted)
    if name in ("SFVI", "PVI", "PACPFL"):
        return None
    if name in ("FedAvg", "FedProx", "FedNova", "FedCurv", "Pooled"):
        return _globals(hierarchy, centred(hierarchy, by_rows))
    if name == "Scaffold":
        return _globals(hierarchy, centred(hierarchy, by_clients))
    if name in ("PerFedAvg", "MAML"):
        return _globals(hierarchy, adapted(hierarchy, by_clients, lr=0.1, most=1.0))

    def loss(theta: Tensor, w: Tensor, weights: Tensor, pull: float) -> Tensor:
        """Return Σ v_i (log p(D_i | w_i, θ) + log p(θ) / N) − n̄ λ/2 Σ ‖(w_i − c_i(θ)) / unit‖²."""
        prior, _, likelihood = hierarchy(theta[None], w[None])
        gap = (w - hierarchy.centres(theta[None])[0]) / hierarchy.unit if pull else torch.zeros(1)
        total = (weights * (likelihood[0] + prior / clients)).sum()
        return total - rows.mean() * pull / 2 * gap.square().sum()

    if name in ("FedPer", "FedRep", "Local"):
        fixed = ~nothing if name == "Local" else ~hierarchy.reads()
        theta, w = joint(hierarchy, fixed, given, lambda t, w: loss(t, w, by_rows, 0.0))
        w = w.masked_fill(~_determined(hierarchy, theta, w), torch.nan)
        return _globals(hierarchy, theta, ~fixed) | _locals(hierarchy, w)
    if name == "FedBABU":
        reads = hierarchy.reads()
        w = hierarchy.centres(given[None]).detach()

        def value(x: Tensor) -> Tensor:
            theta = torch.where(reads, x, given)
            prior, _, likelihood = hierarchy(theta[None], w)
            return likelihood.sum() + prior.sum()

        return _globals(hierarchy, maximum(value, given), reads)
    if name == "Ditto":
        theta = centred(hierarchy, by_rows)
        _, w = joint(hierarchy, ~nothing, theta, lambda t, w: loss(t, w, by_clients, 0.1))
        return _globals(hierarchy, theta) | _locals(hierarchy, w)
    if name == "PFedMe":
        at = hierarchy.start
        theta, w = joint(hierarchy, nothing, at, lambda t, w: loss(t, w, by_clients, 2.0))
        return _globals(hierarchy, theta) | _locals(hierarchy, w)
    if name in ("PFedMAP", "MTL"):
        fixed = _spreads(hierarchy)

        def density(theta: Tensor, w: Tensor) -> Tensor:
            prior, local, likelihood = hierarchy(theta[None], w[None])
            return prior.sum() + local.sum() + likelihood.sum()

        theta, w = joint(hierarchy, fixed, given, density)
        return _globals(hierarchy, theta, ~fixed) | _locals(hierarchy, w)
    if name in ("PFedVEM", "FedABML", "PFedBayes"):
        weights = by_rows if name == "PFedVEM" else by_clients
        kl_weight = 0.05 if name == "PFedBayes" else 1.0
        theta, w, _ = factorised(hierarchy, weights, kl_weight, given)
        return _globals(hierarchy, theta) | _locals(hierarchy, w)
    if name in ("PFedGP", "FedPop"):
        marginal = Marginal(hierarchy, NODES if hierarchy.width == 1 else 5)
        start, _ = laplace(hierarchy)

        def evidence(theta: Tensor) -> Tensor:
            prior = hierarchy(theta[None])[0] if name == "FedPop" else torch.zeros(1)
            return (prior + marginal(theta[None])).sum()

        return _globals(hierarchy, maximum(evidence, start))
    if name == "FedBE":
        return _globals(hierarchy, laplace(hierarchy)[0])
    if name == "FOLA":
        mode, covariance = laplace(hierarchy)
        half = SobolEngine(hierarchy.size, scramble=True, seed=0).draw(4096, dtype=torch.float64)
        noise = torch.distributions.Normal(0.0, 1.0).icdf(half.clamp(1e-6, 1 - 1e-6))
        return _globals(hierarchy, mode + noise @ torch.linalg.cholesky(covariance).mT)
    if name == "SFVIAvg":
        return _globals(hierarchy, gaussian(hierarchy))
    raise ValueError(f"no objective is known of {name}")


def _spreads(hierarchy: Hierarchy) -> Tensor:
    """Return which of θ the scale of a local prior reads: bool ``(D,)``."""
    theta = hierarchy.start.clone().requires_grad_()
    nodes = hierarchy.trace_nodes(hierarchy.constrained(theta))
    found = torch.zeros(hierarchy.size, dtype=torch.bool)
    for name in hierarchy.locals:
        scale = nodes[name]["fn"].stddev.sum()
        if scale.requires_grad:
            (grad,) = torch.autograd.grad(scale, theta, allow_unused=True, retain_graph=True)
            found |= grad is not None and grad != 0
    return found


def _determined(hierarchy: Hierarchy, theta: Tensor, w: Tensor) -> Tensor:
    """Return which of w_i ``(N, P)`` have a finite maximum: there the likelihood is not flat."""
    w = w.detach().requires_grad_()
    (slope,) = torch.autograd.grad(hierarchy(theta[None], w[None])[2].sum(), w, create_graph=True)
    curved = [
        torch.autograd.grad(slope[:, p].sum(), w, retain_graph=True)[0][:, p]
        for p in range(hierarchy.width)
    ]
    return -torch.stack(curved, -1) * hierarchy.unit**2 > 1e-3


def _globals(hierarchy: Hierarchy, theta: Tensor, moved: Tensor | None = None) -> Values:
    """Return the means of θ ``(D,)`` or ``(S, D)`` as the program's values, of those variables that are moved."""
    return {
        name: np.asarray(value.mean(0) if theta.ndim == 2 else value)
        for name, value in hierarchy.constrained(theta).items()
        if moved is None or moved[hierarchy.parts[name][0]].any()
    }


def _locals(hierarchy: Hierarchy, w: Tensor) -> Values:
    """Return w ``(N, P)`` as the program's values."""
    return {
        name: np.asarray(w[:, place].reshape(len(w), *shape).detach())
        for name, (place, shape) in hierarchy.locals.items()
    }
