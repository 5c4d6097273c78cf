"""The structure that steps on point estimates need in a model."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.algorithms import METHODS


def one_for_all(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with federation.clients(), federation.observations() as obs:
        pyro.sample("y", dist.Normal(mu, obs["sigma"]), obs=obs.get("y"))


NAMES = ["FedABML", "PFedBayes", "PerFedAvg", "MAML", "PFedMe", "Ditto", "Local", "FedPer"]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_whose_clients_have_nothing_of_their_own_is_refused(name):
    algorithm = METHODS[name]()
    with pytest.raises(
        ValueError,
        match="needs variables of a client's own, and the model samples none: use FedAvg",
    ):
        bf.start(one_for_all, datasets.eight_schools(), algorithm, rounds=1)


def test_a_mode_of_many_variables_is_made_for_a_new_client():
    """FOLA on a model whose local prior knows no draws: its location has no dimension for them."""
    train, test = datasets.digits(clients=4)
    torch.manual_seed(0)
    model = models.Modulated(models.mlp(64, 8, 10), models.mlp(64, 4), context=4)
    how = {"batch_size": 10, "progress": False, "execution": bf.Execution(compile=False)}
    posterior = bf.fit(model, train, bf.FOLA(), rounds=3, **how)
    assert posterior.sample(2)["weights"].isfinite().all()
    assert (
        posterior.personalize(train.select(train.names[:2]), steps=1)
        .probabilities(test.select(train.names[:2]))["y"]
        .isfinite()
        .all()
    )


@pytest.mark.parametrize(
    "name", ["FedAvg", "Ditto", "PerFedAvg", "PFedMe", "FedPer", "FedCurv", "PFedVEM", "SFVI"]
)
def test_a_parameter_of_the_clients_own_is_theirs_under_every_algorithm(name):
    """A spread ρ_i: points leave it where it starts, at 0.3, and hand it over; PFedVEM and SFVI fit it."""
    train, test = datasets.digits(clients=3)
    model = models.Network(models.mlp(64, 3, 10), local=["2."], spread="client")
    algorithm = METHODS[name]()
    how = {"progress": False, "execution": bf.Execution(compile=False)}
    posterior = bf.fit(model, train, algorithm, rounds=2, **how)
    start = posterior.program.init_locals(train.batch())["prior.rho"]
    fitted = name in ("PFedVEM", "SFVI")
    assert torch.equal(posterior.local_params["prior.rho"], start) != fitted
    assert posterior.probabilities(test, 2)["y"].isfinite().all()
    new = posterior.personalize(train.select(train.names[:1]), steps=1)
    assert new.probabilities(test.select(train.names[:1]), 2)["y"].isfinite().all()
