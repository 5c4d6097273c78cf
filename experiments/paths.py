"""Programs of clients with a path of many numbers each, their covariances in closed form, and simulated rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

CLIENTS = 8
WALK = {"step": dist.HalfNormal(0.5), "sigma": dist.HalfNormal(1.0)}
AR = {"rho": dist.Uniform(0.0, 1.0), **WALK}
GP = {
    "length": dist.LogNormal(0.0, 0.5),
    "height": dist.HalfNormal(1.0),
    "sigma": dist.HalfNormal(1.0),
}
TREE = {
    "mu": dist.Normal(0.0, 2.0),
    "tau_client": dist.HalfNormal(1.0),
    "tau_hospital": dist.HalfNormal(1.0),
    "tau_ward": dist.HalfNormal(1.0),
    "sigma": dist.HalfNormal(1.0),
}
CURVES = {
    "mu": dist.Normal(0.0, 2.0),
    "length": dist.LogNormal(0.0, 0.5),
    "height": dist.HalfNormal(1.0),
}
COUNTS = {"mu": dist.Normal(0.0, 2.0), "tau": dist.HalfNormal(1.0), "step": dist.HalfNormal(1.0)}
JITTER = 1e-4
Theta = Mapping[str, Tensor]


# -- programs --------------------------------------------------------------------------------------


def sampled(priors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Sample the globals."""
    return {name: pyro.sample(name, prior) for name, prior in priors.items()}


def column(value: Tensor) -> Tensor:
    """A global beside a vector of numbers."""
    return value[..., None]


def rows_of(path: Tensor, obs: Any) -> Tensor:
    """The number of the path ``(..., K, 1, T)`` that each row belongs to, ``(..., K, rows)``."""
    at, path = obs["t"].long(), path.squeeze(-2)
    return path.gather(-1, at.expand(*path.shape[:-1], at.shape[-1]))


def normal_rows(federation: Any, path: Tensor, sigma: Tensor) -> None:
    """Rows with Normal noise."""
    pyro.deterministic("path", path)
    with federation.observations() as obs:
        pyro.sample("y", dist.Normal(rows_of(path, obs), sigma), obs=obs.get("y"))


def poisson_rows(federation: Any, path: Tensor) -> None:
    """Counts with this log mean."""
    pyro.deterministic("path", path)
    with federation.observations() as obs:
        pyro.sample("y", dist.Poisson(rows_of(path, obs).exp()), obs=obs.get("y"))


def walk_noise(size: int) -> Callable[[Any], None]:
    """A random walk of which the steps are sampled."""

    def program(federation: Any) -> None:
        at = sampled(WALK)
        with federation.clients():
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([size]).to_event(1))
            path = z[..., :1] + column(at["step"]) * (z.cumsum(-1) - z[..., :1])
            normal_rows(federation, path, at["sigma"])

    return program


def walk_poisson(size: int) -> Callable[[Any], None]:
    """Counts whose log mean is a level of the client's own and a random walk from there."""

    def program(federation: Any) -> None:
        at = sampled(COUNTS)
        with federation.clients():
            level = pyro.sample("level", dist.Normal(at["mu"], at["tau"]))
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([size]).to_event(1))
            poisson_rows(federation, column(level) + column(at["step"]) * z.cumsum(-1))

    return program


def gp_poisson(size: int) -> Callable[[Any], None]:
    """Counts whose log mean is a Gaussian process."""

    def program(federation: Any) -> None:
        at = sampled(CURVES)
        with federation.clients():
            x = pyro.sample("x", dist.MultivariateNormal(torch.zeros(size), kernel(at, size)))
            poisson_rows(federation, column(at["mu"]) + x)

    return program


def ar_sites(size: int) -> Callable[[Any], None]:
    """An autoregression with a site for each number."""

    def program(federation: Any) -> None:
        at = sampled(AR)
        with federation.clients():
            x = pyro.sample("x_0", dist.Normal(0.0, at["step"] * (1 - at["rho"] ** 2).rsqrt()))
            path = [x]
            for t in range(1, size):
                path.append(x := pyro.sample(f"x_{t}", dist.Normal(at["rho"] * x, at["step"])))
            normal_rows(federation, torch.stack(torch.broadcast_tensors(*path), -1), at["sigma"])

    return program


def ar_noise(size: int) -> Callable[[Any], None]:
    """An autoregression computed from noise."""

    def program(federation: Any) -> None:
        at = sampled(AR)
        steps = torch.arange(size)
        away = (steps[:, None] - steps).clamp(min=0)
        weights = (column(at["rho"].log())[..., None] * away).exp().tril()
        with federation.clients():
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([size]).to_event(1))
            first = z[..., :1] * (1 - column(at["rho"]) ** 2).rsqrt()
            noise = column(at["step"]) * torch.cat(
                [first, z[..., 1:].expand(*first.shape[:-1], -1)], -1
            )
            normal_rows(federation, (weights @ noise[..., None]).squeeze(-1), at["sigma"])

    return program


def ar_precision(size: int) -> Callable[[Any], None]:
    """An autoregression as a multivariate Normal with a tridiagonal precision matrix."""

    def program(federation: Any) -> None:
        at = sampled(AR)
        inner, beside = torch.zeros(size), torch.zeros(size, size)
        inner[1:-1] = 1.0
        beside[1:, :-1] = torch.eye(size - 1)
        rho = column(column(at["rho"]))
        Q = torch.eye(size) + rho**2 * torch.diag(inner) - rho * (beside + beside.T)
        Q = Q / column(column(at["step"])) ** 2
        with federation.clients():
            x = pyro.sample("x", dist.MultivariateNormal(torch.zeros(size), precision_matrix=Q))
            normal_rows(federation, x, at["sigma"])

    return program


def gp_covariance(size: int) -> Callable[[Any], None]:
    """A Gaussian process as a multivariate Normal."""

    def program(federation: Any) -> None:
        at = sampled(GP)
        with federation.clients():
            x = pyro.sample("x", dist.MultivariateNormal(torch.zeros(size), kernel(at, size)))
            normal_rows(federation, x, at["sigma"])

    return program


def gp_noise(size: int) -> Callable[[Any], None]:
    """A Gaussian process computed from noise."""

    def program(federation: Any) -> None:
        at = sampled(GP)
        root = torch.linalg.cholesky(kernel(at, size))
        with federation.clients():
            z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([size]).to_event(1))
            normal_rows(federation, (root @ z[..., None]).squeeze(-1), at["sigma"])

    return program


def tree(hospitals: int, wards: int) -> Callable[[Any], None]:
    """Wards within hospitals within clients."""

    def program(federation: Any) -> None:
        at = sampled(TREE)
        with federation.clients():
            client = pyro.sample("level", dist.Normal(at["mu"], at["tau_client"]))
            spread = column(at["tau_hospital"]).expand(*at["mu"].shape, hospitals)
            hospital = pyro.sample("hospital", dist.Normal(column(client), spread).to_event(1))
            above = hospital.repeat_interleave(wards, -1)
            ward = pyro.sample("ward", dist.Normal(above, column(at["tau_ward"])).to_event(1))
            normal_rows(federation, ward, at["sigma"])

    return program


# -- the same in closed form ------------------------------------------------------------------------


def kernel(at: Theta, size: int) -> Tensor:
    """The covariance of a Gaussian process at inputs 0.25 apart, ``(..., T, T)``."""
    x = 0.25 * torch.arange(size).to(at["length"])
    away = (x[:, None] - x) / column(column(at["length"]))
    smooth = (-away.square() / 2).exp() + JITTER * torch.eye(size).to(x)
    return column(column(at["height"])) ** 2 * smooth


def walk_covariance(at: Theta, size: int) -> Tensor:
    t = torch.arange(size).to(at["step"])
    return 1 + column(column(at["step"])) ** 2 * torch.minimum(t[:, None], t)


def counts_covariance(at: Theta, size: int) -> Tensor:
    t = torch.arange(1, size + 1).to(at["step"])
    tau, step = (column(column(at[name])) for name in ("tau", "step"))
    return tau**2 + step**2 * torch.minimum(t[:, None], t)


def ar_covariance(at: Theta, size: int) -> Tensor:
    t = torch.arange(size).to(at["step"])
    rho, step = (column(column(at[name])) for name in ("rho", "step"))
    return step**2 / (1 - rho**2) * rho ** (t[:, None] - t).abs()


def tree_covariance(hospitals: int, wards: int) -> Callable[[Theta, int], Tensor]:
    def covariance(at: Theta, size: int) -> Tensor:
        same = torch.block_diag(*[torch.ones(wards, wards)] * hospitals).to(at["mu"])
        parts = {"tau_client": torch.ones_like(same), "tau_hospital": same}
        parts["tau_ward"] = torch.eye(size).to(same)
        return sum(column(column(at[name])) ** 2 * part for name, part in parts.items())

    return covariance


@dataclass(frozen=True)
class Problem:
    """A program, its priors, the covariance of a client's path given θ, and θ of the simulation.

    Rows are ``each`` numbers with Normal noise at a place of the path, or Poisson counts.
    """

    program: Callable[[Any], None]
    size: int
    priors: Mapping[str, Any]
    covariance: Callable[[Theta, int], Tensor]
    truth: Mapping[str, float]
    each: int = 1
    poisson: bool = False

    def data(self) -> dict[str, dict[str, np.ndarray]]:
        """Simulate the clients' rows."""
        torch.manual_seed(self.size)
        at = {name: torch.tensor(value, dtype=torch.float64) for name, value in self.truth.items()}
        root = torch.linalg.cholesky(self.covariance(at, self.size) + 1e-9 * torch.eye(self.size))
        kept = (torch.rand(self.size) < 0.8).nonzero()[:, 0].repeat_interleave(self.each)
        clients = {}
        for i in range(CLIENTS):
            path = at.get("mu", 0.0) + root @ torch.randn(self.size, dtype=torch.float64)
            if self.poisson:
                y = torch.poisson(path[kept].exp())
            else:
                y = path[kept] + at["sigma"] * torch.randn(len(kept), dtype=torch.float64)
            clients[f"client {i}"] = {"t": kept.numpy().astype(float), "y": y.numpy()}
        return clients


def problems() -> dict[str, Problem]:
    """All rows of the table."""
    walk, ar = {"step": 0.25, "sigma": 0.4}, {"rho": 0.9, "step": 0.3, "sigma": 0.4}
    gp = {"length": 1.0, "height": 1.0, "sigma": 0.4}
    effects = {"mu": 1.0, "tau_client": 0.5, "tau_hospital": 0.6, "tau_ward": 0.3, "sigma": 0.5}
    found = {
        f"walk, noise, {T}": Problem(walk_noise(T), T, WALK, walk_covariance, walk)
        for T in (30, 100, 200)
    }
    for T in (20, 50, 100):
        found[f"AR, sites, {T}"] = Problem(ar_sites(T), T, AR, ar_covariance, ar)
    for T in (50, 100):
        found[f"AR, noise, {T}"] = Problem(ar_noise(T), T, AR, ar_covariance, ar)
    for T in (50,):
        found[f"AR, precision, {T}"] = Problem(ar_precision(T), T, AR, ar_covariance, ar)
    found["GP, covariance, 40"] = Problem(gp_covariance(40), 40, GP, kernel, gp)
    found["GP, noise, 40"] = Problem(gp_noise(40), 40, GP, kernel, gp)
    for h, w in ((5, 8), (10, 20), (15, 20)):
        covariance = tree_covariance(h, w)
        found[f"tree, {h} × {w}"] = Problem(tree(h, w), h * w, TREE, covariance, effects, each=2)
    counts = {"mu": 1.0, "tau": 0.5, "step": 0.2}
    for T in (20, 40, 60, 100):
        found[f"walk, Poisson, {T}"] = Problem(
            walk_poisson(T), T, COUNTS, counts_covariance, counts, poisson=True
        )
    curves = {"mu": 1.0, "length": 1.0, "height": 0.7}
    for T in (24, 40):
        found[f"GP, Poisson, {T}"] = Problem(gp_poisson(T), T, CURVES, kernel, curves, poisson=True)
    return found
