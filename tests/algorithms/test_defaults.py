"""Algorithms as they come, on a network as it comes."""

import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.algorithms import FAMILY

WELL = 0.93
"""Of 160 test rows; FedAvg reaches .97, and a binomial standard error at .95 is .017."""


@pytest.mark.parametrize("name", ["FedABML", "PFedVEM", "PFedBayes", "PFedMe", "PFedMAP", "FOLA"])
def test_defaults_learn_digits(name):
    torch.manual_seed(0)
    train, test = datasets.digits(clients=8)
    algorithm = FAMILY[name]() if name in FAMILY else getattr(bf, name)()
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
