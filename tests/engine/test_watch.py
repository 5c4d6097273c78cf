"""Warnings of a fit that has gone wrong, and none of one that has not."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.elbo.build import build
from bayesfed.engine.watch import (
    check_growth,
    warn_if_falling,
    warn_of_infinities,
    warn_of_spreads,
)
from bayesfed.guides.factorised import factorised

ROUNDS, ROWS = 200, 80


def rising(first, best, rounds=ROUNDS, sd=0.0):
    """An ELBO that comes up to where it stays, with noise."""
    noise = torch.randn(rounds, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gap = (first - best) * torch.exp(-torch.arange(rounds, dtype=torch.float64) / 5)
    return best + gap + sd * noise


def falling(elbo, by):
    """The same with a fall in the second half, in equal steps."""
    late = torch.arange(len(elbo)) - len(elbo) // 2
    return elbo - by * late.clamp(min=0) / (len(elbo) - len(elbo) // 2)


def blown_up():
    """Two per cent of the rounds double what is lost each."""
    elbo = rising(-500.0, -100.0, sd=1.0)
    elbo[-20:] -= 2.0 ** torch.arange(20)
    return elbo


@pytest.mark.parametrize(
    "elbo",
    [
        falling(rising(-500.0, -100.0), 200.0),
        falling(rising(-500.0, -100.0, sd=10.0), 200.0),
        falling(rising(-100.0, -100.0, sd=1.0), 20.0),  # it started well
        falling(rising(-1e7, -100.0), 1000.0),  # it started very badly
        blown_up(),
    ],
    ids=["smooth", "noisy", "good start", "bad start", "exponential"],
)
def test_warning_of_a_fit_that_diverges(elbo):
    with pytest.warns(UserWarning, match="the fit has diverged"):
        warn_if_falling(elbo.tolist(), ROWS)


@pytest.mark.parametrize(
    "elbo",
    [
        rising(-500.0, -100.0),
        rising(-500.0, -100.0, sd=10.0),
        falling(rising(-94.4, -74.66), 0.1),  # converged, and so without noise
        falling(rising(-500.0, -100.0, sd=1.0), 20.0),  # what clients gained at high rates
        falling(rising(-500.0, -100.0, sd=30.0), 50.0),
    ],
    ids=["smooth", "noisy", "converged", "decaying rates", "noisier than the fall"],
)
def test_no_warning_of_a_fit_that_has_converged(elbo):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_falling(elbo.tolist(), ROWS)


def grouped(clients=8, rows=6, spread=1.0):
    """Rows with noise 0.5 around levels of the clients."""
    generator = torch.Generator().manual_seed(0)
    level = 1.0 + spread * torch.randn(clients, 1, generator=generator)
    y = level + 0.5 * torch.randn(clients, rows, generator=generator)
    return bf.Federation.from_arrays({f"client {i}": {"y": y[i]} for i in range(clients)})


def squared_spread(federation):
    """A scale that no parameter is by itself."""
    mu = pyro.param("mu", torch.tensor(0.0))
    v = pyro.param("v", torch.tensor(1.0), constraint=constraints.positive)
    w = pyro.param("w", torch.tensor(1.0), constraint=constraints.positive)
    with federation.clients():
        level = pyro.sample("level", dist.Normal(mu, (v * w).sqrt()))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(level, 0.5), obs=obs.get("y"))


def own_spread(federation):
    """A scale of each client's own."""
    mu = pyro.param("mu", torch.tensor(0.0))
    with federation.clients() as index:
        ones = torch.ones(len(index), 1)
        rho = pyro.param("rho", ones, constraint=constraints.positive, event_dim=0)
        level = pyro.sample("level", dist.Normal(mu, rho))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(level, 0.5), obs=obs.get("y"))


def at_start(model, federation):
    """A program, and all its parameters where they start."""
    program = build(model, factorised(model, federation), federation)
    rows = federation.batch(torch.arange(len(federation)))
    return program, dict(program.init), dict(program.init_locals(rows))


def test_a_scale_that_explodes_is_an_error_whatever_its_parameters():
    program, params, _ = at_start(squared_spread, grouped())
    check_growth(program, params | {"v": params["v"] + 2 * math.log(900)})
    with pytest.raises(
        FloatingPointError, match=r"'level' \(parameters 'v', 'w'\) has grown 1100-fold"
    ):
        check_growth(program, params | {"v": params["v"] + 2 * math.log(1100)})


@pytest.mark.parametrize(
    ("fallen", "apart", "warnings_expected"),
    [(1100, 1.0, True), (900, 1.0, False), (11, 0.001, True), (9, 0.001, False)],
)
def test_warning_of_a_scale_that_collapses(fallen, apart, warnings_expected):
    """Tenfold where q(w_i), 1 wide, is wider than the clients are apart."""
    federation = grouped()
    program, params, own = at_start(squared_spread, federation)
    params["w"] = params["w"] - 2 * math.log(fallen)
    own["level.log_scale"] = own["level.log_scale"] - math.log(100)
    own["level.loc"] = torch.linspace(-apart, apart, len(federation))[:, None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_spreads(program, federation, params, own)
    assert len(caught) == warnings_expected
    if warnings_expected:
        assert f"'level' (parameters 'v', 'w') has fallen to 1/{fallen}" in str(caught[0].message)


@pytest.mark.parametrize(
    ("factor", "what"), [(1100, "grown 1100-fold"), (1 / 1100, "fallen to 1/1100")]
)
def test_the_scale_of_a_single_client_is_watched_too(factor, what):
    federation = grouped()
    program, params, own = at_start(own_spread, federation)
    own["rho"] = own["rho"].clone()
    own["rho"][2] += math.log(factor)
    with pytest.warns(UserWarning, match=rf"'level' \(parameter 'rho'\) has {what}"):
        warn_of_spreads(program, federation, params, own)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [bf.PFedVEM(), bf.FedABML()], ids=["PFedVEM", "FedABML"])
def test_a_collapse_in_a_fit_is_not_silent(algorithm):
    """Levels that do not differ: the maximum is at a scale of zero."""
    federation = grouped(spread=0.0)
    with pytest.warns(UserWarning, match="the scale of local site 'level' .* has fallen"):
        bf.fit(squared_spread, federation, algorithm, rounds=ROUNDS)


@pytest.mark.parametrize("algorithm", [bf.PFedVEM(), bf.FedABML()], ids=["PFedVEM", "FedABML"])
def test_no_warning_of_a_spread_that_is_found(algorithm):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bf.fit(squared_spread, grouped(), algorithm, rounds=50)


@pytest.mark.slow
def test_warning_where_mean_field_loses_a_spread_of_real_data():
    """τ of the first slope: 0.18 at the mode of the marginal posterior, 0.013 at that with a factorised q(w_i)."""
    with pytest.warns(UserWarning, match="local site 'beta' .* has fallen"):
        bf.fit(models.varying_slope, datasets.grunfeld(), bf.PFedVEM(), rounds=200)


def test_clients_whose_local_parameters_are_not_finite_are_named():
    own = {"w": torch.ones(3, 1, 2), "v": torch.tensor([[0.0], [math.nan], [math.inf]])}
    with pytest.warns(UserWarning, match="variables of 2 clients are not finite, such as 'b'"):
        warn_of_infinities(["a", "b", "c"], own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_infinities(["a"], {"w": torch.ones(1, 2)})
