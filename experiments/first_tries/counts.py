"""Programs for counts, as people write them at the first try."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from first_tries.data import of_lines, on, rows

PUMPS = {
    "y": [5, 1, 5, 14, 3, 19, 1, 1, 4, 22],
    "time": [94.3, 15.7, 62.9, 126.0, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5],
}
SURGERY = {
    "y": [0, 18, 8, 46, 8, 13, 9, 31, 14, 8, 29, 24],
    "n": [47, 148, 119, 810, 211, 196, 148, 215, 207, 97, 256, 360],
}
SEEDS = {
    "y": [10, 23, 23, 26, 17, 5, 53, 55, 32, 46, 10, 8, 10, 8, 23, 0, 3, 22, 15, 32, 3],
    "n": [39, 62, 81, 51, 39, 6, 74, 72, 51, 79, 13, 16, 30, 28, 45, 4, 12, 41, 30, 51, 7],
    "seed": [0] * 11 + [1] * 10,
    "extract": [0] * 5 + [1] * 6 + [0] * 5 + [1] * 5,
}
HITS = {"y": [18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7]}


@on(rows(**PUMPS))
def pumps(federation: Any) -> None:
    """Gamma locals, an exposure."""
    shape = pyro.sample("shape", dist.Exponential(1.0))
    rate = pyro.sample("rate", dist.Gamma(0.5, 1.0))
    with federation.clients():
        failures = pyro.sample("failures", dist.Gamma(shape, rate))
        with federation.observations() as obs:
            pyro.sample("y", dist.Poisson(failures * obs["time"]), obs=obs.get("y"))


@on(rows(**PUMPS))
def pumps_normal(federation: Any) -> None:
    """log-Normal rates with an offset."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            rate = torch.exp(a + obs["time"].log())
            pyro.sample("y", dist.Poisson(rate), obs=obs.get("y"))


@on(rows(**SURGERY))
def surgery(federation: Any) -> None:
    """Binomial, one row a client."""
    mu = pyro.sample("mu", dist.Normal(-2.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Binomial(obs["n"], logits=a), obs=obs.get("y"))


@on(rows(**HITS))
def baseball(federation: Any) -> None:
    """Beta locals."""
    middle = pyro.sample("middle", dist.Beta(2.0, 2.0))
    size = pyro.sample("size", dist.LogNormal(4.0, 1.0))
    with federation.clients():
        skill = pyro.sample("skill", dist.Beta(middle * size, (1 - middle) * size))
        with federation.observations() as obs:
            pyro.sample("y", dist.Binomial(45, probs=skill), obs=obs.get("y"))


@on(rows(**SEEDS))
def seeds(federation: Any) -> None:
    """Binomial with crossed treatments."""
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([4]).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        b = pyro.sample("b", dist.Normal(0.0, tau))
        with federation.observations() as obs:
            seed, extract = obs["seed"], obs["extract"]
            logits = beta[0] + beta[1] * seed + beta[2] * extract + beta[3] * seed * extract + b
            pyro.sample("y", dist.Binomial(obs["n"], logits=logits), obs=obs.get("y"))


@on(of_lines(lambda g, y: g.poisson(np.exp(0.5 * y)).astype(float)))
def counts(federation: Any) -> None:
    """Poisson."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Poisson((a + obs["x"] @ beta).exp()), obs=obs.get("y"))


@on(of_lines(lambda g, y: g.negative_binomial(2, 1 / (1 + np.exp(0.5 * y) / 2)).astype(float)))
def overdispersed(federation: Any) -> None:
    """Negative binomial."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    size = pyro.sample("size", dist.Gamma(2.0, 0.5))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            logits = a + 0.4 * obs["x"][..., 0] - size.log()
            outcome = dist.NegativeBinomial(total_count=size, logits=logits)
            pyro.sample("y", outcome, obs=obs.get("y"))


@on(of_lines(lambda g, y: (g.poisson(np.exp(0.5 * y)) * (g.random(len(y)) < 0.7)).astype(float)))
def zero_inflated(federation: Any) -> None:
    """Zero-inflated Poisson."""
    none = pyro.sample("none", dist.Beta(1.0, 1.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            outcome = dist.ZeroInflatedPoisson(a.exp(), gate=none)
            pyro.sample("y", outcome, obs=obs.get("y"))
