"""FedABML as it ships against the paper's formulas, client by client in plain torch; and on models of all kinds."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints
from torch.nn.functional import cross_entropy, linear

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.elbo import noise
from bayesfed.engine.batches import batches
from bayesfed.rules import Turn
from bayesfed.steps.job import Job
from bayesfed.steps.natural_descent import LEFT, MOST
from tests.scenarios import summed

float64 = pytest.mark.usefixtures("float64")
LENGTHS = (6, 3, 9)
EAGER = bf.Execution(compile=False)


def federation(*lengths):
    torch.manual_seed(1)
    return bf.Federation.from_arrays(
        {
            f"client {i}": {"x": torch.randn(n, 3), "y": (torch.arange(n) + i) % 2}
            for i, n in enumerate(lengths or LENGTHS)
        }
    )


def network(**settings):
    torch.manual_seed(0)
    return models.Network(models.mlp(3, 4, 2), **settings)


class Round:
    """One round of all clients as the runner makes it, with what a test needs to do the same by hand."""

    def __init__(self, algorithm, model, data=None, batch_size=None):
        self.data = federation() if data is None else data
        self.settings = bf.FedABML.values(algorithm)
        self.program = algorithm.program(model, self.data)
        server = algorithm.start(self.program)
        self.server = server["theta"]
        self.keys = noise.fold(noise.key(3), self.data.stream_ids)
        everyone = torch.arange(len(self.data))
        self.rows = batches(self.data, everyone, batch_size, self.keys)
        turn = Turn(self.program, noise.key(4), len(self.data))
        message = algorithm.broadcast(turn, server)
        self.job = Job(self.program, message, {}, self.rows, self.keys)
        upload = algorithm.work(self.job).upload
        self.copies = {name: v + upload["theta"][name] for name, v in self.server.items()}
        after, _ = algorithm.decode(turn, server, summed(upload))
        self.after = after["theta"]

    def xy(self, client, step):
        """The rows of one client at a step, without padding."""
        batch = self.rows(step)
        mask = batch.mask[client]
        return batch.fields["x"][client][mask], batch.fields["y"][client][mask]

    def eps(self, client, *path):
        """The noise of the loss at step ``path[0]``, number ``path[1]``: 0 is θ's, 1 + i that of φ's step i."""
        keys = self.keys
        for data in path:
            keys = noise.fold(keys, data)
        supplied = self.program.noise(keys, self.settings["draws"], local=True)
        return supplied["weights"][0][:, client, 0]


# -- by hand, for one client --------------------------------------------------------------------------


def mean_nll(w, x, y):
    """−log p(D | w) / n of the 3-4-2 network."""
    a, b, c, d = w.split([12, 4, 8, 2])
    hidden = linear(x, a.reshape(4, 3), b).relu()
    return cross_entropy(linear(hidden, c.reshape(2, 4), d), y)


def leaves(*values):
    return [value.detach().clone().requires_grad_() for value in values]


def kl(m, v, prior_m, prior_v):
    """KL(N(m, e²ᵛ) ‖ N(m', e²ᵛ'))."""
    ratio = ((2 * v).exp() + (m - prior_m) ** 2) / (2 * prior_v).exp()
    return (prior_v - v + (ratio - 1) / 2).sum()


def loss_of(phi, theta, x, y, eps, weight, hyper=0.0):
    """Eq. 3.5 over n: ``weight`` is λ / n, ``hyper`` −log p(θ) / (N n)."""
    m, v = phi
    nll = torch.stack([mean_nll(m + e * v.exp(), x, y) for e in eps]).mean()
    return nll + weight * kl(m, v, *theta) + hyper


def rms(x):
    return float(x.detach().square().mean().sqrt())


def natural_step(params, grads, rate, nats, widest):
    """The natural gradient of a Normal with location and log scale ``params``, and its bounds."""
    (loc, log_scale), (g_loc, g_scale) = params, grads
    scale = log_scale.exp().clamp(max=widest)
    step = nats * scale * g_loc
    step = step / max(1.0, rms(step))
    fall = (rate * nats * g_scale / 2).clamp(-MOST, MOST)
    return (loc - rate * scale * step).detach(), (log_scale - fall).detach()


def algorithm_one(done, client, theta, steps, widest, *, learnt=True, hyper=None):
    """Algorithm 1 on one client, in natural or plain steps: its θ_i and φ."""
    settings, n, clients = done.settings, LENGTHS[client], len(LENGTHS)
    natural, prior_lr = settings["natural"], settings["prior_lr"]
    nats, weight, phi = n / settings["kl_weight"], settings["kl_weight"] / n, theta
    for r in range(steps):
        x, y = done.xy(client, r)
        half_cosine = (1 + math.cos(math.pi * r / steps)) / 2
        lr = settings["lr"]
        if natural:
            lr = lr * (LEFT + (1 - LEFT) * half_cosine)
        for i in range(settings["inner_steps"]):
            phi = leaves(*phi)
            loss = loss_of(phi, theta, x, y, done.eps(client, r, 1 + i), weight)
            grads = torch.autograd.grad(loss, phi)
            if natural:
                phi = natural_step(phi, grads, lr, nats, widest)
            else:
                phi = [p - lr * g for p, g in zip(phi, grads, strict=True)]
        phi, own = [p.detach() for p in phi], leaves(*theta)
        far = 0.0 if hyper is None else hyper(*own) / (clients * n)
        grads = torch.autograd.grad(weight * kl(*phi, *own) + far, own)
        if natural:
            new = natural_step(own, grads, prior_lr, nats, widest)
        else:
            new = [(t - prior_lr * g).detach() for t, g in zip(own, grads, strict=True)]
        theta = new if learnt else (new[0], theta[1])
    return theta, phi


# -- Algorithm 1 --------------------------------------------------------------------------------------


@float64
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("spread", ["learnt", "fixed"])
def test_algorithm_one_as_it_ships(batch_size, spread):
    algorithm = bf.FedABML()
    done = Round(algorithm, network(spread=spread, scale=0.3), batch_size=batch_size)
    theta = done.server["prior.loc"], torch.full((26,), math.log(0.3))
    uploads = []
    for client, n in enumerate(LENGTHS):
        steps = 5 * -(-n // (batch_size or 9))
        (loc, log_scale), phi = algorithm_one(
            done, client, theta, steps, 0.3, learnt=spread == "learnt"
        )
        found = {"prior.loc": loc} | ({"prior.scale": log_scale} if spread == "learnt" else {})
        assert found.keys() == done.server.keys()
        for name, by_hand in found.items():
            torch.testing.assert_close(done.copies[name][client], by_hand, rtol=0, atol=1e-9)
        assert (loc - theta[0]).abs().max() > 1e-2  # it moved
        assert rms(loc - phi[0]) > 0.05 * rms(loc - theta[0])  # and is not φ: that would be FedAvg
        uploads.append(loc)
    torch.testing.assert_close(done.after["prior.loc"], torch.stack(uploads).mean(0))


@float64
def test_the_two_gradient_lines_of_the_paper():
    """Plain steps: φ ← φ − η ∇L, θ ← θ − η' ∇L."""
    algorithm = bf.FedABML(
        natural=False, inner_steps=1, lr=0.7, prior_lr=0.9, kl_weight=0.6, local_steps=3
    )
    done = Round(algorithm, network(spread="learnt", scale=0.3))
    theta = done.server["prior.loc"], done.server["prior.scale"]
    for client in range(3):
        by_hand, _ = algorithm_one(done, client, theta, 3, 0.3)
        for name, value in zip(("prior.loc", "prior.scale"), by_hand, strict=True):
            torch.testing.assert_close(done.copies[name][client], value, rtol=0, atol=1e-9)


@float64
def test_a_hyper_prior_counts_by_one_over_the_number_of_clients():
    """m ~ N(start, h²), log σ ~ N(log .3, h²); θ in unconstrained coordinates."""
    h = 0.2
    done = Round(bf.FedABML(), network(spread="learnt", scale=0.3, hyper_scale=h))
    start = done.server["prior.loc.loc"], done.server["prior.scale.loc"]
    torch.testing.assert_close(start[1], torch.full((26,), math.log(0.3)))

    def hyper(m, v):
        return ((m - start[0]).square().sum() + (v - start[1]).square().sum()) / (2 * h**2)

    for client in range(3):
        (loc, log_scale), _ = algorithm_one(done, client, start, 5, 0.3, hyper=hyper)
        copies = done.copies
        torch.testing.assert_close(copies["prior.loc.loc"][client], loc, rtol=0, atol=1e-9)
        torch.testing.assert_close(copies["prior.scale.loc"][client], log_scale, rtol=0, atol=1e-9)


@float64
def test_a_client_makes_its_posterior_by_steps_from_the_prior():
    """Eq. 3.8."""
    algorithm = bf.FedABML(natural=False, kl_weight=0.6, draws=3)
    done = Round(algorithm, network(spread="learnt", scale=0.3))
    made = algorithm.personalize(done.job, 4, 0.2)
    for client, n in enumerate(LENGTHS):
        x, y = done.xy(client, 0)
        theta = phi = done.server["prior.loc"], done.server["prior.scale"]
        for step in range(4):
            phi = leaves(*phi)
            loss = loss_of(phi, theta, x, y, done.eps(client, 1 + step), 0.6 / n)
            phi = [p - 0.2 * g for p, g in zip(phi, torch.autograd.grad(loss, phi), strict=True)]
        for name, by_hand in zip(("weights.loc", "weights.log_scale"), phi, strict=True):
            torch.testing.assert_close(made[name][client, 0], by_hand, rtol=0, atol=1e-9)
    at_once = algorithm.personalize(done.job, 0)["weights.loc"]
    assert torch.equal(at_once[1, 0], done.server["prior.loc"])


@float64
def test_the_mean_may_be_weighted_by_rows():
    plain, weighted = (Round(bf.FedABML(weighted=on), network()) for on in (False, True))
    copies = plain.copies["prior.loc"]
    n = torch.tensor(LENGTHS, dtype=copies.dtype)[:, None]
    torch.testing.assert_close(plain.after["prior.loc"], copies.mean(0))
    torch.testing.assert_close(weighted.after["prior.loc"], (n * copies).sum(0) / n.sum())


# -- natural steps ------------------------------------------------------------------------------------


def conjugate(scale):
    def model(federation):
        m = pyro.param("m", torch.zeros(3), event_dim=1)
        with federation.clients():
            w = pyro.sample("w", dist.Normal(m, scale * torch.ones(3)).to_event(1))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(w, 0.1).to_event(1), obs=obs["y"])

    return model


@float64
@pytest.mark.parametrize("scale", [0.03, 1.0, 30.0])
def test_the_posterior_is_exact_whatever_its_scale(scale):
    """Normal rows around w_i: the posterior is Normal with diagonal covariance, and steps from the prior reach it."""
    torch.manual_seed(0)
    y = scale * torch.randn(1, 3) + 0.1 * torch.randn(4, 3)
    data = bf.Federation.from_arrays({"a": {"y": y}})
    algorithm = bf.FedABML(draws=20)
    program = algorithm.program(conjugate(scale), data)
    keys = noise.fold(noise.key(0), data.stream_ids)
    rows = batches(data, torch.arange(1), None, keys)
    phi = algorithm.personalize(Job(program, {"theta": program.init}, {}, rows, keys), 200)
    precision = scale**-2 + 4 * 0.1**-2
    mean, sd = y.sum(0) * 0.1**-2 / precision, precision**-0.5
    assert ((phi["w.loc"][0, 0] - mean).abs() / sd).max() < 0.3
    torch.testing.assert_close(
        phi["w.log_scale"][0, 0].exp(), torch.full((3,), sd), rtol=0.1, atol=0
    )


@float64
def test_the_unit_of_what_a_client_measures_does_not_matter():
    """Everything in units a hundred times smaller: numbers a hundred times as large."""
    torch.manual_seed(0)
    y = torch.randn(5, 4, 1) + 2 * torch.randn(5, 1, 1)

    def fitted(unit):
        def model(federation):
            m = pyro.param("m", torch.tensor(0.0))
            s = pyro.param("s", torch.tensor(unit), constraint=constraints.positive)
            with federation.clients():
                w = pyro.sample("w", dist.Normal(m, s))
                with federation.observations() as obs:
                    pyro.sample("y", dist.Normal(w, unit), obs=obs["y"])

        data = bf.Federation.from_arrays({f"{i}": {"y": unit * y[i, :, 0]} for i in range(5)})
        return bf.fit(model, data, bf.FedABML(), rounds=3, execution=EAGER)

    one, hundred = fitted(1.0), fitted(100.0)
    assert one.params["m"].abs() > 0.1
    torch.testing.assert_close(100 * one.params["m"], hundred.params["m"])
    torch.testing.assert_close(one.params["s"] + math.log(100), hundred.params["s"])
    torch.testing.assert_close(100 * one.local_params["w.loc"], hundred.local_params["w.loc"])


@float64
def test_no_log_scale_moves_further_than_its_bound():
    """A client of 9 rows that all speak against the start: a step of half Newton's would be longer."""
    model = network(spread="learnt", scale=1.0)
    done = Round(bf.FedABML(local_steps=3, lr=1.0, prior_lr=1.9, kl_weight=0.1), model)
    moved = (done.copies["prior.scale"] - done.server["prior.scale"]).abs().max()
    assert 2 * MOST < moved < 3 * MOST + 1e-9


@pytest.mark.parametrize("rate", ["lr", "prior_lr"])
def test_natural_rates_that_must_diverge_are_refused(rate):
    with pytest.raises(ValueError, match=f"{rate} is 100.0: natural steps diverge from 2 on"):
        bf.FedABML(**{rate: 100.0})


@pytest.mark.parametrize("rates", [{"lr": 100.0, "prior_lr": 100.0}, {"lr": 0.1, "prior_lr": 1e4}])
def test_plain_rates_that_diverge_end_in_an_error(rates):
    """Before, σ = 2000 and an infinite NLL without a word."""
    train, _ = datasets.digits(clients=5)
    torch.manual_seed(0)
    model = models.Network(models.mlp(64, 10), spread="learnt")
    algorithm = bf.FedABML(natural=False, inner_steps=1, **rates)
    with pytest.raises(FloatingPointError, match="has grown|not finite"):
        bf.fit(model, train, algorithm, rounds=20, batch_size=10, execution=EAGER)


# -- invariants ---------------------------------------------------------------------------------------------


@float64
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize(
    "settings",
    [{"spread": "learnt", "scale": 0.3}, {"local": ["2."]}, {"spread": "client"}],
    ids=str,
)
def test_neither_chunks_nor_the_order_of_clients_matter(settings, batch_size):
    data, order = federation(6, 3, 9, 1, 5), [3, 0, 4, 2, 1]

    def fit(data, chunk_size=None):
        execution = bf.Execution(compile=False, chunk_size=chunk_size)
        algorithm = bf.FedABML(local_epochs=1, inner_steps=2, personal_steps=5)
        return bf.fit(
            network(**settings),
            data,
            algorithm,
            rounds=2,
            batch_size=batch_size,
            execution=execution,
        )

    one = fit(data)
    chunked, turned = fit(data, 2), fit(data.select([data.names[i] for i in order]))
    for name, value in one.params.items():
        torch.testing.assert_close(chunked.params[name], value, rtol=0, atol=1e-9)
        torch.testing.assert_close(turned.params[name], value, rtol=0, atol=1e-9)
    for name, value in one.local_params.items():
        torch.testing.assert_close(chunked.local_params[name], value, rtol=0, atol=1e-9)
        torch.testing.assert_close(turned.local_params[name], value[order], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", -1.0),
        ("prior_lr", float("nan")),
        ("kl_weight", 0.0),
        ("draws", 0),
        ("local_epochs", 0),
        ("local_steps", 0),
        ("inner_steps", 0),
        ("personal_steps", -1),
    ],
)
def test_a_setting_that_cannot_be_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        bf.fit(network(), federation(), bf.FedABML(**{field: value}), rounds=1)
