"""Programs for categories and times, as people write them at the first try."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from first_tries.data import answers, of_lines, on, simulated


@on(of_lines(lambda g, y: (y > 1).astype(float), least=12))
def logistic(federation: Any) -> None:
    """Logistic."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Bernoulli(logits=a + obs["x"] @ beta), obs=obs.get("y"))


@on(simulated(answers, clients=40))
def one_parameter(federation: Any) -> None:
    """Item response, 1PL: persons are clients."""
    hard = pyro.sample("hard", dist.Normal(torch.zeros(5), 1.5).to_event(1))
    with federation.clients():
        able = pyro.sample("able", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            logits = able - hard[obs["item"].long()]
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=obs.get("y"))


@on(simulated(answers, clients=40))
def two_parameters(federation: Any) -> None:
    """Item response, 2PL, items as a plate."""
    with pyro.plate("items", 5):
        hard = pyro.sample("hard", dist.Normal(0.0, 1.5))
        sharp = pyro.sample("sharp", dist.LogNormal(0.0, 0.5))
    with federation.clients():
        able = pyro.sample("able", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            item = obs["item"].long()
            logits = sharp[item] * (able - hard[item])
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=obs.get("y"))


@on(of_lines(lambda g, y: np.digitize(y, [0.5, 1.5]).astype(float), least=12))
def ordered(federation: Any) -> None:
    """Ordered logistic, an ordered global."""
    base = dist.Normal(torch.zeros(2), 2.0).to_event(1)
    cut = pyro.sample(
        "cut", dist.TransformedDistribution(base, [dist.transforms.OrderedTransform()])
    )
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, tau))
        with federation.observations() as obs:
            outcome = dist.OrderedLogistic(a + obs["x"][..., 0], cut)
            pyro.sample("y", outcome, obs=obs.get("y"))


@on(of_lines(lambda g, y: np.digitize(y, [0.5, 1.5]).astype(float), least=12))
def multinomial(federation: Any) -> None:
    """Categorical outcomes, a vector of a client's own."""
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    base = pyro.sample("base", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(base, tau).to_event(1))
        with federation.observations() as obs:
            pyro.sample("y", dist.Categorical(logits=a), obs=obs.get("y"))


@on(of_lines(lambda g, y: np.digitize(y, [0.5, 1.5]).astype(float), least=12))
def shares(federation: Any) -> None:
    """Dirichlet globals and locals."""
    middle = pyro.sample("middle", dist.Dirichlet(torch.ones(3)))
    size = pyro.sample("size", dist.LogNormal(1.0, 0.5))
    with federation.clients():
        p = pyro.sample("p", dist.Dirichlet(middle * size))
        with federation.observations() as obs:
            pyro.sample("y", dist.Categorical(p), obs=obs.get("y"))


def times(generator: np.random.Generator, y: Any) -> Any:
    return np.exp(0.5 * y) * generator.weibull(1.5, len(y)) + 1e-3


@on(of_lines(times))
def survival(federation: Any) -> None:
    """Weibull with censoring, a frailty."""
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            time, seen = obs["y"].clamp(max=3.0), obs["y"] < 3.0
            hazard = (time / a.exp()) ** shape
            density = shape.log() - a + (shape - 1) * (time.log() - a) - hazard
            pyro.factor("y", torch.where(seen, density, -hazard))


@on(of_lines(times))
def waiting(federation: Any) -> None:
    """Gamma outcomes."""
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.5))
        with federation.observations() as obs:
            pyro.sample("y", dist.Gamma(shape, shape * (-a).exp()), obs=obs.get("y"))
