"""FedPer, FedRep, FedBABU and Local as they ship against their papers' formulas, client by client in plain torch."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.nn.functional import cross_entropy

import bayesfed as bf
from bayesfed import FedBABU, FedPer, FedRep, Local, datasets, models
from bayesfed.algorithms import METHODS
from bayesfed.elbo import noise
from bayesfed.engine.batches import batches

LENGTHS = (12, 5, 31)
BATCH, ROUNDS = 5, 3

pytestmark = pytest.mark.usefixtures("float64")


def federation():
    generator = torch.Generator().manual_seed(1)
    return bf.Federation.from_arrays(
        {
            f"client {i}": {
                "x": torch.randn(n, 3, generator=generator),
                "y": torch.randint(0, 2, (n,), generator=generator),
            }
            for i, n in enumerate(LENGTHS)
        }
    )


def network(**settings):
    """3-2-2: eight weights of the body, six of the head."""
    torch.manual_seed(0)
    return models.Network(models.mlp(3, 2, 2), **{"local": ["2."]} | settings)


def minibatches(data, key, steps):
    """The rows of each step by client, without padding, as the runner gives them."""
    keys, order, found = noise.fold(key, data.stream_ids), data.lengths.argsort(stable=True), {}
    rows = batches(data, order, BATCH, keys[order])
    for k, client in enumerate(order.tolist()):
        kept = []
        for step in range(steps(client)):
            batch = rows(step)
            mask = batch.mask[k]
            kept.append((batch.fields["x"][k][mask], batch.fields["y"][k][mask]))
        found[client] = kept
    return [found[i] for i in range(len(data))]


def epochs(count):
    return lambda client: count * -(-LENGTHS[client] // BATCH)


def gradients(body, head, x, y):
    """Of the mean loss."""
    body, head = body.detach().requires_grad_(), head.detach().requires_grad_()
    hidden = torch.relu(x @ body[:6].reshape(2, 3).T + body[6:])
    loss = cross_entropy(hidden @ head[:4].reshape(2, 2).T + head[4:], y)
    return torch.autograd.grad(loss, (body, head))


def by_hand(data, start, body, turns, lr):
    """The body and the heads: ``turns(body, head, minibatches)`` is a client's round."""
    heads = [start.clone() for _ in LENGTHS]
    share = data.lengths / data.lengths.sum()
    for number in range(ROUNDS):
        rows = minibatches(data, noise.fold(noise.key(0), number), epochs(5))
        found = [turns(body, head, own, lr) for head, own in zip(heads, rows, strict=True)]
        heads = [head for _, head in found]
        body = sum(n * own for n, (own, _) in zip(share, found, strict=True))
    return body, torch.stack(heads)


def together(body, head, rows, lr):
    for x, y in rows:
        of_body, of_head = gradients(body, head, x, y)
        body, head = body - lr * of_body, head - lr * of_head
    return body, head


def head_alone(body, head, rows, lr):
    for x, y in rows:
        head = head - lr * gradients(body, head, x, y)[1]
    return body, head


def body_alone(body, head, rows, lr):
    for x, y in rows:
        body = body - lr * gradients(body, head, x, y)[0]
    return body, head


def head_then_body(body, head, rows, lr):
    _, head = head_alone(body, head, rows, lr)
    return body_alone(body, head, rows, lr)


@pytest.mark.parametrize(
    ("algorithm", "turns"),
    [(FedPer(), together), (FedRep(), head_then_body), (FedBABU(), body_alone)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("settings", [{}, {"spread": "client"}, {"spread": "learnt", "scale": 0.2}])
def test_as_it_ships_against_plain_torch(algorithm, turns, settings):
    data, model = federation(), network(**settings)
    posterior = bf.fit(model, data, algorithm, rounds=ROUNDS, batch_size=BATCH)
    body, heads = by_hand(
        data,
        model.start,
        model.shared_start,
        turns,
        METHODS[algorithm.name].values(algorithm)["lr"],
    )
    torch.testing.assert_close(posterior.params["shared"], body)
    if algorithm.name == "FedBABU":  # heads are trained at the end
        key = noise.fold(noise.key(0), noise.word("personalize"))
        rows = minibatches(data, key, lambda _: algorithm.locals.personal_steps)
        pairs = zip(heads, rows, strict=True)
        heads = torch.stack(
            [head_alone(body, head, own, algorithm.steps.lr)[1] for head, own in pairs]
        )
    torch.testing.assert_close(posterior.sample(1)["weights"][0], heads)


def test_local_as_it_ships():
    """Each client is what it would be alone."""
    data = federation()
    torch.manual_seed(0)
    model = models.Network(models.mlp(3, 2))
    posterior = bf.fit(model, data, Local(), rounds=ROUNDS, batch_size=BATCH)
    own = [model.start.clone() for _ in LENGTHS]
    for number in range(ROUNDS):
        rows = minibatches(data, noise.fold(noise.key(0), number), epochs(5))
        for i, steps in enumerate(rows):
            for x, y in steps:
                w = own[i].requires_grad_()
                loss = cross_entropy(x @ w[:6].reshape(2, 3).T + w[6:], y)
                own[i] = (w - Local().steps.lr * torch.autograd.grad(loss, w)[0]).detach()
    torch.testing.assert_close(posterior.sample(1)["weights"][0], torch.stack(own))
    torch.testing.assert_close(posterior.params["prior.loc"], model.start)


def test_a_new_client_trains_its_head_only():
    data, model = federation(), network()
    posterior = bf.fit(model, data, FedPer(), rounds=2)
    new = posterior.personalize(data, steps=3, lr=0.2)
    body, heads = posterior.params["shared"], []
    for name in data.names:
        one, head = data.select([name]), model.start
        heads.append(head_alone(body, head, [(one["x"], one["y"])] * 3, 0.2)[1])
    torch.testing.assert_close(new.sample(1)["weights"][0], torch.stack(heads))
    assert torch.equal(new.params["shared"], body)


def hierarchy(federation):
    """A random body β, σ; personal levels; what the prior alone reads stays where it is."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
        with federation.observations() as obs:
            y = obs.get("y")
            mean = alpha + (beta * obs["x"]).sum(-1)
            pyro.sample("y", dist.Normal(mean, sigma), obs=None if y is None else y.double())


@pytest.mark.slow
def test_a_hierarchy_has_its_least_squares():
    """Levels without a prior: dummies of the clients in a regression under the priors of β and σ."""
    data = federation()
    algorithm = FedPer(lr=0.05, local_epochs=1, lr_decay=0.01)
    posterior = bf.fit(hierarchy, data, algorithm, rounds=400)
    found = {name: value[0] for name, value in posterior.sample(1).items()}
    start = posterior.program.init
    unread = posterior.program.unread
    assert unread and all(torch.equal(posterior.params[name], start[name]) for name in unread)
    dummies = torch.nn.functional.one_hot(data.owner, 3).double()
    design, y = torch.cat([data["x"], dummies], 1), data["y"].double()
    ridge = torch.diag(torch.tensor([0.25] * 3 + [0.0] * 3))
    variance = torch.tensor(1.0)
    for _ in range(
        100
    ):  # β given σ, and the maximum in log σ of −n log σ − s / (2 σ²) − σ² / 2 + log σ given β
        fitted = torch.linalg.solve(design.T @ design + variance * ridge, design.T @ y)
        s, n = (y - design @ fitted).square().sum(), len(y)
        variance = (-(n - 1) + ((n - 1) ** 2 + 4 * s).sqrt()) / 2
    torch.testing.assert_close(found["beta"], fitted[:3], rtol=0, atol=2e-3)
    torch.testing.assert_close(found["alpha"], fitted[3:], rtol=0, atol=2e-3)
    torch.testing.assert_close(found["sigma"], variance.sqrt(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("algorithm", [FedPer(), FedRep(), FedBABU()], ids=str)
def test_a_model_without_head_or_body_is_refused(algorithm):
    with pytest.raises(
        ValueError, match=r"the likelihood reads nothing beside 'weights'.*use Local"
    ):
        bf.fit(network(local="all"), federation(), algorithm, rounds=1)
    with pytest.raises(ValueError, match="the model samples none: use FedAvg"):
        bf.fit(network(local=()), federation(), algorithm, rounds=1)


def test_local_refuses_what_is_shared():
    with pytest.raises(ValueError, match="the likelihood reads 'shared', which all clients share"):
        bf.fit(network(), federation(), Local(), rounds=1)
    with pytest.raises(ValueError, match="the model samples none"):
        bf.fit(network(local=()), federation(), Local(), rounds=1)


@pytest.mark.parametrize("algorithm", [FedPer(), FedRep(), FedBABU()], ids=str)
@pytest.mark.parametrize("hyper_scale", [None, 0.3])
def test_defaults_learn_digits(algorithm, hyper_scale):
    torch.set_default_dtype(torch.float32)
    train, test = datasets.digits(clients=8)
    torch.manual_seed(0)
    model = models.Network(models.mlp(64, 32, 10), local=["2."], hyper_scale=hyper_scale)
    posterior = bf.fit(model, train, algorithm, rounds=20, batch_size=10)
    right = posterior.probabilities(test)["y"].argmax(1) == test["y"]
    assert right.float().mean() > 0.94
