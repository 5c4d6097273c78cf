"""FedAvg, FedProx, FedNova and SCAFFOLD as they ship against the papers' formulas, client by client in plain torch."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.nn.functional import cross_entropy

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.algorithms import METHODS
from bayesfed.elbo import noise
from bayesfed.engine.batches import batches

LENGTHS = (12, 5, 31)
BATCH = 5

pytestmark = pytest.mark.usefixtures("float64")


def federation(*lengths):
    generator = torch.Generator().manual_seed(1)
    return bf.Federation.from_arrays(
        {
            f"client {i}": {
                "x": torch.randn(n, 3, generator=generator),
                "y": torch.randint(0, 2, (n,), generator=generator),
            }
            for i, n in enumerate(lengths or LENGTHS)
        }
    )


def network(**settings):
    torch.manual_seed(0)
    return models.Network(models.mlp(3, 2), **settings)


def minibatches(data, rounds, steps):
    """``[round][client]``: the rows of each step, without padding, as the runner gives them."""
    found = []
    for number in range(rounds):
        key = noise.fold(noise.key(0), number)
        keys = noise.fold(key, data.stream_ids)
        order = data.lengths.argsort(stable=True)
        rows = batches(data, order, BATCH, keys[order])
        of_round = {}
        for k, client in enumerate(order.tolist()):
            of_round[client] = []
            for step in range(steps(client)):
                batch = rows(step)
                kept = batch.mask[k]
                of_round[client].append((batch.fields["x"][k][kept], batch.fields["y"][k][kept]))
        found.append([of_round[i] for i in range(len(data))])
    return found


def gradient(w, x, y):
    """Of the mean loss of a logistic regression 3-2."""
    w = w.detach().requires_grad_()
    loss = cross_entropy(x @ w[:6].reshape(2, 3).T + w[6:], y)
    return torch.autograd.grad(loss, w)[0]


def steps_of(epochs):
    return lambda client: epochs * -(-LENGTHS[client] // BATCH)


def by_hand(data, algorithm, rounds, start):
    """θ after some rounds: McMahan et al. 2017, Algorithm 1; Li et al. 2020, eq. 2; Wang et al. 2020, eq. 8."""
    theta, settings = start.clone(), METHODS[algorithm.name].values(algorithm)
    share = data.lengths / data.lengths.sum()
    for of_round in minibatches(data, rounds, steps_of(settings["local_epochs"])):
        ends, counts = [], []
        for client in of_round:
            w = theta.clone()
            for x, y in client:
                step = gradient(w, x, y) + settings["proximal"] * (w - theta)
                w = w - settings["lr"] * step
            ends.append(w)
            counts.append(len(client))
        if algorithm.name == "FedNova":
            effective = sum(p * t for p, t in zip(share, counts, strict=True))
            moves = [(theta - w) / t for w, t in zip(ends, counts, strict=True)]
            theta = theta - effective * sum(p * d for p, d in zip(share, moves, strict=True))
        else:
            theta = sum(p * w for p, w in zip(share, ends, strict=True))
    return theta


@pytest.mark.parametrize(
    "algorithm",
    [bf.FedAvg(), bf.FedAvg(proximal=0.5), bf.FedNova()],
    ids=["FedAvg", "FedProx", "FedNova"],
)
def test_three_rounds_by_hand(algorithm):
    data, model = federation(), network()
    posterior = bf.fit(model, data, algorithm, rounds=3, batch_size=BATCH)
    expected = by_hand(data, algorithm, 3, model.start.double())
    torch.testing.assert_close(posterior.params["prior.loc"], expected, rtol=1e-6, atol=1e-8)


def test_scaffold_by_hand():
    """Karimireddy et al. 2020, Algorithm 1, option II, all clients, global rate 1."""
    data, model, algorithm, rounds = federation(), network(), bf.Scaffold(), 3
    lr, epochs = algorithm.steps.lr, algorithm.steps.epochs
    theta = model.start.double()
    control, own = torch.zeros_like(theta), [torch.zeros_like(theta) for _ in LENGTHS]
    for of_round in minibatches(data, rounds, steps_of(epochs)):
        ends, changes = [], []
        for i, client in enumerate(of_round):
            w = theta.clone()
            for x, y in client:
                w = w - lr * (gradient(w, x, y) - own[i] + control)
            new = own[i] - control + (theta - w) / (len(client) * lr)
            ends.append(w)
            changes.append(new - own[i])
            own[i] = new
        theta = sum(ends) / len(ends)
        control = control + sum(changes) / len(changes)
    posterior = bf.fit(model, data, algorithm, rounds=rounds, batch_size=BATCH)
    torch.testing.assert_close(posterior.params["prior.loc"], theta, rtol=1e-6, atol=1e-8)


def stationarity(data, theta):
    """Norm of the gradient of the mean over clients of their mean losses."""
    total = torch.zeros_like(theta)
    for name in data.names:
        one = data.select([name])
        total = total + gradient(theta, one["x"], one["y"]) / len(data)
    return float(total.norm())


@pytest.mark.slow
def test_scaffold_ends_where_the_clients_mean_gradient_is_zero():
    """FedAvg of clients of one size ends elsewhere: its many local steps drift (their section 3)."""
    data, model = federation(8, 8, 8), network()
    settings = {"lr": 0.2, "local_epochs": 10}
    ends = {
        algorithm: bf.fit(model, data, algorithm(**settings), rounds=400).params["prior.loc"]
        for algorithm in (bf.FedAvg, bf.Scaffold)
    }
    assert stationarity(data, ends[bf.Scaffold]) < 1e-6
    assert stationarity(data, ends[bf.FedAvg]) > 1e-3


def test_in_a_hierarchy_clients_stand_at_the_centre_of_their_prior():
    """Normal means: θ is then the mean of all rows under its prior, here with one step of gradient descent a round."""
    data = bf.Federation.from_arrays({"a": {"y": [1.0, 2.0]}, "b": {"y": [6.0]}})

    def means(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        with federation.clients():
            w = pyro.sample("w", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(w, 1.0), obs=obs.get("y"))

    posterior = bf.fit(means, data, bf.FedAvg(lr=0.3, local_epochs=1), rounds=200)
    torch.testing.assert_close(posterior.params["mu.loc"], torch.tensor(9.0 / (3 + 1 / 4)))
    assert float(posterior.sample(3)["mu"].std()) < 1e-12


def test_fine_tuning_starts_at_the_centre_and_descends():
    data, model = federation(), network()
    posterior = bf.fit(model, data, bf.FedAvg(personal_steps=0), rounds=2)
    at_centre = posterior.local_params["weights.loc"].squeeze(1)
    torch.testing.assert_close(at_centre, posterior.params["prior.loc"].expand_as(at_centre))
    tuned = posterior.personalize(data, steps=2, lr=0.05)
    for i, name in enumerate(data.names):
        one, w = data.select([name]), posterior.params["prior.loc"]
        for _ in range(2):
            w = w - 0.05 * gradient(w, one["x"], one["y"])
        torch.testing.assert_close(tuned.local_params["weights.loc"][i, 0], w)


@pytest.mark.parametrize("algorithm", [bf.FedAvg(), bf.FedNova(), bf.Scaffold()], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, {"local": ()}, {"local": ["2."]}, {"spread": "learnt", "hyper_scale": 0.3, "scale": 0.1}],
    ids=["all local", "all shared", "a head", "hyper-prior"],
)
def test_one_network_for_every_rule(algorithm, settings):
    torch.set_default_dtype(torch.float32)
    train, test = datasets.digits(clients=5)
    torch.manual_seed(0)
    model = models.Network(models.mlp(64, 16, 10), **settings)
    posterior = bf.fit(model, train, algorithm, rounds=20, batch_size=10)
    right = posterior.probabilities(test, centre=True)["y"].argmax(1) == test["y"]
    least = 0.9 if model.size else 0.8  # one network for all: a client has three digits only
    assert right.double().mean() > least


def test_fine_tuning_has_no_pull():
    """After FedProx a new client takes steps on its own loss alone, as after FedAvg."""
    data, model = federation(), network()
    posterior = bf.fit(model, data, bf.FedProx(proximal=5.0), rounds=2)
    new, theta = posterior.personalize(data, steps=3, lr=0.2), posterior.params["prior.loc"]
    own = new.sample(1)["weights"][0]
    for i, name in enumerate(data.names):
        one, w = data.select([name]), theta.clone()
        for _ in range(3):
            w = w - 0.2 * gradient(w, one["x"], one["y"])
        torch.testing.assert_close(own[i], w, rtol=1e-6, atol=1e-8)
