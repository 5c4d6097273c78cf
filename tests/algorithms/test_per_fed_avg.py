"""Per-FedAvg and pFedMe as they ship against the papers' formulas, client by client in plain torch."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.nn.functional import cross_entropy, linear

import bayesfed as bf
from bayesfed import PerFedAvg, PFedMe, datasets, models
from bayesfed.elbo import noise
from bayesfed.engine.batches import batches
from bayesfed.rules import Turn
from bayesfed.steps.job import Job
from tests.scenarios import summed

float64 = pytest.mark.usefixtures("float64")
LENGTHS = (6, 3, 9)
EAGER = bf.Execution(compile=False)


def federation():
    torch.manual_seed(1)
    return bf.Federation.from_arrays(
        {
            f"client {i}": {"x": torch.randn(n, 3), "y": (torch.arange(n) + i) % 2}
            for i, n in enumerate(LENGTHS)
        }
    )


def network(**settings):
    torch.manual_seed(0)
    return models.Network(models.mlp(3, 4, 2), **settings)


class Round:
    """One round of all clients as the runner makes it."""

    def __init__(self, algorithm, model, batch_size):
        data = federation()
        program = algorithm.program(model, data)
        server = algorithm.start(program)
        self.server = server["theta"]
        keys = noise.fold(noise.key(3), data.stream_ids)
        self.rows = batches(data, torch.arange(3), batch_size, keys)
        turn = Turn(program, noise.key(4), 3)
        self.job = Job(program, algorithm.broadcast(turn, server), {}, self.rows, keys)
        upload = algorithm.work(self.job).upload
        self.copies = {name: v + upload["theta"][name] for name, v in self.server.items()}
        after, _ = algorithm.decode(turn, server, summed(upload))
        self.after = after["theta"]

    def xy(self, client, step):
        batch = self.rows(step)
        mask = batch.mask[client]
        return batch.fields["x"][client][mask], batch.fields["y"][client][mask]

    def steps(self, client, batch_size, epochs=5):
        return epochs * -(-LENGTHS[client] // (batch_size or max(LENGTHS)))


def mean_nll(w, x, y):
    """−log p(D | w) / n of the 3-4-2 network."""
    a, b, c, d = w.split([12, 4, 8, 2])
    return cross_entropy(linear(linear(x, a.reshape(4, 3), b).relu(), c.reshape(2, 4), d), y)


# -- Per-FedAvg ---------------------------------------------------------------------------------------


@float64
@pytest.mark.parametrize("second_order", [True, False])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_per_fed_avg(second_order, batch_size):
    """θ ← θ − β ∇_θ f(θ − α ∇f(θ)), the inner and the outer gradient on different minibatches; a plain mean."""
    algorithm = PerFedAvg(second_order=second_order)
    done = Round(algorithm, network(), batch_size)
    for client in range(3):
        w = done.server["prior.loc"]
        for step in range(done.steps(client, batch_size)):
            w = w.detach().requires_grad_()
            loss = mean_nll(w, *done.xy(client, 2 * step))
            (inner,) = torch.autograd.grad(loss, w, create_graph=True)
            phi = w - 0.1 * (inner if second_order else inner.detach())
            (outer,) = torch.autograd.grad(mean_nll(phi, *done.xy(client, 2 * step + 1)), w)
            w = (w - 0.1 * outer).detach()
        torch.testing.assert_close(done.copies["prior.loc"][client], w, rtol=0, atol=1e-9)
        assert (w - done.server["prior.loc"]).abs().max() > 1e-2
    expected = done.copies["prior.loc"].mean(0)
    torch.testing.assert_close(done.after["prior.loc"], expected, rtol=0, atol=1e-12)


@float64
def test_the_orders_differ():
    first, second = (
        Round(PerFedAvg(second_order=on, lr=0.8), network(), None).copies["prior.loc"]
        for on in (False, True)
    )
    assert (first - second).abs().max() > 1e-3


@float64
def test_its_personal_points_are_steps_of_gradient_descent():
    algorithm = PerFedAvg()
    done = Round(algorithm, network(), None)
    made = algorithm.personalize(done.job, 3, 0.5)["weights.loc"]
    for client in range(3):
        w = done.server["prior.loc"]
        for _ in range(3):
            w = w.detach().requires_grad_()
            w = w - 0.5 * torch.autograd.grad(mean_nll(w, *done.xy(client, 0)), w)[0]
        torch.testing.assert_close(made[client, 0], w.detach(), rtol=0, atol=1e-9)


# -- pFedMe -------------------------------------------------------------------------------------------


@float64
@pytest.mark.parametrize("batch_size", [None, 4])
def test_pfedme(batch_size):
    """θ ← θ − η λ (θ − w) after k steps on f(w) + λ/2 ‖w − θ‖²; a plain mean."""
    algorithm = PFedMe()
    settings = PFedMe.values(algorithm)
    lam = settings["lam"]
    done = Round(algorithm, network(), batch_size)
    for client in range(3):
        theta = w = done.server["prior.loc"]
        for step in range(done.steps(client, batch_size)):
            x, y = done.xy(client, step)
            for _ in range(settings["inner_steps"]):
                w = w.detach().requires_grad_()
                (grad,) = torch.autograd.grad(mean_nll(w, x, y), w)
                w = (w - settings["lr"] * (grad + lam * (w - theta))).detach()
            theta = theta - settings["prior_lr"] * lam * (theta - w)
        torch.testing.assert_close(done.copies["prior.loc"][client], theta, rtol=0, atol=1e-9)
        assert (theta - w).norm() > 0.01 * (theta - done.server["prior.loc"]).norm()
    expected = done.copies["prior.loc"].mean(0)
    torch.testing.assert_close(done.after["prior.loc"], expected, rtol=0, atol=1e-12)


@float64
def test_its_personal_points_stay_near_theta():
    algorithm = PFedMe()
    settings = PFedMe.values(algorithm)
    lam = settings["lam"]
    done = Round(algorithm, network(), None)
    made = algorithm.personalize(done.job, 3, 0.2)["weights.loc"]
    for client in range(3):
        theta = w = done.server["prior.loc"]
        for _ in range(3):
            w = w.detach().requires_grad_()
            (grad,) = torch.autograd.grad(mean_nll(w, *done.xy(client, 0)), w)
            w = (w - 0.2 * (grad + lam * (w - theta))).detach()
        torch.testing.assert_close(made[client, 0], w, rtol=0, atol=1e-9)


# -- models of all kinds -------------------------------------------------------------------------------


def levels(federation):
    """Global mean, spread and noise; a positive and a real local site."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        b = pyro.sample("b", dist.Gamma(3.0, 3.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a * b, sigma), obs=obs.get("y"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [PerFedAvg(), PerFedAvg(second_order=False), PFedMe()], ids=str
)
def test_a_hierarchy_with_little_noise_does_not_diverge(algorithm):
    """Rows of sd .05: plain steps at these rates would."""
    generator = torch.Generator().manual_seed(0)
    level = 1 + 0.3 * torch.randn(6, generator=generator)
    data = bf.Federation.from_arrays(
        {f"{i}": {"y": level[i] + 0.05 * torch.randn(8, generator=generator)} for i in range(6)}
    )
    posterior = bf.fit(levels, data, algorithm, rounds=40)
    draws = posterior.sample(5)
    product = (draws["a"] * draws["b"]).mean(0).reshape(-1)
    assert (product - level).abs().max() < 0.4
    assert float(draws["sigma"].mean()) < 0.5
    assert torch.isfinite(draws["tau"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [PerFedAvg(), PFedMe()], ids=str)
def test_they_learn_digits_as_they_ship(algorithm):
    train, test = datasets.digits(clients=8)
    torch.manual_seed(0)
    model = models.Network(models.mlp(64, 32, 10))
    posterior = bf.fit(model, train, algorithm, rounds=10, batch_size=10, execution=EAGER)
    probabilities = posterior.probabilities(test)["y"]
    assert (probabilities.argmax(1) == test["y"]).float().mean() > 0.93  # 160 rows: s.e. .015


@pytest.mark.parametrize("field", ["lr", "prior_lr", "lam"])
def test_a_setting_that_cannot_be_is_named(field):
    with pytest.raises(ValueError, match=field):
        bf.fit(network(), federation(), PFedMe(**{field: 0.0}), rounds=1)
