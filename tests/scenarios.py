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


def empirical(federation):
    """alpha_i ~ N(mu, tau), mu and tau being parameters; y_ij ~ N(alpha_i, 0.5)."""
    mu = pyro.param("mu", torch.tensor(0.0))
    tau = pyro.param("tau", torch.tensor(1.0), constraint=dist.constraints.positive)
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
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


# -- hierarchies that no example has ------------------------------------------------------------------

HOSPITALS, ANIMALS, WARDS = 12, 30, 15


def deaths(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            rate = dist.Binomial(total_count=obs["n"], logits=a)
            pyro.sample("deaths", rate, obs=obs.get("deaths"))


def hospitals():
    """One row of each of 12 hospitals, of 40 to 800 patients of whom 8 % die."""
    generator = torch.Generator().manual_seed(3)
    n = torch.randint(40, 800, (HOSPITALS,), generator=generator).float()
    rate = torch.sigmoid(-2.5 + 0.4 * torch.randn(HOSPITALS, generator=generator))
    died = (rate * n).round()
    return bf.Federation.from_arrays(
        {f"hospital {i}": {"n": n[i : i + 1], "deaths": died[i : i + 1]} for i in range(HOSPITALS)}
    )


def growth(federation, day=1.0, gram=1.0):
    """Ages in days and weights in grams, or in other units of so many days and grams, with priors in these units."""
    level = pyro.sample("level", dist.Normal(250.0 / gram, 100.0 / gram))
    slope = pyro.sample("slope", dist.Normal(6.0 * day / gram, 5.0 * day / gram))
    sd_level = pyro.sample("sd_level", dist.HalfNormal(30.0 / gram))
    sd_slope = pyro.sample("sd_slope", dist.HalfNormal(2.0 * day / gram))
    sigma = pyro.sample("sigma", dist.HalfNormal(20.0 / gram))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(level, sd_level))
        b = pyro.sample("b", dist.Normal(slope, sd_slope))
        with federation.observations() as obs:
            line = a + b * obs["age"]
            pyro.sample("weight", dist.Normal(line, sigma), obs=obs.get("weight"))


def curves(day=1.0, gram=1.0):
    """Five weights of each of 30 animals between their 8th and 36th day."""
    generator = torch.Generator().manual_seed(4)
    age, found = torch.tensor([8.0, 15.0, 22.0, 29.0, 36.0]), {}
    for i in range(ANIMALS):
        a, b, *noise = torch.randn(7, generator=generator)
        weight = 106 + 10 * a + (6.2 + 0.5 * b) * age + 6 * torch.stack(noise)
        found[f"animal {i}"] = {"age": age / day, "weight": weight / gram}
    return bf.Federation.from_arrays(found)


def falls(federation):
    """Counts with exposure, a slope that all clients share, and few rows each."""
    level = pyro.sample("level", dist.Normal(0.0, 3.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(level, spread))
        with federation.observations() as obs:
            rate = (a + slope * obs["staff"]).exp() * obs["days"]
            pyro.sample("falls", dist.Poisson(rate), obs=obs.get("falls"))


def wards():
    """Falls of patients in two to six months of each of 15 wards, with its days of care in thousands."""
    generator, found = torch.Generator().manual_seed(5), {}
    given = {"generator": generator, "dtype": torch.float64}  # the same whatever the default
    for i in range(WARDS):
        n = 2 + i % 5
        days = 0.3 + torch.rand(n, **given)
        staff, level = torch.randn(n, **given), torch.randn((), **given)
        rate = (1.2 + 0.5 * level - 0.4 * staff).exp() * days
        counts = torch.poisson(rate, generator=generator)
        rows = {"days": days, "staff": staff, "falls": counts}
        found[f"ward {i}"] = {n: v.to(torch.get_default_dtype()) for n, v in rows.items()}
    return bf.Federation.from_arrays(found)
