"""Clusters of clients: one of several networks for each client, the choice a discrete variable that is summed out."""

import pytest
import torch
from torch.nn.functional import log_softmax, one_hot

import bayesfed as bf
from bayesfed.models import LabelShares, Network, mlp


def opposite(count: int, rows: int, seed: int) -> bf.Federation:
    """Clients whose label is whether x_0 is positive, or, for each second one, whether it is negative."""
    noise = torch.Generator().manual_seed(seed)
    clients = {}
    for i in range(count):
        x = torch.randn(rows, 3, generator=noise)
        clients[f"{seed}-{i}"] = {"x": x, "y": ((x[:, 0] > 0) ^ (i % 2 == 1)).long()}
    return bf.Federation.from_arrays(clients)


class Shift(torch.nn.Module):
    """A layer that cannot draw its first weights."""

    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


def network(clusters: int, **settings: object) -> Network:
    torch.manual_seed(0)
    return Network(mlp(3, 8, 2), clusters=clusters, **settings)


def fitted(rounds: int, clusters: int = 2) -> bf.Posterior:
    algorithm = bf.FedAvg(lr=0.5, personal_steps=0)
    how = {"rounds": rounds, "batch_size": 10, "progress": False}
    return bf.fit(network(clusters), opposite(8, 40, 0), algorithm, **how)


def each_network(posterior: bf.Posterior, x: torch.Tensor) -> torch.Tensor:
    """Log probabilities of labels under each of the two networks, ``(2, rows, labels)``, by torch alone."""
    module, found = mlp(3, 8, 2), []
    for weights in posterior.params["prior.loc"].chunk(2):
        torch.nn.utils.vector_to_parameters(weights, module.parameters())
        found.append(log_softmax(module(x), -1))
    return torch.stack(found).detach()


def test_clients_with_opposite_labels_have_different_networks() -> None:
    rows = opposite(8, 40, 0)

    def accuracy(clusters: int) -> float:
        predicted = fitted(40, clusters).probabilities(rows, 1)["y"].argmax(-1)
        return float((predicted == rows["y"]).double().mean())

    assert accuracy(2) > 0.95
    assert accuracy(1) < 0.7


def test_predictions_of_a_new_client_are_averaged_over_its_cluster() -> None:
    """p(y | x, own rows) = Σ_c p(c | own rows) p(y | x, c), with p(c | own rows) from the rows' densities."""
    posterior = fitted(1)
    own, rows = opposite(2, 3, 7), opposite(2, 5, 7)
    found = posterior.personalize(own, steps=0).probabilities(rows, 1)["y"]
    for i, name in enumerate(own.names):
        client, ahead = own.select([name]), rows.select([name])
        fits = (each_network(posterior, client["x"]) * one_hot(client["y"], 2)).sum((-2, -1))
        weight = fits.softmax(0)[:, None, None]
        expected = (weight * each_network(posterior, ahead["x"]).exp()).sum(0)
        torch.testing.assert_close(found[5 * i : 5 * i + 5], expected, atol=1e-5, rtol=1e-4)
        assert 1e-3 < float(weight.min()) < 0.49


def test_steps_are_on_the_network_that_fits_best() -> None:
    rows = opposite(2, 40, 7)
    before = network(2).start.chunk(2)
    one = bf.fit(network(2), rows.select(rows.names[:1]), bf.FedAvg(), rounds=1, progress=False)
    moved = [
        float((now - then).abs().max())
        for now, then in zip(one.params["prior.loc"].chunk(2), before, strict=True)
    ]
    assert min(moved) == 0 < max(moved)


def test_label_shares_multiply_the_predictions_of_clusters() -> None:
    prior = LabelShares((0.6, 0.4), concentration=2.0)
    train = opposite(4, 20, 3)
    algorithm = bf.FedAvg(personal_steps=0)
    plain, shared = (
        bf.fit(network(2, label_shares=p), train, algorithm, rounds=2, progress=False)
        for p in (None, prior)
    )
    counts = torch.stack([one_hot(train.select([n])["y"], 2).sum(0) for n in train.names])
    mean = torch.tensor(prior.mean)
    expected = plain.probabilities(train, 1)["y"] * ((counts + 2 * mean) / mean)[train.owner]
    found = shared.probabilities(train, 1)["y"]
    torch.testing.assert_close(found, expected / expected.sum(-1, keepdim=True))


def test_what_has_no_clusters_is_refused() -> None:
    with pytest.raises(ValueError, match="for labels"):
        network(2, likelihood="normal")
    with pytest.raises(ValueError, match="one of clusters and subclasses"):
        Network(mlp(3, 8, 4), clusters=2, subclasses=2)
    with pytest.raises(ValueError, match="reset_parameters"):
        Network(Shift(), clusters=2)
    with pytest.raises(ValueError, match="point estimate"):
        bf.fit(network(2, hyper_scale=0.3), opposite(2, 5, 0), bf.SFVI(), rounds=1)
