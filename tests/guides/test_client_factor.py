"""The closed form of a client's factor, against conjugate posteriors and scipy's optimiser."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, minimize

import bayesfed as bf
from bayesfed.guides import client_factor, newton
from bayesfed.guides.local import NormalPrior, Scaling, conditional

D = torch.float64


def factor(log_likelihood, prior, u, z):
    loc, precision = prior
    matrix = precision if precision.ndim > loc.ndim else torch.diag_embed(precision)

    def log_joint(u):
        distance = ((matrix @ (u - loc)[..., None]).squeeze(-1) * (u - loc)).sum((-2, -1))
        return log_likelihood(u, z) - distance / 2

    mode = newton.newton(log_joint, matrix.diagonal(dim1=-2, dim2=-1), u)
    return client_factor.factor(log_likelihood, lambda z: prior, mode, z)


@pytest.mark.parametrize("correlation", [None, 0.0, 0.9])
def test_gaussian_likelihood_gives_the_exact_conditional_posterior_at_any_globals(correlation):
    """y = X u + offset · z_0 + N(0, e^{2 z_1}), u ~ N(m, t²): q(u | z) is known for every z."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 2, generator=g, dtype=D)
    offset, y = torch.randn(2, 3, 7, generator=g, dtype=D)
    m, t = torch.tensor([0.3, -1.0], dtype=D), torch.tensor([0.7, 2.0], dtype=D)

    def log_likelihood(u, z):
        mean = (x @ u.squeeze(-2)[..., None]).squeeze(-1) + offset * z[..., 0]
        return torch.distributions.Normal(mean, z[..., 1].exp()).log_prob(y).sum(-1)

    centre = torch.tensor([0.4, -0.2], dtype=D).expand(3, 1, 2)
    prior, of_u = (m.expand(3, 1, 2), t.square().reciprocal().expand(3, 1, 2)), torch.diag(t**-2)
    if correlation is not None:
        both = torch.tensor([[1.0, correlation], [correlation, 1.0]], dtype=D)
        of_u = torch.linalg.inv(t[:, None] * both * t)
        prior = prior[0], of_u.expand(3, 1, 2, 2)
    root = None if correlation is None else torch.linalg.cholesky(torch.linalg.inv(of_u))
    found = factor(log_likelihood, prior, torch.zeros(3, 1, 2, dtype=D), centre)
    unit = Scaling(torch.zeros(2, dtype=D), torch.ones(2, dtype=D))
    for shift in ([0.0, 0.0], [0.5, 0.0], [-1.0, 0.7]):
        c = torch.tensor(shift, dtype=D).expand(3, 1, 2)
        z = centre + c
        q = conditional(unit, NormalPrior(m, t, root), c, **found)
        precision = x.mT @ x / (2 * z[:, :, 1:]).exp() + of_u
        natural = x.mT @ (y - offset * z[..., 0])[..., None] / (2 * z[:, :, 1:]).exp()
        natural = natural.squeeze(-1) + of_u @ m
        covariance = torch.linalg.inv(precision)
        mean = (covariance @ natural[..., None]).squeeze(-1)
        torch.testing.assert_close(q.loc[:, 0], mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(q.covariance_matrix[:, 0], covariance, rtol=1e-9, atol=1e-9)


def test_a_client_whose_steps_gain_nothing_but_round_off_takes_no_more():
    """Round-off makes every other value a little less likely than u, as it does of many rows."""
    u, calls = torch.full((1, 1, 1), 0.302), []

    class Guide:
        def block_prior_at_centre(self, params, batch):
            zero = torch.zeros(1, 1, 1)
            return client_factor.BlockPrior(zero, zero, zero, zero + 1)

        def block_prior_at(self, params, batch, z):
            return torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)

        def block_log_likelihood(self, params, batch, values, z):
            calls.append(len(values))
            off = 1e-3 * (values.detach() != u)
            return -(50 * (values - 0.3).square() + off).sum((-2, -1)) + 0.0 * z.sum()

    class Batch:
        scale = torch.ones(1)

        def __len__(self):
            return 1

    earlier = {"loc": u, "log_precision": torch.full((1, 1, 1), 4.6)}
    found = client_factor.closed_form(Guide(), {}, earlier, Batch())
    torch.testing.assert_close(found["loc"], torch.full((1, 1, 1), 0.3))  # û plus a Newton step
    assert len(calls) < 10


@pytest.mark.parametrize("count", [0.0, 3.0, 400.0])
def test_poisson_mode_and_curvature(count):
    """Newton's method starts at the prior's mode; the log rate is up to six prior standard deviations away."""
    y = torch.tensor([[count, count + 1]], dtype=D)

    def log_likelihood(u, z):
        return torch.distributions.Poisson(u.squeeze(-1).exp()).log_prob(y).sum(-1)

    prior = torch.zeros(1, 1, 1, dtype=D), torch.ones(1, 1, 1, dtype=D)
    z = torch.zeros(1, 1, 1, dtype=D)
    found = factor(log_likelihood, prior, torch.zeros(1, 1, 1, dtype=D), z)
    exact = minimize(
        lambda u: 2 * np.exp(u[0]) - (2 * count + 1) * u[0] + u[0] ** 2 / 2,
        np.zeros(1),
        tol=1e-12,
    ).x[0]
    rate = 2 * np.exp(exact)
    # six Newton steps leave the mode within a hundredth of the posterior's width
    assert abs(float(found["log_precision"].exp()) / rate - 1) < 0.02
    a, h = float(found["loc"]), float(found["log_precision"].exp())
    assert abs(h * a / (h + 1) - exact) < 0.01 / (rate + 1) ** 0.5


@pytest.mark.parametrize("count", [2.0, 4000.0])
def test_a_factor_follows_the_mode_as_the_globals_change(count):
    """y ~ Poisson(e^{u + z_0}), u ~ N(z_1, e^{2 z_2}): derivatives of brentq's mode and curvature by differences.

    H is a function of u + z_0, and with many events u + z_0 hardly changes with z, so neither does H.
    """
    z = np.array([0.3, 0.5, -0.2])

    def at(z):
        tau = np.exp(-2 * z[2])
        mode = brentq(lambda u: count - np.exp(u + z[0]) - tau * (u - z[1]), -30, 30, xtol=1e-14)
        h = np.exp(mode + z[0])
        return mode, h, mode + (count - h) / h

    def log_likelihood(u, z):
        return (count * (u + z[..., :1]) - (u + z[..., :1]).exp()).sum((-2, -1))

    def prior(z):
        return z[..., 1:2], (-2 * z[..., 2:]).exp()

    mode, h, a = at(z)
    there, here = (torch.tensor(x, dtype=D).reshape(1, 1, -1) for x in ([mode], z))
    found = client_factor.factor(log_likelihood, prior, there, here)
    assert float(found["loc"]) == pytest.approx(a, rel=1e-9)
    assert float(found["log_precision"]) == pytest.approx(np.log(h), rel=1e-9)
    for i, step in enumerate(1e-5 * np.eye(3)):
        (_, more, right), (_, less, left) = at(z + step), at(z - step)
        slope = (np.log(more) - np.log(less)) / 2e-5
        assert float(found["precision_weight"][..., i]) == pytest.approx(slope, rel=1e-5, abs=1e-8)
        moves = float(found["loc_weight"][..., i]) / np.sqrt(h)
        assert moves == pytest.approx((right - left) / 2e-5, rel=1e-5, abs=1e-8)
    if count > 1000:
        assert float(found["precision_weight"].abs().max()) < 0.01  # a constant mode would have 1


@pytest.mark.parametrize("globals_", [1, 5])
def test_a_factor_of_several_variables_follows_the_mode_as_the_globals_change(globals_):
    """Fewer globals than variables, and more: Poisson rows, whose mode and curvature at other z Newton's steps give."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 3, generator=g, dtype=D)
    shift = torch.randn(9, globals_, generator=g, dtype=D) / 4
    y = torch.poisson(torch.full((9,), 3.0, dtype=D), generator=g)
    here = torch.randn(1, 1, globals_, generator=g, dtype=D) / 4
    precision = torch.ones(1, 1, 3, dtype=D)

    def log_likelihood(u, z):
        rate = (u @ x.T + z @ shift.T).exp()
        return (y * rate.log() - rate).sum((-2, -1))

    def at(z):
        def log_joint(u):
            return log_likelihood(u, z) - (precision * u.square()).sum((-2, -1)) / 2

        mode = newton.newton(log_joint, precision, torch.zeros(1, 1, 3, dtype=D), steps=20)
        grad, hessian = newton.curvature(lambda u: log_likelihood(u, z), mode)
        a = mode - torch.linalg.solve(hessian, grad[..., None]).squeeze(-1)
        return mode, a, (-hessian).diagonal(dim1=-2, dim2=-1).log()

    found = client_factor.factor(
        log_likelihood, lambda z: (0 * precision, precision), at(here)[0], here
    )
    scale = (found["log_precision"] / 2).exp()
    root = scale[..., None] * found["tril"] + torch.diag_embed(scale)
    moves = torch.linalg.solve_triangular(root.mT, found["loc_weight"], upper=True)
    for i, step in enumerate(1e-5 * torch.eye(globals_, dtype=D)):
        (_, right, more), (_, left, less) = at(here + step), at(here - step)
        torch.testing.assert_close(moves[..., i], (right - left) / 2e-5, rtol=1e-5, atol=1e-8)
        slope = (more - less) / 2e-5
        torch.testing.assert_close(found["precision_weight"][..., i], slope, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("people", [1.0, 1e3, 8e6])
def test_offsets_of_any_size_reach_the_mode(people):
    """Counts are Poisson(people · e^u) with u ~ N(0, 10²) and Newton's method starts at 0; the mode is brentq's."""
    count = 30.0

    class Guide:
        def block_prior_at_centre(self, params, batch):
            one = torch.ones(1, 1, 1, dtype=D)
            return client_factor.BlockPrior(0 * one, 0.01 * one, 0 * one, one)

        def block_prior_at(self, params, batch, z):
            return torch.zeros_like(z), torch.full_like(z, 0.01)

        def block_log_likelihood(self, params, batch, u, z):
            return (count * u - people * u.exp()).sum((-2, -1))

    batch = bf.Federation.from_arrays({"a": {"y": torch.zeros(1, dtype=D)}}).batch()
    start = {name: torch.zeros(1, 1, 1, dtype=D) for name in ("loc", "log_precision")}
    found = client_factor.closed_form(Guide(), {}, start, batch)
    mode = brentq(lambda u: count - people * np.exp(u) - 0.01 * u, -30.0, 30.0)
    assert float(found["log_precision"]) == pytest.approx(np.log(people) + mode, abs=1e-3)
    slope = count - people * np.exp(mode)
    assert float(found["loc"]) == pytest.approx(mode + slope / (people * np.exp(mode)), abs=1e-3)


@pytest.mark.parametrize("start", [(0.0, 0.0), (-1.0, -2.0), (-5.0, -4.0), (1.0, 5.0)])
def test_modes_are_reached_from_where_a_log_density_is_not_concave(start):
    """The mode of a mean and a log standard deviation of normal data, from starts with residuals of e⁴ of the latter.

    With their signs the eigenvalues of the Hessian there lead Newton steps nowhere.
    """
    precision = torch.tensor([[[7.45, 13.8]]], dtype=D)

    def log_density(u):
        mean, log_sd = u.unbind(-1)
        squares = 2.2 + 20.0 * (mean - 0.1).square()
        prior = precision[..., 0] * mean.square() + precision[..., 1] * (log_sd - 0.3).square()
        return (-5 * log_sd - squares / 2 * (-2 * log_sd).exp() - prior / 2).sum(-1)

    u = newton.newton(log_density, precision, torch.tensor([[start]], dtype=D), steps=20)
    grad, hessian = newton.curvature(log_density, u)
    torch.testing.assert_close(grad.detach(), torch.zeros_like(grad), atol=1e-3, rtol=0)
    assert bool((torch.linalg.eigvalsh(hessian) < 0).all())


def test_no_curvature_leaves_a_weak_factor():
    flat = factor(
        lambda u, z: 0.0 * u.sum((-2, -1)) + 0.0 * z.sum(),
        (torch.zeros(1, 1, 2, dtype=D), torch.ones(1, 1, 2, dtype=D)),
        torch.ones(1, 1, 2, dtype=D),
        torch.zeros(1, 1, 1, dtype=D),
    )
    precision = flat["log_precision"].exp()
    torch.testing.assert_close(precision, torch.full_like(precision, client_factor.WEAKEST))
    assert all(bool(value.isfinite().all()) for value in flat.values())


def test_eigenvalues_of_a_batch_do_not_fail_for_one_matrix_out_of_range():
    wild = torch.diag(torch.tensor([0.0, 12.764, 15.829, 10.272, 3.7914, 19.663]))
    wild[1:4, 0] = torch.tensor([3.7260e19, -9.5330e19, 3.9373e27])
    good = 2 * torch.eye(6)
    with pytest.raises(RuntimeError, match="eigh"):
        torch.linalg.eigh(wild)
    found = newton.positive(torch.stack([wild, good]), torch.ones(2, 6))
    torch.testing.assert_close(found[1], good)
    assert found.isfinite().all()


@pytest.mark.parametrize("spread", [0.01, 1.0])
def test_a_precision_changes_no_faster_than_a_bound_over_the_spread_of_the_globals(spread):
    """Between two peaks that the globals move it is almost flat, and changes by far more than there is of it."""
    mode, z = torch.zeros(1, 1, 1, dtype=D), torch.tensor([[[1.02, -1.02]]], dtype=D)

    class Guide:
        def block_log_likelihood(self, params, batch, u, z):
            apart = -((u - z) ** 2).squeeze(-2) / 2
            return torch.logaddexp(apart[..., 0], apart[..., 1])

        def block_prior_at(self, params, batch, z):
            return torch.zeros_like(mode), torch.ones_like(mode)

    unit = torch.full_like(z, spread**0.5)  # c is (z - centre) / unit, of standard deviation unit
    prior = client_factor.BlockPrior(mode, torch.ones_like(mode), z, unit)
    found = client_factor._scaled_factor(Guide(), {}, None, prior, mode)["precision_weight"]
    guide = Guide()
    free = client_factor.factor(
        lambda u, z: guide.block_log_likelihood({}, None, u, z),
        lambda z: guide.block_prior_at({}, None, z),
        mode,
        z,
    )["precision_weight"]
    change = (free * spread).norm()
    assert (change > client_factor.STEEPEST) == (spread == 1.0)
    expected = free * unit * min(1.0, client_factor.STEEPEST / float(change))
    torch.testing.assert_close(found, expected)
