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
    marginal      pFedGP: Σ log p(D_i | θ), w_i integrated out
    Laplace       FOLA: the mode of log p(θ) + Σ log p(D_i | θ), w_i integrated out by Laplace's method, and the
                  Hessian there
    Gaussian      SFVIAvg, PVI: the Gaussian q(θ) of the largest ELBO where q(w_i | θ) is p(w_i | θ, D_i)
    posterior     SFVI, whose fit ends with importance weights, and PACPFL, whose hyper-posterior with τ = 1 is the
                  posterior: NUTS

What a method does not move counts as given. FedAvg, FedProx, FedNova, FedCurv and pFedMe have no objective whose
stationary point they reach with several local steps at a fixed rate, where clients differ (client drift: Karimireddy et
al. 2020, section 3), and neither has FedABML: they are compared with the objective all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to
from torch.quasirandom import SobolEngine

import bayesfed as bf
from bayesfed.guides.fisher import prior_units

NODES, DRAWS = 9, 256
"""Quadrature nodes in each of a client's dimensions; draws of θ (half of them, and their mirror images)."""
Values = dict[str, np.ndarray]


class _Centred(Messenger):
    """Local variables at the mean of their prior."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self.names = names

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.names and not msg["done"]:
            msg["value"], msg["done"] = msg["fn"].mean, True


class Hierarchy:
    """The densities of a program with real-valued local variables, at unconstrained values.

    Attributes:
        rows: n_i, ``(N,)``.
        start: the medians of 100 draws of θ's prior, ``(D,)``.
        parts: by global variable, its places in θ, its shape and its bijection.
        locals: by local variable, its places in w_i and its shape.
    """

    def __init__(self, model: Callable[[Any], Any], federation: bf.Federation) -> None:
        self.model, self.federation = model, federation
        nodes = self._nodes({})
        self.rows = federation.lengths.double()
        self.parts: dict[str, tuple[slice, torch.Size, Any]] = {}
        self.locals: dict[str, tuple[slice, torch.Size]] = {}
        self.observed = [name for name, node in nodes.items() if node["is_observed"]]
        ends = [0, 0]
        for name, node in nodes.items():
            if node["is_observed"]:
                continue
            local = bool(node["cond_indep_stack"])
            bijection, event = biject_to(node["fn"].support), node["fn"].event_shape
            if local and not isinstance(
                bijection, type(biject_to(torch.distributions.constraints.real))
            ):
                real = bijection(torch.tensor([-1.7]).expand(event or [1])).eq(-1.7).all()
                if not real:
                    raise ValueError(f"local variable {name!r} is not real-valued")
            shape = event if local else bijection.inverse_shape(event)
            place = slice(ends[local], ends[local] + shape.numel())
            ends[local] = place.stop
            if local:
                self.locals[name] = place, shape
            else:
                self.parts[name] = place, shape, bijection
        self.size, self.width = ends
        draws = []
        for seed in range(100):
            pyro.set_rng_seed(seed)
            draws.append(self.unconstrained({n: v["value"] for n, v in self._nodes({}).items()}))
        self.start = torch.stack(draws).median(0).values

    def _nodes(self, values: Mapping[str, Tensor], centred: bool = False) -> dict[str, Any]:
        given = poutine.condition(self.model, values)
        names = set(self.locals) if centred else set()
        with pyro.validation_enabled(False), _Centred(names):
            trace = poutine.trace(given).get_trace(self.federation)
            trace.compute_log_prob()
        return {
            name: node
            for name, node in trace.nodes.items()
            if node["type"] == "sample" and type(node["fn"]).__name__ != "_Subsample"
        }

    def constrained(self, theta: Tensor) -> dict[str, Tensor]:
        """Return θ ``(..., D)`` as the program's values."""
        return {
            name: bijection(
                theta[..., place].unflatten(-1, shape or (1,)).squeeze(() if shape else -1)
            )
            for name, (place, shape, bijection) in self.parts.items()
        }

    def unconstrained(self, values: Mapping[str, Any]) -> Tensor:
        """Return values of θ as one vector."""
        found = [
            bijection.inv(torch.as_tensor(values[name]).double()).reshape(-1)
            for name, (_, _, bijection) in self.parts.items()
        ]
        return torch.cat(found)

    def __call__(self, theta: Tensor, w: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return log p(θ) ``(T,)``, and log p(w_i | θ) and log p(D_i | w_i, θ) ``(T, N)``.

        θ has shape ``(T, D)``, w ``(T, N, P)``. Without w the clients are at the centre of their prior.
        """
        count, clients = max(len(theta), 1 if w is None else len(w)), len(self.rows)
        values, log_det = {}, torch.zeros(len(theta), dtype=theta.dtype)
        for name, (place, shape, bijection) in self.parts.items():
            u = theta[:, place].reshape(-1, 1, 1, *shape)
            values[name] = bijection(u)
            jacobian = bijection.log_abs_det_jacobian(u, values[name])
            log_det = log_det + jacobian.reshape(len(theta), -1).sum(-1)
        for name, (place, shape) in self.locals.items() if w is not None else ():
            values[name] = w[..., place].reshape(-1, clients, 1, *shape)
        nodes = self._nodes(values, centred=w is None)
        prior = log_det
        for name in self.parts:
            prior = prior + nodes[name]["log_prob"].reshape(len(theta), -1).sum(-1)

        def by_client(names: Any) -> Tensor:
            total = torch.zeros(count, clients, dtype=theta.dtype)
            for name in names:
                density = nodes[name]["log_prob"]
                density = density.reshape(*[1] * (3 - density.ndim), *density.shape)
                total = total + density.expand(count, clients, density.shape[-1]).sum(-1)
            return total

        self.centre = torch.cat(
            [
                nodes[name]["value"].expand(count, clients, 1, *shape).reshape(count, clients, -1)
                for name, (_, shape) in self.locals.items()
            ]
            or [torch.zeros(count, clients, 0)],
            -1,
        )
        return prior, by_client(self.locals), by_client(self.observed)

    def centres(self, theta: Tensor) -> Tensor:
        """Return the centres of the clients' priors at θ ``(T, D)``: ``(T, N, P)``."""
        self(theta)
        return self.centre

    def reads(self) -> Tensor:
        """Return which of θ the likelihood reads beside the clients' own variables: bool ``(D,)``."""
        theta = self.start.clone().requires_grad_()
        w = self.centres(theta[None]).detach() + 0.1 * self.unit
        total = self(theta[None], w)[2].sum() + 0.0 * theta.sum()
        return torch.autograd.grad(total, theta)[0] != 0

    @cached_property
    def unit(self) -> Tensor:
        """The standard deviation of the clients' first priors in each dimension, ``(P,)``."""
        nodes = self._nodes(self.constrained(self.start))
        scales = [nodes[name]["fn"].stddev.reshape(len(self.rows), -1)[0] for name in self.locals]
        return torch.cat(scales) if scales else torch.zeros(0)


def hierarchy_of(
    model: Callable[[Any], Any], federation: bf.Federation, posterior: bf.Posterior
) -> Hierarchy:
    """Return the densities, with a fit's own units of clients' variables where its objective has distances in them."""
    hierarchy = Hierarchy(model, federation)
    if posterior.algorithm.name in ("Ditto", "PFedMe", "PerFedAvg"):
        units, guide = prior_units(posterior.program), posterior.program.guide
        hierarchy.unit = torch.cat(
            [
                units.get(f"{name}.loc", torch.ones(())).expand(site.start.shape).reshape(-1)
                for name, site in guide.locals.items()
            ]
        ).double()
    return hierarchy


# -- numerical tools ----------------------------------------------------------------------------------


def maximum(value: Callable[[Tensor], Tensor], start: Tensor, tries: int = 6) -> Tensor:
    """Return where a function of a vector is largest, by L-BFGS from a start, until its gradient is nothing."""
    x = start.detach().clone().requires_grad_()

    def closure() -> Tensor:
        x.grad = None
        loss = -value(x)
        loss.backward()
        return loss

    for _ in range(tries):
        search = torch.optim.LBFGS(
            [x],
            max_iter=400,
            history_size=30,
            tolerance_grad=1e-9,
            tolerance_change=1e-13,
            line_search_fn="strong_wolfe",
        )
        search.step(closure)
        if x.grad is not None and float(x.grad.abs().max()) < 1e-6:
            break
    return x.detach()


def grid(width: int, nodes: int = NODES) -> tuple[Tensor, Tensor]:
    """Return nodes ``(Q, P)`` and weights ``(Q,)`` of Gauss–Hermite quadrature under N(0, I)."""
    x, weight = np.polynomial.hermite_e.hermegauss(nodes)
    points = torch.tensor(list(product(x, repeat=width)), dtype=torch.float64).reshape(-1, width)
    weights = torch.tensor(list(product(weight / weight.sum(), repeat=width)), dtype=torch.float64)
    return points, weights.reshape(-1, width).prod(-1)


def modes(hierarchy: Hierarchy, theta: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mode of p(w_i | θ, D_i) ``(T, N, P)`` by Newton's method, differentiable in θ, and its precision."""

    def slopes(w: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        w = w if w.requires_grad else w.requires_grad_()
        _, prior, likelihood = hierarchy(at, w)
        (grad,) = torch.autograd.grad((prior + likelihood).sum(), w, create_graph=True)
        rows = [
            torch.autograd.grad(grad[..., p].sum(), w, create_graph=True)[0]
            for p in range(w.shape[-1])
        ]
        return grad, -torch.stack(rows, -2)

    def density(w: Tensor) -> Tensor:
        with torch.no_grad():
            _, prior, likelihood = hierarchy(theta, w)
        return prior + likelihood

    w, fixed = start.detach().expand(len(theta), -1, -1).clone(), theta.detach()
    for _ in range(50):
        grad, precision = (x.detach() for x in slopes(w, fixed))
        values, vectors = torch.linalg.eigh(precision)
        floor = 1e-3 * values.abs().max(-1, keepdim=True).values
        inverse = (vectors / values.abs().maximum(floor)[..., None, :]) @ vectors.mT
        step = (inverse @ grad[..., None]).squeeze(-1)
        w, now = w.detach(), density(w.detach())
        for _halving in range(30):
            better = density(w + step) >= now - 1e-9
            step = torch.where(better[..., None], step, step / 2)
            if better.all():
                break
        w = w + step
        if float((step * grad).sum(-1).max()) < 1e-12:
            break
    w = w.detach()
    for _ in range(2):  # through these the mode depends on θ
        grad, precision = slopes(w, theta)
        w = w + torch.linalg.solve(precision, grad[..., None]).squeeze(-1)
    return w, slopes(w, theta)[1]


class Marginal:
    """Σ v_i log p(D_i | θ), the clients' variables integrated out by adaptive quadrature; with one node Laplace's."""

    def __init__(self, hierarchy: Hierarchy, nodes: int) -> None:
        self.hierarchy, self.nodes = hierarchy, grid(hierarchy.width, nodes)
        self.at: Tensor | None = None

    def __call__(self, theta: Tensor) -> Tensor:
        """Return ``(T,)`` at θ ``(T, D)``."""
        hierarchy, (points, weights) = self.hierarchy, self.nodes
        start = hierarchy.centres(theta) if self.at is None else self.at
        start = start if len(start) == len(theta) else hierarchy.centres(theta)
        mode, precision = modes(hierarchy, theta, start)
        self.at = mode.detach()
        root = torch.linalg.cholesky(precision)
        x = points[:, None, None, :, None].expand(-1, *root.shape[:-1], 1)
        away = torch.linalg.solve_triangular(root.mT, x, upper=True).squeeze(-1)
        w = (mode + away).flatten(0, 1)
        _, prior, likelihood = hierarchy(theta.repeat(len(points), 1), w)
        weight = weights.log() + points.square().sum(-1) / 2
        total = (prior + likelihood).unflatten(0, (len(points), -1)) + weight[:, None, None]
        log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        normaliser = hierarchy.width / 2 * np.log(2 * np.pi)
        return (total.logsumexp(0) - log_det + normaliser).sum(-1)


# -- objectives ---------------------------------------------------------------------------------------


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
        size = grad.square().mean(-1, keepdim=True).sqrt()
        w = w + lr * hierarchy.unit * grad * (most / size.clamp(min=most))
        prior, _, likelihood = hierarchy(theta[None], w)
        return (weights * (likelihood + prior[:, None] / len(weights))).sum()

    return maximum(value, centred(hierarchy, weights))


def gaussian(hierarchy: Hierarchy) -> Tensor:
    """Return draws of the Gaussian q(θ) with the largest ELBO: ``(S, D)``."""
    size, marginal = hierarchy.size, Marginal(hierarchy, 1 if hierarchy.width > 1 else 5)
    half = SobolEngine(size, scramble=True, seed=0).draw(DRAWS // 2, dtype=torch.float64)
    noise = torch.distributions.Normal(0.0, 1.0).icdf(half.clamp(1e-6, 1 - 1e-6))
    noise = torch.cat([noise, -noise])
    rows, columns = torch.tril_indices(size, size, -1)
    mode, covariance = laplace(hierarchy)

    def parts(x: Tensor) -> Tensor:
        loc, scale, below = x.split([size, size, len(rows)])
        root = torch.diag(scale.exp()).index_put((rows, columns), below)
        return mode + (noise @ root.mT + loc) @ first.mT

    def value(x: Tensor) -> Tensor:
        theta = parts(x)
        prior = hierarchy(theta)[0]
        return (prior + marginal(theta)).mean() + x[size : 2 * size].sum()

    first = torch.linalg.cholesky(covariance)
    return parts(maximum(value, torch.zeros(2 * size + len(rows)), tries=1))


def laplace(hierarchy: Hierarchy) -> tuple[Tensor, Tensor]:
    """Return the mode of θ, the clients' variables integrated out by Laplace's method, and the covariance there."""
    marginal = Marginal(hierarchy, 1)

    def value(theta: Tensor) -> Tensor:
        return (hierarchy(theta[None])[0] + marginal(theta[None])).sum()

    mode = maximum(value, hierarchy.start)

    def gradient(theta: Tensor) -> Tensor:
        leaf = theta.clone().requires_grad_()
        return torch.autograd.grad(value(leaf), leaf)[0]

    step = 1e-4
    rows = [
        (gradient(mode + step * e) - gradient(mode - step * e)) / (2 * step)
        for e in torch.eye(hierarchy.size)
    ]
    hessian = torch.stack(rows)
    return mode, torch.linalg.inv(-(hessian + hessian.mT) / 2)


# -- by method ----------------------------------------------------------------------------------------


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
    if name in ("SFVI", "PACPFL"):
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
    if name == "PFedGP":
        marginal = Marginal(hierarchy, NODES if hierarchy.width == 1 else 5)
        start, _ = laplace(hierarchy)
        return _globals(hierarchy, maximum(lambda t: marginal(t[None]).sum(), start))
    if name == "FOLA":
        mode, covariance = laplace(hierarchy)
        half = SobolEngine(hierarchy.size, scramble=True, seed=0).draw(4096, dtype=torch.float64)
        noise = torch.distributions.Normal(0.0, 1.0).icdf(half.clamp(1e-6, 1 - 1e-6))
        return _globals(hierarchy, mode + noise @ torch.linalg.cholesky(covariance).mT)
    if name in ("SFVIAvg", "PVI"):
        return _globals(hierarchy, gaussian(hierarchy))
    raise ValueError(f"no objective is known of {name}")


def _spreads(hierarchy: Hierarchy) -> Tensor:
    """Return which of θ the scale of a local prior reads: bool ``(D,)``."""
    theta = hierarchy.start.clone().requires_grad_()
    nodes = hierarchy._nodes(hierarchy.constrained(theta))
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
