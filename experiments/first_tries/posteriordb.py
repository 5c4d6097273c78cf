"""Posteriors of posteriordb (github.com/stan-dev/posteriordb) as Pyro programs with clients, by their names there.

The priors are those of posteriordb's Stan programs; where these have none a Normal takes the place that is wide against
the posterior. Programs with Gamma(0.001, 0.001) and the like are there a second time with 0.1. Data are inline where
they are published, from R's rstanarm (``apt-get install r-cran-rstanarm``), or simulated from the program with the
numbers of rows, clients and variables of posteriordb's. Models that have no groups have arbitrary clients: consecutive
rows.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import runner
import torch

import bayesfed as bf
from first_tries import normal
from first_tries.counts import SEEDS, SURGERY
from first_tries.data import Data, rows
from first_tries.normal import simulated

Program = Callable[[Any], None]
POSTERIORS: dict[str, tuple[Program, Data, str]] = {}
"""Name in posteriordb to the program, its data, and where these are from."""


def posterior(name: str, data: Data, source: str) -> Callable[[Program], Program]:
    """Enter a program and its data."""

    def enter(program: Program) -> Program:
        POSTERIORS[name] = program, data, source
        return program

    return enter


def from_rstanarm(name: str, clients: int) -> dict[str, dict[str, Any]]:
    """Return the columns of a data frame of rstanarm for clients of consecutive rows."""
    code = f'data({name}, package = "rstanarm"); write.csv({name}, row.names = FALSE)'
    out = subprocess.run(["Rscript", "-e", code], capture_output=True, text=True, check=True).stdout
    table = list(csv.DictReader(io.StringIO(out)))
    columns = {key: np.array([float(row[key]) for row in table]) for key in table[0]}
    return split(columns, clients)


def split(columns: dict[str, Any], clients: int) -> dict[str, dict[str, Any]]:
    """Return columns for clients of consecutive rows."""
    parts = {key: np.array_split(value, clients) for key, value in columns.items()}
    return {f"c{i}": {key: value[i] for key, value in parts.items()} for i in range(clients)}


def grouped(make: Callable[[np.random.Generator], dict[str, Any]], clients: int) -> Data:
    """Return simulated rows, for clients of consecutive ones."""
    return lambda: bf.Federation.from_arrays(split(make(np.random.default_rng(0)), clients))


posterior("eight_schools-eight_schools_centered", bf.datasets.eight_schools, "published")(
    normal.eight_schools
)
posterior("eight_schools-eight_schools_noncentered", bf.datasets.eight_schools, "published")(
    normal.eight_schools_free
)


def radon() -> bf.Federation:
    """Return the houses of Minnesota; counties are clients."""
    found = json.loads(runner.RADON.read_text())
    y, floor, county = (np.array(found[key], dtype=float) for key in ("y", "x", "county"))
    parts = {}
    for i, (name, uranium) in enumerate(zip(found["county_name"], found["u"], strict=True)):
        own = county == i
        parts[name] = {"y": y[own], "floor": floor[own], "uranium": np.full(own.sum(), uranium)}
    return bf.Federation.from_arrays(parts)


@posterior("radon_mn-radon_hierarchical_intercept_centered", radon, "published")
def radon_intercept(federation: Any) -> None:
    mu = pyro.sample("mu_alpha", dist.Normal(0.0, 10.0))
    spread = pyro.sample("sigma_alpha", dist.HalfNormal(1.0))
    noise = pyro.sample("sigma_y", dist.HalfNormal(1.0))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 10.0).to_event(1))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, spread))
        with federation.observations() as obs:
            mean = alpha + obs["uranium"] * beta[0] + obs["floor"] * beta[1]
            pyro.sample("y", dist.Normal(mean, noise), obs=obs.get("y"))


def kids() -> bf.Federation:
    """Return test scores of children, and their mothers' schooling and IQ as z-scores of two standard deviations."""
    found = from_rstanarm("kidiq", 14)
    for key in ("mom_hs", "mom_iq"):
        every = np.concatenate([columns[key] for columns in found.values()])
        for columns in found.values():
            columns[key] = (columns[key] - every.mean()) / (2 * every.std(ddof=1))
    return bf.Federation.from_arrays(found)


@posterior("kidiq_with_mom_work-kidscore_interaction_z", kids, "rstanarm")
def kidscore_interaction(federation: Any) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(4), 1000.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.5))
    with federation.clients(), federation.observations() as obs:
        school, iq = obs["mom_hs"], obs["mom_iq"]
        mean = beta[0] + beta[1] * school + beta[2] * iq + beta[3] * school * iq
        pyro.sample("kid_score", dist.Normal(mean, sigma), obs=obs.get("kid_score"))


RATS = """
151 199 246 283 320  145 199 249 293 354  147 214 263 312 328  155 200 237 272 297  135 188 230 280 323
159 210 252 298 331  141 189 231 275 305  159 201 248 297 338  177 236 285 350 376  134 182 220 260 296
160 208 261 313 352  143 188 220 273 314  154 200 244 289 325  171 221 270 326 358  163 216 242 281 312
160 207 248 288 324  142 187 234 280 316  156 203 243 283 317  157 212 259 307 336  152 203 246 286 321
154 205 253 298 334  139 190 225 267 302  146 191 229 272 302  157 211 250 285 323  132 185 237 286 331
160 207 257 303 345  169 216 261 295 333  157 205 248 289 316  137 180 219 258 291  153 200 244 286 324
"""


def rats() -> bf.Federation:
    """Return the weights in g of 30 rats, which are clients, at 8, 15, 22, 29 and 36 days."""
    weights = np.array(RATS.split(), dtype=float).reshape(30, 5)
    days = np.array([8.0, 15.0, 22.0, 29.0, 36.0]) - 22.0
    return bf.Federation.from_arrays(
        {f"rat {i + 1}": {"day": days, "y": y} for i, y in enumerate(weights)}
    )


@posterior("rats_data-rats_model", rats, "published")
def rats_model(federation: Any, shape: float = 0.001) -> None:
    mu_alpha = pyro.sample("mu_alpha", dist.Normal(0.0, 100.0))
    mu_beta = pyro.sample("mu_beta", dist.Normal(0.0, 100.0))
    var_y = pyro.sample("sigmasq_y", dist.InverseGamma(shape, shape))
    var_alpha = pyro.sample("sigmasq_alpha", dist.InverseGamma(shape, shape))
    var_beta = pyro.sample("sigmasq_beta", dist.InverseGamma(shape, shape))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu_alpha, var_alpha.sqrt()))
        beta = pyro.sample("beta", dist.Normal(mu_beta, var_beta.sqrt()))
        with federation.observations() as obs:
            mean = alpha + beta * obs["day"]
            pyro.sample("y", dist.Normal(mean, var_y.sqrt()), obs=obs.get("y"))


posterior("rats_data-rats_model, 0.1", rats, "published")(partial(rats_model, shape=0.1))


@posterior("seeds_data-seeds_stanified_model", rows(**SEEDS), "published")
def seeds_stanified(federation: Any) -> None:
    alpha = pyro.sample("alpha", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
    with federation.clients():
        b = pyro.sample("b", dist.Normal(0.0, sigma))
        with federation.observations() as obs:
            seed, extract = obs["seed"], obs["extract"]
            fixed = alpha[0] + alpha[1] * seed + alpha[2] * extract + alpha[3] * seed * extract
            outcome = dist.Binomial(obs["n"], logits=fixed + b)
            pyro.sample("y", outcome, obs=obs.get("y"))


@posterior("surgical_data-surgical_model", rows(**SURGERY), "published")
def surgical(federation: Any, shape: float = 0.001) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1000.0))
    variance = pyro.sample("sigmasq", dist.InverseGamma(shape, shape))
    with federation.clients():
        b = pyro.sample("b", dist.Normal(mu, variance.sqrt()))
        with federation.observations() as obs:
            pyro.sample("y", dist.Binomial(obs["n"], logits=b), obs=obs.get("y"))


posterior("surgical_data-surgical_model, 0.1", rows(**SURGERY), "published")(
    partial(surgical, shape=0.1)
)


AGES = """1.0 1.5 1.5 1.5 2.5 4.0 5.0 5.0 7.0 8.0 8.5 9.0 9.5 9.5 10.0 12.0 12.0 13.0 13.0 14.5 15.5 15.5 16.5 17.0
22.5 29.0 31.5"""
LENGTHS = """1.80 1.85 1.87 1.77 2.02 2.27 2.15 2.26 2.47 2.19 2.26 2.40 2.39 2.41 2.50 2.32 2.32 2.43 2.47 2.56 2.65
2.47 2.64 2.56 2.70 2.72 2.57"""


def animals() -> bf.Federation:
    """Return ages in years and lengths in m."""
    columns = {"age": np.array(AGES.split(), float), "y": np.array(LENGTHS.split(), float)}
    return bf.Federation.from_arrays(split(columns, 3))


@posterior("dugongs_data-dugongs_model", animals, "published")
def dugongs(federation: Any, shape: float = 0.0001) -> None:
    alpha = pyro.sample("alpha", dist.Normal(0.0, 1000.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1000.0))
    rate = pyro.sample("lambda", dist.Uniform(0.5, 1.0))
    precision = pyro.sample("tau", dist.Gamma(shape, shape))
    with federation.clients(), federation.observations() as obs:
        mean = alpha - beta * rate ** obs["age"]
        pyro.sample("y", dist.Normal(mean, precision.rsqrt()), obs=obs.get("y"))


posterior("dugongs_data-dugongs_model, 0.1", animals, "published")(partial(dugongs, shape=0.1))


def twenty_items(generator: np.random.Generator, i: int, n: int) -> dict[str, Any]:
    """Draw one of 100 persons' answers to twenty items, which are the same for all."""
    of_items = np.random.default_rng(1)
    sharp, hard = np.exp(of_items.normal(0, 0.5, 20)), of_items.normal(0.3, 1.2, 20)
    p = 1 / (1 + np.exp(-sharp * (generator.normal(0, 1.2) - hard)))
    return {"item": np.arange(20.0), "y": (generator.random(20) < p).astype(float)}


@posterior("irt_2pl-irt_2pl", simulated(twenty_items, clients=100), "simulated")
def irt_2pl(federation: Any) -> None:
    sigma_theta = pyro.sample("sigma_theta", dist.HalfCauchy(2.0))
    sigma_a = pyro.sample("sigma_a", dist.HalfCauchy(2.0))
    mu_b = pyro.sample("mu_b", dist.Normal(0.0, 5.0))
    sigma_b = pyro.sample("sigma_b", dist.HalfCauchy(2.0))
    a = pyro.sample("a", dist.LogNormal(torch.zeros(20), sigma_a).to_event(1))
    b = pyro.sample("b", dist.Normal(mu_b, sigma_b).expand([20]).to_event(1))
    with federation.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, sigma_theta))
        with federation.observations() as obs:
            item = obs["item"].long()
            outcome = dist.Bernoulli(logits=a[item] * (theta - b[item]))
            pyro.sample("y", outcome, obs=obs.get("y"))


def dog(generator: np.random.Generator, i: int, n: int) -> dict[str, Any]:
    """Draw 25 trials of one of 30 dogs, which avoids a shock or not."""
    avoided, shocked, found = 0, 0, []
    for _ in range(25):
        p = 1 / (1 + np.exp(-(1.8 - 0.35 * avoided - 0.2 * shocked)))
        y = int(generator.random() < p)
        found.append((avoided, shocked, y))
        avoided, shocked = avoided + 1 - y, shocked + y
    columns = np.array(found, dtype=float).T
    return dict(zip(("avoided", "shocked", "y"), columns, strict=True))


@posterior("dogs-dogs", simulated(dog, clients=30), "simulated")
def dogs(federation: Any) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(3), 100.0).to_event(1))
    with federation.clients(), federation.observations() as obs:
        logits = beta[0] + beta[1] * obs["avoided"] + beta[2] * obs["shocked"]
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=obs.get("y"))


def falcons(generator: np.random.Generator) -> dict[str, Any]:
    """Draw forty years' counts."""
    year = (np.arange(40) - 19.5) / 20
    log_rate = 4.3 + 1.2 * year + 0.1 * year**2 - 0.6 * year**3 + generator.normal(0, 0.1, 40)
    return {"year": year, "y": generator.poisson(np.exp(log_rate)).astype(float)}


@posterior("GLMM_Poisson_data-GLMM_Poisson_model", grouped(falcons, 40), "simulated")
def glmm_poisson(federation: Any) -> None:
    alpha = pyro.sample("alpha", dist.Uniform(-20.0, 20.0))
    beta = pyro.sample("beta", dist.Uniform(-10.0, 10.0).expand([3]).to_event(1))
    sigma = pyro.sample("sigma", dist.Uniform(0.0, 5.0))
    with federation.clients():
        eps = pyro.sample("eps", dist.Normal(0.0, sigma))
        with federation.observations() as obs:
            year = obs["year"]
            trend = beta[0] * year + beta[1] * year**2 + beta[2] * year**3
            pyro.sample("y", dist.Poisson((alpha + trend + eps).exp()), obs=obs.get("y"))


def two_normals(generator: np.random.Generator) -> dict[str, Any]:
    """Draw a thousand rows of two kinds."""
    first = generator.random(1000) < 0.4
    y = np.where(first, generator.normal(-2.75, 1.0, 1000), generator.normal(2.75, 1.0, 1000))
    return {"y": y}


@posterior("low_dim_gauss_mix-low_dim_gauss_mix", grouped(two_normals, 20), "simulated")
def gauss_mix(federation: Any) -> None:
    middle = pyro.sample(
        "middle", dist.Normal(0.0, 2.0**0.5)
    )  # of two means ~ Normal(0, 2), in order
    apart = pyro.sample("apart", dist.HalfNormal(8.0**0.5))
    mu = torch.stack([middle - apart / 2, middle + apart / 2], -1)
    sigma = pyro.sample("sigma", dist.HalfNormal(torch.full((2,), 2.0)).to_event(1))
    theta = pyro.sample("theta", dist.Beta(5.0, 5.0))
    with federation.clients(), federation.observations() as obs:
        kinds = dist.Categorical(torch.stack([theta, 1 - theta], -1))
        outcome = dist.MixtureSameFamily(kinds, dist.Normal(mu, sigma))
        pyro.sample("y", outcome, obs=obs.get("y"))


def fifth_order(generator: np.random.Generator) -> dict[str, Any]:
    """Draw 200 times of an autoregression, and the five values before each."""
    y = list(generator.normal(0, 0.1, 5))
    for _ in range(195):
        before = np.array(y[-1:-6:-1])
        y.append(0.02 + before @ [0.7, -0.3, 0.2, -0.1, 0.1] + generator.normal(0, 0.15))
    lags = np.stack([y[5 - k : 200 - k] for k in range(1, 6)], -1)
    return {"before": lags, "y": np.array(y[5:])}


@posterior("arK-arK", grouped(fifth_order, 5), "simulated")
def ar_k(federation: Any) -> None:
    alpha = pyro.sample("alpha", dist.Normal(0.0, 10.0))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(5), 10.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.5))
    with federation.clients(), federation.observations() as obs:
        mean = alpha + (obs["before"] * beta).sum(-1)
        pyro.sample("y", dist.Normal(mean, sigma), obs=obs.get("y"))


@posterior(
    "wells_data-wells_dist100_model",
    lambda: bf.Federation.from_arrays(from_rstanarm("wells", 20)),
    "rstanarm",
)
def wells_dist100(federation: Any) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 100.0).to_event(1))
    with federation.clients(), federation.observations() as obs:
        logits = beta[0] + beta[1] * obs["dist"] / 100
        pyro.sample("switch", dist.Bernoulli(logits=logits), obs=obs.get("switch"))


@posterior("radon_mn-radon_variable_intercept_slope_centered", radon, "published")
def radon_slope(federation: Any) -> None:
    mu_alpha = pyro.sample("mu_alpha", dist.Normal(0.0, 10.0))
    mu_beta = pyro.sample("mu_beta", dist.Normal(0.0, 10.0))
    sigma_alpha = pyro.sample("sigma_alpha", dist.HalfNormal(1.0))
    sigma_beta = pyro.sample("sigma_beta", dist.HalfNormal(1.0))
    sigma_y = pyro.sample("sigma_y", dist.HalfNormal(1.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu_alpha, sigma_alpha))
        beta = pyro.sample("beta", dist.Normal(mu_beta, sigma_beta))
        with federation.observations() as obs:
            mean = alpha + obs["floor"] * beta
            pyro.sample("y", dist.Normal(mean, sigma_y), obs=obs.get("y"))
