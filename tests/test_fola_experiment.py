"""The pieces of the experiment on FOLA's first rounds: clients, figures, the pooled posterior, and rules that note."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import bayesfed as bf
from bayesfed.models import mlp

FOLDER = Path(__file__).parents[1] / "experiments" / "mnist"


@pytest.fixture(scope="module")
def scripts():
    """Load the scripts; the modules beside them are importable meanwhile, and forgotten afterwards."""
    path, modules = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    yield importlib.import_module("fola"), importlib.import_module("fola_covariance")
    sys.path[:] = path
    for name in ("fola", "fola_covariance", "run", "recipes", "runner"):
        if name not in modules:
            sys.modules.pop(name, None)


@pytest.fixture
def fola(scripts):
    return scripts[0]


@pytest.fixture
def covariance(scripts):
    return scripts[1]


def rows_of(seed, count=40):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


@pytest.mark.parametrize("alpha", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("clients", [5, 20])
def test_that_clients_have_equally_many_rows_and_none_is_dealt_twice(fola, alpha, clients):
    labels = np.random.default_rng(0).integers(10, size=1000)
    hands = fola.dealt(labels, alpha, clients, seed=1)
    assert [len(hand) for hand in hands] == [1000 // clients] * clients
    assert sorted(np.concatenate(hands)) == list(range(1000))


def test_that_a_small_alpha_gives_clients_few_digits(fola):
    labels = np.random.default_rng(0).integers(10, size=2000)

    def digits(alpha):
        return np.mean([len(np.unique(labels[h])) for h in fola.dealt(labels, alpha, 20, seed=1)])

    assert digits(0.01) < 3 and digits(100.0) > 9


def test_that_the_distance_is_half_a_squared_one_from_the_mode(covariance):
    mode, precision = torch.tensor([1.0, -1.0]), torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    assert covariance.distance(mode, mode, precision) == 0
    assert covariance.distance(mode + torch.tensor([2.0, 0.0]), mode, precision) == pytest.approx(
        4.0
    )
    assert covariance.distance(
        mode + torch.tensor([1.0, -1.0]), mode, torch.eye(2)
    ) == pytest.approx(1.0)


def test_that_local_accuracy_of_identical_clients_is_the_global_one(fola):
    module, rows = mlp(4, 5, 3), rows_of(0)
    theta = parameters_to_vector(module.parameters()).detach()
    of_all = fola.accuracy(module, theta, rows)
    assert of_all == pytest.approx(
        100 * float((module(rows[0]).argmax(1) == rows[1]).double().mean())
    )
    notes = [(3.0, theta), (10.0, theta)]
    mean = fola.mean_of_clients(notes, lambda own: fola.accuracy(module, own, rows))
    assert mean == pytest.approx(of_all, rel=1e-12)


def test_that_clients_are_weighted_by_their_rows(fola):
    notes = [(1.0, torch.tensor(0.0)), (3.0, torch.tensor(8.0))]
    assert fola.mean_of_clients(notes, float) == 6.0


def test_that_a_cell_says_how_many_runs_have_diverged(fola):
    assert fola.mean_cell([1.0, float("nan"), 3.0], ".1f") == "1 of 3 diverged"
    assert fola.mean_cell([1.0, 3.0], ".1f") == "2.0 ± 1.0"


def test_the_pooled_posterior(covariance):
    """Its gradient vanishes at the mode, and its Hessian is that of ``log_softmax`` by finite differences."""
    x, y = rows_of(1)
    x = x.double()
    mode, precision = covariance.posterior(x, y, 3, gamma=1.0)
    assert mode.shape == (15,) and precision.shape == (15, 15)

    def slope(theta):
        leaf = theta.clone().requires_grad_()
        logits = x @ leaf[:12].reshape(3, 4).T + leaf[12:]
        value = -logits.log_softmax(1)[range(len(y)), y].sum() + leaf.square().sum() / 2
        return torch.autograd.grad(value, leaf)[0]

    assert slope(mode).abs().max() < 1e-5
    step = 1e-5 * torch.eye(15, dtype=torch.float64)
    found = torch.stack([(slope(mode + s) - slope(mode - s)) / 2e-5 for s in step])
    torch.testing.assert_close(precision, found, atol=1e-6, rtol=1e-5)


def test_that_a_mean_of_pixels_is_taken(covariance):
    x = torch.arange(784.0).reshape(1, -1)
    pooled, _ = covariance.pooled_images((x, torch.zeros(1)))
    assert pooled.shape == (1, 49) and pooled.dtype == torch.float64
    corner = x.reshape(28, 28)[:4, :4].double().mean()
    assert pooled[0, 0] == corner


@pytest.mark.parametrize("name", ["FedAvg", "FedCurv", "FOLA", "prior loss"])
def test_that_the_rule_notes_every_client_and_changes_nothing(fola, name):
    clients = [dict(zip("xy", rows_of(i, 20 + 10 * i), strict=True)) for i in range(3)]
    federation = bf.Federation.from_arrays({f"c{i}": rows for i, rows in enumerate(clients)})
    torch.manual_seed(0)
    module = mlp(4, 12, 3)
    start = parameters_to_vector(module.parameters()).detach().clone()
    algorithm = (fola.METHODS | fola.PARTS)[name](rate=0.1, epochs=2, rows=federation.rows)
    seen = []

    def figures(r, theta, notes):
        seen.append((theta.clone(), list(notes)))
        return [float(r)]

    found = fola.curve(module, federation, algorithm, (1, 2), figures, batch_size=10, seed=0)
    assert found == [[1.0], [2.0]]
    for _, notes in seen:
        assert sorted(n for n, _ in notes) == [20, 30, 40]
    theta, notes = seen[0]
    mean = sum(n / 90 * own for n, own in notes)
    assert (mean - start).norm() > 1e-3
    assert torch.allclose(theta, mean, atol=1e-6) == (name != "FOLA")
    run = bf.start(
        fola.Network(module, local=()), federation, algorithm, rounds=2, batch_size=10, seed=0
    )
    bf.step(run), bf.step(run)
    torch.testing.assert_close(fola.server_theta(run), seen[1][0], atol=1e-5, rtol=1e-4)


def test_that_the_network_of_a_single_client_is_the_servers(fola):
    """With FedAvg of one client GA and LA are the same figure."""
    x, y = rows_of(0)
    federation = bf.Federation.from_arrays({"a": {"x": x, "y": y}})
    module = nn.Sequential(nn.Linear(4, 3))
    algorithm = fola.fedavg(rate=0.1, epochs=5, rows=len(y))

    def figures(r, theta, notes):
        local = fola.mean_of_clients(notes, lambda own: fola.accuracy(module, own, (x, y)))
        return [fola.accuracy(module, theta, (x, y)), local]

    ((ga, la),) = fola.curve(module, federation, algorithm, (1,), figures, batch_size=10, seed=0)
    assert ga == la > 40
