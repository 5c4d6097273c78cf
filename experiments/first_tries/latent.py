"""Programs with latent variables of rows, mixtures and classes, as people write them at the first try."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from first_tries.data import lines, of_lines, on, simulated


@on(simulated(lines))
def measured_with_error(federation: Any) -> None:
    """A covariate measured with error: a continuous latent variable of a row."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(1.0, tau))
        with federation.observations() as obs:
            truth = pyro.sample("truth", dist.Normal(0.0, 1.0))
            pyro.sample("x", dist.Normal(truth, 0.5), obs=obs["x"][..., 0])
            pyro.sample("y", dist.Normal(a + slope * truth, sigma), obs=obs.get("y"))


def measured_integrated(federation: Any) -> None:
    """The same with the truth integrated out by hand: NUTS would sample it for padding, too."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(1.0, tau))
        with federation.observations() as obs:
            x = obs["x"][..., 0]  # truth | x ~ N(0.8 x, 0.2)
            noise = (sigma**2 + 0.2 * slope**2).sqrt()
            pyro.sample("y", dist.Normal(a + slope * 0.8 * x, noise), obs=obs.get("y"))


@on(simulated(lines, least=12))
def mixture(federation: Any) -> None:
    """A mixture of two kinds of rows, summed out."""
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    apart = pyro.sample("apart", dist.HalfNormal(2.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            kinds = dist.Categorical(torch.stack([share, 1 - share], -1))
            parts = dist.Normal(torch.stack([a, a + apart], -1), 0.6)
            pyro.sample("y", dist.MixtureSameFamily(kinds, parts), obs=obs.get("y"))


@on(of_lines(lambda g, y: y + 3.0 * (g.random(len(y)) < 0.3), least=15))
def kinds(federation: Any) -> None:
    """A discrete latent variable of a row."""
    share = pyro.sample("share", dist.Dirichlet(torch.tensor([2.0, 2.0])))
    low = pyro.sample("low", dist.Normal(1.0, 1.0))
    gap = pyro.sample("gap", dist.LogNormal(1.0, 0.3))
    middle = torch.stack([low, low + gap], -1)
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            kind = pyro.sample("kind", dist.Categorical(share))
            pyro.sample("y", dist.Normal(a + middle[kind], 1.0), obs=obs.get("y"))


def two_kinds(generator: np.random.Generator, i: int, n: int) -> dict[str, Any]:
    """Draw rows that are higher for every third client."""
    return {"y": (2.0 if i % 3 == 0 else 0.0) + 1.5 * generator.normal(size=n)}


@on(simulated(two_kinds, clients=20, least=3))
def kinds_of_clients(federation: Any) -> None:
    """A discrete latent variable of a client."""
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    low = pyro.sample("low", dist.Normal(0.0, 1.0))
    gap = pyro.sample("gap", dist.LogNormal(0.7, 0.3))
    with federation.clients():
        high = pyro.sample("high", dist.Bernoulli(share))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(low + gap * high, 1.5), obs=obs.get("y"))


def two_classes(generator: np.random.Generator, i: int, n: int) -> dict[str, Any]:
    """Draw rows that are higher for every third client, around a mean of each client."""
    middle = (3.0 if i % 3 == 0 else 0.0) + 0.5 * generator.normal()
    return {"y": middle + generator.normal(size=n)}


@on(simulated(two_classes, clients=20, least=8))
def classes(federation: Any) -> None:
    """Latent classes of clients, a random effect that depends on them."""
    share = pyro.sample("share", dist.Dirichlet(torch.tensor([2.0, 2.0])))
    low = pyro.sample("low", dist.Normal(0.0, 1.0))
    gap = pyro.sample("gap", dist.LogNormal(0.7, 0.3))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    level = torch.stack([low, low + gap], -1)
    with federation.clients():
        kind = pyro.sample("kind", dist.Categorical(share))
        a = pyro.sample("a", dist.Normal(level[kind], tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))


def classes_summed(federation: Any) -> None:
    """The same with the class summed out by hand: Pyro's own sum has the effect once for each class."""
    share = pyro.sample("share", dist.Dirichlet(torch.tensor([2.0, 2.0])))
    low = pyro.sample("low", dist.Normal(0.0, 1.0))
    gap = pyro.sample("gap", dist.LogNormal(0.7, 0.3))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    parts = dist.Normal(torch.stack([low, low + gap], -1), tau.unsqueeze(-1))
    mixture, wide = dist.MixtureSameFamily(dist.Categorical(share), parts), dist.Normal(1.0, 4.0)
    with federation.clients():
        a = pyro.sample("a", wide)
        pyro.factor("of_classes", mixture.log_prob(a) - wide.log_prob(a))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))


REFERENCES = {"classes": classes_summed, "measured_with_error": measured_integrated}
"""The programs that NUTS samples in place of others."""
