"""Programs with normal or nearly normal outcomes, as people write them at the first try."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch.distributions import transforms

import bayesfed as bf
from bayesfed import datasets
from first_tries.data import hospitals, lines, of_lines, on, series, simulated


@on(datasets.eight_schools)
def eight_schools(federation: Any) -> None:
    """Centred."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with federation.clients():
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(theta, obs["sigma"]), obs=obs.get("y"))


@on(datasets.eight_schools)
def eight_schools_free(federation: Any) -> None:
    """Non-centred, `pyro.deterministic`."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with federation.clients():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        theta = pyro.deterministic("theta", mu + tau * z)
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(theta, obs["sigma"]), obs=obs.get("y"))


DYES = [
    [1545, 1440, 1440, 1520, 1580],
    [1540, 1555, 1490, 1560, 1495],
    [1595, 1550, 1605, 1510, 1560],
    [1445, 1440, 1595, 1465, 1545],
    [1595, 1630, 1515, 1635, 1625],
    [1520, 1455, 1450, 1480, 1445],
]


@on(
    lambda: bf.Federation.from_arrays(
        {f"batch {i + 1}": {"y": np.array(y) / 100 - 15} for i, y in enumerate(DYES)}
    )
)
def dyes(federation: Any) -> None:
    """Variance components."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    between = pyro.sample("between", dist.HalfNormal(1.0))
    within = pyro.sample("within", dist.HalfNormal(1.0))
    with federation.clients():
        batch = pyro.sample("batch", dist.Normal(mu, between))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(batch, within), obs=obs.get("y"))


@on(datasets.grunfeld)
def grunfeld(federation: Any) -> None:
    """Slopes of a client's own, a matrix product."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(torch.ones(3)).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        w = pyro.sample("w", dist.Normal(mu, tau).to_event(1))
        with federation.observations() as obs:
            mean = w[..., 0] + (obs["x"] * w[..., 1:]).sum(-1)
            pyro.sample("y", dist.Normal(mean, sigma), obs=obs.get("y"))


@on(simulated(lines))
def category_effects(federation: Any) -> None:
    """`effect[kind]`, a vector with a random scale."""
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    effect = pyro.sample("effect", dist.Normal(0.0, spread).expand([3]).to_event(1))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, tau))
        with federation.observations() as obs:
            mean = 1 + a + effect[obs["kind"].long()] + obs["x"] @ beta
            pyro.sample("y", dist.Normal(mean, sigma), obs=obs.get("y"))


@on(simulated(lines))
def category_plate(federation: Any) -> None:
    """A plate of categories outside the clients."""
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]))
    with pyro.plate("kinds", 3):
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, tau))
        with federation.observations() as obs:
            mean = a + effect[obs["kind"].long()] + beta[0] * obs["x"][..., 0]
            pyro.sample("y", dist.Normal(mean + beta[1] * obs["x"][..., 1], 0.6), obs=obs.get("y"))


@on(simulated(lines, clients=8, least=15))
def categories_of_a_client(federation: Any) -> None:
    """A plate of categories inside the clients."""
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with federation.clients():
        effect = pyro.sample("effect", dist.Normal(mu, tau).expand([3]).to_event(1))
        with federation.observations() as obs:
            kind = torch.nn.functional.one_hot(obs["kind"].long(), 3)
            pyro.sample("y", dist.Normal((effect * kind).sum(-1), 1.0), obs=obs.get("y"))


@on(simulated(hospitals, clients=9))
def regions(federation: Any) -> None:
    """A level above the clients."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    between = pyro.sample("between", dist.HalfNormal(1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    region = pyro.sample("region", dist.Normal(0.0, between).expand([3]).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, tau))
        with federation.observations() as obs:
            mean = mu + region[obs["region"].long()] + a
            pyro.sample("y", dist.Normal(mean, sigma), obs=obs.get("y"))


@on(simulated(hospitals, clients=9, least=14))
def wards(federation: Any) -> None:
    """A level within the clients: a local behind a local."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    within = pyro.sample("within", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        ward = pyro.sample(
            "ward", dist.Normal(a.unsqueeze(-1).expand(*a.shape, 4), within).to_event(1)
        )
        with federation.observations() as obs:
            here = torch.nn.functional.one_hot(obs["ward"].long(), 4)
            pyro.sample("y", dist.Normal((ward * here).sum(-1), 1.0), obs=obs.get("y"))


@on(simulated(hospitals, clients=9, least=14))
def crossed(federation: Any) -> None:
    """Effects crossed with the clients."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    doctor = pyro.sample("doctor", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            mean = a + spread * doctor[obs["ward"].long()]
            pyro.sample("y", dist.Normal(mean, 1.0), obs=obs.get("y"))


@on(simulated(lines, least=12))
def correlated(federation: Any) -> None:
    """LKJ-correlated intercepts and slopes."""
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(2)).to_event(1))
    root = pyro.sample("root", dist.LKJCholesky(2, 2.0))
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        w = pyro.sample("w", dist.MultivariateNormal(mu, scale_tril=scale.diag() @ root))
        with federation.observations() as obs:
            mean = w[..., 0] + w[..., 1] * obs["x"][..., 0]
            pyro.sample("y", dist.Normal(mean, sigma), obs=obs.get("y"))


@on(simulated(lines))
def own_noise(federation: Any) -> None:
    """A log-Normal scale of a client's own."""
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    spread = pyro.sample("spread", dist.HalfNormal(0.5))
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        sigma = pyro.sample("sigma", dist.LogNormal(level, spread))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, sigma), obs=obs.get("y"))


@on(of_lines(lambda g, y: y + 3 * g.standard_t(2, len(y)) * (g.random(len(y)) < 0.1)))
def robust(federation: Any) -> None:
    """Student-t outcomes with a learnt number of degrees of freedom."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    nu = pyro.sample("nu", dist.Gamma(2.0, 0.1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.StudentT(1 + nu, a, sigma), obs=obs.get("y"))


@on(simulated(lines))
def robust_clients(federation: Any) -> None:
    """Student-t locals."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.StudentT(4.0, mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, sigma), obs=obs.get("y"))


@on(simulated(lines))
def horseshoe(federation: Any) -> None:
    """A regularised horseshoe over coefficients."""
    shrink = pyro.sample("shrink", dist.HalfCauchy(0.5))
    each = pyro.sample("each", dist.HalfCauchy(torch.ones(2)).to_event(1))
    slab = each * shrink / (1 + (each * shrink) ** 2 / 4).sqrt()
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), slab).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a + obs["x"] @ beta, 0.8), obs=obs.get("y"))


@on(simulated(series, clients=8))
def autoregression(federation: Any) -> None:
    """AR(1), lags as a field."""
    rho = pyro.sample("rho", dist.Uniform(-1.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        level = pyro.sample("level", dist.Normal(0.0, tau))
        with federation.observations() as obs:
            mean = level + rho * obs["before"]
            pyro.sample("y", dist.Normal(mean, sigma), obs=obs.get("y"))


@on(simulated(series, clients=8))
def random_walk(federation: Any) -> None:
    """Locals over time, `torch.stack`."""
    step = pyro.sample("step", dist.HalfNormal(0.5))
    with federation.clients():
        levels = [pyro.sample("level_0", dist.Normal(0.0, 1.0))]
        for t in (1, 2, 3):
            levels.append(pyro.sample(f"level_{t}", dist.Normal(levels[-1], step)))
        path = torch.stack(levels, -1)
        with federation.observations() as obs:
            phase = torch.nn.functional.one_hot((obs["before"].abs() * 2).long().clamp(max=3), 4)
            pyro.sample("y", dist.Normal((path * phase).sum(-1), 0.7), obs=obs.get("y"))


@on(simulated(lines, least=12))
def two_outcomes(federation: Any) -> None:
    """Two observed sites."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    load = pyro.sample("load", dist.Normal(0.0, 1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))
            pyro.sample("x0", dist.Normal(load * a, 1.0), obs=obs["x"][..., 0])


@on(simulated(lines, least=12))
def outcome_of_vectors(federation: Any) -> None:
    """A multivariate outcome."""
    root = pyro.sample("root", dist.LKJCholesky(2, 1.0))
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(2)).to_event(1))
    with federation.clients():
        m = pyro.sample("m", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with federation.observations() as obs:
            outcome = dist.MultivariateNormal(m, scale_tril=scale.diag() @ root)
            pyro.sample("x", outcome, obs=obs.get("x"))


@on(of_lines(lambda g, y: np.minimum(y, 1.5)))
def censored(federation: Any) -> None:
    """`pyro.factor`: a tobit."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            outcome = dist.Normal(a, sigma)
            above = torch.special.log_ndtr((a - 1.5) / sigma)
            pyro.factor("y", torch.where(obs["y"] >= 1.5, above, outcome.log_prob(obs["y"])))


@on(simulated(lines))
def curve(federation: Any) -> None:
    """A saturating curve: not linear in its variables."""
    top = pyro.sample("top", dist.LogNormal(0.0, 0.5))
    rate = pyro.sample("rate", dist.LogNormal(0.0, 0.5))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(1.0, 1.0))
        with federation.observations() as obs:
            grown = top * (1 - torch.exp(-rate * obs["x"][..., 0].abs()))
            pyro.sample("y", dist.Normal(a + grown, 1.0), obs=obs.get("y"))


@on(simulated(lines))
def skewed(federation: Any) -> None:
    """A transformed outcome: `TransformedDistribution`."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            outcome = dist.TransformedDistribution(
                dist.Normal(a, torch.ones_like(obs["y"])), [transforms.ExpTransform()]
            )
            pyro.sample("y", outcome, obs=obs["y"].exp())
