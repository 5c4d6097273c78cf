"""CAFeMe on models that are no networks, against their formulas in plain torch."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import CAFeMe
from bayesfed.steps.through_steps import split
from tests.algorithms.test_cafeme import keys_of, update

float64 = pytest.mark.usefixtures("float64")


def sensors(federation):
    """A line a client: its slope is adapted, its offset a set encoder's mean of what the rows look like under it."""
    centre = pyro.sample("centre", dist.Normal(1.0, 2.0))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    features = pyro.param(
        "features", lambda: torch.tensor([[0.3, -0.8, 0.5], [0.9, 0.4, -0.2]]), event_dim=2
    )
    readout = pyro.param("readout", lambda: torch.tensor([0.7, -0.4, 0.6]), event_dim=1)
    with federation.clients():
        slope = pyro.sample("slope", dist.Normal(centre, 0.5))

        def mean_of_rows(rows, mask):
            gap = rows["level"] - slope * rows["t"]
            seen = torch.stack([rows["t"], gap], -1)[..., None]
            hidden = (seen * features).sum(-2).tanh() * mask[..., None]
            return (hidden.sum(-2, keepdim=True) / mask.sum(-1)[:, None, None] * readout).sum(-1)

        offset = pyro.sample("offset", dist.Normal(0.0, 1.0), infer={"context": mean_of_rows})
        with federation.observations() as obs:
            line = offset + slope * obs["t"]
            pyro.sample("level", dist.Normal(line, noise), obs=obs.get("level"))


def readings(*lengths):
    torch.manual_seed(2)
    return bf.Federation.from_arrays(
        {
            f"client {i}": {
                "t": (t := torch.randn(n)),
                "level": 1 + i + 2 * t + 0.3 * torch.randn(n),
            }
            for i, n in enumerate(lengths)
        }
    )


def offset_by_hand(theta, slope, t, level):
    hidden = torch.stack([t, level - slope * t], 1) @ theta["features"]
    return (hidden.tanh() @ theta["readout"]).mean()


def sensor_loss_by_hand(theta, slope, rows, context):
    """Mean −log p of the rows, the offset read from ``context``."""
    line = offset_by_hand(theta, slope, *context) + slope * rows[0]
    return -torch.distributions.Normal(line, theta["noise.loc"].exp()).log_prob(rows[1]).mean()


@float64
@pytest.mark.parametrize("second_order", [True, False])
def test_any_model_with_an_encoder_will_do(second_order):
    """A step on θ by hand: points and parameters alike, through three steps on the slope, hyper-prior included."""
    data = readings(7, 4)
    algorithm = CAFeMe(inner_lr=0.05, lr=0.1, inner_steps=3, second_order=second_order)
    program, keys = algorithm.program(sensors, data), keys_of(data)
    assert [site.name for site in program.contexts] == ["offset"]
    assert set(program.init) == {"centre.loc", "noise.loc", "features", "readout"}
    personal, held_out = split(data.batch(), data.lengths, 0.5, keys)
    upload, terms = update(algorithm, program, program.init, data)
    for client, n in enumerate(data.lengths.tolist()):
        support, query = (
            tuple(part.fields[name][client, part.mask[client]] for name in ("t", "level"))
            for part in (personal, held_out)
        )
        theta = {name: value.clone().requires_grad_() for name, value in program.init.items()}
        slope = theta["centre.loc"]
        for _ in range(3):
            loss = sensor_loss_by_hand(theta, slope, support, support)
            (grad,) = torch.autograd.grad(loss, slope, create_graph=True)
            slope = slope - 0.05 * (grad if second_order else grad.detach())
        loss = sensor_loss_by_hand(theta, slope, query, support)
        hyper = torch.distributions.Normal(1.0, 2.0).log_prob(theta["centre.loc"])
        hyper = hyper + torch.distributions.Normal(-1.0, 0.5).log_prob(theta["noise.loc"])
        torch.testing.assert_close(terms[client], -n * loss.detach(), rtol=1e-10, atol=1e-10)
        objective = loss - hyper / 2 / n
        grads = torch.autograd.grad(objective, list(theta.values()))
        for name, grad in zip(theta, grads, strict=True):
            torch.testing.assert_close(
                upload["theta"][name][client], -0.1 * grad, rtol=1e-8, atol=1e-10
            )
            assert (grad.abs() > 1e-4).any()


def shrunk(federation):
    """A level a client, made from its rows and nothing else: a weight times their mean."""
    weight = pyro.param("weight", torch.tensor(0.1))

    def encode(rows, mask):
        return weight * (rows["y"] * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)

    with federation.clients():
        level = pyro.sample("level", dist.Normal(0.0, 1.0), infer={"context": encode})
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(level, 1.0), obs=obs.get("y"))


def test_an_encoder_alone_is_learnt():
    """Nothing to adapt: the best weight of the mean of half of the rows, by least squares over many splits."""
    generator = torch.Generator().manual_seed(0)
    levels = 3 * torch.randn(30, 1, generator=generator)
    y = levels + torch.randn(30, 10, generator=generator)
    data = bf.Federation.from_arrays({f"client {i}": {"y": row} for i, row in enumerate(y)})
    posterior = bf.fit(shrunk, data, CAFeMe(lr=0.02), rounds=300)
    assert abs(float(posterior.params["weight"]) - 0.98) < 0.03  # 9 / (9 + 1 / 5)
    torch.testing.assert_close(
        posterior.sample(1)["level"][0],
        posterior.params["weight"] * y.mean(1),
        rtol=1e-5,
        atol=1e-5,
    )


def test_an_encoder_of_another_shape_is_named():
    def wrong(federation):
        with federation.clients():
            encode = lambda rows, mask: rows["y"].mean(-1)  # noqa: E731
            level = pyro.sample("level", dist.Normal(0.0, 1.0), infer={"context": encode})
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(level, 1.0), obs=obs.get("y"))

    data = bf.Federation.from_arrays({"a": {"y": torch.randn(3)}, "b": {"y": torch.randn(4)}})
    with pytest.raises(ValueError, match=r"site 'level' gives values \(1,\), not \(1, 1\)"):
        bf.fit(wrong, data, CAFeMe(), rounds=1)
