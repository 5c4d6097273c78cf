"""A start warns of fields whose units do not fit the priors, unless the model standardises them itself."""

import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest

import bayesfed as bf
from bayesfed import datasets, models

YEARS = np.random.default_rng(0).integers(1990, 2021, (4, 9)).astype(float)
DOLLARS = np.random.default_rng(1).lognormal(10.5, 0.5, (4, 9))
Y = np.random.default_rng(2).normal(size=(4, 9))


def federation(**fields):
    return bf.Federation.from_arrays(
        {f"c{i}": {name: value[i] for name, value in fields.items()} for i in range(4)}
    )


def linear(mean, family=lambda m: dist.Normal(m, 1.0)):
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        g = pyro.sample("g", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", family(a + mean(g, obs)), obs=obs.get("y"))

    return model


def warnings_of(model, data):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bf.start(model, data, rounds=1)
    return [str(warning.message) for warning in caught]


def first(g, obs):
    return g[..., 0] * obs["x"]


LOGISTIC = dict(family=lambda m: dist.Bernoulli(logits=m))
WILD = {
    "year": (linear(first), federation(x=YEARS, y=Y), ["'x' is about 2005 ± "]),
    "dollars": (linear(first), federation(x=DOLLARS, y=Y), ["'x' is about 4."]),
    "logistic": (
        linear(first, **LOGISTIC),
        federation(x=DOLLARS, y=(Y > 0).astype(float)),
        ["'x' is about"],
    ),
    "two of them": (
        linear(lambda g, obs: g[..., 0] * obs["x"] + g[..., 1] * obs["t"]),
        federation(x=DOLLARS, t=YEARS, y=Y),
        ["'x' is about", "'t' is about"],
    ),
    "an entry": (
        linear(lambda g, obs: (g * obs["x"]).sum(-1)),
        federation(x=np.stack([Y, YEARS], -1), y=Y),
        ["± 9.5 in entry 1"],
    ),
    "counts": (
        linear(first, family=lambda m: dist.Poisson(m.exp())),
        federation(x=DOLLARS, y=np.abs(Y).round()),
        ["'x' is about"],
    ),
    "outcome": (
        linear(lambda g, obs: 0.0 * obs["x"]),
        federation(x=Y, y=1e5 + 3e4 * Y),
        ["'y' is about"],
    ),
}


@pytest.mark.parametrize("name", WILD)
def test_wild_units_are_named(name):
    model, data, expected = WILD[name]
    found = warnings_of(model, data)
    assert len(found) == len(expected)
    for message, what in zip(found, expected, strict=True):
        assert what in message and "(x - mean) / sd" in message


def test_positive_outcomes_are_divided_by_their_mean():
    """A standardised time would be negative."""
    times = 365 * np.random.default_rng(3).weibull(1.5, (4, 9))
    (message,) = warnings_of(models.weibull_survival, federation(x=Y[:, :, None], time=times))
    assert "'time' is about" in message and "Give it in a unit near its mean" in message


TAME = {
    "times in years": (
        models.weibull_survival,
        federation(x=Y[:, :, None], time=np.random.default_rng(3).weibull(1.5, (4, 9))),
    ),
    "standardised": (
        linear(first),
        datasets.standardise(federation(x=YEARS, y=Y), ["x"])[0],
    ),
    "centred by the program": (
        linear(lambda g, obs: g[..., 0] * (obs["x"] - 2005.0) / 10.0),
        federation(x=YEARS, y=Y),
    ),
    "its logarithm": (
        linear(lambda g, obs: g[..., 0] * (obs["x"].log() - 10.0)),
        federation(x=DOLLARS, y=Y),
    ),
    "not read": (linear(lambda g, obs: 0.0), federation(x=YEARS, y=Y)),
    "an index": (
        linear(lambda g, obs: (obs["x"] > 2005).float() * g[..., 1]),
        federation(x=YEARS, y=Y),
    ),
    "constant": (linear(first), federation(x=np.full((4, 9), 2.0), y=Y)),
    "large counts": (
        linear(lambda g, obs: 5.0 + 0.0 * obs["x"], family=lambda m: dist.Poisson(m.exp())),
        federation(x=Y, y=np.abs(200 * Y).round()),
    ),
}


@pytest.mark.parametrize("name", TAME)
def test_others_are_not(name):
    assert warnings_of(*TAME[name]) == []
