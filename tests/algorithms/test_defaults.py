"""Algorithms as they come, on a network as it comes."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.algorithms import METHODS

WELL = 0.93
"""Of 160 test rows; FedAvg reaches .97, and a binomial standard error at .95 is .017."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedABML", "PFedVEM", "PFedBayes", "PFedMe", "PFedMAP", "FOLA"])
def test_defaults_learn_digits(name):
    torch.manual_seed(0)
    train, test = datasets.digits(clients=8)
    algorithm = METHODS[name]()
    model = models.Network(models.mlp(64, 32, 10))
    posterior = bf.fit(
        model,
        train,
        algorithm,
        rounds=20,
        batch_size=10,
        progress=False,
        execution=bf.Execution(compile=False),
    )
    right = posterior.probabilities(test, 50)["y"].argmax(1) == test["y"]
    assert right.float().mean() >= WELL


def coefficients(size):
    """Regression with so many coefficients."""

    def model(federation):
        beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([size]).to_event(1))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(a + beta.sum(-1), 1.0), obs=obs.get("y"))

    return model, bf.Federation.from_arrays({"a": {"y": [1.0]}, "b": {"y": [0.5, 2.0]}})


@pytest.mark.parametrize("algorithm", [bf.SFVI(), bf.SFVIAvg()], ids=["SFVI", "SFVIAvg"])
def test_mean_field_is_never_taken_in_silence(algorithm):
    """Up to 100 global dimensions the default is full rank; above, who has chosen nothing is told."""
    program = algorithm.program(*coefficients(100))
    assert (program.guide.family, program.guide.conditioned) == (bf.FullRank(), False)
    assert algorithm.program(*coefficients(50)).guide.conditioned
    with pytest.warns(UserWarning, match="the 101 global dimensions .* too small.*FullRank"):
        assert algorithm.program(*coefficients(101)).guide.family == bf.MeanField()
    for family in (bf.FullRank(), bf.MeanField()):  # warnings are errors
        chosen = algorithm.replace(globals=family)
        assert chosen.program(*coefficients(101)).guide.family == family
