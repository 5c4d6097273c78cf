"""Every method as it comes, on hierarchies that are in no example: no fit diverges in silence."""

import warnings
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed.algorithms import METHODS
from bayesfed.engine.rounds import HALVINGS
from bayesfed.engine.run import Stopped
from tests.scenarios import ANIMALS, curves, deaths, growth, hospitals

ABROAD = 100.0
"""Prior standard deviations from the centre of the prior beyond which an estimate is absurd."""


PROBLEMS = {"hospitals": (deaths, hospitals), "curves": (growth, curves)}
REFUSED = {  # by name, with what to take
    ("hospitals", "FedPer"), ("hospitals", "FedRep"), ("hospitals", "FedBABU"),
    ("hospitals", "CAFeMe"), ("curves", "CAFeMe"), ("curves", "Local"),
}  # fmt: skip
SLOW = {("curves", "SFVIAvg"), ("hospitals", "FedBE"), ("hospitals", "PVI")}
STATES = {"mu": (0.0, 2.0), "level": (250.0, 100.0), "slope": (6.0, 5.0)}
DEVIATIONS = {
    "hospitals": {"a": ("mu", "tau")},
    "curves": {"a": ("level", "sd_level"), "b": ("slope", "sd_slope")},
}


def absurd(problem, posterior):
    """Return the variables that are not finite, or too far from the centre of their prior."""
    draws, found = posterior.sample(20), []
    for name, (centre, sd) in STATES.items():
        if name in draws and not ((draws[name] - centre) / sd).abs().max() < ABROAD:
            found.append(name)
    for name, (centre, sd) in DEVIATIONS[problem].items():
        away = (draws[name] - draws[centre][:, None]) / draws[sd][:, None].clamp(min=1e-3)
        if not away.abs().max() < ABROAD:
            found.append(name)
    return found


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        pytest.param(name, problem, marks=pytest.mark.slow if (problem, name) in SLOW else ())
        for name in METHODS
        for problem in PROBLEMS
        if name not in ("MAML", "MTL", "Pooled")
    ],
)
def test_no_method_diverges_in_silence(name, problem):
    model, data = PROBLEMS[problem][0], PROBLEMS[problem][1]()
    if (problem, name) in REFUSED:
        with pytest.raises(ValueError, match=f"^{name} "):
            bf.fit(model, data, METHODS[name](), rounds=2)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = bf.fit(model, data, METHODS[name](), rounds=8 if name == "FOLA" else 20)
    assert absurd(problem, posterior) == []
    elbo = posterior.history["elbo"]
    first, last = elbo[~elbo.isnan()][0], elbo[-1]
    assert last > -20_000 and last > first - 500


def test_rates_that_go_uphill_are_halved_and_the_fit_arrives():
    """At the maximum of the pooled objective, all clients at the centre of their prior, by Newton's method."""
    data = hospitals()
    with pytest.warns(
        UserWarning, match=r"in \d+ rounds? the steps of clients went uphill.*1/\d+ of"
    ):
        posterior = bf.fit(deaths, data, bf.FedAvg(local_epochs=1), rounds=200)
    n, died = (torch.cat([data.select([name])[f] for name in data.names]) for f in ("n", "deaths"))
    mu = torch.tensor(0.0, dtype=torch.float64)
    for _ in range(50):
        p = torch.sigmoid(mu)
        mu = mu + ((died - n * p).sum() - mu / 4) / ((n * p * (1 - p)).sum() + 1 / 4)
    assert posterior.params["mu.loc"] == pytest.approx(float(mu), abs=0.01)


def test_fine_tuning_takes_lower_rates_where_its_steps_go_uphill():
    """A hospital's own estimate is near its own rate, in logits: 40 patients or more say more than the prior."""
    data = hospitals()
    with pytest.warns(UserWarning, match="uphill"):
        posterior = bf.fit(deaths, data, bf.FedAvg(), rounds=20)
    n, died = (torch.cat([data.select([name])[f] for name in data.names]) for f in ("n", "deaths"))
    own = posterior.sample(1)["a"][0]
    assert (own - torch.logit(died / n)).abs().max() < 0.3


def test_a_run_whose_steps_always_go_uphill_stops():
    """Steps of a kinked loss that never fit."""

    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                scale = torch.where(a == 0, 1.0, 1e-30)
                pyro.sample("y", dist.Normal(a, scale), obs=obs.get("y"))

    data = bf.Federation.from_arrays({"a": {"y": [1.0]}, "b": {"y": [2.0]}})
    with pytest.raises(Stopped, match=rf"round {HALVINGS + 1}: the clients' steps go uphill"):
        bf.fit(model, data, bf.FedAvg(), rounds=HALVINGS + 5)


def test_one_client_among_many_does_not_slow_the_others():
    """A client whose rows are of another unit is left out and named; the rates of 149 others stay as they are."""

    def model(federation):
        mu = pyro.param("mu", torch.tensor(0.0))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(a * obs["x"], 1.0), obs=obs.get("y"))

    rows = {f"client {i}": {"x": [1.0, 1.0], "y": [1.0, 2.0]} for i in range(149)}
    rows["strange"] = {"x": [100.0, 120.0], "y": [1.0, 2.0]}
    data = bf.Federation.from_arrays(rows)
    with pytest.warns(UserWarning, match="did not count: 'strange'") as found:
        posterior = bf.fit(model, data, bf.FedAvg(), rounds=30)
    assert not any("halved" in str(warning.message) for warning in found)
    assert posterior.params["mu"] == pytest.approx(1.5, abs=0.01)


@pytest.mark.parametrize("day", [1e-3, 365.25])
@pytest.mark.parametrize(
    "name",
    [
        "FedAvg",
        "FedProx",
        "FedNova",
        "Scaffold",
        "FedCurv",
        "FedPer",
        "FedRep",
        "FedBABU",
        "Ditto",
        "PerFedAvg",
        "PFedMe",
        "PFedVEM",
        "PFedMAP",
    ],
)
def test_steps_follow_the_unit_of_a_field(name, day, float64):
    """Ages in other units, the priors alike: the same fit, in those units."""
    found = []
    for unit in (1.0, day):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = bf.fit(partial(growth, day=unit), curves(unit), METHODS[name](), rounds=8)
        draws = posterior.sample(1)
        draws |= {n: draws[n] / unit for n in ("slope", "sd_slope", "b")}
        found.append(draws)
    rtol = 1e-3 if name == "PFedVEM" else 1e-4  # the units of priors are found by L-BFGS
    for variable, value in found[0].items():
        torch.testing.assert_close(found[1][variable], value, rtol=rtol, atol=1e-6)


def test_fed_avg_arrives_on_growth_curves():
    """From a level of 250 and a noise of 20, both far off, to the means of the curves' own least-squares fits."""
    with pytest.warns(UserWarning, match="uphill"):
        posterior = bf.fit(growth, curves(), bf.FedAvg(), rounds=150)
    data = curves()
    age, weight = (data[field].reshape(ANIMALS, 5) for field in ("age", "weight"))
    slope = ((age - 22) * weight).sum(1) / ((age - 22) ** 2).sum(1)
    level = weight.mean(1) - 22 * slope
    assert posterior.params["level.loc"] == pytest.approx(float(level.mean()), abs=1.5)
    assert posterior.params["slope.loc"] == pytest.approx(float(slope.mean()), abs=0.1)
