"""Targets with known answers, shared by the tests."""

from __future__ import annotations

from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import bayesfed as bf


def summed(upload):
    """Return the sum of the uploads ``(K, ...)`` of K clients, as the server sees it."""
    return {
        part: {name: value.sum(0) for name, value in values.items()}
        for part, values in upload.items()
    }


def conjugate_hierarchy(federation):
    """mu ~ N(0, 2), alpha_i ~ N(mu, 1), y_ij ~ N(alpha_i, 0.5): everything is jointly Gaussian."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(alpha, 0.5), obs=obs.get("y"))


def known_scales(federation):
    """Normal throughout: q has the posterior in it."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with federation.clients():
        theta = pyro.sample("theta", dist.Normal(mu, 8.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(theta, obs["sigma"]), obs=obs.get("y"))


@dataclass(frozen=True)
class Exact:
    """Means and standard deviations of mu and alpha_i, and the log evidence."""

    mu: tuple[float, float]
    alpha: tuple[Tensor, Tensor]
    log_evidence: float


def exact(federation: bf.Federation) -> Exact:
    """By conditioning the joint Gaussian of (mu, alpha, y), in float64."""
    owner, y, clients = federation.owner, federation["y"].double(), len(federation)
    design = torch.zeros(1 + clients, 1 + clients, dtype=torch.float64)
    design[0, 0] = 2.0  # mu = 2 e_0, alpha_i = mu + e_i
    design[1:, 0], design[1:, 1:] = 2.0, torch.eye(clients)
    prior = design @ design.T
    pick = torch.nn.functional.one_hot(owner + 1, 1 + clients).double()
    marginal = pick @ prior @ pick.T + 0.25 * torch.eye(len(y), dtype=torch.float64)
    gain = prior @ pick.T @ torch.linalg.inv(marginal)
    loc, cov = gain @ y, prior - gain @ pick @ prior
    sd = cov.diagonal().sqrt()
    evidence = torch.distributions.MultivariateNormal(torch.zeros_like(y), marginal).log_prob(y)
    return Exact((float(loc[0]), float(sd[0])), (loc[1:], sd[1:]), float(evidence))


def ragged(clients: int = 8, seed: int = 0, dtype: torch.dtype | None = None) -> bf.Federation:
    """Clients of 1 to 6 rows drawn from :func:`conjugate_hierarchy`."""
    generator = torch.Generator().manual_seed(seed)
    data = {}
    for i in range(clients):
        rows = 1 + int(torch.randint(6, (), generator=generator))
        alpha = 0.7 + torch.randn((), generator=generator)
        y = alpha + 0.5 * torch.randn(rows, generator=generator)
        data[f"client {i}"] = {"y": y.to(dtype or torch.get_default_dtype())}
    return bf.Federation.from_arrays(data)
