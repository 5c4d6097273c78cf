"""The posterior where the priors of globals depend on others or are heavy-tailed: against integrals on a grid."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

import bayesfed as bf
from bayesfed.output import trajectories
from bayesfed.output.prior_coordinates import find_prior_coordinates
from bayesfed.tracing.compiler import Compiler, using

QUANTILES = np.array([0.05, 0.25, 0.5, 0.75, 0.95])
TAU = np.exp(np.linspace(-9, 2.5, 4001))


def effects(federation):
    """Effects of three categories whose spread the data hardly determine: a funnel."""
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    effect = pyro.sample("effect", dist.Normal(torch.zeros(3), tau[..., None]).to_event(1))
    with federation.clients():
        level = pyro.sample("level", dist.Normal(0.0, 0.5))
        with federation.observations() as obs:
            of_kind = (effect * torch.nn.functional.one_hot(obs["kind"].long(), 3)).sum(-1)
            pyro.sample("y", dist.Normal(level + of_kind, 1.0), obs=obs["y"])


def cauchy(federation):
    """A level of which the data say only that it is not small: the posterior has the tail of its prior."""
    far = pyro.sample("far", dist.Cauchy(0.0, 1.0))
    with federation.clients():
        level = pyro.sample("level", dist.Normal(2 * far.tanh(), 0.5))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(level, 1.0), obs=obs["y"])


KINDS = {"a": [0.0, 1.0], "b": [1.0, 2.0, 2.0]}
ROWS = {"a": [0.2, -0.4], "b": [0.5, 0.1, -0.3]}


def kinds():
    clients = {name: {"y": ROWS[name], "kind": KINDS[name]} for name in ROWS}
    return bf.Federation.from_arrays(clients)


def covariance(tau):
    """Return the covariance of the five rows given tau, with effects and levels integrated out."""
    kind, client = np.array([0, 1, 1, 2, 2]), np.array([0, 0, 1, 1, 1])
    same_kind, same_client = (x[:, None] == x for x in (kind, client))
    return np.eye(5) + tau**2 * same_kind + 0.25 * same_client


def grid_quantiles(x, log_density):
    """Return quantiles of a density on a grid ``(G,)`` of unequal steps."""
    weight = np.exp(log_density - log_density.max()) * np.gradient(x)
    return np.interp(QUANTILES, weight.cumsum() / weight.sum(), x)


def test_a_funnel_of_globals_has_its_neck():
    y = np.concatenate([ROWS["a"], ROWS["b"]])
    zero = np.zeros(5)
    log_density = [
        stats.halfnorm.logpdf(tau) + stats.multivariate_normal.logpdf(y, zero, covariance(tau))
        for tau in TAU
    ]
    exact = grid_quantiles(TAU, np.array(log_density))
    weight = np.exp(np.array(log_density) - max(log_density)) * np.gradient(TAU)
    posterior = bf.fit(effects, kinds(), seed=0, progress=False)
    found = np.quantile(posterior.sample(20_000)["tau"].numpy(), QUANTILES)
    reached = np.interp(found, TAU, weight.cumsum() / weight.sum())
    assert np.abs(reached[:4] - QUANTILES[:4]).max() < 0.045, (found, exact)
    assert found[4] == pytest.approx(exact[4], rel=0.1)


def test_a_cauchy_global_has_its_tail():
    y = np.array([2.5, 2.0, 1.5, 2.2])
    grid = np.tan(np.linspace(-np.pi / 2 + 1e-4, np.pi / 2 - 1e-4, 20_001))
    covariance_of_rows = np.eye(4) + 0.25 * np.kron(np.eye(2), np.ones((2, 2)))
    normal = stats.multivariate_normal(np.zeros(4), covariance_of_rows)
    log_likelihood = normal.logpdf(y - 2 * np.tanh(grid)[:, None])
    exact = grid_quantiles(grid, stats.cauchy.logpdf(grid) + log_likelihood)
    clients = {"a": {"y": y[:2]}, "b": {"y": y[2:]}}
    posterior = bf.fit(cauchy, bf.Federation.from_arrays(clients), seed=0, progress=False)
    found = np.quantile(posterior.sample(20_000)["far"].numpy(), QUANTILES)
    np.testing.assert_allclose(found[:4], exact[:4], atol=0.15, rtol=0.1)
    assert found[4] == pytest.approx(exact[4], rel=0.3)


def scales(federation):
    """Positive variables whose priors have a density at 0, or a heavy tail."""
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    rate = pyro.sample("rate", dist.Exponential(torch.tensor([0.5, 3.0])).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(1.5))
    with federation.clients():
        level = pyro.sample("level", dist.Normal(0.0, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(level + rate.sum(-1), sigma), obs=obs["y"])


def test_priors_are_standard_normal_in_their_coordinates():
    posterior = bf.fit(scales, kinds(), bf.SFVI(corrected=False), rounds=2, progress=False)
    program, scaling = posterior.program, posterior.program.guide.globals
    generator = torch.Generator().manual_seed(0)
    n = 20_000
    uniform = torch.rand(n, 4, generator=generator, dtype=torch.float64)
    values = torch.cat(
        [
            torch.as_tensor(stats.halfnorm(scale=2.0).ppf(uniform[:, :1])),
            torch.as_tensor(stats.expon(scale=[2.0, 1 / 3]).ppf(uniform[:, 1:3])),
            torch.as_tensor(stats.halfcauchy(scale=1.5).ppf(uniform[:, 3:])),
        ],
        1,
    )
    loc, unit = (torch.cat([getattr(s, x) for s in scaling.values()]) for x in ("loc", "scale"))
    z = (values.log() - loc) / unit
    v, _ = find_prior_coordinates(program, posterior.params, z[:5]).from_guide(z)
    torch.testing.assert_close(v, torch.special.ndtri(uniform), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("model", [effects, cauchy, scales])
def test_coordinates_are_changed_there_and_back_and_by_how_much_their_volume(model):
    data = kinds().to(dtype=torch.float64)
    posterior = bf.fit(model, data, bf.SFVI(corrected=False), rounds=2, progress=False)
    size = len(posterior.params["global.loc"])
    z = torch.randn(6, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    coordinates = find_prior_coordinates(posterior.program, posterior.params, z)
    v, log_det = coordinates.from_guide(z)
    torch.testing.assert_close(coordinates.to_guide(v), z, atol=1e-9, rtol=1e-9)
    for s in range(6):
        numeric = torch.stack(
            [
                coordinates.from_guide(z[s] + 1e-6 * unit)[0][0]
                - coordinates.from_guide(z[s] - 1e-6 * unit)[0][0]
                for unit in torch.eye(size, dtype=torch.float64)[:, None]
            ]
        )
        assert float((numeric / 2e-6).slogdet()[1]) == pytest.approx(float(log_det[s]), abs=1e-5)


@pytest.mark.parametrize("model", [effects, cauchy, scales])
def test_changes_of_coordinates_are_recorded(model):
    """Chains change coordinates thousands of times: each through Pyro's handlers would take most of their time."""
    posterior = bf.fit(model, kinds(), bf.SFVI(corrected=False), rounds=2, progress=False)
    v = torch.randn(4, len(posterior.params["global.loc"]))
    coordinates = find_prior_coordinates(posterior.program, posterior.params, v)
    expected = trajectories._to_guide(coordinates, v)
    with using(Compiler()) as compiler:
        for _ in range(2):
            torch.testing.assert_close(trajectories._to_guide(coordinates, v), expected)
    (graph,) = compiler.graphs.values()
    assert graph is not None


def test_a_prior_with_constants_keeps_the_coordinates_of_the_guide():
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.LogNormal(0.0, 1.0))
        with federation.clients():
            level = pyro.sample("level", dist.Normal(mu, tau))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(level, 1.0), obs=obs["y"])

    posterior = bf.fit(model, kinds(), rounds=2, progress=False)
    z = torch.randn(5, 2)
    assert find_prior_coordinates(posterior.program, posterior.params, z) is None
