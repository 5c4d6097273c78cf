"""pFedVEM: its closed forms by hand, EM's fixed points, and its special cases as they ship in plain torch."""

from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import optimize, stats
from torch.distributions import constraints

import bayesfed as bf
from bayesfed import PFedVEM, datasets, metrics
from bayesfed.elbo import noise
from bayesfed.engine.batches import batches
from bayesfed.guides.closed_forms import closed_forms, own_spreads
from bayesfed.models import Network, mlp
from bayesfed.rules import Turn
from bayesfed.steps.job import Job, Work
from tests.scenarios import summed

D = torch.float64

pytestmark = pytest.mark.usefixtures("float64")


def regression(lengths=(6, 4, 9)):
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for i, n in enumerate(lengths):
        x = torch.randn(n, 2, generator=generator, dtype=D)
        slope = torch.tensor([1.0, -0.5], dtype=D) + 0.3 * i
        noise_ = 0.3 * torch.randn(n, generator=generator, dtype=D)
        arrays[f"client {i}"] = {"x": x, "y": x @ slope + noise_}
    return bf.Federation.from_arrays(arrays)


def means(lengths=(4, 4, 4, 4, 4)):
    """Rows of three numbers, around those of each client."""
    generator = torch.Generator().manual_seed(0)
    m, rho, arrays = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([0.8, 1.0, 1.2]), {}
    for i, n in enumerate(lengths):
        centre = m + rho * torch.randn(3, generator=generator)
        arrays[f"client {i}"] = {"y": centre + 0.5 * torch.randn(n, 3, generator=generator)}
    return bf.Federation.from_arrays(arrays)


def wide(loc, scale, hyper=False):
    """Normal means of three dimensions and noise 0.5, with a centre and a spread of these shapes."""

    def model(federation):
        if hyper:
            a = pyro.sample("a", dist.Normal(1.0, 0.5).expand(loc).to_event(1))
            b = pyro.sample("b", dist.HalfNormal(0.7).expand(scale).to_event(1))
        else:
            over = constraints.positive
            a = pyro.param("a", torch.zeros(loc), event_dim=len(loc))
            b = pyro.param("b", torch.ones(scale), constraint=over, event_dim=len(scale))
        b = b if scale else torch.as_tensor(b)[..., None]
        with federation.clients():
            w = pyro.sample("w", dist.Normal(a * torch.ones(3), b * torch.ones(3)).to_event(1))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(w, 0.5).to_event(1), obs=obs.get("y"))

    return model


def job(program, federation, message, clients=None):
    keys = noise.fold(noise.fold(noise.key(0), 0), federation.stream_ids)
    rows = batches(federation, torch.arange(len(federation)), None, keys)
    return Job(program, message, clients or {}, rows, keys)


def m_step(algorithm, program, federation, theta, phi, found=None):
    """θ after the M-step, of clients that have made these q(w_i)."""
    server = algorithm.start(program) | {"theta": theta}
    task = job(program, federation, server)
    parts = {"theta": {}, "posterior": phi} | (found or {})
    upload, _ = algorithm.rule.encode(task, Work(parts, None))
    turn = Turn(program, noise.key(0), len(federation))
    return algorithm.decode(turn, server, summed(upload))[0]["theta"]


# -- the M-step ----------------------------------------------------------------------------------------


def test_rho_by_hand():
    """(tr Σ + ‖μ − m‖²) / D with Σ = diag(.25, 1), μ − m = (3, 1): (1.25 + 10) / 2."""
    federation = bf.Federation.from_arrays({"a": {"x": torch.ones(2, 1), "y": torch.ones(2)}})
    model = Network(torch.nn.Linear(1, 1), likelihood="normal", spread="client")
    program = PFedVEM().program(model, federation)
    phi = {
        "weights.loc": torch.tensor([[[4.0, 1.0]]]),
        "weights.log_scale": torch.tensor([[[math.log(0.5), 0.0]]]),
        "prior.rho": torch.zeros(1, 1, 1),
    }
    known = closed_forms(program)
    assert known == ({"prior.loc": ["weights"]}, {}, {"prior.rho": ["weights"]})
    theta = {"prior.loc": torch.tensor([[[1.0, 0.0]]])}
    found = own_spreads(program, known.own, theta, phi, federation.batch(torch.arange(1)))
    torch.testing.assert_close((2 * found["prior.rho"]).exp().squeeze(), torch.tensor(5.625))


def test_the_server_takes_means_weighted_by_precision():
    """μ = (1, 3), ρ² = (1, ¼): m = (1 · 1 + 4 · 3) / 5 (eq. 7); the body by rows: (2 · 10 + 6 · 30) / 8."""

    def model(federation):
        v = pyro.param("v", torch.tensor(0.0))
        m = pyro.param("m", torch.tensor(0.7))
        with federation.clients() as index:
            r = pyro.param("r", torch.ones(len(index), 1), constraint=constraints.positive)
            w = pyro.sample("w", dist.Normal(m, r))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(w + v, 1.0), obs=obs.get("y"))

    federation = bf.Federation.from_arrays({"2": {"y": torch.ones(2)}, "6": {"y": torch.ones(6)}})
    algorithm = PFedVEM()
    program = algorithm.program(model, federation)
    assert closed_forms(program) == ({"m": ["w"]}, {}, {"r": ["w"]})
    phi = {
        "w.loc": torch.tensor([[1.0], [3.0]]),
        "w.log_scale": torch.zeros(2, 1),
        "r": torch.tensor([[0.0], [math.log(0.5)]]),
    }
    body = torch.tensor([[10.0], [30.0]])
    found = {"theta": {"v": body}, "squares": {"v": torch.ones(2, 1)}}
    new = m_step(algorithm, program, federation, program.init, phi, found)
    torch.testing.assert_close(new["m"], torch.tensor(13 / 5))
    torch.testing.assert_close(new["v"], torch.tensor(25.0))


@pytest.mark.parametrize(
    ("loc", "scale"), [((3,), (3,)), ((3,), (1,)), ((1,), (3,)), ((1,), (1,)), ((3,), ())]
)
def test_em_ends_at_the_maximum_of_the_marginal_likelihood(loc, scale):
    """ȳ_i ~ N(m, ρ² + σ² / n): with exact E-steps, EM's fixed point is the maximum of their likelihood."""
    lengths = (4,) * 8 if loc == scale else (2, 3, 4, 8, 5, 4, 2, 6)
    federation, algorithm = means(lengths), PFedVEM()
    program = algorithm.program(wide(loc, scale), federation)
    assert closed_forms(program) == ({"a": ["w"]}, {"b": ["w"]}, {})
    y_bar = torch.stack([federation.select([n])["y"].mean(0) for n in federation.names])
    variance = 0.25 / federation.lengths[:, None]
    theta = dict(program.init)
    for _ in range(200):
        rho = theta["b"].exp().expand(3)
        precision = 1 / rho**2 + 1 / variance
        mu = (theta["a"] / rho**2 + y_bar / variance) / precision
        phi = {"w.loc": mu[:, None], "w.log_scale": -precision.log()[:, None] / 2}
        theta = m_step(algorithm, program, federation, theta, phi)

    def loss(flat):
        m, log_rho = flat[: math.prod(loc)], flat[math.prod(loc) :]
        sd = np.sqrt(np.exp(2 * log_rho) + variance.numpy())
        return -stats.norm.logpdf(y_bar.numpy(), m, sd).sum()

    size = math.prod(loc) + math.prod(scale)
    best = optimize.minimize(loss, np.zeros(size), tol=1e-12).x
    found = torch.cat([theta["a"].reshape(-1), theta["b"].reshape(-1)])
    torch.testing.assert_close(found, torch.tensor(best), rtol=0, atol=1e-4)
    if loc == scale == (3,):  # equal n: m = mean ȳ_i, ρ² = var ȳ_i − σ² / n
        torch.testing.assert_close(theta["a"], y_bar.mean(0))
        rho = y_bar.var(0, correction=0) - 0.25 / 4
        torch.testing.assert_close((2 * theta["b"]).exp(), rho, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("loc", "scale"), [((3,), (3,)), ((3,), (1,)), ((1,), (1,))])
@pytest.mark.parametrize("kl_weight", [1.0, 0.3])
def test_the_m_step_under_a_hyper_prior(loc, scale, kl_weight):
    """Against SciPy: log p(m) + log p(log ρ) + λ Σ_i E_q[log N(w_i; m, ρ²)], the Jacobian of ρ included."""
    federation, algorithm = means(), PFedVEM(kl_weight=kl_weight)
    program = algorithm.program(wide(loc, scale, hyper=True), federation)
    generator = torch.Generator().manual_seed(1)
    mu = torch.randn(5, 3, generator=generator)
    s = 0.3 + torch.rand(5, 3, generator=generator)
    phi = {"w.loc": mu[:, None], "w.log_scale": s.log()[:, None]}
    theta = m_step(algorithm, program, federation, program.init, phi)
    (a,), (b,) = closed_forms(program).centres, closed_forms(program).spreads
    first = math.prod(loc)

    def loss(flat):
        m, log_rho = flat[:first], flat[first:]
        rho = np.exp(log_rho)
        expected = stats.norm.logpdf(mu.numpy(), m, rho) - s.numpy() ** 2 / (2 * rho**2)
        prior = stats.norm.logpdf(m, 1.0, 0.5).sum()
        prior += (stats.halfnorm.logpdf(rho, scale=0.7) + log_rho).sum()
        return -prior - kl_weight * expected.sum()

    best = optimize.minimize(loss, np.zeros(first + math.prod(scale)), tol=1e-12).x
    found = torch.cat([theta[a].reshape(-1), theta[b].reshape(-1)])
    torch.testing.assert_close(found, torch.tensor(best), rtol=0, atol=1e-5)


def test_a_part_of_the_cohort_stands_for_all():
    """Under a hyper-prior the sums of K uploads count N / K times: clients doubled weigh as two of them."""
    few, many = means((4, 4, 4)), means((4, 4, 4))
    arrays = {f"{name} {i}": {"y": many.select([name])["y"]} for name in many.names for i in (0, 1)}
    many = bf.Federation.from_arrays(arrays)
    model, algorithm = wide((3,), (1,), hyper=True), PFedVEM()
    one, all_ = algorithm.program(model, few), algorithm.program(model, many)
    mu, log_scale = (
        torch.randn(3, 1, 3, generator=torch.Generator().manual_seed(0)),
        torch.zeros(3, 1, 3),
    )
    phi = {"w.loc": mu, "w.log_scale": log_scale}
    twice = {name: value.repeat_interleave(2, 0) for name, value in phi.items()}
    whole = m_step(algorithm, all_, many, all_.init, twice)
    part = m_step(algorithm, all_, few, all_.init, phi)  # three of the six
    alone = m_step(algorithm, one, few, one.init, phi)
    for name, value in whole.items():
        torch.testing.assert_close(part[name], value, rtol=0, atol=1e-6)
        assert not torch.allclose(alone[name], value, atol=1e-3)


def test_rho_adapts_to_how_far_clients_are():
    """Clients of one slope are drawn together, clients of three slopes are not."""
    spread = {}
    for gap in (0.0, 2.0):
        generator = torch.Generator().manual_seed(0)
        data = {}
        for i in range(3):
            x = torch.randn(40, 2, generator=generator)
            y = x @ torch.tensor([1.0 + gap * i, -0.5 - gap * i])
            y = y + 0.3 * torch.randn(40, generator=generator)
            data[f"client {i}"] = {"x": x, "y": y}
        federation = bf.Federation.from_arrays(data)
        torch.manual_seed(0)
        model = Network(
            torch.nn.Linear(2, 1), likelihood="normal", noise=0.3, spread="client", scale=1.0
        )
        algorithm = PFedVEM(head_steps=10, lr=0.02)
        fallen = pytest.warns(UserWarning, match="has fallen to 1/")
        with nullcontext() if gap else fallen:  # the clients do not differ, and that is said
            posterior = bf.fit(model, federation, algorithm, rounds=60)
        (own,) = closed_forms(posterior.program).own
        spread[gap] = float(posterior.local_params[own].exp().mean())
    assert spread[0.0] < 0.3 < spread[2.0]


# -- what has a closed form ------------------------------------------------------------------------------


def structure(model):
    return closed_forms(PFedVEM().program(model, means((2, 3))))


def program_of(body):
    """A model of one number for each client; ``body(federation, a, b)`` makes its mean from globals a and b > 0."""

    def model(federation):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.LogNormal(0.0, 1.0))
        with federation.clients():
            mean = body(a, b)
            with federation.observations() as obs:
                y = obs.get("y")
                pyro.sample("y", dist.Normal(mean, 1.0), obs=None if y is None else y[..., 0])

    return model


def _nested(a, b):
    u = pyro.sample("u", dist.Normal(a, 1.0))
    return pyro.sample("w", dist.Normal(u, b))


@pytest.mark.parametrize(
    ("body", "centres", "spreads"),
    [
        (lambda a, b: pyro.sample("w", dist.Normal(a, b)), ["w"], ["w"]),
        (lambda a, b: pyro.sample("w", dist.LogNormal(a, b)).log(), ["w"], ["w"]),
        (
            lambda a, b: a + pyro.sample("w", dist.Normal(a, b)),
            None,
            ["w"],
        ),  # the likelihood reads a
        (lambda a, b: pyro.sample("w", dist.Normal(2 * a, b)), None, ["w"]),
        (lambda a, b: pyro.sample("w", dist.Normal(a, 0.5)) * b, ["w"], None),
        (lambda a, b: pyro.sample("w", dist.StudentT(4.0, a, b)), None, None),
        (
            lambda a, b: (
                pyro.sample("w", dist.Normal(a, b)) + pyro.sample("u", dist.Normal(a, 1.0))
            ),
            ["w", "u"],
            ["w"],
        ),
        (
            lambda a, b: (
                pyro.sample("w", dist.Normal(a, 1.0)) + pyro.sample("u", dist.Normal(0.0, a.exp()))
            ),
            None,
            None,
        ),
        (_nested, ["u"], None),  # w stands on another local variable
    ],
    ids=[
        "normal",
        "log-normal",
        "read-by-likelihood",
        "twice",
        "fixed",
        "student",
        "shared",
        "two-roles",
        "nested",
    ],
)
def test_structure_is_found_by_tracing(body, centres, spreads):
    found = structure(program_of(body))
    assert list(map(sorted, found.centres.values())) == ([sorted(centres)] if centres else [])
    if centres is None and spreads is None and found.spreads:
        pytest.fail(f"{found.spreads}")
    assert list(found.spreads.values()) == ([spreads] if spreads else [])


def test_clients_pull_a_shared_parameter_by_their_rows():
    """What all clients share is at the maximum over all rows, however they differ: the shares of three kinds."""

    def model(federation):
        shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
        with federation.clients():
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                pyro.sample("kind", dist.Categorical(shares), obs=obs.get("kind"))
                pyro.sample("y", dist.Normal(w, 1.0), obs=obs.get("y"))

    kinds = {"a": [0] * 9 + [1], "b": [1, 1, 2, 0], "c": [2], "d": [2, 1, 0, 0, 0, 0]}
    federation = bf.Federation.from_arrays(
        {name: {"kind": torch.tensor(k), "y": torch.zeros(len(k))} for name, k in kinds.items()}
    )
    posterior = bf.fit(model, federation, PFedVEM(), rounds=100)
    counts = federation["kind"].bincount()
    found = posterior.sample(1)["shares"][0]
    # the maximum in unconstrained coordinates: the Jacobian of stick breaking counts (1, 1, 1) more, nearly
    assert (found - (counts + 1) / (counts + 1).sum()).abs().max() < 0.01


@pytest.mark.parametrize("point", [False, True])
def test_hierarchies_without_structure_learn_by_steps(point):
    """Student's t around a regression on the clients' own field, random globals, two local sites: the ELBO rises."""

    def model(federation):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        share = pyro.sample("share", dist.Beta(2.0, 2.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with federation.clients():
            u = pyro.sample("u", dist.StudentT(5.0, slope, 0.5))
            v = pyro.sample("v", dist.Gamma(2.0, 1.0 + share))
            with federation.observations() as obs:
                mean = u + v * obs["x"][..., 0] + slope * obs["x"][..., 1]
                pyro.sample("y", dist.Normal(mean, sigma), obs=obs.get("y"))

    posterior = bf.fit(model, regression(), PFedVEM(point=point), rounds=30)
    elbo = posterior.history["elbo"]
    assert elbo[-10:].mean() > elbo[:3].mean() + 2
    draws = posterior.sample(50)
    assert all(value.isfinite().all() for value in draws.values())
    assert (draws["u"].std(0) > 0).all() != point


def test_points_leave_a_spread_where_it_is():
    model = wide((3,), (3,))
    posterior = bf.fit(model, means(), PFedVEM(point=True), rounds=3)
    assert posterior.params["b"].eq(0).all()
    assert posterior.params["a"].ne(0).all()


# -- special cases as they ship ---------------------------------------------------------------------------


class Adam:
    """Kingma & Ba 2015, Algorithm 1; no step is longer than the rate."""

    def __init__(self, values):
        self.values, self.steps = values, 0
        self.mean = [torch.zeros_like(v) for v in values]
        self.square = [torch.zeros_like(v) for v in values]

    def descend(self, loss, lr):
        self.steps += 1
        for i, grad in enumerate(torch.autograd.grad(loss, self.values)):
            self.mean[i] = 0.9 * self.mean[i] + 0.1 * grad
            self.square[i] = 0.999 * self.square[i] + 0.001 * grad**2
            scale = (self.square[i] / (1 - 0.999**self.steps)).sqrt() + 1e-8
            move = (self.mean[i] / (1 - 0.9**self.steps) / scale).clamp(-1, 1)
            with torch.no_grad():
                self.values[i] -= lr * move


def rate(algorithm, done):
    """Half a cosine from 1 to what is left in the last round."""
    last = algorithm.lr_decay
    return last + (1 - last) * (1 + math.cos(math.pi * done)) / 2


@pytest.mark.parametrize("rho", [0.7, 2.0])
def test_points_under_a_fixed_rho_are_pfedmap(rho):
    """Three rounds of Adam on the mean over rows of ½ (y − Xw)² + ‖w − m‖² / (2 ρ²), its moments kept by the client."""
    federation, algorithm = regression(), PFedVEM(point=True)
    settings = PFedVEM.values(algorithm)
    torch.manual_seed(0)
    model = Network(torch.nn.Linear(2, 1), likelihood="normal", scale=rho)
    posterior = bf.fit(model, federation, algorithm, rounds=3)
    common = model.start.clone()
    own = [common.clone().requires_grad_() for _ in federation.names]
    optimisers = [Adam([w]) for w in own]
    for number in range(3):
        lr = settings["lr"] * rate(algorithm, number / 3)
        for w, optimiser, name in zip(own, optimisers, federation.names, strict=True):
            data = federation.select([name])
            for _ in range(settings["head_epochs"]):
                error = data["y"] - data["x"] @ w[:2] - w[2]
                loss = error.square().sum() / 2 + (w - common).square().sum() / (2 * rho**2)
                optimiser.descend(loss / len(error), lr)
        common = torch.stack([w.detach() for w in own]).mean(0)
    (centre,) = closed_forms(posterior.program).centres
    torch.testing.assert_close(posterior.params[centre], common, rtol=0, atol=1e-9)
    mine = posterior.local_params["weights.loc"][:, 0]
    torch.testing.assert_close(mine, torch.stack(own).detach(), rtol=0, atol=1e-9)


def test_as_it_ships_against_plain_torch():
    """Three rounds of PFedVEM() with a personal head: eq. 5 and 7, client by client, with the same draws."""
    federation, algorithm = regression((5, 8)), PFedVEM()
    settings = PFedVEM.values(algorithm)
    torch.manual_seed(0)
    model = Network(mlp(2, 3, 1), local=["2."], likelihood="normal", spread="client")
    posterior = bf.fit(model, federation, algorithm, rounds=3)
    m, body = model.start.clone(), model.shared_start.clone()
    phi = [
        [m.clone().requires_grad_(), torch.full_like(m, math.log(0.3)).requires_grad_()]
        for _ in federation.names
    ]
    assert settings["init_scale"] == 0.3
    optimisers = [Adam(params) for params in phi]
    rhos = [torch.tensor(0.3, dtype=D)] * 2

    def negative_elbo(data, params, rho, v, keys, step):
        supplied = algorithm.steps.noise(posterior.program, keys, step)["weights"][0]
        w = params[0] + params[1].exp() * supplied.reshape(settings["draws"], model.size)
        hidden = torch.relu(data["x"] @ v[:6].reshape(3, 2).T + v[6:])
        mean = w[:, :3] @ hidden.T + w[:, 3:]
        nll = -dist.Normal(mean, 1.0).log_prob(data["y"]).sum(1).mean()
        q, p = dist.Normal(params[0], params[1].exp()), dist.Normal(m, rho)
        return (nll + torch.distributions.kl_divergence(q, p).sum()) / len(data["y"])

    square = None
    for number in range(3):
        keys = noise.fold(noise.fold(noise.key(0), number), federation.stream_ids)
        bodies, squares, slower = [], [], rate(algorithm, number / 3)
        for i, name in enumerate(federation.names):
            data, params, key = federation.select([name]), phi[i], keys[i : i + 1]
            for step in range(settings["head_epochs"]):
                loss = negative_elbo(data, params, rhos[i], body, key, step)
                optimisers[i].descend(loss, slower * settings["lr"])
            rho = ((2 * params[1]).exp() + (params[0] - m) ** 2).mean().sqrt().detach()
            v, own_squares = body.clone(), []
            for step in range(settings["body_epochs"]):
                v.requires_grad_()
                loss = negative_elbo(data, params, rho, v, key, -1 - step)
                (grad,) = torch.autograd.grad(loss, v)
                own_squares.append(grad.square().mean())
                unit = (own_squares[-1] if square is None else square).sqrt()
                v = (v - slower * settings["body_lr"] * (grad / unit).clamp(-3, 3)).detach()
            rhos[i] = rho
            bodies.append(v)
            squares.append(torch.stack(own_squares).mean())
        tau = 1 / torch.stack(rhos)[:, None] ** 2
        mu = torch.stack([params[0].detach() for params in phi])
        m = (tau * mu).sum(0) / tau.sum()
        n = federation.lengths[:, None]
        body = (n * torch.stack(bodies)).sum(0) / n.sum()
        now = (n[:, 0] * torch.stack(squares)).sum() / n.sum()
        square = now if square is None else (square + now) / 2
    (centre,) = closed_forms(posterior.program).centres
    torch.testing.assert_close(posterior.params[centre], m, rtol=0, atol=1e-9)
    torch.testing.assert_close(posterior.params["shared"], body, rtol=0, atol=1e-9)
    found = posterior.local_params["weights.log_scale"][:, 0]
    torch.testing.assert_close(found, torch.stack([p[1].detach() for p in phi]), rtol=0, atol=1e-9)


# -- who uploads ------------------------------------------------------------------------------------------


def test_all_train_and_some_upload():
    """m is eq. 7 over those who have uploaded; the others' q(w_i) have moved too."""
    federation = regression((5,) * 8)
    torch.manual_seed(0)
    model = Network(torch.nn.Linear(2, 1), likelihood="normal", spread="client", scale=0.5)
    algorithm = PFedVEM(upload_fraction=0.5)
    run = bf.start(model, federation, algorithm, rounds=1)
    known = closed_forms(run.program)
    (centre,), (own,) = known.centres, known.own
    bf.step(run)
    params = run.clients.tensors["params"]
    tau = (-2 * params[own]).exp()[:, 0]
    mu = params["weights.loc"][:, 0]
    assert (mu != model.start).all()
    keys = noise.fold(noise.fold(noise.key(0), 0), federation.stream_ids)
    chosen = noise.uniform(noise.fold(keys, noise.word("upload"))) < 0.5
    assert 0 < chosen.sum() < 8
    expected = (tau * mu)[chosen].sum(0) / tau[chosen].sum()
    torch.testing.assert_close(run.server["theta"][centre], expected)


def test_nobody_uploads():
    federation = means()
    program = PFedVEM().program(wide((3,), (1,)), federation)
    phi = program.init_locals(federation.batch(torch.arange(5)))
    new = m_step(PFedVEM(upload_fraction=1e-9), program, federation, program.init, phi)
    for name, value in program.init.items():
        assert torch.equal(new[name], value)


def test_chunks_and_a_fraction_of_uploads():
    federation = regression((5, 5, 5, 5))
    torch.manual_seed(0)
    model = Network(mlp(2, 4, 1), local=["2."], likelihood="normal", spread="client", scale=0.5)
    settings = {"head_epochs": 2, "body_epochs": 2}
    algorithm = PFedVEM(**settings, upload_fraction=0.5)
    whole = bf.fit(model, federation, algorithm, rounds=3)
    one_by_one = bf.Execution(chunk_size=1)
    chunked = bf.fit(model, federation, algorithm, rounds=3, execution=one_by_one)
    for name, value in whole.params.items():
        torch.testing.assert_close(chunked.params[name], value, rtol=1e-9, atol=1e-9)
    everyone = bf.fit(model, federation, PFedVEM(**settings), rounds=3)
    assert not torch.equal(everyone.params["shared"], whole.params["shared"])


# -- what comes out ---------------------------------------------------------------------------------------


def test_learns_a_hierarchy():
    """Normal means, m and ρ learnt: those of the maximum marginal likelihood, and the clients' exact posteriors there.

    Adam's last steps, of 0.003 to 0.01, leave an error of a few of them.
    """
    federation = means((6,) * 12)
    posterior = bf.fit(wide((3,), (3,)), federation, PFedVEM(lr=0.03), rounds=200)
    y_bar = torch.stack([federation.select([n])["y"].mean(0) for n in federation.names])
    m, variance = y_bar.mean(0), 0.25 / 6
    rho = (y_bar.var(0, correction=0) - variance).sqrt()
    torch.testing.assert_close(posterior.params["a"], m, rtol=0, atol=0.02)
    torch.testing.assert_close(posterior.params["b"].exp(), rho, rtol=0.05, atol=0)
    precision = 1 / rho**2 + 1 / variance
    mu = (m / rho**2 + y_bar / variance) / precision
    sd = precision.rsqrt().expand(12, 3)
    torch.testing.assert_close(posterior.local_params["w.loc"][:, 0], mu, rtol=0, atol=0.03)
    found = posterior.local_params["w.log_scale"][:, 0].exp()
    torch.testing.assert_close(found, sd, rtol=0.1, atol=0)


@pytest.mark.parametrize("spread", ["fixed", "learnt", "client"])
def test_learns_a_personal_head_on_digits(spread):
    torch.set_default_dtype(torch.float32)
    train, test = datasets.digits(clients=5)
    torch.manual_seed(0)
    model = Network(mlp(64, 32, 10), local=["2."], spread=spread)
    accuracy = {}
    for rounds in (1, 20):
        posterior = bf.fit(model, train, PFedVEM(), rounds=rounds, batch_size=10)
        probabilities = posterior.probabilities(test, 20)["y"]
        report = metrics.classification(probabilities, test["y"], test.owner, test.names)
        accuracy[rounds] = report.overall["accuracy"]
    assert accuracy[20] > max(0.93, accuracy[1])


def test_a_new_client_gets_the_exact_mean_field_posterior():
    """Linear regression under N(m, ρ² I): mean (XᵀX + I/ρ²)⁻¹ (Xᵀy + m/ρ²), variances 1 / diag of that precision.

    Steps on draws in antithetic noise would be exact; with 200 draws the mean's Monte Carlo error is about
    0.01 of a unit, to which 0.03 leaves room.
    """
    federation, rho = regression(), 0.7
    torch.manual_seed(0)
    model = Network(torch.nn.Linear(2, 1), likelihood="normal", scale=rho)
    algorithm = PFedVEM(optimizer="sgd", lr=0.1, draws=200, init_scale=0.3)
    posterior = bf.fit(model, federation, algorithm, rounds=1)
    new = posterior.personalize(federation, steps=300, lr=0.2)
    (centre,) = closed_forms(posterior.program).centres
    m = posterior.params[centre]
    for i, name in enumerate(federation.names):
        data = federation.select([name])
        x = torch.cat([data["x"], torch.ones(len(data["y"]), 1)], 1)
        precision = x.mT @ x + torch.eye(3) / rho**2
        mean = torch.linalg.solve(precision, x.mT @ data["y"] + m / rho**2)
        found = {part: new.local_params[f"weights.{part}"][i, 0] for part in ("loc", "log_scale")}
        torch.testing.assert_close(found["loc"], mean, rtol=0, atol=0.03)
        sd = precision.diagonal().rsqrt()
        torch.testing.assert_close(found["log_scale"].exp(), sd, rtol=0.05, atol=0)


def test_refuses_a_fraction_that_is_none():
    with pytest.raises(ValueError, match="upload_fraction is 0"):
        PFedVEM(upload_fraction=0)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_each_client_keeps_the_state_of_its_own_optimiser(optimizer):
    data = means()
    algorithm = bf.PFedVEM(optimizer=optimizer)
    program = algorithm.program(wide((3,), ()), data)
    states = algorithm.start_clients(program, algorithm.start(program), data.batch())
    for part in states.values():
        assert all(value.shape[:1] == (len(data),) for value in part.values())


def test_personalising_takes_every_clients_own_spread_in_closed_form():
    """ρ_i² = (tr Σ_i + ‖μ_i − m‖²) / D before each step: s² at the start, and after one step what that has made."""
    federation = regression()
    model = Network(torch.nn.Linear(2, 1), likelihood="normal", spread="client", scale=0.9)
    algorithm = bf.PFedVEM(init_scale=0.3, body_epochs=0)
    posterior = bf.fit(model, federation, algorithm, rounds=1, progress=False)
    m, expected = posterior.params["prior.loc"], torch.full((3,), 0.3)
    for steps in (1, 2):
        found = posterior.personalize(federation, steps=steps).local_params
        torch.testing.assert_close(found["prior.rho"].exp().flatten(), expected)
        square = (found["weights.loc"] - m).square() + (2 * found["weights.log_scale"]).exp()
        expected = square.flatten(1).mean(1).sqrt()
