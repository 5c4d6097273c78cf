"""Common calls of ArviZ on several kinds of fits, under ArviZ 0.2x and 1.x."""

from __future__ import annotations

import arviz as az
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr

import bayesfed as bf
from bayesfed import models
from bayesfed.output.arviz_compat import dataset

OLD = az.__version__.startswith("0.")

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(Estimated shape parameter|Pareto k is above)"
    ),  # few rows, few draws
    pytest.mark.filterwarnings("ignore:For one or more samples the posterior variance"),
    pytest.mark.filterwarnings("ignore:.*rcParams"),  # more variables than subplots
    pytest.mark.filterwarnings("ignore:Your data appears to have a single value"),  # points
    pytest.mark.filterwarnings("ignore:Variables y in"),  # ArviZ 1.x has a plot for the binary
    pytest.mark.filterwarnings("ignore:invalid value encountered in scalar divide"),  # points
    pytest.mark.filterwarnings("ignore:Passing a dict or None:DeprecationWarning"),  # 0.2x
    pytest.mark.filterwarnings("ignore:The inplace keyword"),  # 0.2x to pandas
    pytest.mark.filterwarnings("ignore:The copy keyword is deprecated"),  # 0.2x to pandas
]


def two_outcomes(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a + obs["x"], scale), obs=obs.get("y"))
            pyro.sample("visits", dist.Poisson((0.3 * a).exp()), obs=obs.get("visits"))


def one_outcome(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a + obs["x"], 1.0), obs=obs.get("y"))


def rows(outcome, gaps=False):
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, n in {"north": 8, "Øst": 11, "south": 6}.items():
        x = torch.randn(n, generator=generator)
        y = x + torch.randn(n, generator=generator)
        if gaps:
            y[::3] = torch.nan
        found[name] = {"x": x, "y": (y > 0).long() if outcome == "binary" else y}
        if outcome == "two":
            found[name]["visits"] = torch.poisson(torch.ones(n), generator=generator)
        if outcome == "binary":
            found[name]["x"] = x[:, None]
    return bf.Federation.from_arrays(found, missing="keep" if gaps else "fail")


def network():
    return models.Network(models.mlp(1, 2))


FITS = {
    "one outcome": lambda: bf.fit(one_outcome, rows("one"), rounds=10),
    "two outcomes": lambda: bf.fit(two_outcomes, rows("two"), rounds=10),
    "missing": lambda: bf.fit(one_outcome, rows("one", gaps=True), rounds=10),
    "FOLA": lambda: bf.fit(one_outcome, rows("one"), bf.FOLA(), rounds=2),
    "particles": lambda: bf.fit(one_outcome, rows("one"), bf.PACPFL(particles=5), rounds=2),
    "Gaussian process": lambda: bf.fit(
        models.GaussianProcess(), rows("one"), bf.PACPFL(), rounds=2
    ),
    "FedABML": lambda: bf.fit(network(), rows("binary"), bf.FedABML(), rounds=2),
    "FedAvg": lambda: bf.fit(network(), rows("binary"), bf.FedAvg(), rounds=2),
}
FINITE = {"particles", "Gaussian process", "FedAvg"}
"""Fits with repeated draws: no Pareto distribution can be fitted to the tail, of which ArviZ 1.x warns."""


@pytest.fixture(scope="module", params=FITS)
def fit(request):
    matplotlib.use("Agg")
    idata = FITS[request.param]().to_arviz(200)
    yield request.param, idata
    plt.close("all")


def only(name):
    """The argument that ArviZ needs if there are several likelihoods."""
    return {"var_name": "y"} if name == "two outcomes" else {}


def some(idata):
    """A few of the variables, since a picture has at most 40 parts."""
    sizes = {name: value[0, 0].size for name, value in idata.posterior.data_vars.items()}
    first, *others = sorted(sizes, key=sizes.get)
    return [first] if sizes[first] > 1 else [first, *others[:1]]


def test_the_summary_does_not_flatter(fit):
    _, idata = fit
    table = az.summary(idata)
    assert not {"1", "1.0", "1.00"} & set(table["r_hat"].astype(str))
    assert np.isfinite(table["mean"].astype(float)).all()


def test_leave_one_out(fit):
    name, idata = fit
    if name in FINITE and not OLD:
        pytest.skip("ArviZ 1.x: all tail values are the same")
    found = az.loo(idata, pointwise=True, **only(name))
    sizes = {"missing": 16, "Gaussian process": 3}
    assert found.n_data_points == sizes.get(name, 25)
    az.plot_khat(found)
    ranks = az.compare({"one": idata, "other": idata}, **only(name))
    assert set(ranks.index) == {"one", "other"}


def test_leave_one_out_corrected_for_q(fit):
    name, idata = fit
    if name in FINITE | {"FedABML"}:
        with pytest.raises(ValueError, match="no log_q"):
            bf.loo(idata)
        return
    found = bf.loo(idata, **only(name))
    az.plot_khat(found)
    assert set(az.compare({"one": found, "other": found}).index) == {"one", "other"}


@pytest.mark.skipif(not OLD, reason="ArviZ 1.x has none")
def test_waic(fit):
    name, idata = fit
    assert np.isfinite(az.waic(idata, **only(name)).elpd_waic)


def test_one_of_several_likelihoods_is_chosen_by_name():
    idata = FITS["two outcomes"]().to_arviz(50)
    with pytest.raises((TypeError, ValueError), match="var_name"):
        az.loo(idata)
    with pytest.raises((TypeError, ValueError), match="var_name"):
        bf.loo(idata)


def test_posterior_predictive_checks(fit):
    name, idata = fit
    if OLD:
        az.plot_ppc(idata, num_pp_samples=5)
        az.plot_ppc(idata, num_pp_samples=5, group="prior")
        az.plot_bpv(idata)
    else:
        az.plot_ppc_dist(idata, num_samples=5)
        az.plot_ppc_dist(idata, num_samples=5, group="prior_predictive")
    rowwise = name != "Gaussian process" and not (name in FINITE and not OLD)
    if rowwise and name not in {"FedABML", "FedAvg"}:  # of continuous outcomes
        if OLD:
            az.plot_loo_pit(idata, y="y")
        else:
            az.plot_loo_pit(idata, var_names=["y"])


def test_plots_of_draws(fit):
    _, idata = fit
    az.plot_trace(idata, var_names=some(idata))
    az.plot_forest(idata)
    one = {"client": ["Øst"]} if "client" in idata.posterior.dims else {}
    az.plot_pair(idata, var_names=some(idata), coords=one)
    if OLD:
        az.plot_posterior(idata, var_names=some(idata))
        az.plot_dist_comparison(idata, var_names=some(idata))
    else:
        az.plot_dist(idata, var_names=some(idata))
        az.plot_prior_posterior(idata, var_names=some(idata))


def test_netcdf_files(fit, tmp_path):
    name, idata = fit
    idata.to_netcdf(tmp_path / "idata.nc", engine="h5netcdf")
    again = az.from_netcdf(tmp_path / "idata.nc")
    assert az.extract(again)["sample"].size == 200
    for group in ("posterior", "prior_predictive", "history"):
        for variable, value in idata[group].data_vars.items():
            np.testing.assert_array_equal(again[group][variable].values, value.values)
    if name == "two outcomes":
        assert float(again["params"]["scale"][0]) > 0


def test_two_fits_are_joined_as_chains(fit):
    _, idata = fit
    joined = (
        az.concat(idata, idata, dim="chain")
        if OLD
        else xr.concat([idata, idata], "chain", data_vars="minimal")
    )
    assert joined["posterior"].sizes["chain"] == joined["history"].sizes["chain"] == 2
    assert joined["observed_data"].equals(idata["observed_data"])


def test_a_table_has_a_row_per_draw(fit):
    _, idata = fit
    if not OLD:
        for group in {"posterior", "posterior_predictive"} & set(idata.children):
            table = az.dataset_to_dataframe(dataset(idata, group))
            numbers = idata[group].data_vars.values()
            assert table.shape == (200, sum(value[0, 0].size for value in numbers))
        return
    assert len(idata.to_dataframe()) == 200
    for group in ("posterior", "posterior_predictive"):
        if group in idata.groups():
            table, numbers = idata.to_dataframe(groups=group), idata[group].data_vars.values()
            assert table.shape == (200, 2 + sum(value[0, 0].size for value in numbers))


def test_names_with_slashes_are_written_and_read(tmp_path):
    def ratio(federation):
        mu = pyro.sample("I(visits / days)", dist.Normal(0.0, 2.0))
        with federation.clients():
            a = pyro.sample("ward/unit", dist.Normal(mu, 1.0).expand([2]).to_event(1))
            with federation.observations() as obs:
                pyro.sample("y/n", dist.Normal(a[..., 0], 1.0), obs=obs.get("y/n"))

    clients = {"a/b": {"y/n": [1.0, 2.0]}, "c": {"y/n": [0.5]}}
    idata = bf.fit(ratio, bf.Federation.from_arrays(clients), rounds=2).to_arviz(20)
    idata.to_netcdf(tmp_path / "idata.nc", engine="h5netcdf")
    again = az.from_netcdf(tmp_path / "idata.nc")
    assert set(again["posterior"].data_vars) == {"I(visits : days)", "ward:unit"}
    assert again["posterior"]["client"].values.tolist() == ["a/b", "c"]
    assert again["observed_data"]["y:n"].values.tolist() == [1.0, 2.0, 0.5]


def test_r_hat_compares_fits():
    """With one fit per chain, r_hat is large if the fits differ and 1 if they agree."""
    first, again = (
        dataset(bf.fit(one_outcome, rows("one"), seed=seed).to_arviz(400, seed=seed), "posterior")
        for seed in (0, 1)
    )
    agree = az.rhat(xr.concat([first, again], "chain"))["mu"]
    differ = az.rhat(xr.concat([first, again + 1.0], "chain"))["mu"]
    assert float(agree) < 1.03
    assert float(differ) > 1.2
