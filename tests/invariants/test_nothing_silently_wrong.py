"""Invariant 5: bad input is a clear error that names the client, field or site and says what to do."""

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal

import bayesfed as bf
from bayesfed import datasets, models


def federation(**changes):
    clients = {
        "north": {"x": [1.0, 2.0, 3.0], "y": [1.0, 2.5, 2.0]},
        "south": {"x": [0.5, 1.5], "y": [0.0, 1.0]},
    }
    for name, fields in changes.items():
        clients[name] = clients.get(name, {}) | fields
    return bf.Federation.from_arrays(clients)


def good(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(alpha, 1.0), obs=obs.get("y"))


def separate(federation):
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(alpha, 1.0), obs=obs.get("y"))


def fit(model, data=None, algorithm=None, **kwargs):
    return bf.fit(model, data or federation(), algorithm, **{"rounds": 2, **kwargs})


# -- models ------------------------------------------------------------------------------------------


def test_no_clients_plate():
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu, 1.0))

    with pytest.raises(ValueError, match="no clients plate: open `with federation.clients"):
        fit(model)


def test_observed_site_outside_the_plate():
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("total", dist.Normal(mu, 1.0), obs=torch.tensor(1.0))
        good_part(federation, mu)

    def good_part(federation, mu):
        with federation.clients():
            pyro.sample("alpha", dist.Normal(mu, 1.0))

    with pytest.raises(ValueError, match="observed site 'total' lies outside the clients plate"):
        fit(model)


def test_global_site_inside_by_mistake():
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            pyro.sample("mu", dist.Normal(mu, 1.0))

    with pytest.raises(
        ValueError, match="site 'mu' is sampled twice, outside it and inside the clients"
    ):
        fit(model)


def test_two_latent_sites_of_a_row():
    def model(federation):
        with federation.clients(), federation.observations() as obs:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            v = pyro.sample("v", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z * v, 1.0), obs=obs["y"])

    with pytest.raises(ValueError, match="sites 'z' and 'v' are continuous, and of a row: one"):
        fit(model)


def test_discrete_latent_site():
    def model(federation):
        z = pyro.sample("z", dist.Bernoulli(0.5))
        with federation.clients(), federation.observations() as obs:
            pyro.sample("y", dist.Normal(z, 1.0), obs=obs["y"])

    with pytest.raises(ValueError, match="latent site 'z' is discrete, and lies outside"):
        fit(model)


def test_unknown_field():
    def model(federation):
        with federation.clients(), federation.observations() as obs:
            pyro.sample("y", dist.Normal(obs["z"], 1.0), obs=obs["y"])

    with pytest.raises(KeyError, match="unknown field 'z': the federation has x, y"):
        fit(model)


def test_nothing_observed():
    def model(federation):
        with federation.clients():
            pyro.sample("alpha", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="observes nothing"):
        fit(model)


def test_a_value_outside_the_support_names_client_and_row():
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Poisson(alpha.exp()), obs=obs["y"])

    data = federation(north={"y": [1.0, 2.0, 3.0]}, south={"y": [1.0, -1.0]})
    with pytest.raises(
        ValueError, match=r"client 'south', row 1: observed site 'y' is -1.0.* outside"
    ):
        fit(model, data)


# -- guides ------------------------------------------------------------------------------------------


def test_guide_that_misses_a_site():
    def guide(federation):
        pyro.sample("mu", dist.Normal(pyro.param("loc", torch.tensor(0.0)), 1.0))

    with pytest.raises(ValueError, match="guide misses site 'alpha' of the model; it has mu"):
        fit(good, algorithm=bf.SFVI(guide=guide))


def test_guide_with_a_site_on_the_wrong_side():
    def guide(federation):
        pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("alpha", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="'alpha' is local in the model but not in the guide"):
        fit(good, algorithm=bf.SFVI(guide=guide))


def test_guide_with_a_site_too_many():
    def guide(federation):
        pyro.sample("mu", dist.Normal(0.0, 1.0))
        pyro.sample("nu", dist.Normal(0.0, 1.0))
        with federation.clients():
            pyro.sample("alpha", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="guide samples 'nu', which the model does not"):
        fit(good, algorithm=bf.SFVI(guide=guide))


def test_local_parameter_without_a_row_per_client():
    def guide(federation):
        pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            pyro.sample("alpha", dist.Normal(pyro.param("a", torch.tensor(0.0)), 1.0))

    with pytest.raises(ValueError, match="local parameter 'a' has shape .* a row per client"):
        fit(good, algorithm=bf.SFVI(guide=guide))


@pytest.mark.parametrize("inside", [True, False])
def test_local_variables_of_a_guide_without_a_row_per_client(inside):
    """As guides of the pooled data are written, with the clients along the last dimension."""

    def guide(federation):
        pyro.sample("mu", dist.Normal(0.0, 1.0))
        loc = None if inside else pyro.param("loc", torch.zeros(2))
        with federation.clients():
            loc = pyro.param("loc", torch.zeros(2)) if inside else loc
            pyro.sample("alpha", dist.Normal(loc, 1.0))

    with pytest.raises(
        ValueError, match="local variable 'alpha' .* one row per client.*torch.zeros"
    ):
        fit(good, algorithm=bf.SFVI(guide=guide))


@pytest.mark.parametrize("auto", [AutoNormal, AutoDelta, AutoMultivariateNormal])
def test_autoguides_of_pyro_are_refused_with_their_equivalents(auto):
    with pytest.raises(ValueError, match=f"Pyro's {auto.__name__}.*Leave it out.*MeanField"):
        fit(good, algorithm=bf.SFVI(guide=auto(good)))


def test_guide_that_cannot_be_reparameterised():
    def guide(federation):
        pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            pyro.sample("alpha", dist.Gamma(torch.ones(2, 1), 1.0))

    with pytest.raises(NotImplementedError, match="site 'alpha' of the guide.*transformed Normal"):
        fit(good, algorithm=bf.SFVI(guide=guide))


@pytest.mark.parametrize(
    "algorithm",
    [bf.FedAvg, bf.FedNova, bf.Scaffold, bf.PerFedAvg, bf.PFedMe, bf.Ditto, bf.FedCurv, bf.FedABML],
)
def test_no_global_variables(algorithm):
    with pytest.raises(
        ValueError, match=f"{algorithm.__name__} learns what clients share.*Use Local"
    ):
        fit(separate, algorithm=algorithm())


@pytest.mark.parametrize("algorithm", [bf.Local, bf.PFedVEM, bf.SFVI])
def test_algorithms_that_need_no_global_variables(algorithm):
    assert fit(separate, algorithm=algorithm()).local_params


def test_algorithms_refuse_guides_that_they_cannot_average():
    with pytest.raises(
        ValueError, match=r"global_guide is Flow.*must be MeanField\(\) or FullRank\(\)"
    ):
        fit(good, algorithm=bf.SFVIAvg(global_guide=bf.Flow()))


# -- data --------------------------------------------------------------------------------------------


def test_empty_client():
    with pytest.raises(ValueError, match="client 'west' is empty"):
        federation(west={"x": [], "y": []})


def test_nan_names_client_and_row_and_can_be_dropped():
    frame = pd.DataFrame({"firm": list("aabb"), "y": [1.0, 2.0, 3.0, np.nan]})
    with pytest.raises(ValueError, match="client 'b', row 1: field 'y' is NaN.*missing='drop'"):
        bf.Federation.from_frame(frame, client="firm")
    with pytest.warns(UserWarning, match="leaves out 1 of 4 rows, of 1 client "):
        kept = bf.Federation.from_frame(frame, client="firm", missing="drop")
    assert kept.lengths.tolist() == [2, 1]
    with pytest.raises(ValueError, match="choose 'fail', 'drop' or 'keep'"):
        bf.Federation.from_frame(frame, client="firm", missing="ignore")


def test_a_client_whose_rows_are_all_dropped_is_empty():
    frame = pd.DataFrame({"firm": list("aab"), "y": [1.0, 2.0, np.nan]})
    with (
        pytest.warns(UserWarning, match="leaves out 1 of 3 rows"),
        pytest.raises(ValueError, match="client 'b' is empty"),
    ):
        bf.Federation.from_frame(frame, client="firm", missing="drop")


@pytest.mark.parametrize(
    "column",
    [
        pd.Series(["low", "high", "low", "high"]),
        pd.Series(["low", "high", "low", "high"], dtype="category"),
        pd.Series([1, 2, 1, 2], dtype="category"),
        pd.Series(pd.to_datetime(["2026-01-01"] * 4)),
    ],
)
def test_categorical_field(column):
    frame = pd.DataFrame({"firm": list("aabb"), "risk": column})
    with pytest.raises(TypeError, match=r"field 'risk' .*(convert it to numbers|encode it)"):
        bf.Federation.from_frame(frame, client="firm")


def test_missing_client_name():
    frame = pd.DataFrame({"firm": ["a", None, "b"], "y": [1.0, 2.0, 3.0]})
    with pytest.raises(ValueError, match="row 1 has no client: column 'firm' is missing"):
        bf.Federation.from_frame(frame, client="firm")
    with pytest.raises(TypeError, match="clients need names"):
        bf.Federation.from_arrays([{"y": [1.0]}])


def test_unknown_columns():
    frame = pd.DataFrame({"firm": ["a"], "y": [1.0]})
    with pytest.raises(KeyError, match="no column 'county'; it has firm, y"):
        bf.Federation.from_frame(frame, client="county")
    with pytest.raises(KeyError, match="no column 'x'"):
        bf.Federation.from_frame(frame, client="firm", fields=["x"])


def test_fields_that_clients_do_not_share():
    with pytest.raises(KeyError, match="client 'west' has no field 'y'"):
        federation(west={"x": [1.0]})


def test_field_of_a_wrong_length():
    with pytest.raises(
        ValueError, match="client 'west': field 'y' has length 1, field 'x' has length 2"
    ):
        federation(west={"x": [1.0, 2.0], "y": [1.0]})


def test_unknown_client():
    with pytest.raises(KeyError, match="no client 'east' in this federation: north, south"):
        federation().select(["east"])


# -- schedules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, 3, -1, 0.0, 1.5])
def test_clients_per_round_out_of_range(wrong):
    with pytest.raises(ValueError, match=f"clients_per_round is {wrong}"):
        fit(good, clients_per_round=wrong)


@pytest.mark.parametrize("wrong", [True, "all", None])
def test_clients_per_round_of_a_wrong_type(wrong):
    with pytest.raises(ValueError, match="clients_per_round is"):
        fit(good, clients_per_round=wrong)


@pytest.mark.parametrize("wrong", [0, -1])
@pytest.mark.parametrize("what", ["rounds", "batch_size"])
def test_counts(what, wrong):
    with pytest.raises(ValueError, match=f"^{what} is {wrong}; it must be at least 1$"):
        fit(good, **{what: wrong})


@pytest.mark.parametrize("what", ["rounds", "batch_size", "seed"])
def test_whole_numbers(what):
    with pytest.raises(ValueError, match=f"^{what} is 2.5; it must be a whole number$"):
        fit(good, **{what: 2.5})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_size": 0}, "chunk_size is 0; it must be at least 1 or 'auto'"),
        ({"chunk_size": "some"}, "chunk_size is \"some\"; it must be a whole number or 'auto'"),
        ({"compile": "always"}, "compile is \"always\"; it must be 'auto' or true or false"),
        ({"precision": "half"}, "precision is \"half\"; it must be 'full', 'tf32' or 'bf16'"),
        ({"device": 3}, "device is 3; it must be text or a device"),
    ],
)
def test_executions_that_are_refused(settings, message):
    with pytest.raises(ValueError) as caught:
        bf.Execution(**settings)
    assert str(caught.value) == message


@pytest.mark.filterwarnings("ignore:field 'y' is about 2e")  # and are said so at the start
def test_non_finite_elbo_names_client_and_round():
    data = federation(south={"y": [1.0, 1e30]})
    with pytest.raises(
        FloatingPointError, match=r"round 1: the .* of client 'south' is not finite"
    ):
        fit(good, data)


def test_prediction_for_a_client_that_took_no_part():
    schools = datasets.eight_schools()
    others, school = schools.hold_out(["A"])
    posterior = bf.fit(models.eight_schools, others, rounds=2)
    with pytest.raises(
        KeyError, match="client 'A' took no part in the fit: use posterior.personalize"
    ):
        posterior.predict(school)
