"""The check of algorithms passes for every method and for the worked examples, and names what is wrong with broken parts."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import bayesfed as bf
from bayesfed import models
from bayesfed.algorithms import METHODS, Algorithm
from bayesfed.rules import Mean, mean_of
from bayesfed.steps import Descent
from bayesfed.testing import check_algorithm
from docs import own_parts

SMALL = {
    "local_steps": 2,
    "local_epochs": 1,
    "head_epochs": 1,
    "finetune_steps": 1,
    "inner_steps": 1,
    "outer_steps": 2,
    "particles": 2,
    "draws": 2,
}


def federation(clients=4):
    generator = torch.Generator().manual_seed(0)

    def client(n):
        x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
        return {"x": x, "y": (x.sum(1) > 0).double()}

    return bf.Federation.from_arrays({f"client {n}": client(n) for n in range(4, 4 + clients)})


def network(**settings):
    torch.manual_seed(0)
    return models.Network(models.mlp(3, 4, 2), **settings)


def modulated():
    torch.manual_seed(0)
    return models.Modulated(models.mlp(3, 4, 2), models.mlp(3, 2), context=3)


MODELS: dict[str, Callable[[], Any]] = {
    "CAFeMe": modulated,
    **dict.fromkeys(("FedPer", "FedRep", "FedBABU"), lambda: network(local=["2."], scale=0.5)),
    **dict.fromkeys(("PACPFL", "PFedGP"), lambda: network(scale=0.3, hyper_scale=0.4)),
}


def small(name):
    method = METHODS[name]
    given = SMALL | ({"local_steps": 5, "draws": 8} if name == "PVI" else {})
    return method(**{key: value for key, value in given.items() if key in method.settings})


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.name == n])
def test_every_method_passes(name, float64):
    model = MODELS.get(name, lambda: models.hierarchical_logistic)()
    check_algorithm(small(name), model, federation())


@pytest.mark.parametrize("make", [lambda: own_parts.adam, own_parts.with_momentum])
def test_the_worked_examples_pass(make, float64):
    check_algorithm(make(), models.hierarchical_logistic, federation())
