"""Natural-gradient steps of a Gaussian, on targets with a known posterior."""

from __future__ import annotations

import pytest
import torch

from bayesfed.guides import natural_gradient

D = torch.float64
PRECISION = torch.tensor([[4.0, 1.2, 0.0], [1.2, 900.0, -20.0], [0.0, -20.0, 2.0]], dtype=D)
CENTRE = torch.tensor([1.0, -3.0, 0.5], dtype=D)


LOC, ROOT = torch.zeros(3, dtype=D), 0.3 * torch.eye(3, dtype=D)
TRUE = natural_gradient.QuadraticTerm(PRECISION @ CENTRE, -PRECISION)


def draws(count: int, seed: int, loc=LOC, root=ROOT, paired: bool = True):
    noise = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=D)
    return loc + (natural_gradient.paired(noise) if paired else noise) @ root.mT


def blank(clients: int = 1) -> natural_gradient.QuadraticTerm:
    return natural_gradient.QuadraticTerm(
        torch.zeros(clients, 3, dtype=D), torch.zeros(clients, 3, 3, dtype=D)
    )


@pytest.mark.parametrize(("count", "paired"), [(8, True), (7, True), (5, False)])
def test_the_fit_of_a_quadratic_is_exact(count, paired):
    """With more draws than dimensions, however they were drawn: it is a linear regression without noise."""
    z = draws(count, 0, paired=paired)
    grads = natural_gradient.gradient_at(TRUE, z)[None]
    pull, slope = natural_gradient.fit_quadratic(LOC, ROOT, z, grads, blank())
    torch.testing.assert_close(slope[0], TRUE.slope)
    torch.testing.assert_close(pull[0], TRUE.pull)


def test_few_draws_change_a_quadratic_in_the_directions_that_they_span():
    """A pair spans one of three directions: the gradient is right there, and after three rounds in all of them."""
    found = blank()
    for seed in range(3):
        z = draws(2, seed)
        found = natural_gradient.fit_quadratic(
            LOC, ROOT, z, natural_gradient.gradient_at(TRUE, z)[None], found
        )
        now = natural_gradient.gradient_at(
            natural_gradient.QuadraticTerm(*(v[0] for v in found)), z
        )
        torch.testing.assert_close(now, natural_gradient.gradient_at(TRUE, z))
        torch.testing.assert_close(found.slope, found.slope.mT)
    error = [(found.slope[0] - TRUE.slope).norm() / TRUE.slope.norm()]
    for seed in range(3, 60):
        z = draws(2, seed)
        found = natural_gradient.fit_quadratic(
            LOC, ROOT, z, natural_gradient.gradient_at(TRUE, z)[None], found
        )
        error.append((found.slope[0] - TRUE.slope).norm() / TRUE.slope.norm())
    assert error[-1] < 1e-6 < 0.01 < error[0]


def test_quadratics_of_several_terms_are_those_of_each_and_add_up():
    z = draws(8, 1)
    both = torch.stack([natural_gradient.gradient_at(TRUE, z), z**3])
    together = natural_gradient.fit_quadratic(LOC, ROOT, z, both, blank(2))
    for client in range(2):
        alone = natural_gradient.fit_quadratic(LOC, ROOT, z, both[client : client + 1], blank())
        torch.testing.assert_close(together.slope[client], alone.slope[0])
        torch.testing.assert_close(together.pull[client], alone.pull[0])
    total = natural_gradient.fit_quadratic(LOC, ROOT, z, both.sum(0, keepdim=True), blank())
    torch.testing.assert_close(together.slope.sum(0), total.slope[0])


def test_the_diagonal_quadratic_has_the_slopes_along_the_axes():
    scale = ROOT.diagonal()
    z = draws(4000, 2)
    grads = natural_gradient.gradient_at(TRUE, z)[None]
    pull, slope = natural_gradient.fit_quadratic(LOC, scale, z, grads, blank())
    torch.testing.assert_close(slope[0], TRUE.slope.diagonal(), rtol=0.2, atol=1.0)
    one = TRUE.pull + TRUE.slope.diagonal() * z  # without the rest it is exact
    pull, slope = natural_gradient.fit_quadratic(LOC, scale, z, one[None], blank())
    torch.testing.assert_close(slope[0], TRUE.slope.diagonal())
    torch.testing.assert_close(pull[0], TRUE.pull)


def climb(steps: int, *, diagonal: bool = False, entropy: float = 1.0):
    """From N(0, 0.3² I) towards N(CENTRE, PRECISION⁻¹)."""
    loc, root = LOC, ROOT
    for _ in range(steps):
        if diagonal:
            scale, of = (
                root.diagonal(),
                natural_gradient.QuadraticTerm(TRUE.pull, TRUE.slope.diagonal()),
            )
            cross = TRUE.slope - TRUE.slope.diagonal().diag()
            of = natural_gradient.QuadraticTerm(of.pull + cross @ loc, of.slope)
            to = natural_gradient.direction(loc, scale, of, draws(8, 0, loc, root))
            loc, scale = natural_gradient.step(loc, scale, to, 1.0)
            root = scale.diag()
        else:
            to = natural_gradient.direction(loc, root, TRUE, draws(8, 0, loc, root), entropy)
            loc, root = natural_gradient.step(loc, root, to, 1.0)
    return loc, root


def test_reaches_a_gaussian_whose_precisions_differ_by_500():
    """m takes one step but for the bound on its length, and so does Σ where it narrows."""
    loc, root = climb(12)
    torch.testing.assert_close(loc, CENTRE, rtol=0, atol=1e-6)
    torch.testing.assert_close(root @ root.mT @ PRECISION, torch.eye(3, dtype=D), rtol=0, atol=1e-4)


def test_less_entropy_makes_it_narrower():
    loc, root = climb(60, entropy=0.25)
    torch.testing.assert_close(loc, CENTRE, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        root @ root.mT @ PRECISION, 0.25 * torch.eye(3, dtype=D), rtol=0, atol=1e-4
    )


def test_mean_field_takes_the_diagonal_of_the_precision():
    """The best diagonal Gaussian has the target's mean and variances 1 / Λ_dd (Bishop 2006, eq. 10.12)."""
    loc, root = climb(60, diagonal=True)
    torch.testing.assert_close(loc, CENTRE, rtol=0, atol=1e-3)
    torch.testing.assert_close(root.diagonal() ** -2, PRECISION.diagonal())


def test_a_step_at_the_optimum_stays_there():
    root = torch.linalg.cholesky(torch.linalg.inv(PRECISION))
    to = natural_gradient.direction(CENTRE, root, TRUE, draws(8, 0, CENTRE, root))
    loc, new = natural_gradient.step(CENTRE, root, to, 0.5)
    torch.testing.assert_close(loc, CENTRE)
    torch.testing.assert_close(new @ new.mT, root @ root.mT)


@pytest.mark.parametrize("size", [1e3, 1e8])
def test_however_large_the_gradient_a_step_is_bounded(size):
    of = natural_gradient.QuadraticTerm(
        torch.ones(3, dtype=D) * size, -size * torch.eye(3, dtype=D)
    )
    loc, root = natural_gradient.step(
        LOC, ROOT, natural_gradient.direction(LOC, ROOT, of, draws(8, 0)), 0.1
    )
    assert loc.abs().max() <= 0.1 * natural_gradient.FARTHEST
    assert root.diagonal().min() >= 0.3 * (1 + 0.1 * natural_gradient.NARROWEST) ** -0.5 - 1e-12


def test_directions_agree_unless_the_second_reverses_the_first():
    """On a quadratic, after half a step and after one and a half; in the Fisher metric, whatever the units."""
    root = 0.9 * torch.linalg.cholesky(torch.linalg.inv(PRECISION))
    start = CENTRE + 0.1 * root.sum(1)
    first = natural_gradient.direction(start, root, TRUE, draws(8, 0, start, root))
    for rate, sign in ((0.5, 1), (1.5, -1)):
        q = natural_gradient.step(start, root, first, rate)
        there = natural_gradient.direction(*q, TRUE, draws(8, 1, *q))
        assert natural_gradient.agreement(first, there).sign() == sign


def test_a_step_stays_in_the_span_of_the_draws():
    """With a pair of draws q moves and narrows along it, in its coordinates, and is unchanged across."""
    z = draws(2, 0)
    to = natural_gradient.direction(LOC, ROOT, TRUE, z)
    along = torch.linalg.solve_triangular(ROOT, (z[0] - LOC)[:, None], upper=False)[:, 0]
    along = along / along.norm()
    torch.testing.assert_close(to.loc, (to.loc @ along) * along)
    torch.testing.assert_close(to.spread, (along @ to.spread @ along) * along.outer(along))
    assert to.loc.norm() > 0.1


def noisy_climb(noise: float, steps: int, generator: torch.Generator):
    """q after these steps of rates 1 to 0.1, from gradients whose mean over 16 draws has this noise."""
    loc, root = LOC, ROOT
    for number in range(steps):
        z = draws(16, number, loc, root)
        shake = 4 * noise * torch.randn(16, 3, generator=generator, dtype=D)
        of = natural_gradient.fit_quadratic(
            loc, root, z, (natural_gradient.gradient_at(TRUE, z) + shake)[None], blank()
        )
        to = natural_gradient.direction(
            loc, root, natural_gradient.QuadraticTerm(of.pull[0], of.slope[0]), z, noise=noise
        )
        loc, root = natural_gradient.step(loc, root, to, max(0.1, 1 / (1 + number / 4)))
    return loc, root


def test_noise_biases_neither_the_mean_nor_the_width_of_q():
    """Noise of 0.7 in units of the widest direction. Over 40 runs the mean of m is within three of its standard
    errors of the target's, and the logarithms of the widths of the target's within 0.1 on average."""
    widest = float(torch.linalg.eigvalsh(torch.linalg.inv(PRECISION))[-1].sqrt())
    generator = torch.Generator().manual_seed(0)
    runs = [noisy_climb(0.7 / widest, 80, generator) for _ in range(40)]
    means = torch.stack([loc for loc, _ in runs])
    widths = torch.stack([torch.linalg.eigvalsh(r.mT @ PRECISION @ r).log() / 2 for _, r in runs])
    print(means.mean(0), means.std(0), widths.mean(0), widths.std(0))
    error = means.std(0) / len(runs) ** 0.5
    assert ((means.mean(0) - CENTRE).abs() < 3 * error).all()
    assert abs(float(widths.mean())) < 0.1


@pytest.mark.parametrize("whole", [True, False])
def test_where_the_density_curves_upwards_a_step_is_no_longer_than_downwards(whole):
    """At a saddle with curvatures of ±400 in units of q: steps of gradient / |curvature| uphill in both directions."""
    slope = torch.tensor([-400.0, 400.0, 400.0], dtype=D)
    pull, at = torch.tensor([40.0, 40.0, -40.0], dtype=D), torch.ones(3, dtype=D)
    z = draws(8, 0, LOC, at.diag())
    scale, slope = (at.diag(), slope.diag()) if whole else (at, slope)
    to = natural_gradient.direction(LOC, scale, natural_gradient.QuadraticTerm(pull, slope), z)
    expected = torch.tensor([0.1, 0.1, -0.1], dtype=D)
    torch.testing.assert_close(to.loc, expected, rtol=0.01, atol=0.0)
