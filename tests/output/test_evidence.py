"""Estimates of log p(D_i | θ) against closed forms and quadrature."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import multivariate_normal, norm, poisson

import bayesfed as bf
from bayesfed.elbo import noise
from bayesfed.output import evidence, locals_given_theta, modes
from bayesfed.output.conditionals import has_block
from bayesfed.output.log_densities import sum_log_weights
from bayesfed.output.log_target import log_target
from bayesfed.output.polynomials import LEJA, SPREAD, _first_pivots, find_polynomial

TAU, SIGMA = 0.7, 0.5


def normal(federation):
    """Each client's level, and a slope that is not linear in its unconstrained coordinate."""
    slope = pyro.sample("slope", dist.LogNormal(0.0, 1.0))
    with federation.clients():
        level = pyro.sample("level", dist.Normal(0.0, TAU))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(level + slope * obs["x"], SIGMA), obs=obs.get("y"))


def counts(federation):
    slope = pyro.sample("slope", dist.LogNormal(0.0, 1.0))
    with federation.clients():
        level = pyro.sample("level", dist.Normal(0.0, TAU))
        with federation.observations() as obs:
            pyro.sample("y", dist.Poisson((level + slope * obs["x"]).exp()), obs=obs.get("y"))


def data(of_mean, rows=4):
    generator = np.random.default_rng(0)
    clients = {}
    for i in range(3):
        x = generator.uniform(0.5, 1.5, rows + i)
        mean = generator.normal(0, TAU) + 0.8 * x
        clients[f"c{i}"] = {"x": x, "y": of_mean(generator, mean)}
    return bf.Federation.from_arrays(clients).to(dtype=torch.float64)


def closed_form(slope, x, y):
    covariance = SIGMA**2 * np.eye(len(x)) + TAU**2
    return multivariate_normal(slope * x, covariance).logpdf(y)


def by_quadrature(slope, x, y):
    def density(level):
        return norm(0, TAU).pdf(level) * np.exp(poisson.logpmf(y, np.exp(level + slope * x)).sum())

    return np.log(quad(density, -5, 5, epsabs=0, epsrel=1e-8, points=[0.0])[0])


CASES = {
    "Normal": (normal, lambda g, mean: mean + SIGMA * g.normal(size=len(mean)), closed_form, 1e-5),
    "Poisson": (
        counts,
        lambda g, mean: g.poisson(np.exp(mean)).astype(float),
        by_quadrature,
        0.002,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_estimates_near_and_far_from_the_centre_of_q(case):
    """Slopes from 0.2 to 4, where q(slope) is about 0.8 ± 0.2. An estimate by one draw of q is nats off at the ends."""
    model, outcome, truth, tolerance = CASES[case]
    federation = data(outcome)
    posterior = bf.fit(model, federation, bf.SFVI(corrected=False), rounds=15)
    assert has_block(posterior.program)
    slopes = np.geomspace(0.2, 4.0, 12)
    start = posterior.program.guide.globals["slope"]
    z = (torch.as_tensor(np.log(slopes)) - start.loc) / start.scale
    theta = {"global": z[:, None, None, None]}
    rows = [
        (federation.select([n])["x"].numpy(), federation.select([n])["y"].numpy())
        for n in federation.names
    ]
    expected = np.array([sum(truth(slope, x, y) for x, y in rows) for slope in slopes])
    by_laplace = sum_log_weights(posterior, theta, len(z), noise.key(0), laplace=True).numpy()
    by_q = sum_log_weights(posterior, theta, len(z), noise.key(0)).numpy()
    assert np.abs(by_laplace - expected).max() < tolerance
    assert np.abs(by_q - expected).max() > 1.0


def slopes_of_counts():
    """A fit, draws of its global log slope, the last two far from the others, and the exact log evidence at these."""
    federation = data(CASES["Poisson"][1])
    posterior = bf.fit(counts, federation, bf.SFVI(corrected=False), rounds=5)
    start = posterior.program.guide.globals["slope"]
    near = 0.1 * torch.randn(300, generator=torch.Generator().manual_seed(1))
    u = torch.cat([near, torch.tensor([-1.0, 1.5])]).double() - 0.2
    theta = {"global": ((u - start.loc) / start.scale)[:, None, None, None]}
    rows = [
        (federation.select([n])["x"].numpy(), federation.select([n])["y"].numpy())
        for n in federation.names
    ]
    return (
        posterior,
        u,
        theta,
        lambda s: sum(by_quadrature(float(u[s].exp()), x, y) for x, y in rows),
    )


def test_a_polynomial_in_the_globals_replaces_quadrature_at_most_of_many_draws(monkeypatch):
    """Not at draws that are far from the others, and at none where the polynomial is not exact enough."""
    posterior, u, theta, exact = slopes_of_counts()
    computed, by_points = [], evidence._by_points
    monkeypatch.setattr(
        evidence,
        "_by_points",
        lambda given, *a: computed.append(given.size) or by_points(given, *a),
    )

    def estimate():
        computed.clear()
        return sum_log_weights(posterior, theta, len(u), noise.key(0), laplace=True).numpy()

    found = estimate()
    assert sum(computed) < len(u) / 4
    for s in (*range(0, len(u), 40), -2, -1):
        assert abs(found[s] - exact(s)) < 0.003
    monkeypatch.setattr(evidence, "ERROR", 0.0)
    all_points = estimate()
    assert sum(computed) == len(u)  # at no draw twice
    assert 0 < np.abs(found - all_points).max() < 0.003


@pytest.mark.parametrize(
    ("case", "rows", "points"), [("Normal", 4, 1), ("Poisson", 60, 3), ("Poisson", 4, 7)]
)
def test_fewer_points_where_they_give_the_same(case, rows, points, monkeypatch):
    """One point of a Gaussian likelihood, and three of clients with many rows."""
    model, outcome, truth, tolerance = CASES[case]
    federation = data(outcome, rows)
    posterior = bf.fit(model, federation, bf.SFVI(corrected=False), rounds=5)
    start = posterior.program.guide.globals["slope"]
    slopes = np.geomspace(0.5, 1.2, 200)
    z = (torch.as_tensor(np.log(slopes)) - start.loc) / start.scale
    used, by_points = set(), evidence._by_points

    def recorded(given, mode, root, own):
        if given.size > evidence.COMPARED:
            used.add(len(own.log_weights))
        return by_points(given, mode, root, own)

    monkeypatch.setattr(evidence, "_by_points", recorded)
    monkeypatch.setattr(evidence, "WORTH", 0)
    monkeypatch.setattr(evidence, "find_polynomial", lambda z, degree: None)
    theta = {"global": z[:, None, None, None]}
    found = sum_log_weights(posterior, theta, len(z), noise.key(0), laplace=True).numpy()
    clients = [federation.select([name]) for name in federation.names]
    for s in range(0, 200, 20):
        expected = sum(truth(slopes[s], own["x"].numpy(), own["y"].numpy()) for own in clients)
        assert found[s] == pytest.approx(expected, abs=tolerance)
    assert used == {points}


def test_estimates_where_q_is_absurdly_far_from_the_mode():
    """The mean of q(level | far) is linear in far, and the posterior given far hardly moves beyond far = 3."""

    def saturating(federation):
        far = pyro.sample("far", dist.Cauchy(0.0, 1.0))
        with federation.clients():
            level = pyro.sample("level", dist.Normal(far.tanh(), TAU))
            with federation.observations() as obs:
                pyro.sample("y", dist.Poisson(level.exp()), obs=obs["y"])

    clients = {"a": {"y": [3.0, 1.0, 2.0]}, "b": {"y": [0.0, 4.0]}}
    federation = bf.Federation.from_arrays(clients).to(dtype=torch.float64)
    posterior = bf.fit(saturating, federation, bf.SFVI(corrected=False), rounds=15)
    far = np.array([-1e4, -300.0, -30.0, -3.0, 3.0, 30.0, 300.0, 1e4])
    start = posterior.program.guide.globals["far"]
    z = (torch.as_tensor(far) - start.loc) / start.scale
    found = sum_log_weights(posterior, {"global": z[:, None, None, None]}, 8, noise.key(0), True)

    def truth(at, y):
        def density(level):
            return norm(at, TAU).pdf(level) * np.exp(poisson.logpmf(y, np.exp(level)).sum())

        return np.log(quad(density, -6, 6, epsabs=0, epsrel=1e-8, points=[at])[0])

    expected = [
        sum(truth(np.tanh(at), np.array(rows["y"])) for rows in clients.values()) for at in far
    ]
    assert np.abs(found.numpy() - np.array(expected)).max() < 0.1


def test_errors_of_common_points_cancel_in_weights():
    """A thousand clients with three variables each: the log weights of draws of θ keep their order."""

    def many(federation):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with federation.clients():
            w = pyro.sample("w", dist.Normal(mu, 0.7).to_event(1))
            with federation.observations() as obs:
                pyro.sample("y", dist.Bernoulli(logits=(w * obs["x"]).sum(-1)), obs=obs["y"])

    generator = np.random.default_rng(0)
    x = generator.normal(size=(1000, 4, 3))
    w = 0.7 * generator.normal(size=(1000, 1, 3))
    y = 1.0 * (generator.random((1000, 4)) < 1 / (1 + np.exp(-(x * w).sum(-1))))
    clients = {f"c{i}": {"x": x[i], "y": y[i]} for i in range(1000)}
    posterior = bf.fit(many, bf.Federation.from_arrays(clients), bf.SFVI(corrected=False), rounds=3)
    theta = {"global": 0.05 * torch.randn(20, 1, 1, 3)}
    one, other = (
        sum_log_weights(posterior, theta, 20, noise.key(seed), laplace=True) for seed in (0, 1)
    )
    plain = [sum_log_weights(posterior, theta, 20, noise.key(seed)) for seed in (0, 1)]
    assert float((one - other).std()) < 0.5 < float((plain[0] - plain[1]).std())


def three_counts(federation):
    """Three independent counts of a client, whose logarithms are skewed where the spread is large."""
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    with federation.clients():
        level = pyro.sample("level", dist.Normal(torch.zeros(3), tau[..., None]).to_event(1))
        with federation.observations() as obs:
            rate = dist.Poisson(level.exp()).to_event(1)
            pyro.sample("y", rate, obs=obs["y"])


def test_skewed_posteriors_of_several_variables():
    """The error of log p(D | θ) hardly changes with a spread between 0.1 and 3, on which the skewness depends.

    With 16 points of one width it changes by 0.05 to 0.8, by the noise of the clients.
    """
    counts = np.array([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [3.0, 0.0, 1.0]])
    clients = {f"c{i}": {"y": y[None]} for i, y in enumerate(counts)}
    federation = bf.Federation.from_arrays(clients).to(dtype=torch.float64)
    posterior = bf.fit(three_counts, federation, bf.SFVI(corrected=False), rounds=5)
    taus = np.geomspace(0.1, 3.0, 9)
    start = posterior.program.guide.globals["tau"]
    z = (torch.as_tensor(np.log(taus)) - start.loc) / start.scale
    u = np.linspace(-30, 10, 40_001)

    def truth(tau, y):
        density = norm(0, tau).pdf(u) * poisson.pmf(y, np.exp(u))
        return np.log(density.sum() * (u[1] - u[0]))

    expected = np.array([sum(truth(tau, y) for y in counts.flatten()) for tau in taus])
    for seed in range(3):
        theta = {"global": z[:, None, None, None]}
        found = sum_log_weights(posterior, theta, len(z), noise.key(seed), laplace=True)
        assert np.ptp(found.numpy() - expected) < 0.1


def test_chunks_of_clients_add_up(monkeypatch):
    posterior = bf.fit(normal, data(CASES["Normal"][1]), bf.SFVI(corrected=False), rounds=2)
    theta = {"global": torch.randn(5, 1, 1, 1, dtype=torch.float64)}
    together = sum_log_weights(posterior, theta, 5, noise.key(0), laplace=True)
    monkeypatch.setattr("bayesfed.data.chunks.PASS", 1)
    monkeypatch.setattr("bayesfed.data.chunks.SMALL", 1)
    torch.testing.assert_close(
        sum_log_weights(posterior, theta, 5, noise.key(0), laplace=True), together
    )


def test_poor_estimates_are_made_from_more_candidates(monkeypatch):
    """p(level | mu) has two modes, of which a Laplace approximation has one: it loses up to log 2 of the evidence.

    The other mode is 11 standard deviations away, which candidates reach at a third of the keys, such as 1.
    """

    def squares(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            level = pyro.sample("level", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(level.square(), 0.8), obs=obs["y"])

    clients = {"a": [2.0], "b": [1.0, 2.5]}
    federation = bf.Federation.from_arrays({n: {"y": y} for n, y in clients.items()})
    federation = federation.to(dtype=torch.float64)
    posterior = bf.fit(squares, federation, bf.SFVI(corrected=False), rounds=5)
    mu = torch.linspace(-1.0, 1.0, 100, dtype=torch.float64)
    start = posterior.program.guide.globals["mu"]
    theta = {"global": ((mu - start.loc) / start.scale)[:, None, None, None]}

    def truth(at, y):
        def density(level):
            return np.exp(-((level - at) ** 2) / 2 - ((level**2 - y) ** 2).sum() / 1.28)

        return np.log(quad(density, -8, 8, epsabs=0, epsrel=1e-8, points=[-1.5, 1.5])[0])

    exact = [sum(truth(at, np.array(y)) for y in clients.values()) for at in mu.tolist()]

    def error():
        found = sum_log_weights(posterior, theta, len(mu), noise.key(1), laplace=True).numpy()
        return float((found - np.array(exact)).std())  # a constant does not matter

    assert error() < 0.4  # all estimates are around the higher mode
    monkeypatch.setattr(modes, "_higher_modes", lambda given, u, root: (u, root))
    monkeypatch.setattr(locals_given_theta, "SHARE", 4)  # a quarter of these few draws is compared
    approximations, approximate = [], locals_given_theta.laplace_approximation
    monkeypatch.setattr(
        locals_given_theta,
        "laplace_approximation",
        lambda given: approximations.append(given.size) or approximate(given),
    )
    with_more = error()
    assert approximations == [len(mu)]  # one for all candidates of both kinds
    with monkeypatch.context() as patched:  # common candidates do not depend on the blocks
        patched.setattr(locals_given_theta, "PASS", 1)
        assert error() == pytest.approx(with_more, rel=1e-6)
    monkeypatch.setattr(locals_given_theta, "POOR", np.inf)

    assert with_more < 0.7 < error()


@pytest.mark.parametrize("draws", [[[0.0]] * 50, [[float("inf")]] * 10 + [[1.0]] * 40])
def test_draws_without_a_spread_or_an_end_have_no_polynomial(draws):
    assert find_polynomial(torch.tensor(draws), 2) is None


@pytest.mark.parametrize("each", [SPREAD, LEJA])
def test_a_polynomial_is_of_the_highest_degree_that_draws_are_enough_for(each):
    z = torch.randn(400, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for degree, coefficients in ((1, 4), (2, 10), (3, 20)):
        found = find_polynomial(z, degree, each)
        assert found.features.shape[1] == coefficients
        assert len(found.few) == len(found.few.unique()) == math.ceil(each * coefficients)
        values = (z @ torch.arange(1.0, 4.0, dtype=torch.float64)) ** degree
        torch.testing.assert_close(found.fitted(values[found.few, None])[:, 0], values)
    assert find_polynomial(torch.randn(400, 1000), 3, each) is None


@pytest.mark.parametrize("dependent", [False, True])
def test_the_first_points_of_a_polynomial_are_the_pivots_of_an_lu_decomposition(dependent):
    features = torch.randn(60, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if dependent:
        features[:, 5] = 2 * features[:, 1]
        features[:, 6] = 0.0
    permutation, _, _ = torch.linalg.lu(features)
    assert torch.equal(_first_pivots(features), permutation.argmax(0)[:7])


def common_level(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        level = pyro.sample("level", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Poisson(level.exp() * obs["x"]), obs=obs.get("y"))


def test_spreads_below_the_precision_of_a_level():
    """In single precision all points of quadrature round to the mode there: log p(D_i | θ) is that without a spread."""
    federation = data(lambda generator, mean: generator.poisson(np.exp(mean)))
    federation = federation.to(dtype=torch.float32)
    fitted = bf.fit(common_level, federation, bf.SFVI(corrected=False), rounds=5, progress=False)
    log_tau = torch.tensor([-6.0, -9.0, -12.0, -14.0, -15.0, -16.0, -18.0, -25.0, -35.0])
    parts = []
    for name, value in (("mu", torch.full_like(log_tau, 0.77)), ("tau", log_tau)):
        scaling = fitted.program.guide.globals[name]
        parts.append((value[:, None] - scaling.loc) / scaling.scale)
    theta = {"global": torch.cat(parts, 1)[:, None, None]}
    chunk, key = torch.arange(len(federation)), fitted.key(0)
    found = locals_given_theta.evidence_by_laplace(fitted, theta, len(log_tau), chunk, key)
    for i, name in enumerate(federation.names):
        rows = federation.select([name])
        rate = np.exp(0.77) * rows["x"].double().numpy()
        expected = poisson.logpmf(rows["y"].numpy(), rate).sum()
        np.testing.assert_allclose(found[:, i], expected, atol=2e-3)


def rows_that_depend(federation):
    """Rows of a client with a common part: their precision matrix overflows where ``step`` is tiny."""
    step = pyro.sample("step", dist.LogNormal(0.0, 1.0))
    with federation.clients():
        path = pyro.sample(
            "path",
            dist.MultivariateNormal(torch.zeros(3), precision_matrix=torch.eye(3) / step**2),
        )
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal((path * obs["x"]).sum(-1), 1.0), obs=obs.get("y"))


@pytest.mark.parametrize("laplace", [False, True])
def test_a_draw_at_which_a_matrix_has_no_factor_has_no_weight(laplace):
    """1 / step² is 1e40 there, infinite in single precision; the other draws are as exact as without it."""
    generator = np.random.default_rng(0)
    clients = {
        f"c{i}": {"x": generator.normal(size=(4, 3)), "y": generator.normal(size=4)}
        for i in range(6)
    }
    federation = bf.Federation.from_arrays(clients).to(dtype=torch.float32)
    algorithm = bf.SFVI(corrected=False)
    fitted = bf.fit(rows_that_depend, federation, algorithm, rounds=3, progress=False)
    log_step = torch.linspace(-0.5, 0.5, 9)
    log_step[5] = math.log(1e-20)
    scaling = fitted.program.guide.globals["step"]
    theta = {"global": ((log_step - scaling.loc) / scaling.scale)[:, None, None, None]}
    found = sum_log_weights(fitted, theta, 9, fitted.key(0), laplace)
    assert found[5] == -torch.inf and bool(found[[0, 1, 2, 3, 4, 6, 7, 8]].isfinite().all())
    if laplace:  # exact: all is Normal
        for s, size in enumerate(log_step.double().exp().tolist()):
            if s != 5:
                expected = 0.0
                for rows in clients.values():
                    covariance = np.eye(4) + size**2 * rows["x"] @ rows["x"].T
                    expected += multivariate_normal.logpdf(rows["y"], np.zeros(4), covariance)
                assert float(found[s]) == pytest.approx(expected, abs=1e-3)


def test_a_prior_at_which_a_matrix_has_no_factor_has_no_weight():
    """Clients with many variables are asked for the prior, too, where 1 / step² is infinite."""

    def paths(federation):
        step = pyro.sample("step", dist.LogNormal(0.0, 1.0))
        with federation.clients():
            precision = torch.eye(24) / step[..., None, None] ** 2
            path = pyro.sample(
                "path", dist.MultivariateNormal(torch.zeros(24), precision_matrix=precision)
            )
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(path[..., 0], 1.0), obs=obs.get("y"))

    federation = bf.Federation.from_arrays({n: {"y": [1.0, 2.0]} for n in "abc"})
    algorithm = bf.SFVI(corrected=False)
    fitted = bf.fit(paths, federation.to(dtype=torch.float32), algorithm, rounds=2, progress=False)
    z = torch.tensor([[0.0], [0.5], [-60.0], [-0.5]])
    found = log_target(fitted, z, fitted.key(0), sum_log_weights, laplace=False)
    assert found.isfinite().tolist() == [True, True, False, True]
