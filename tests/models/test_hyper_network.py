"""Hyper-networks: weights of clients from embeddings."""

import torch
from torch.func import functional_call, grad, vjp

import bayesfed as bf
from bayesfed.models import HyperNetwork, mlp


def clients(count: int) -> bf.Federation:
    """Clients whose label is whether a direction of their own, one of two, is positive."""
    noise = torch.Generator().manual_seed(0)
    found = {}
    for i in range(count):
        x = torch.randn(40, 3, generator=noise)
        found[f"{i}"] = {"x": x, "y": (x[:, i % 2] > 0).long()}
    return bf.Federation.from_arrays(found)


def network() -> HyperNetwork:
    torch.manual_seed(0)
    return HyperNetwork(mlp(3, 4, 2), embedding=2, hidden=5)


def test_a_step_on_the_hyper_network_is_the_chain_rule_on_the_change_of_weights() -> None:
    """pFedHN, Algorithm 1: the change of φ is the Jacobian of h, transposed, times the change of a client's w_i."""
    data, model, rate = clients(1), network(), 0.1
    algorithm = bf.FedPer().replace(
        steps=bf.steps.Descent("body", lr=rate, steps=1), locals=bf.FedBABU().locals
    )
    posterior = bf.fit(model, data, algorithm, rounds=1, progress=False)
    params = {name: value.detach() for name, value in model.hyper.named_parameters()}

    def weights(phi: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(model.hyper, phi, torch.zeros(2))

    def loss(w: torch.Tensor) -> torch.Tensor:
        sizes = [value.numel() for value in model.module.parameters()]
        named = dict(model.module.named_parameters())
        parts = zip(named, w.split(sizes), strict=True)
        own = {name: part.reshape(named[name].shape) for name, part in parts}
        return torch.nn.functional.cross_entropy(
            functional_call(model.module, own, data["x"]), data["y"]
        )

    w, pull = vjp(weights, params)
    (change,) = pull(-rate * grad(loss)(w))
    expected = torch.cat([(params[name] + change[name]).flatten() for name in params])
    torch.testing.assert_close(posterior.params["hyper"], expected, atol=1e-8, rtol=1e-6)


def test_clients_of_two_kinds_have_weights_of_two_kinds() -> None:
    data = clients(6)
    posterior = bf.fit(network(), data, bf.FedPer(lr=0.5), rounds=60, progress=False)
    right = posterior.probabilities(data, 1)["y"].argmax(-1) == data["y"]
    assert right.double().mean() > 0.9  # a single network for all has about 0.75
    v = posterior.sample(1)["embedding"][0]
    between = (v[0::2].mean(0) - v[1::2].mean(0)).norm()
    assert between > 2 * (v[0::2].std(0) + v[1::2].std(0)).norm()


def test_the_embedding_of_a_client_has_a_posterior() -> None:
    data = clients(4)
    how = {"rounds": 5, "progress": False}
    posterior = bf.fit(network(), data, bf.PFedVEM(), **how)
    assert (posterior.sample(50)["embedding"].std(0) > 0).all()
