"""Stein variational gradient descent of particles, and its temperature."""

import math

import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.elbo import noise
from bayesfed.engine import rounds
from bayesfed.engine.parts import nested
from bayesfed.rules import Stein, Turn
from bayesfed.rules.stein import newton_step, stein_direction

float64 = pytest.mark.usefixtures("float64")


@float64
def test_the_direction_is_that_of_the_paper():
    """Eq. 39, term by term with autograd through the kernel."""
    torch.manual_seed(1)
    phi, score = torch.randn(4, 3), torch.randn(4, 3)
    h = torch.pdist(phi).square().median() / math.log(4)
    by_hand = torch.zeros(4, 3)
    for target in range(4):
        for source in range(4):
            moving = phi[source].clone().requires_grad_()
            kernel = (-(moving - phi[target]).square().sum() / h).exp()
            (slope,) = torch.autograd.grad(kernel, moving)
            by_hand[target] += (kernel.detach() * score[source] + slope) / 4
    torch.testing.assert_close(stein_direction(phi, score), by_hand, rtol=1e-12, atol=1e-12)


@float64
def test_many_particles_have_the_moments_of_a_gaussian():
    """100 particles in two dimensions. SVGD's particles are spread more evenly than independent draws, whose
    mean has a Monte Carlo error of 0.1 sd and whose covariance one of about 0.14: the tolerances."""
    covariance = torch.tensor([[1.0, 0.6], [0.6, 2.0]])
    target = dist.MultivariateNormal(torch.tensor([1.0, -2.0]), covariance)
    torch.manual_seed(0)
    phi = torch.randn(100, 2) * 0.1
    for step in range(2000):
        score = torch.linalg.solve(covariance, (target.loc - phi).T).T
        phi = phi + (1.0 if step < 1500 else 0.3) * stein_direction(phi, score)
    assert (phi.mean(0) - target.loc).abs().max() < 0.1
    assert (phi.T.cov() - covariance).abs().max() < 0.28


def test_tau_is_that_of_corollary_4_4():
    algorithm = Stein(lam=100.0, new_data_clients=3, upsilon=0.5)
    by_hand = 100 / (100 + 10 * 24 * 3.5)
    assert algorithm.temperature(clients=24, rows=10) == pytest.approx(by_hand)
    assert Stein(lam=100.0, beta=5.0, new_data_clients=3, upsilon=0.5).temperature(
        24, 10
    ) == pytest.approx(100 / (100 + 5 * 24 * 3.5))
    with pytest.raises(ValueError, match="must exceed"):
        Stein(lam=3.0, new_data_clients=3).temperature(clients=24, rows=10)


@float64
def test_steps_in_the_metric_of_the_curvature_follow_no_unit():
    """16 particles far away, whose target has standard deviations of 0.001 and 0.1 and a correlation of 0.9."""
    root = torch.tensor([[1e-3, 0.0], [0.09, 0.0436]])
    loc, precision = torch.tensor([0.3, -0.7]), torch.cholesky_inverse(root)
    torch.manual_seed(0)
    phi = torch.randn(16, 2)
    for _ in range(60):
        score = (loc - phi) @ precision
        step, length = newton_step(phi, score, precision.expand(16, 2, 2))
        phi = phi + step
    assert length < 0.02
    white = torch.linalg.solve_triangular(root, (phi - loc).T, upper=False)
    assert white.mean(1).abs().max() < 0.02
    spread = torch.linalg.eigvalsh(white.cov(correction=0))
    assert ((spread > 0.85**2) & (spread < 1.1**2)).all()


@float64
def test_a_particle_climbs_where_the_density_curves_upwards():
    """By as much as if it curved downwards, and by at most 1; beside particles that have arrived."""
    phi = torch.tensor([[0.0], [0.01], [5.0]])
    score, curvature = torch.tensor([[0.0], [-1.0], [-200.0]]), torch.tensor([100.0, 100.0, -400.0])
    step, _ = newton_step(phi, score, curvature[:, None, None])
    assert float(step[2]) == pytest.approx(-0.25, rel=1e-6)


def test_a_round_without_all_clients_is_no_gradient_of_a_single_particle():
    """The step of the last round is taken again, shorter: part of a sum would be followed as if it were all of it."""
    run = bf.start(models.eight_schools, datasets.eight_schools(), bf.PFedGP())
    while float(run.server["newton"]["probe"]) or not run.server["newton"]["step"].any():
        bf.step(run)
    program, before = run.program, run.server
    question = rounds.ask(run)
    total = nested(rounds.answer(run, question).total)
    turn = Turn(program, noise.key(0), program.clients, steps=run.plan.algorithm.steps, whole=True)
    after, _ = run.plan.algorithm.decode(turn.of(program.clients - 1), before, total)
    torch.testing.assert_close(after["newton"]["step"], before["newton"]["step"] / 2)
    torch.testing.assert_close(after["newton"]["base"], before["newton"]["base"])
    whole, _ = run.plan.algorithm.decode(turn, before, total)
    assert not torch.equal(whole["newton"]["base"], before["newton"]["base"])
