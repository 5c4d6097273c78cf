"""pFedVEM as it ships: special cases, who uploads, and the posteriors of clients."""

from __future__ import annotations

import math

import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import PFedVEM, datasets, metrics
from bayesfed.elbo import noise
from bayesfed.guides.closed_forms import closed_forms
from bayesfed.models import Network, mlp
from tests.algorithms.pfedvem_by_hand import D, m_step, means, regression, wide

pytestmark = pytest.mark.usefixtures("float64")


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
