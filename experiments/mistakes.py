"""Mistakes of the kind that Pyro itself lets pass, each with how to make it."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch

import bayesfed as bf
from bayesfed import datasets, models

EAGER = bf.Execution(compile=False)


# -- data and models -------------------------------------------------------------------------------


def federation(seed: int = 3) -> bf.Federation:
    """Return eight clients of unequal length: y around a level of the client, and a covariate that does nothing."""
    generator, clients = np.random.default_rng(seed), {}
    for i, n in enumerate([3, 9, 5, 12, 1, 7, 4, 10]):
        level = generator.normal(3.0, 1.0)
        clients[f"c{i}"] = {
            "y": level + generator.normal(size=n),
            "x": generator.normal(1.0, 1.0, size=n),
            "first": np.arange(n) == 0,
        }
    return bf.Federation.from_arrays(clients)


def hierarchy(
    prior: Callable[[Any], Any] = lambda f: dist.Normal(0.0, 5.0),
    value: Callable[[Any], Any] = lambda a: a,
    mean: Callable[[Any, Any], Any] = lambda a, obs: a,
) -> Callable[[Any], None]:
    """Return a model of clients' levels, of which a part may be wrong."""

    def model(federation: Any) -> None:
        mu = pyro.sample("mu", prior(federation))
        with federation.clients():
            a = value(pyro.sample("a", dist.Normal(mu, 1.0)))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(mean(a, obs), 1.0), obs=obs.get("y"))

    return model


def shallow(federation: Any) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pass
        pyro.sample("y", dist.Normal(a, 1.0), obs=obs["y"])


def summed(federation: Any) -> None:
    b = pyro.sample("b", dist.Normal(0.0, 5.0).expand([2]).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(b.sum(), 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))


def lagged(federation: Any) -> None:
    rho = pyro.sample("rho", dist.Normal(0.0, 1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            before = torch.where(obs["first"] == 1, 0.0, obs["y"].roll(1, -1))
            pyro.sample("y", dist.Normal(a + rho * before, 1.0), obs=obs["y"])


def wide(federation: Any) -> None:
    mu = pyro.sample("mu", dist.Cauchy(0.0, 10.0))
    tau = pyro.sample("tau", dist.HalfCauchy(25.0))
    with federation.clients():
        a = pyro.sample("a", dist.StudentT(4.0, mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))


def counted() -> bf.Federation:
    generator, lengths = np.random.default_rng(4), {"a": 5, "b": 9, "c": 3, "d": 12}
    return bf.Federation.from_arrays(
        {
            name: {"y": generator.poisson(6 if name == "d" else 0.6, n).astype(float)}
            for name, n in lengths.items()
        }
    )


def slope(federation: Any) -> None:
    mu, g = pyro.sample("mu", dist.Normal(0.0, 100.0)), pyro.sample("g", dist.Normal(0.0, 1.0))
    s, tau = pyro.sample("s", dist.HalfNormal(2.0)), pyro.sample("tau", dist.HalfNormal(2.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a + g * obs["x"], s), obs=obs.get("y"))


def years() -> bf.Federation:
    generator = np.random.default_rng(1)
    lengths, levels = generator.integers(4, 15, 8), generator.normal(2, 1, 8)
    clients = {}
    for k, n in enumerate(lengths):
        x = generator.integers(1990, 2021, n).astype(float)
        y = levels[k] + 0.05 * (x - 2005) + 0.5 * generator.normal(size=n)
        clients[f"c{k}"] = {"x": x, "y": y}
    return bf.Federation.from_arrays(clients)


def dollars() -> bf.Federation:
    generator, clients = np.random.default_rng(2), {}
    for k in range(8):
        x = generator.lognormal(10.5, 0.5, int(generator.integers(5, 15)))
        y = 1 + generator.normal() + 3e-5 * x + 0.5 * generator.normal(size=len(x))
        clients[f"c{k}"] = {"x": x, "y": y}
    return bf.Federation.from_arrays(clients)


def apart() -> bf.Federation:
    """Return sixty clients, one at 5 and the next at −5."""
    torch.manual_seed(0)
    return bf.Federation.from_arrays(
        {f"c{k}": {"y": 5.0 * (-1) ** k + torch.randn(6)} for k in range(60)}
    )


def frame(**columns: Any) -> bf.Federation:
    return bf.Federation.from_frame(pd.DataFrame({"who": ["a", "a", "b"]} | columns), client="who")


# -- attempts --------------------------------------------------------------------------------------


def started(model: Any, data: bf.Federation | None = None, **how: Any) -> Callable[[], Any]:
    return lambda: bf.start(model, data or federation(), rounds=1, **how)


def fitted(model: Any, data: bf.Federation, rounds: int, **how: Any) -> Callable[[], Any]:
    return lambda: bf.fit(model, data, rounds=rounds, progress=False, execution=EAGER, **how)


def years_anyway() -> Any:
    """Fit for three hundred rounds in spite of the warning at the start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fitted(slope, years(), 300)()


def unvisited() -> Any:
    """Fit with clients' states in files, where those that were in no cohort keep their first state."""
    model = hierarchy()
    with tempfile.TemporaryDirectory() as folder:
        execution = bf.Execution(compile=False, states=folder)
        return bf.fit(model, apart(), rounds=40, clients_per_round=1, execution=execution)


def centre(model: Any, variance: float, rounds: int, of: Callable[[Any], Any]) -> Callable[[], Any]:
    """Fit levels of clients around a centre with a prior of that variance; report it beside the exact one.

    A row has the centre for mean and variance 2, and two rows of one client covariance 1. A caveat comes first.
    """

    def found() -> Any:
        data = federation()
        posterior = fitted(model, data, rounds)()
        if posterior.caveat:
            return posterior
        drawn, n = of(posterior.sample(20_000)), data.lengths.double()
        weight = n / (1 + n)  # 1 / the variance of a client's mean around the centre, 1 + 1 / n
        means = torch.stack([data.select([name])["y"].double().mean() for name in data.names])
        precision = weight.sum() + 1 / variance
        exact = (weight * means).sum() / precision
        spread = f"{drawn.std():0.2f}, exact {exact:0.2f} ± {precision**-0.5:0.2f}"
        return f"{drawn.mean():0.2f} ± {spread}"

    return found


def wide_locals() -> Any:
    """Fit Student-t levels under wide priors; report their spreads beside 1 / √n, which they nearly are."""
    data = counted()
    posterior = fitted(wide, data, 300)()
    if posterior.caveat:
        return posterior
    found = ", ".join(f"{sd:0.2f}" for sd in posterior.sample(20_000)["a"].std(0))
    right = ", ".join(f"{n**-0.5:0.2f}" for n in data.lengths.tolist())
    return f"no warning: {found}, about right {right}"


ATTEMPTS: list[tuple[str, Callable[[], Any]]] = [
    (
        "the observed site one indent too shallow: padding is data",
        started(shallow),
    ),
    (
        "`b.sum()` over a vector of global variables",
        centre(summed, 50.0, 100, lambda draws: draws["b"].sum(-1)),
    ),
    (
        "`obs['x'].mean(-1)`: the mean of a client's padded rows",
        started(hierarchy(mean=lambda a, o: a + o["x"] - o["x"].mean(-1, keepdim=True))),
    ),
    (
        "`x - x.mean()`: over the clients of a batch",
        started(hierarchy(mean=lambda a, o: a + o["x"] - o["x"].mean())),
    ),
    (
        "`a - a.mean(-2)`: levels that sum to zero over a batch",
        started(hierarchy(value=lambda a: a - a.mean(-2, keepdim=True))),
    ),
    (
        "the data's mean as the centre of a prior",
        started(hierarchy(prior=lambda f: dist.Normal(f.fields["y"].mean(), 0.2))),
    ),
    (
        "`len(federation)` in a prior",
        started(hierarchy(prior=lambda f: dist.Normal(0.0, 4.0 / len(f)))),
    ),
    (
        "a row that looks at the one before, in minibatches",
        started(lagged, batch_size=2),
    ),
    (
        "numbers that the model draws itself",
        started(hierarchy(mean=lambda a, o: a + torch.randn(()))),
    ),
    (
        "numbers that numpy draws in the model",
        started(hierarchy(mean=lambda a, o: a + float(np.random.normal()))),
    ),
    (
        "prior N(0, 100²), 80 rounds",
        centre(
            hierarchy(prior=lambda f: dist.Normal(0.0, 100.0)), 1e4, 80, lambda draws: draws["mu"]
        ),
    ),
    (
        "Cauchy(0, 10), HalfCauchy(25), Student-t locals, 300 rounds",
        wide_locals,
    ),
    ("a calendar year as a covariate", started(slope, years())),
    ("dollars as a covariate", started(slope, dollars())),
    ("the same years, the fit after 300 rounds", years_anyway),
    (
        "3 rounds",
        fitted(models.eight_schools, datasets.eight_schools(), 3),
    ),
    (
        "60 clients, one a round, 40 rounds, states in files",
        unvisited,
    ),
    ('text "02139"', lambda: frame(code=["02139", "10001", "2139"])),
    (
        "seconds since 1970",
        lambda: frame(time=[1700000000, 1700000050, 1700000100]),
    ),
    ("identifiers above 2²⁴", lambda: frame(id=[16777217, 16777216, 5])),
    (
        "a category with a missing value",
        lambda: frame(sex=pd.Categorical(["m", None, "f"])),
    ),
    (
        '`missing="drop"`',
        lambda: bf.Federation.from_frame(
            pd.DataFrame({"who": ["a", "a", "b"], "x": [1.0, np.nan, 2.0]}),
            client="who",
            missing="drop",
        ),
    ),
    ("infinity", lambda: frame(x=[1.0, np.inf, 2.0])),
]
