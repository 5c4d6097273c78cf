"""Outcomes that are missing count for nothing, and can be predicted; covariates that are missing are refused."""

import warnings

import arviz as az
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf


def intercepts(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a + obs["x"], 1.0), obs=obs.get("y"))


def indexed(federation):
    """The same, which runs under vmap."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(2), torch.tensor([5.0, 0.5])))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu[0], mu[1].exp()))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a + obs["x"], 1.0), obs=obs.get("y"))


def counts(federation):
    """Outcomes that are no reals."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            y = obs.get("y")
            y = None if y is None else y.abs().round()
            pyro.sample("y", dist.Poisson((a + 0.1 * obs["x"]).exp()), obs=y)


def shares(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            y = obs.get("y")
            y = None if y is None else y.sigmoid()
            pyro.sample("y", dist.Beta((a + obs["x"]).exp(), 1.0), obs=y)


def rows():
    generator = torch.Generator().manual_seed(0)
    return {
        f"c{i}": {
            "x": torch.randn(n, generator=generator),
            "y": i + torch.randn(n, generator=generator),
        }
        for i, n in enumerate([6, 9, 4, 7])
    }


def with_gaps(every=3):
    found = rows()
    for value in found.values():
        value["y"][::every] = torch.nan
    return found


ALGORITHMS = [bf.SFVI(), bf.FedABML(), bf.FOLA(), bf.PACPFL()]
"""Those that weight what clients send by n_i count all rows, outcomes or not: FedAvg."""


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("model", "algorithm"),
    [(intercepts, a) for a in ALGORITHMS] + [(m, bf.FOLA()) for m in (indexed, counts, shares)],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_the_fit_is_that_without_these_rows(model, algorithm):
    kept = bf.Federation.from_arrays(with_gaps(), missing="keep")
    with pytest.warns(UserWarning, match="leaves out 10 of 26 rows"):
        dropped = bf.Federation.from_arrays(with_gaps(), missing="drop")
    draws = [bf.fit(model, data, algorithm, rounds=2).sample(20) for data in (kept, dropped)]
    for name, value in draws[
        0
    ].items():  # Adam's steps make much of round-off where slopes are nearly 0
        torch.testing.assert_close(draws[1][name], value, rtol=1e-3, atol=1e-3)


def test_missing_outcomes_are_predicted_and_arviz_has_the_rest():
    data = bf.Federation.from_arrays(with_gaps(), missing="keep")
    posterior = bf.fit(intercepts, data, rounds=30)
    predicted = posterior.predict(num_samples=2000)["y"]
    assert predicted.shape == (2000, 26)
    expected = posterior.sample(2000)["a"].mean(0)[data.owner] + data["x"]
    torch.testing.assert_close(predicted.mean(0), expected, rtol=0, atol=5 * 1.5 / 2000**0.5)
    assert posterior.log_likelihood(num_samples=3)["y"].isnan()[0].equal(data["y"].isnan())
    idata, gone = posterior.to_arviz(400), data["y"].isnan()
    there = ("chain", "draw", "y_observed")
    assert idata.observed_data["y"].dims == there[2:]
    for group in ("posterior_predictive", "prior_predictive", "log_likelihood"):
        assert idata[group]["y"].dims == there
        assert idata[group]["y_observed"].values.tolist() == (~gone).nonzero()[:, 0].tolist()
    assert torch.equal(torch.tensor(idata.observed_data["y"].values), data["y"][~gone])
    absent = idata.predictions["y"]
    assert absent["y_missing"].values.tolist() == gone.nonzero()[:, 0].tolist()
    owners = [data.names[i] for i in data.owner[gone]]
    assert absent["y_missing_client"].values.tolist() == owners
    predicted = posterior.predict(num_samples=400)["y"]
    assert torch.equal(torch.tensor(absent.values[0]), predicted[:, gone])
    assert list(idata.constant_data.data_vars) == ["x"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert az.loo(idata).n_data_points == 16


def test_a_covariate_that_is_missing_is_refused():
    found = rows()
    found["c1"]["x"][4] = torch.nan
    data = bf.Federation.from_arrays(found, missing="keep")
    with pytest.raises(
        ValueError, match=r"client 'c1', row 4: x is missing, and site 'y' depends on it \(1 such"
    ):
        bf.fit(intercepts, data, rounds=1)
    with pytest.raises(
        ValueError, match="NaN. Correct the data, .*missing='keep' if the field is an outcome"
    ):
        bf.Federation.from_arrays(found)


@pytest.mark.parametrize(
    ("model", "algorithm"),
    [(intercepts, a) for a in (bf.SFVI(), bf.PVI(), bf.PACPFL())] + [(indexed, bf.FOLA())],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_a_new_client_without_outcomes_has_the_prior(model, algorithm):
    """q(w | θ) = p(w | θ) where there is nothing to learn from."""
    posterior = bf.fit(model, bf.Federation.from_arrays(rows()), algorithm, rounds=10)
    new = bf.Federation.from_arrays({"z": {"x": torch.tensor([0.0, 1.0])}})
    draws = posterior.personalize(new).sample(8000)
    mu = draws["mu"] if model is intercepts else draws["mu"][:, 0]
    scale = draws["tau"] if model is intercepts else draws["mu"][:, 1].exp()
    standard = (draws["a"][:, 0] - mu) / scale
    assert abs(float(standard.mean())) < 5 / 8000**0.5
    assert abs(float(standard.std()) - 1) < 0.06
    assert posterior.personalize(new).predict(num_samples=5)["y"].shape == (5, 2)
