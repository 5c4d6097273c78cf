"""Programs as people write them, each at its first try: makes first_try.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/first_try.py                 # half an hour; rows are replaced as they come
    python experiments/first_try.py seeds pumps     # some
    python experiments/first_try.py --no-nuts       # only whether they fit: minutes

Plain Pyro, written for one client with nothing of bayesfed in mind but its two plates. `bf.fit(program, data)` with the
settings it comes with, stopping by itself; then the distance from NUTS on the pooled data (the same function, see
pooled_nuts.py): the largest shift of a posterior mean in NUTS' standard deviations, and the range of the ratios of
standard deviations, over all entries of global and of local variables. The scales of a horseshoe have the tails of a
Cauchy, and so no mean and no standard deviation: their row compares what does not exist. k is Pareto's. Data are those
of textbooks, of statsmodels, or simulated.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pooled_nuts import nuts
from tables import keep, rounds_of
from torch.distributions import transforms

import bayesfed as bf
from bayesfed import datasets

HERE = Path(__file__).parent
HEADER = [
    "| program | what is in it | globals: shift | sd ratio | locals: shift | sd ratio | rounds | k | s |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
]
PROGRAMS: dict[str, tuple[Callable[[Any], None], Callable[[], bf.Federation]]] = {}


def on(
    data: Callable[[], bf.Federation],
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Enter a program and its data into the table."""

    def enter(program: Callable[[Any], None]) -> Callable[[Any], None]:
        PROGRAMS[program.__name__] = program, data
        return program

    return enter


# -- data ------------------------------------------------------------------------------------------


def rows(**columns: Any) -> Callable[[], bf.Federation]:
    """One row a client."""
    length = len(next(iter(columns.values())))

    def data() -> bf.Federation:
        return bf.Federation.from_arrays(
            {
                f"{i + 1}": {name: [float(v[i])] for name, v in columns.items()}
                for i in range(length)
            }
        )

    return data


def simulated(
    make: Callable[[np.random.Generator, int, int], dict[str, Any]],
    clients: int = 12,
    least: int = 6,
    seed: int = 0,
) -> Callable[[], bf.Federation]:
    """Clients with ``least`` rows and more; ``make`` gives client i's n rows."""

    def data() -> bf.Federation:
        generator = np.random.default_rng(seed)
        return bf.Federation.from_arrays(
            {f"c{i}": make(generator, i, least + i % 7) for i in range(clients)}
        )

    return data


def lines(generator: np.random.Generator, i: int, n: int) -> dict[str, Any]:
    """y = a_i + 0.8 x₁ − 0.5 x₂ + an effect of one of three kinds + noise."""
    x, kind = generator.normal(size=(n, 2)), generator.integers(0, 3, n)
    a = np.random.default_rng(1000 + i).normal(1.0, 0.7)
    mean = a + x @ [0.8, -0.5] + np.array([0.0, 0.6, -0.4])[kind]
    return {"x": x, "kind": kind.astype(float), "y": mean + 0.6 * generator.normal(size=n)}


def of_lines(outcome: Callable[[np.random.Generator, Any], Any], **settings: Any) -> Any:
    """The same with another outcome, made from that y."""

    def make(generator: np.random.Generator, i: int, n: int) -> dict[str, Any]:
        found = lines(generator, i, n)
        return {**found, "y": outcome(generator, found["y"])}

    return simulated(make, **settings)


def hospitals(generator: np.random.Generator, i: int, n: int) -> dict[str, Any]:
    """Nine hospitals in three regions, with wards."""
    region = i % 3
    level = [1.0, -0.3, 0.2][region] + np.random.default_rng(2000 + i).normal(0, 0.5)
    ward = generator.integers(0, 4, n)
    shift = np.random.default_rng(3000 + i).normal(0, 0.4, 4)[ward]
    y = 2 + level + shift + generator.normal(size=n)
    return {"region": np.full(n, float(region)), "ward": ward.astype(float), "y": y}


def series(generator: np.random.Generator, i: int, n: int) -> dict[str, Any]:
    """An autoregression with ρ = 0.7 around a level of its own."""
    level, y = np.random.default_rng(4000 + i).normal(0, 1), [0.0]
    for _ in range(2 * n):
        y.append(level * 0.3 + 0.7 * y[-1] + 0.5 * generator.normal())
    return {"y": y[1:], "before": y[:-1]}


def answers(generator: np.random.Generator, i: int, n: int) -> dict[str, Any]:
    """A person's answers to five items of other difficulties."""
    ability = np.random.default_rng(5000 + i).normal()
    item = np.arange(5)
    p = 1 / (1 + np.exp(-(ability - np.array([-1.0, -0.5, 0.0, 0.5, 1.0]))))
    return {"item": item.astype(float), "y": (generator.random(5) < p).astype(float)}


# -- normal outcomes -------------------------------------------------------------------------------


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
            law = dist.MultivariateNormal(m, scale_tril=scale.diag() @ root)
            pyro.sample("x", law, obs=obs.get("x"))


@on(of_lines(lambda g, y: np.minimum(y, 1.5)))
def censored(federation: Any) -> None:
    """`pyro.factor`: a tobit."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            law = dist.Normal(a, sigma)
            above = torch.special.log_ndtr((a - 1.5) / sigma)
            pyro.factor("y", torch.where(obs["y"] >= 1.5, above, law.log_prob(obs["y"])))


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
    """The same by hand: of rows that are padding NUTS would walk the truth."""
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
            laws = dist.Normal(torch.stack([a, a + apart], -1), 0.6)
            pyro.sample("y", dist.MixtureSameFamily(kinds, laws), obs=obs.get("y"))


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
    """Every third client's rows lie higher."""
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
    """Every third client lies higher, and clients differ besides."""
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
    """The same by hand: Pyro's own sum has the effect once for each class."""
    share = pyro.sample("share", dist.Dirichlet(torch.tensor([2.0, 2.0])))
    low = pyro.sample("low", dist.Normal(0.0, 1.0))
    gap = pyro.sample("gap", dist.LogNormal(0.7, 0.3))
    tau = pyro.sample("tau", dist.HalfNormal(0.5))
    laws = dist.Normal(torch.stack([low, low + gap], -1), tau.unsqueeze(-1))
    mixture, wide = dist.MixtureSameFamily(dist.Categorical(share), laws), dist.Normal(1.0, 4.0)
    with federation.clients():
        a = pyro.sample("a", wide)
        pyro.factor("of_classes", mixture.log_prob(a) - wide.log_prob(a))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))


REFERENCES = {"classes": classes_summed, "measured_with_error": measured_integrated}
"""What NUTS walks in place of a program."""


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
            law = dist.TransformedDistribution(
                dist.Normal(a, torch.ones_like(obs["y"])), [transforms.ExpTransform()]
            )
            pyro.sample("y", law, obs=obs["y"].exp())


# -- counts ----------------------------------------------------------------------------------------

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
            law = dist.NegativeBinomial(total_count=size, logits=logits)
            pyro.sample("y", law, obs=obs.get("y"))


@on(of_lines(lambda g, y: (g.poisson(np.exp(0.5 * y)) * (g.random(len(y)) < 0.7)).astype(float)))
def zero_inflated(federation: Any) -> None:
    """Zero-inflated Poisson."""
    none = pyro.sample("none", dist.Beta(1.0, 1.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            law = dist.ZeroInflatedPoisson(a.exp(), gate=none)
            pyro.sample("y", law, obs=obs.get("y"))


# -- categories and times --------------------------------------------------------------------------


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
        "cut",
        dist.TransformedDistribution(base, [dist.transforms.OrderedTransform()]),
    )
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, tau))
        with federation.observations() as obs:
            law = dist.OrderedLogistic(a + obs["x"][..., 0], cut)
            pyro.sample("y", law, obs=obs.get("y"))


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


# -- the table -------------------------------------------------------------------------------------


def against(posterior: bf.Posterior, reference: dict[str, np.ndarray]) -> list[str]:
    """The four cells: shift and range of ratios, of global and of local variables."""
    draws = {name: value.double().numpy() for name, value in posterior.sample(20_000).items()}
    local = {site.name for site in posterior.program.locals}
    cells = []
    for names in (draws.keys() - local, local):
        shifts, ratios = [0.0], []
        for name in names:
            ours, theirs = draws[name], _arranged(reference[name], draws[name].shape)
            sd = theirs.std(0)
            known = sd > 1e-9
            shifts.append(float((np.abs(ours.mean(0) - theirs.mean(0)) / sd)[known].max()))
            ratios.append((ours.std(0) / sd)[known].ravel())
        if not ratios:
            cells += ["", ""]
            continue
        ratio = np.concatenate(ratios)
        cells += [f"{max(shifts):.2f}", f"{ratio.min():.2f}–{ratio.max():.2f}"]
    return cells


def _arranged(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """NUTS' draws in the order of ours."""
    return value.reshape(len(value), *shape[1:])


def row(name: str, sampled: bool) -> str:
    """One row, without its bars."""
    program, data = PROGRAMS[name]
    torch.set_num_threads(1)
    start, what = time.perf_counter(), (program.__doc__ or "").rstrip(".")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = bf.fit(program, data(), seed=1, progress=False)
    except (ValueError, NotImplementedError) as error:
        return " | ".join([name, what, f"refused: {error}", *[""] * 6])
    seconds = time.perf_counter() - start
    cells = [""] * 4
    if sampled:
        cells = against(posterior, nuts(f"first_try_{name}", REFERENCES.get(name, program), data()))
    k = "" if posterior.khat is None else f"{posterior.khat:.2f}"
    return " | ".join([name, what, *cells, rounds_of(posterior), k, f"{seconds:.0f}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS), metavar="program")
    parser.add_argument("--no-nuts", action="store_true", help="only fit; the table stays")
    args = parser.parse_args()
    print("\n".join(HEADER))
    for name in args.programs:
        found = f"| {row(name, not args.no_nuts)} |"
        print(found, flush=True)
        if not args.no_nuts:
            keep(HERE / "first_try.md", HEADER, found, list(PROGRAMS))


if __name__ == "__main__":
    main()
