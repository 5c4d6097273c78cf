"""The densities of a program at unconstrained values, by Pyro's own trace, and their maximum by L-BFGS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

import bayesfed as bf
from bayesfed.guides.fisher import prior_units


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
        nodes = self.trace_nodes({})
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
            draws.append(
                self.unconstrained({n: v["value"] for n, v in self.trace_nodes({}).items()})
            )
        self.start = torch.stack(draws).median(0).values

    def trace_nodes(self, values: Mapping[str, Tensor], centred: bool = False) -> dict[str, Any]:
        """Return the sample sites of a trace at some values."""
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
        nodes = self.trace_nodes(values, centred=w is None)
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
        nodes = self.trace_nodes(self.constrained(self.start))
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
