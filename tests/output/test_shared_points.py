"""Estimates of log p(D_i | θ) by points that all draws of θ share, against sums over fine grids in NumPy."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.special import gammaln, logsumexp
from scipy.stats import multivariate_normal

import bayesfed as bf
from bayesfed.output import locals_given_theta, shared_points
from bayesfed.output.conditionals import Conditionals
from bayesfed.output.draws import globals_at
from bayesfed.output.effort import draws_of_q
from bayesfed.output.locals_given_theta import evidence_by_laplace
from bayesfed.output.modes import laplace_approximation
from bayesfed.output.shared_points import share_points
from bayesfed.output.sums_over_points import (
    evidence_by_shared_points,
    normals_by_shared_points,
    with_moments,
)

CLIENTS, DRAWS = 6, 60


def slopes(federation):
    """An intercept and a slope of each client around those of all."""
    mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    tau = pyro.sample("tau", dist.LogNormal(torch.zeros(2) - 1.0, 0.5).to_event(1))
    with federation.clients():
        effect = pyro.sample("effect", dist.Normal(torch.zeros(2), tau).to_event(1))
        with federation.observations() as obs:
            eta = mean[..., 0] + effect[..., 0] + (mean[..., 1] + effect[..., 1]) * obs["x"]
            pyro.sample("y", dist.Poisson(eta.exp()), obs=obs.get("y"))


def correlated(federation):
    """The same, the effects with a correlation."""
    mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    tau = pyro.sample("tau", dist.LogNormal(torch.zeros(2) - 1.0, 0.5).to_event(1))
    rho = pyro.sample("rho", dist.Uniform(-1.0, 1.0))
    lower = torch.stack(
        [
            torch.stack([torch.ones_like(rho), 0 * rho], -1),
            torch.stack([rho, (1 - rho**2).sqrt()], -1),
        ],
        -2,
    )
    with federation.clients():
        effect = pyro.sample(
            "effect", dist.MultivariateNormal(mean, scale_tril=tau[..., None] * lower)
        )
        with federation.observations() as obs:
            eta = effect[..., 0] + effect[..., 1] * obs["x"]
            pyro.sample("y", dist.Poisson(eta.exp()), obs=obs.get("y"))


def levels(federation):
    """A level of each client on another scale than the outcome, in thousands."""
    mean = pyro.sample("mean", dist.Normal(0.0, 2000.0))
    tau = pyro.sample("tau", dist.LogNormal(6.0, 0.5))
    with federation.clients():
        level = pyro.sample("level", dist.Normal(mean, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Poisson((level / 1000).exp()), obs=obs.get("y"))


def another_slope(federation):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    with federation.clients():
        effect = pyro.sample("effect", dist.Normal(mean, 0.5))
        with federation.observations() as obs:
            pyro.sample("y", dist.Poisson((effect + slope * obs["x"]).exp()), obs=obs.get("y"))


def dispersed(federation):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    shape = pyro.sample("shape", dist.LogNormal(0.0, 1.0))
    with federation.clients():
        effect = pyro.sample("effect", dist.Normal(mean, 0.5))
        with federation.observations() as obs:
            rate = dist.GammaPoisson(shape, shape / effect.exp())
            pyro.sample("y", rate, obs=obs.get("y"))


def heavy(federation):
    """Effects with a Student-t prior: its logarithm is no polynomial."""
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    with federation.clients():
        effect = pyro.sample("effect", dist.StudentT(4.0, mean, 0.5))
        with federation.observations() as obs:
            pyro.sample("y", dist.Poisson(effect.exp()), obs=obs.get("y"))


def data(rows=25):
    generator = np.random.default_rng(4)
    clients = {}
    for i in range(CLIENTS):
        x = generator.normal(size=rows + i)
        eta = 1.0 + 0.3 * generator.normal() + (0.4 + 0.3 * generator.normal()) * x
        clients[f"c{i}"] = {"x": x, "y": generator.poisson(np.exp(eta)).astype(float)}
    return bf.Federation.from_arrays(clients)


def fitted_points(program, monkeypatch, rows=25):
    """Return a fit, draws of θ from q, the clients' posteriors given these, and their points."""
    monkeypatch.setattr(shared_points, "ENOUGH", 0)
    monkeypatch.setattr(shared_points, "MANY", 0)
    posterior = bf.fit(program, data(rows), bf.SFVI(corrected=False), progress=False)
    z = draws_of_q(posterior, DRAWS)[:, None, None]
    chunk = torch.arange(CLIENTS)
    given = Conditionals(
        posterior.program,
        posterior.params_of(chunk),
        {"global": z},
        posterior.federation.batch(chunk),
        len(z),
    )
    return posterior, z, given, shared_points.shared_points(posterior, z[:, 0, 0])


def globals_of(posterior, z):
    """The constrained global variables at draws of θ, by name, ``(S, ...)``."""
    found = globals_at(posterior, {"global": z}, len(z))
    return {n: v.double().numpy() for n, v in found.items()}


def prior_of(drawn, s, v):
    """Return the log density of intercepts and slopes ``(G, 2)`` given the draw of θ in position s."""
    tau, rho = drawn["tau"][s], drawn["rho"][s] if "rho" in drawn else 0.0
    covariance = np.outer(tau, tau) * np.array([[1, rho], [rho, 1]])
    return multivariate_normal(drawn["mean"][s], covariance).logpdf(v)


def on_grid(rows, points, log_prior):
    """Return log ∫ p(D | v) p(v) dv by a fine grid, and the mean and covariance of v.

    Args:
        rows: x and y of a client.
        points: intercepts and slopes of the grid, ``(G, 2)``, and the volume of a cell.
        log_prior: log p(v) at these.
    """
    x, y = (rows[name].numpy()[:, None] for name in ("x", "y"))
    v, volume = points
    eta = v[:, 0] + v[:, 1] * x
    logs = (y * eta - np.exp(eta) - gammaln(y + 1)).sum(0) + log_prior
    share = np.exp(logs - logsumexp(logs))
    mean = share @ v
    return logsumexp(logs) + np.log(volume), mean, (v - mean).T @ (share[:, None] * (v - mean))


def grid(low=-1.5, high=3.5, size=501):
    axis = np.linspace(low, high, size)
    v = np.stack([g.ravel() for g in np.meshgrid(axis, axis, indexing="ij")], 1)
    return v, (axis[1] - axis[0]) ** 2


@pytest.mark.parametrize("program", [slopes, correlated])
def test_evidence_and_moments_are_those_of_fine_grids(program, monkeypatch):
    posterior, z, given, points = fitted_points(program, monkeypatch)
    found = evidence_by_shared_points(points, given)
    mean, root = normals_by_shared_points(points, given)
    drawn, v = globals_of(posterior, z), grid()
    checked = 0
    for s in range(0, DRAWS, 12):
        log_prior, centre = prior_of(drawn, s, v[0]), 0.0
        if program is slopes:  # whose effects are differences from the mean
            centre = drawn["mean"][s]
        for k in range(CLIENTS):
            exact, own, around = on_grid(posterior.federation.select([f"c{k}"]), v, log_prior)
            assert abs(found[s, k] - exact) < 2e-3
            sd = np.sqrt(np.diag(around))
            assert np.abs((mean[s, k, 0].double().numpy() + centre - own) / sd).max() < 0.1
            spread = (root[s, k, 0] @ root[s, k, 0].mT).double().numpy()
            assert np.abs(spread / np.outer(sd, sd) - around / np.outer(sd, sd)).max() < 0.1
            checked += 1
    assert checked == 5 * CLIENTS


@pytest.mark.parametrize("program", [slopes, correlated])
def test_factors_have_the_moments_of_the_posteriors_at_the_centre(program, monkeypatch):
    """Not those of Laplace's approximation, which counts have elsewhere."""
    posterior, z, given, _ = fitted_points(program, monkeypatch, rows=3)
    matched = with_moments(posterior, z[:, 0, 0])
    centre = posterior.program.guide.family.normal(posterior.params)[0].expand(1, 1, 1, -1)
    drawn, v = globals_of(posterior, centre), grid(-6.0, 6.0, 801)
    log_prior, mu = prior_of(drawn, 0, v[0]), drawn["mean"][0]
    distances = []
    for fitted in (posterior, matched):
        at = Conditionals(
            fitted.program,
            fitted.params_of(torch.arange(CLIENTS)),
            {"global": centre},
            given.batch,
            1,
        )
        q = at.block()
        for k in range(CLIENTS):
            _, mean, around = on_grid(posterior.federation.select([f"c{k}"]), v, log_prior)
            own = q.mean[0, k, 0].double().numpy() + (mu if program is slopes else 0.0)
            root = q.scale_tril[0, k, 0].double().numpy()
            sd = np.sqrt(np.diag(around))
            of_mean = np.abs((own - mean) / sd).max()
            of_spread = np.abs((root @ root.T - around) / np.outer(sd, sd)).max()
            distances.append((of_mean, of_spread))
    before, after = np.split(np.array(distances), 2)
    assert before.max() > 0.02
    assert after.max() < 2e-3


def test_rows_may_depend_on_the_globals_through_the_clients_variables_alone(monkeypatch):
    """In any unit."""
    posterior, z, given, points = fitted_points(levels, monkeypatch)
    assert not points.moved.any()
    found = evidence_by_shared_points(points, given)
    drawn, level = globals_of(posterior, z), np.linspace(-1000, 3000, 4001)
    for s in range(0, DRAWS, 6):
        mu, tau = drawn["mean"][s], drawn["tau"][s]
        prior = -(((level - mu) / tau) ** 2) / 2 - np.log(tau * np.sqrt(2 * np.pi))
        for k in range(CLIENTS):
            y = posterior.federation.select([f"c{k}"])["y"].numpy()[:, None]
            rows = (y * level / 1000 - np.exp(level / 1000) - gammaln(y + 1)).sum(0)
            assert abs(found[s, k] - logsumexp(rows + prior)) < 2e-3  # a cell has length 1


@pytest.mark.parametrize("program", [another_slope, dispersed])
def test_there_are_none_where_the_rows_depend_on_a_global_in_another_way(program, monkeypatch):
    posterior, z, _, points = fitted_points(program, monkeypatch)
    assert points is None
    assert not share_points(posterior, z[:, 0, 0], DRAWS)


def test_a_fit_shows_whether_there_are_some_before_it_has_clients_parameters(monkeypatch):
    posterior, z, _, points = fitted_points(slopes, monkeypatch)
    assert points is not None
    assert share_points(posterior, z[:, 0, 0], DRAWS)


def test_other_priors_than_a_normal_have_no_estimates(monkeypatch):
    posterior, z, _, points = fitted_points(heavy, monkeypatch)
    assert points is None
    assert not share_points(posterior, z[:, 0, 0], DRAWS)


def test_an_absurd_draw_of_theta_leaves_the_others_their_estimates(monkeypatch):
    _, z, given, points = fitted_points(slopes, monkeypatch)
    absurd = z.clone()
    absurd[7] = torch.inf
    found = evidence_by_shared_points(points, given._replace(theta={"global": absurd}))
    rest = torch.arange(DRAWS) != 7
    torch.testing.assert_close(found[rest], evidence_by_shared_points(points, given)[rest])
    assert found[7].isnan().all()


def test_draws_of_theta_far_from_the_points_have_other_estimates(monkeypatch):
    """The sum is that around the modes there, and theirs alone is computed anew."""
    posterior, z, _, _ = fitted_points(slopes, monkeypatch)
    far = z[:2].clone()
    far[..., :2] += 1.0
    far[..., 2:] -= 4.0
    theta, chunk = {"global": torch.cat([z, far])}, torch.arange(CLIENTS)
    computed, around_modes = [], locals_given_theta.evidence_around_modes

    def recorded(fitted, theta, count, chunk, *rest):
        computed.append((count, len(chunk)))
        return around_modes(fitted, theta, count, chunk, *rest)

    monkeypatch.setattr(locals_given_theta, "evidence_around_modes", recorded)
    found = evidence_by_laplace(posterior, theta, DRAWS + 2, chunk, posterior.key(0))
    assert computed == [(2, CLIENTS)]
    key = posterior.key(0)
    expected = around_modes(posterior, {"global": far}, 2, chunk, key)
    assert torch.equal(found[-2:], expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_prior_that_is_narrow_along_one_axis_has_other_estimates(axis, monkeypatch):
    """Where it is narrower than the points are apart, a lattice's sum may have any value."""
    posterior, z, given, points = fitted_points(slopes, monkeypatch)
    narrow = z.clone()
    narrow[..., 2 + axis] -= torch.linspace(-8.0, 8.0, DRAWS).clamp(min=0.0)[:, None, None]
    theta, chunk = {"global": narrow}, torch.arange(CLIENTS)
    own = given._replace(theta=theta)
    found = evidence_by_shared_points(points, own)
    key = posterior.key(0)
    exact = locals_given_theta.evidence_around_modes(posterior, theta, DRAWS, chunk, key)
    known = found.isfinite().all(1)
    assert bool(known[:20].all()) and int(known.sum()) < DRAWS - 10
    assert float((found - exact)[known].sum(1).abs().max()) < 0.02
    mean, root = normals_by_shared_points(points, own)
    mode, spread = laplace_approximation(own)
    for s, k in (mean.isfinite().flatten(2).all(2)).nonzero().tolist():
        sd = spread[s, k, 0].square().sum(-1).sqrt()
        assert ((mean - mode)[s, k, 0].abs() / sd).max() < 0.3
        assert (root[s, k, 0].square().sum(-1).sqrt() / sd - 1).abs().max() < 0.2
    assert mean[-1].isnan().all()


def test_rough_densities_have_other_estimates(monkeypatch):
    """The sum over half of the points shows that a density with kinks is not one for a lattice."""

    def rough(federation):
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        with federation.clients():
            effect = pyro.sample("effect", dist.Normal(mean, 5.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Laplace(effect, 0.02), obs=obs.get("y"))

    _, _, given, points = fitted_points(rough, monkeypatch, rows=1)
    found = evidence_by_shared_points(points, given)
    assert laplace_approximation(given)[0].isfinite().all()
    assert found.isnan().any(0).sum() > 0


def test_a_fit_is_the_same_with_and_without_them(monkeypatch):
    """Means within three Monte Carlo errors, standard deviations within four."""
    monkeypatch.setattr(shared_points, "ENOUGH", 0)
    monkeypatch.setattr(shared_points, "MANY", 0)
    monkeypatch.setattr("bayesfed.output.effort.SLOW", 0.0)
    federation = data()
    posteriors = [bf.fit(slopes, federation, seed=1, progress=False)]
    monkeypatch.setattr("bayesfed.output.effort.share_points", lambda *_: False)
    monkeypatch.setattr(locals_given_theta, "shared_points", lambda *_: None)
    posteriors.append(bf.fit(slopes, federation, seed=2, progress=False))
    assert all(p.correction is not None for p in posteriors)
    one, other = (p.sample(2000) for p in posteriors)
    for name in ("mean", "tau", "effect"):
        a, b = (x[name].double().flatten(1) for x in (one, other))
        sd, error = b.std(0), (2 / 1000) ** 0.5
        assert ((a.mean(0) - b.mean(0)) / sd).abs().max() < 3 * error
        assert (a.std(0) / sd).log().abs().max() < 4 * error / 2**0.5
