"""Errors of a model name its line and the problem."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf


def program(mean):
    def model(federation):
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(mean(a, b, obs), 1.0), obs=obs.get("y"))

    return model


def writes(a, b, obs):
    both = torch.zeros(2)
    first = both[:1]
    first[0] = b[1]
    return a + both[0]


def asks(a, b, obs):
    return a if b[0] > 0 else -a


def draws(a, b, obs):
    return a + torch.randn(())


MISTAKES = [
    (writes, r"line \d+, `first\[0\] = b\[1\]`: it writes into a view of a tensor. .*torch.stack"),
    (asks, r"`return a if b\[0\] > 0 else -a`: it asks for the value of a tensor .*torch.where"),
    (draws, "site 'y' differs from one run to the next"),
    (lambda a, b, obs: a + b * obs["y"], r"`pyro.sample\(\"y\".*: shapes do not fit"),
    (lambda a, b, obs: a + obs["x"].mT @ b, "obs.*mT @ b.*: shapes do not fit"),
    (lambda a, b, obs: a + obs["x"] @ a, "one number where a vector is wanted"),
    (lambda a, b, obs: a + b[obs["kind"]], r"an index must be whole numbers: .*\.long\(\)"),
    (lambda a, b, obs: a + b[obs["kind"].long() + 1], "categories count from 0"),
    (lambda a, b, obs: a + b.nothing, "'Tensor' object has no attribute 'nothing'"),
]


@pytest.mark.parametrize("algorithm", [bf.SFVI(), bf.FedAvg()], ids=["SFVI", "FedAvg"])
@pytest.mark.parametrize(("mean", "message"), MISTAKES)
def test_the_line_and_what_to_write_instead(mean, message, algorithm):
    rows = {
        "x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
        "kind": [0.0, 1.0, 1.0],
        "y": [1.0, 2.0, 3.0],
    }
    data = bf.Federation.from_arrays({"north": rows, "south": rows})
    with pytest.raises(ValueError, match=message):
        bf.start(program(mean), data, algorithm, rounds=1)


def test_a_flat_prior_is_refused_with_what_to_write():
    def flat(federation):
        mu = pyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
        with federation.clients(), federation.observations() as obs:
            pyro.sample("y", dist.Normal(mu, 1.0), obs=obs.get("y"))

    federation = bf.Federation.from_arrays({"a": {"y": [1.0]}, "b": {"y": [2.0]}})
    with pytest.raises(ValueError, match=r"the prior is flat.*dist.Normal\(0.0, 100.0\)"):
        bf.fit(flat, federation, rounds=1, progress=False)


def test_a_layer_without_a_rule_for_vmap_is_refused_with_another():
    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = torch.nn.LSTM(2, 3, batch_first=True), torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.last(self.layer(x)[0][..., -1, :])

    rows = {"x": torch.ones(4, 5, 2), "y": [0.0, 1.0, 0.0, 1.0]}
    federation = bf.Federation.from_arrays({"a": rows, "b": rows})
    with pytest.raises(ValueError, match=r"vmap lacks this operation.*nn\.GRUCell"):
        bf.fit(bf.models.Network(Recurrent()), federation, bf.FedAvg(), rounds=1, progress=False)


@pytest.mark.parametrize("local", [True, False])
def test_a_distribution_that_cannot_be_drawn_in_batches_is_refused_with_the_line(local):
    """Pyro's TruncatedPolyaGamma adds a list to a torch.Size."""

    def model(federation):
        w = None if local else pyro.sample("w", dist.TruncatedPolyaGamma(torch.tensor(0.0)))
        with federation.clients():
            w = pyro.sample("w", dist.TruncatedPolyaGamma(torch.tensor(0.0))) if local else w
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(w, 1.0), obs=obs.get("y"))

    federation = bf.Federation.from_arrays({"a": {"y": [1.0]}, "b": {"y": [2.0]}})
    with pytest.raises(ValueError, match=r"line \d+, .*PolyaGamma.*has no sampler.*Use another"):
        bf.fit(model, federation, rounds=1, progress=False)
