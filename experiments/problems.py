"""Small hierarchies with a reference posterior, shared by several experiments.

Each is a Pyro program with its data, and the same model in NumPyro on the pooled rows, whose NUTS is the reference. The
data: eight schools; Grunfeld's firms; radon in 85 counties (runner.RADON, JSON with `county`, `x` and `y`); 200 rows
of each of the six plans of the RAND experiment and of eight Chinese cities; voters by education; two infections of each
of 38 patients; three simulated sets of ten clients and 114 rows, negative binomial with exposure, Weibull with
censoring, Student-t; 18 simulated clients with ten rows each, whose intercepts and slopes are correlated; and 10,000
simulated clients.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as ndist
import pandas as pd
import pyro
import pyro.distributions as dist
import runner
import torch
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import LocScaleReparam

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.models.weibull_survival import CensoredWeibull

CUTS = [0.5, 1.0, 5.0]
"""Months: the kidney patients have about as many infections in each interval."""
RUNS = runner.ROOT / "runs/reference"


# -- models that the package does not ship ---------------------------------------------------------


def negative_binomial(federation: Any) -> None:
    """Overdispersed counts with exposure."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
    size = pyro.sample("size", dist.LogNormal(0.0, 1.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
        with federation.observations() as obs:
            log_mean = alpha + beta * obs["x"] + obs["exposure"].log()
            counts = dist.NegativeBinomial(size, logits=log_mean - size.log())
            pyro.sample("y", counts, obs=obs.get("y"))


def weibull(federation: Any) -> None:
    """Survival with censoring, a frailty for each client."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
        with federation.observations() as obs:
            times = CensoredWeibull(alpha + beta * obs["x"], shape, 1 - obs["censored"])
            pyro.sample("t", times, obs=obs.get("t"))


def student_t(federation: Any) -> None:
    """Regression with heavy tails, an intercept for each client."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.StudentT(4.0, alpha + beta * obs["x"], sigma), obs=obs.get("y"))


def correlated_slopes(federation: Any) -> None:
    """A regression with an intercept and a slope of each client, correlated."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    tau = pyro.sample("tau", dist.HalfNormal(torch.ones(2)).to_event(1))
    rho = pyro.sample("rho", dist.Uniform(-1.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    below = torch.stack([rho, (1 - rho.square()).sqrt()], -1)
    first = torch.stack([torch.ones_like(rho), torch.zeros_like(rho)], -1)
    with federation.clients():
        root = tau[..., None] * torch.stack([first, below], -2)
        w = pyro.sample("w", dist.MultivariateNormal(mu, scale_tril=root))
        with federation.observations() as obs:
            mean = w[..., 0] + w[..., 1] * obs["x"]
            pyro.sample("y", dist.Normal(mean, sigma), obs=obs.get("y"))


def days() -> bf.Federation:
    """Return 18 clients with ten days each."""
    generator, clients = np.random.default_rng(0), {}
    for i in range(18):
        x = (np.arange(10) - 4.5) / 3
        a, b = generator.multivariate_normal([0.5, 0.4], [[0.5, -0.06], [-0.06, 0.04]])
        clients[f"client {i}"] = {"x": x, "y": a + b * x + 0.5 * generator.normal(size=10)}
    return bf.Federation.from_arrays(clients)


def simulated(kind: str) -> bf.Federation:
    """Return ten clients with 7 to 16 rows."""
    generator, clients = np.random.default_rng(0), {}
    for i in range(10):
        n = 7 + i if i < 9 else 15
        alpha, x = 0.5 + 0.6 * generator.normal(), generator.normal(size=n)
        rows: dict[str, Any] = {"x": x}
        if kind == "counts":
            exposure = generator.uniform(0.5, 3.0, n)
            rate = exposure * np.exp(alpha + 0.4 * x) * generator.gamma(2.0, 0.5, n)
            rows |= {"exposure": exposure, "y": generator.poisson(rate)}
        elif kind == "times":
            t = np.exp(alpha + 0.4 * x) * generator.weibull(1.5, n)
            end = generator.uniform(1.0, 5.0, n)
            rows |= {"t": np.minimum(t, end), "censored": (t > end) * 1.0}
        else:
            rows |= {"y": alpha + 0.4 * x + 0.5 * generator.standard_t(4, n)}
        clients[f"client {i}"] = rows
    return bf.Federation.from_arrays(clients)


def radon() -> bf.Federation:
    """Return log radon by floor in 85 counties."""
    raw = json.loads(runner.RADON.read_text())
    frame = pd.DataFrame({"county": raw["county"], "floor": raw["x"], "log_radon": raw["y"]})
    return bf.Federation.from_frame(
        frame, client="county", fields={"x": ["floor"], "y": "log_radon"}
    )


def thinned(federation: bf.Federation, rows: int) -> bf.Federation:
    """Return at most that many rows of each client, spread evenly over its rows."""
    parts = {}
    for i, name in enumerate(federation.names):
        start, end = int(federation.offsets[i]), int(federation.offsets[i + 1])
        at = torch.linspace(start, end - 1, min(rows, end - start)).long()
        parts[name] = {field: federation[field][at] for field in federation.fields}
    return bf.Federation.from_arrays(parts)


# -- the same models in NumPyro, on all rows; `of` is the client of each row -----------------------


def _half(scale: float, shape: Any = ()) -> Any:
    return ndist.HalfNormal(scale).expand(shape).to_event(len(shape))


def _intercept(clients: int, mu_scale: float = 2.0) -> Any:
    mu = numpyro.sample("mu", ndist.Normal(0.0, mu_scale))
    tau = numpyro.sample("tau", ndist.HalfNormal(1.0))
    with numpyro.plate("clients", clients):
        return numpyro.sample("alpha", ndist.Normal(mu, tau))


def n_eight_schools(rows: Any, of: Any, clients: int) -> None:
    mu = numpyro.sample("mu", ndist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", ndist.HalfCauchy(5.0))
    with numpyro.plate("clients", clients):
        theta = numpyro.sample("theta", ndist.Normal(mu, tau))
    numpyro.sample("y", ndist.Normal(theta[of], rows["sigma"]), obs=rows["y"])


def n_varying_intercept(rows: Any, of: Any, clients: int) -> None:
    width = rows["x"].shape[1:]
    alpha = _intercept(clients)
    beta = numpyro.sample("beta", ndist.Normal(0.0, 2.0).expand(width).to_event(1))
    sigma = numpyro.sample("sigma", ndist.HalfNormal(1.0))
    numpyro.sample("y", ndist.Normal(alpha[of] + rows["x"] @ beta, sigma), obs=rows["y"])


def _slopes(rows: Any, of: Any, clients: int, scale: float) -> Any:
    width = rows["x"].shape[1:]
    mu_alpha = numpyro.sample("mu_alpha", ndist.Normal(0.0, scale))
    tau_alpha = numpyro.sample("tau_alpha", ndist.HalfNormal(1.0))
    mu_beta = numpyro.sample("mu_beta", ndist.Normal(0.0, scale).expand(width).to_event(1))
    tau_beta = numpyro.sample("tau_beta", _half(1.0, width))
    with numpyro.plate("clients", clients):
        alpha = numpyro.sample("alpha", ndist.Normal(mu_alpha, tau_alpha))
        beta = numpyro.sample("beta", ndist.Normal(mu_beta, tau_beta).to_event(1))
    return alpha[of] + (beta[of] * rows["x"]).sum(-1)


def n_varying_slope(rows: Any, of: Any, clients: int) -> None:
    sigma = numpyro.sample("sigma", ndist.HalfNormal(1.0))
    mean = _slopes(rows, of, clients, 2.0)
    numpyro.sample("y", ndist.Normal(mean, sigma), obs=rows["y"])


def n_logistic(rows: Any, of: Any, clients: int) -> None:
    numpyro.sample("y", ndist.Bernoulli(logits=_slopes(rows, of, clients, 2.5)), obs=rows["y"])


def n_count(rows: Any, of: Any, clients: int) -> None:
    width = rows["x"].shape[1:]
    alpha = _intercept(clients, 5.0)
    beta = numpyro.sample("beta", ndist.Normal(0.0, 1.0).expand(width).to_event(1))
    numpyro.sample("y", ndist.Poisson(jnp.exp(alpha[of] + rows["x"] @ beta)), obs=rows["y"])


def n_negative_binomial(rows: Any, of: Any, clients: int) -> None:
    alpha = _intercept(clients)
    beta = numpyro.sample("beta", ndist.Normal(0.0, 1.0))
    size = numpyro.sample("size", ndist.LogNormal(0.0, 1.0))
    mean = rows["exposure"] * jnp.exp(alpha[of] + beta * rows["x"])
    numpyro.sample("y", ndist.NegativeBinomial2(mean, size), obs=rows["y"])


def n_weibull(rows: Any, of: Any, clients: int) -> None:
    alpha = _intercept(clients)
    beta = numpyro.sample("beta", ndist.Normal(0.0, 1.0))
    shape = numpyro.sample("shape", ndist.LogNormal(0.0, 0.5))
    over = ndist.Weibull(jnp.exp(alpha[of] + beta * rows["x"]), shape)
    beyond = -((rows["t"] / over.scale) ** shape)
    numpyro.factor("t", jnp.where(rows["censored"] == 1, beyond, over.log_prob(rows["t"])).sum())


def n_weibull_survival(rows: Any, of: Any, clients: int) -> None:
    alpha = _intercept(clients)
    beta = numpyro.sample("beta", ndist.Normal(0.0, 1.0).expand(rows["x"].shape[1:]).to_event(1))
    shape = numpyro.sample("shape", ndist.LogNormal(0.0, 0.5))
    over = ndist.Weibull(jnp.exp(alpha[of] + rows["x"] @ beta), shape)
    beyond = -((rows["time"] / over.scale) ** shape)
    numpyro.factor("t", jnp.where(rows["event"] == 1, over.log_prob(rows["time"]), beyond).sum())


def _frailty(rows: Any, of: Any, clients: int, scale: float) -> Any:
    tau = numpyro.sample("tau", ndist.HalfNormal(1.0))
    beta = numpyro.sample("beta", ndist.Normal(0.0, scale).expand(rows["x"].shape[1:]).to_event(1))
    with numpyro.plate("clients", clients):
        alpha = numpyro.sample("alpha", ndist.Normal(0.0, tau))
    return alpha[of] + rows["x"] @ beta


def n_cox(rows: Any, of: Any, clients: int) -> None:
    """Poisson regression on rows that are split at the cuts."""
    edges = jnp.array([0.0, *CUTS, jnp.inf])
    log_hazard = numpyro.sample(
        "log_hazard", ndist.Normal(0.0, 2.0).expand([len(CUTS) + 1]).to_event(1)
    )
    time = rows["time"][:, None]
    at_risk = jnp.clip(time, edges[:-1], edges[1:]) - edges[:-1]
    events = rows["event"][:, None] * ((edges[:-1] < time) & (time <= edges[1:]))
    rate = at_risk * jnp.exp(log_hazard + _frailty(rows, of, clients, 1.0)[:, None])
    with numpyro.handlers.mask(mask=at_risk > 0):
        numpyro.sample("t", ndist.Poisson(jnp.where(at_risk > 0, rate, 1.0)), obs=events)


def n_ordered_logistic(rows: Any, of: Any, clients: int) -> None:
    to_cutpoints = ndist.transforms.SimplexToOrderedTransform()
    prior = ndist.TransformedDistribution(ndist.Dirichlet(jnp.ones(7)), to_cutpoints)
    cutpoints = numpyro.sample("cutpoints", prior)
    location = _frailty(rows, of, clients, 2.5)
    numpyro.sample("y", ndist.OrderedLogistic(location, cutpoints), obs=rows["y"].astype(int))


def n_student_t(rows: Any, of: Any, clients: int) -> None:
    alpha = _intercept(clients)
    beta = numpyro.sample("beta", ndist.Normal(0.0, 1.0))
    sigma = numpyro.sample("sigma", ndist.HalfNormal(1.0))
    over = ndist.StudentT(4.0, alpha[of] + beta * rows["x"], sigma)
    numpyro.sample("y", over, obs=rows["y"])


def n_correlated_slopes(rows: Any, of: Any, clients: int) -> None:
    """Non-centred by hand: NumPyro has no such reparametrisation of a multivariate Normal."""
    mu = numpyro.sample("mu", ndist.Normal(0.0, 2.0).expand([2]).to_event(1))
    tau = numpyro.sample("tau", _half(1.0, (2,)))
    rho = numpyro.sample("rho", ndist.Uniform(-1.0, 1.0))
    sigma = numpyro.sample("sigma", ndist.HalfNormal(1.0))
    with numpyro.plate("clients", clients):
        z = numpyro.sample("z", ndist.Normal(0.0, 1.0).expand([2]).to_event(1))
    slope = rho * z[:, 0] + jnp.sqrt(1 - rho**2) * z[:, 1]
    w = numpyro.deterministic("w", mu + tau * jnp.stack([z[:, 0], slope], -1))
    numpyro.sample("y", ndist.Normal(w[of, 0] + w[of, 1] * rows["x"], sigma), obs=rows["y"])


# -- the problems ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A model, its twin in NumPyro and its data.

    Attributes:
        model: the Pyro program.
        twin: the same in NumPyro.
        data: makes the federation.
        centred: NUTS samples the local variables as they are written, not non-centred.
    """

    model: Callable[[Any], None]
    twin: Callable[[Any, Any, int], None]
    data: Callable[[], bf.Federation]
    centred: bool = False


PROBLEMS = {
    "eight schools": Problem(models.eight_schools, n_eight_schools, datasets.eight_schools),
    "grunfeld": Problem(models.varying_slope, n_varying_slope, datasets.grunfeld, centred=True),
    "correlated slopes": Problem(correlated_slopes, n_correlated_slopes, days),
    "radon": Problem(models.varying_intercept, n_varying_intercept, radon),
    "count": Problem(
        models.hierarchical_count, n_count, lambda: thinned(datasets.randhie(), 200), centred=True
    ),
    "logistic": Problem(
        models.hierarchical_logistic, n_logistic, lambda: thinned(datasets.china_smoking(), 200)
    ),
    "negative binomial": Problem(
        negative_binomial, n_negative_binomial, lambda: simulated("counts")
    ),
    "censored Weibull": Problem(weibull, n_weibull, lambda: simulated("times")),
    "Student-t": Problem(student_t, n_student_t, lambda: simulated("heavy")),
    "anes96": Problem(models.OrderedLogistic(categories=7), n_ordered_logistic, datasets.anes96),
    "kidney": Problem(models.weibull_survival, n_weibull_survival, datasets.kidney),
    "kidney, Cox": Problem(models.Cox(CUTS), n_cox, datasets.kidney),
}


def sampler(problem: Problem, warmup: int, draws: int, chains: int) -> MCMC:
    """Return NumPyro's NUTS on the twin."""
    local = [] if problem.centred else ["theta", "alpha", "beta"]
    config = {site: LocScaleReparam(0.0) for site in local}

    def centring(site: dict[str, Any]) -> Any:
        inside = any(frame.name == "clients" for frame in site["cond_indep_stack"])
        return config.get(site["name"]) if inside else None

    model = numpyro.handlers.reparam(problem.twin, config=centring)
    kernel = NUTS(model, target_accept_prob=0.9)
    return MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method="sequential",
        progress_bar=False,
    )


def pooled(federation: bf.Federation) -> tuple[dict[str, Any], Any, int]:
    """Return all rows, and the client of each."""
    rows = {name: jnp.asarray(federation[name].numpy()) for name in federation.fields}
    return rows, jnp.asarray(federation.owner.numpy()), len(federation)


def reference(name: str, problem: Problem, federation: bf.Federation) -> dict[str, np.ndarray]:
    """Return draws of NUTS by sample site, from four chains of 2000; they are stored in runs/reference."""
    path = RUNS / f"problem_{name.replace(' ', '_').replace(',', '')}.npz"
    if not path.exists():
        mcmc = sampler(problem, 1500, 2000, 4)
        mcmc.run(jax.random.PRNGKey(0), *pooled(federation))
        draws = az.convert_to_dataset(mcmc.get_samples(group_by_chain=True))
        print(
            f"{name}: NUTS' r_hat {float(az.rhat(draws).to_array().max()):.3f}, "
            f"ess {float(az.ess(draws).to_array().min()):.0f}",
            flush=True,
        )
        RUNS.mkdir(parents=True, exist_ok=True)
        np.savez(path, **{k: np.asarray(v) for k, v in mcmc.get_samples().items()})
    return dict(np.load(path))
