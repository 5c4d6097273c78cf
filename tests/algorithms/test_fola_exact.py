"""FOLA's rounds against the exact posteriors of regressions."""

import torch
from torch import nn
from torch.func import functional_call

import bayesfed as bf
from bayesfed.models.network import Network
from tests.algorithms.fola_rounds import (
    EAGER,
    PAPER,
    ROWS,
    N,
    correlated,
    network,
    pooled,
    run,
    separate,
)

EXACT = {
    "lr": 0.3,
    "local_steps": 60,
    "fisher": "hessian",
    "online": False,
    "covariance": "diagonal",
}


def test_one_round_is_the_exact_posterior_under_a_flat_prior(float64):
    """Diagonal design, exact curvature, π_i = n_i / n, γ → 0: mode and precision per row of the pooled posterior."""
    federation, sd = separate(noise=0.5), 0.5
    algorithm = bf.FOLA(**EXACT, cavity=False, gamma=1e-9)
    server, _, _ = run(algorithm, network([0.3, 0.3, 0.3], noise=sd), federation, 1)
    mode, precision = pooled(federation, sd)
    torch.testing.assert_close(server.loc, mode, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(server.precision, precision.diagonal(), atol=1e-6, rtol=1e-6)


def test_cavity_is_the_exact_posterior_under_any_prior(float64):
    """One undamped round where L_i is quadratic and separable; λ and what the prior is do not matter."""
    federation, sd, gamma = separate(noise=0.5), 0.5, 0.25 * N
    for weight in (0.3, 1.0):
        algorithm = bf.FOLA(**EXACT, cavity=True, damping=1.0, prior_weight=weight, gamma=gamma)
        for rounds in (1, 2):
            server, clients, _ = run(
                algorithm, network([0.3, 0.3, 0.3], noise=sd), federation, rounds
            )
            mode, precision = pooled(federation, sd, gamma, 0.3)
            torch.testing.assert_close(server.loc, mode, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(server.precision, precision.diagonal(), atol=1e-6, rtol=1e-6)
        pi = torch.tensor(ROWS)[:, None] / N
        held = gamma / N * 0.3 + (pi * clients["factor"]["shift"]).sum(0)
        torch.testing.assert_close(server.precision * server.loc, held)


def test_as_it_comes_one_round_is_the_exact_posterior_of_any_regression(float64):
    """Correlated inputs: whole matrices, Newton's method, the cavity; diagonals are not enough."""
    federation, sd, gamma = correlated(noise=0.5), 0.5, 2.0
    mode, precision = pooled(federation, sd, gamma, 0.3)
    model = network([0.3, 0.3, 0.3], noise=sd)
    posterior = bf.fit(model, federation, bf.FOLA(gamma=gamma), rounds=1, execution=EAGER)
    whole = bf.FOLA(gamma=gamma).program(model, federation).guide
    assert str(posterior.program.guide) == str(whole) == "FullRank globals, conditioned locals"
    server, _, _ = run(bf.FOLA(gamma=gamma), model, federation, 1)
    torch.testing.assert_close(server.loc, mode, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(server.precision, precision, atol=1e-6, rtol=1e-6)
    diagonal, _, _ = run(bf.FOLA(gamma=gamma, covariance="diagonal"), model, federation, 1)
    assert (diagonal.loc - mode).abs().max() > 0.05
    draws = posterior.sample(40_000)["shared"].reshape(-1, 3)
    covariance = torch.linalg.inv(N * precision)
    sd = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - mode).abs() < 5 * sd / 200).all()
    error = (draws.T.cov() - covariance).abs() / torch.outer(sd, sd)
    assert (error < 5 * 2**0.5 / 200).all()


def test_full_matrices_by_plain_steps_are_exact_too(float64):
    """The paper's own schedule, λ = r − 1: the average over rounds of exact Gaussians."""
    federation, gamma = correlated(), 2.0
    mode, precision = pooled(federation, 1.0, gamma, 0.3)
    settings = {"lr": 0.2, "local_steps": 300, "fisher": "hessian", "online": False}
    algorithm = bf.FOLA(**settings, covariance="full", cavity=False, prior_weight=None, gamma=gamma)
    server, _, _ = run(algorithm, network([0.3, 0.3, 0.3]), federation, 2)
    torch.testing.assert_close(server.precision, precision)
    torch.testing.assert_close(server.loc, mode, atol=1e-6, rtol=1e-6)


def test_what_stays_at_the_pooled_mode(float64):
    """Eq. 24 with λ = 1 drifts off it from round 3 on; with λ = r − 1 and with the cavity it does not."""
    federation, model = separate(), network([0.0, 0.0, 0.0])
    mode, precision = pooled(federation, 1.0)

    def distance(rounds, **how):
        settings = EXACT | {"lr": 0.8, "cavity": False, "gamma": 1e-9} | how
        server, _, _ = run(bf.FOLA(**settings), model, federation, rounds)
        error = server.loc - mode
        return float(error @ precision @ error / 2)

    assert distance(2) < 1e-12
    assert distance(3) > 1e-5
    assert distance(10) > 10 * distance(3)
    assert distance(10, prior_weight=None) < 1e-12
    assert distance(10, cavity=True, damping=1.0) < 1e-12


def test_cavity_finds_the_pooled_mode_with_a_crude_curvature(float64):
    """A logistic regression of correlated inputs, squared gradients: its mode is that of the pooled loss and prior."""
    rng = torch.Generator().manual_seed(3)
    clients = {}
    for i, rows in enumerate((15, 20, 30)):
        x = torch.randn(rows, 2, generator=rng) + 0.7 * torch.randn(rows, 1, generator=rng)
        clients[str(i)] = {"x": x, "y": (x[:, 0] + i * torch.randn(rows, generator=rng) > 0).long()}
    federation = bf.Federation.from_arrays(clients)
    module = nn.Linear(2, 2)
    nn.init.zeros_(module.weight), nn.init.zeros_(module.bias)
    settings = PAPER | {"lr": 0.5, "cavity": True}
    algorithm = bf.FOLA(**settings, local_steps=20, damping=0.5, gamma=65 / 9)
    server, clients, _ = run(algorithm, Network(module, local=()), federation, 60)
    v = server.loc.clone().requires_grad_()
    logits = functional_call(
        module, {"weight": v[:4].view(2, 2), "bias": v[4:]}, (federation.fields["x"],)
    )
    loss = nn.functional.cross_entropy(logits, federation.fields["y"]) + v.square().sum() / 18
    (grad,) = torch.autograd.grad(loss, v)
    assert float(grad.abs().max()) < 1e-6
    pi = torch.tensor([15.0, 20.0, 30.0])[:, None] / 65
    held = 1 / 9 + (pi * clients["factor"]["precision"]).sum(0)
    torch.testing.assert_close(server.precision, held)
