"""Local parameters of stateless clients are computed when they are read, and only for the clients concerned."""

from __future__ import annotations

import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models


@pytest.fixture
def asked(monkeypatch):
    """The number of clients in each call of ``personalize``."""
    calls = []
    before = bf.Algorithm.personalize

    def counted(self, job, *args):
        calls.append(len(job))
        return before(self, job, *args)

    monkeypatch.setattr(bf.Algorithm, "personalize", counted)
    return calls


@pytest.fixture
def fitted(monkeypatch):
    monkeypatch.setattr("bayesfed.output.locals_of_run.LITTLE", 0)
    train, test = datasets.digits(clients=5)
    model = models.Network(models.mlp(64, 10))
    posterior = bf.fit(model, train, bf.FedAvg(personal_steps=3), rounds=2, batch_size=10)
    return posterior, test


def test_a_fit_computes_none(asked, fitted):
    posterior, _ = fitted
    assert "FedAvg" in repr(posterior)
    assert not asked


def test_one_clients_parameters_are_computed_alone(asked, fitted):
    posterior, test = fitted
    name = posterior.federation.names[2]
    one = posterior.select([name])
    assert not asked
    found = one.probabilities(test.select([name]), centre=True)["y"]
    assert asked == [1]
    everyone = posterior.probabilities(test, centre=True)["y"]
    assert asked == [1, 5]
    torch.testing.assert_close(found, everyone[test.owner == 2], rtol=1e-5, atol=1e-6)
    again = posterior.select([name]).probabilities(test.select([name]), centre=True)["y"]
    assert asked == [1, 5]
    torch.testing.assert_close(found, again, rtol=1e-5, atol=1e-6)


def test_new_clients_need_none_of_the_old(asked, fitted):
    posterior, test = fitted
    posterior.personalize(test, steps=1)
    assert asked == [5]


def test_a_file_holds_them(asked, fitted, tmp_path):
    posterior, _ = fitted
    posterior.save(tmp_path / "posterior.safetensors")
    assert asked == [5]
    model = posterior.program.model
    read = bf.Posterior.load(tmp_path / "posterior.safetensors", model, posterior.federation)
    assert read.local_params.keys() == posterior.local_params.keys()
    for name, value in read.local_params.items():
        assert torch.equal(value, posterior.local_params[name])


def test_small_ones_are_computed_at_the_end_of_the_fit(asked):
    """Warnings about them are then given when the fit ends."""
    train, _ = datasets.digits(clients=5)
    bf.fit(models.Network(models.mlp(64, 10)), train, bf.FedAvg(personal_steps=3), rounds=2)
    assert asked == [5]
