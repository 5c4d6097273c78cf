"""The server's part of SFVI: the terms that it keeps of its clients, and what these learn while it takes long steps."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed.fitting import start, step
from bayesfed.guides.automatic import LAPLACE
from bayesfed.rules import NaturalGradient
from bayesfed.rules.natural_gradient import FAR, QUADRATIC


def test_a_stale_update_has_as_much_left_as_if_it_had_been_in_time():
    of_two = {name: torch.full((3,), 4.0) for name in QUADRATIC}
    server = {"quadratic": {"level": torch.tensor(3.0)}}
    total = {
        "quadratic": of_two,
        "forgetting": {"level": torch.tensor(2.0)},
        "gradients": {"mu": torch.ones(2)},
        "mean gradient": {"rate": torch.ones(1)},
    }
    found = NaturalGradient().stale(server, total, 2)
    assert found.keys() == {"quadratic", "mean gradient"}
    assert found["quadratic"].keys() == of_two.keys()
    for name, value in of_two.items():
        left = value * torch.tensor(-2.0).exp()
        torch.testing.assert_close(found["quadratic"][name], left)
    assert torch.equal(found["mean gradient"]["rate"], total["mean gradient"]["rate"])


def shifted(size):
    """Numbers of each client around those of all, which are far from the middle of their prior."""

    def model(federation):
        mean = pyro.sample("mean", dist.Normal(torch.zeros(size), 10.0).to_event(1))
        with federation.clients():
            own = pyro.sample("own", dist.Normal(mean, 1.0).to_event(1))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(own, 1.0).to_event(1), obs=obs.get("y"))

    return model


@pytest.mark.parametrize(
    ("size", "learns"), [(3, False), (LAPLACE[1] + 1, True)], ids=["closed form", "none"]
)
def test_clients_without_a_closed_form_learn_while_the_server_takes_long_steps(size, learns):
    """Those that have one need not: it moves with the globals."""
    generator = np.random.default_rng(0)
    clients = {f"c{i}": {"y": 20 + generator.normal(size=(4, size))} for i in range(3)}
    algorithm = bf.SFVI(corrected=False, global_guide=bf.MeanField())
    run = start(shifted(size), bf.Federation.from_arrays(clients), algorithm)
    for _ in range(2):
        step(run)
    assert float(run.server["before"]["far"]) > FAR
    states = run.clients.tensors
    name = "own.loc" if learns else "local.loc"
    moved = states["params"][name] - (0.0 if learns else states["origin"][name])
    assert bool(moved.any()) == learns
