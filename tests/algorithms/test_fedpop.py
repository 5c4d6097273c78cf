"""FedPop against the maximum of a marginal likelihood that is known in closed form."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed.guides.fisher import prior_units
from bayesfed.rules import observed_information


def hierarchy(federation):
    """Normal intercepts with a common slope: a closed form for the prior's parameters, and a body without one."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    tau = pyro.sample("tau", dist.LogNormal(0.0, 1.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 10.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a + slope * obs["x"], 0.7), obs=obs.get("y"))


def data():
    generator = torch.Generator().manual_seed(1)

    def client(n):
        a, x = 2 + 1.5 * torch.randn((), generator=generator), torch.randn(n, generator=generator)
        return {"x": x, "y": a - 0.5 * x + 0.7 * torch.randn(n, generator=generator)}

    return bf.Federation.from_arrays({f"client {n}": client(2 + n % 5) for n in range(30)})


def negative_log_density(federation, theta):
    """−log p(θ) − Σ log N(y_i; μ + slope x_i, τ² 1 1ᵀ + 0.49 I) of θ = (μ, log τ, slope)."""
    mu, log_tau, slope = theta
    value = -dist.Normal(0.0, 10.0).log_prob(theta[[0, 2]]).sum() + log_tau**2 / 2
    for name in federation.names:
        own = federation.select([name])
        x, y = own["x"].double(), own["y"].double()
        covariance = (2 * log_tau).exp() + 0.49 * torch.eye(len(x), dtype=torch.float64)
        value = value - dist.MultivariateNormal(mu + slope * x, covariance).log_prob(y)
    return value


def lowest(value, size):
    """Return where a function of a vector of this size is lowest, from 0, and its Hessian there."""
    theta = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([theta], max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        search.zero_grad()
        found = value(theta)
        found.backward()
        return found

    search.step(closure)
    return theta.detach(), torch.autograd.functional.hessian(value, theta.detach())


def best(federation):
    """Return (μ, log τ, slope) at the maximum of the marginal density, and the information there."""
    return lowest(functools.partial(negative_log_density, federation), 3)


@pytest.fixture(scope="module", params=[pytest.param(200, marks=pytest.mark.slow), None])
def fitted(request):
    federation = data()
    return federation, bf.fit(
        hierarchy, federation, bf.FedPop(), rounds=request.param, seed=0, progress=False
    )


def test_theta_is_at_the_maximum_of_the_marginal_likelihood(fitted):
    federation, posterior = fitted
    (mu, log_tau, slope), _ = best(federation)
    found = {name: float(v) for name, v in posterior.params.items()}
    assert found["mu.loc"] == pytest.approx(float(mu), abs=0.02)
    assert found["tau.loc"] == pytest.approx(float(log_tau), abs=0.02)
    assert found["slope.loc"] == pytest.approx(float(slope), abs=0.02)


def test_the_clients_variables_have_the_posterior_given_theta(fitted):
    """Mean and standard deviation of each a_i; a client that took no part makes the same from its rows."""
    federation, posterior = fitted
    mu, tau = posterior.params["mu.loc"], posterior.params["tau.loc"].exp()
    new = posterior.personalize(federation, steps=600)
    for number, name in enumerate(federation.names):
        own = federation.select([name])
        rest = own["y"] - posterior.params["slope.loc"] * own["x"]
        precision = tau**-2 + len(rest) / 0.49
        mean, sd = (mu * tau**-2 + rest.sum() / 0.49) / precision, precision**-0.5
        for found in (posterior, new):
            loc = found.local_params["a.loc"][number].squeeze()
            scale = found.local_params["a.log_scale"][number].squeeze().exp()
            assert abs(float((loc - mean) / sd)) < 0.35, name
            assert 0.7 < float(scale / sd) < 1.4, name


@pytest.mark.parametrize("seed", range(3))
def test_a_run_without_rounds_ends_at_the_maximum(seed):
    """The means of Normal chains with control variates are exact, and Newton's method converges in a few rounds."""
    federation = data()
    optimum, information = best(federation)
    run = bf.start(hierarchy, federation, bf.FedPop(), seed=seed)
    while not run.stopping.converged:
        bf.step(run)
    assert run.done < 20
    theta = torch.stack([run.server["theta"][f"{name}.loc"] for name in ("mu", "tau", "slope")])
    away = (theta.flatten() - optimum) @ torch.linalg.cholesky(information)
    assert bool((away.abs() < observed_information.PRECISE).all())
    units = torch.tensor(
        [float(prior_units(run.program)[f"{n}.loc"]) for n in ("mu", "tau", "slope")]
    )
    found = run.server["newton"]["information"] / torch.outer(units, units)
    torch.testing.assert_close(found, information, rtol=0.05, atol=0.01 * float(information.max()))


def test_a_run_without_rounds_is_refused_where_the_server_cannot_take_newton_steps():
    with pytest.raises(ValueError, match="rounds"):
        bf.fit(hierarchy, data(), bf.FedPop(), clients_per_round=0.5)


def log_odds(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.LogNormal(0.0, 0.5))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Bernoulli(logits=a), obs=obs.get("y"))


@pytest.mark.parametrize("seed", range(3))
def test_a_run_with_clients_that_are_not_normal_ends_within_its_standard_error(seed):
    """Two to six outcomes a client: log p(D_i | θ) on a grid of 400 points. Within 4 standard errors."""
    generator = torch.Generator().manual_seed(2)
    counts = {
        f"{n}": torch.bernoulli(torch.full((2 + n % 5,), 0.7), generator=generator)
        for n in range(20)
    }
    federation = bf.Federation.from_arrays({name: {"y": y} for name, y in counts.items()})
    grid = torch.linspace(-8.0, 8.0, 400, dtype=torch.float64)

    def value(theta):
        mu, log_tau = theta
        total = -(mu**2) / 8 - log_tau**2 / 0.5
        for y in counts.values():
            a = mu + log_tau.exp() * grid
            likelihood = y.sum() * a - len(y) * torch.nn.functional.softplus(a)
            total = total + (likelihood - grid**2 / 2).logsumexp(0)
        return -total

    optimum, information = lowest(value, 2)
    run = bf.start(log_odds, federation, bf.FedPop(), seed=seed)
    while not run.stopping.converged:
        bf.step(run)
    assert run.done < 100
    found = torch.stack([run.server["theta"][f"{name}.loc"] for name in ("mu", "tau")]).flatten()
    away = (found - optimum) @ torch.linalg.cholesky(information)
    assert bool((away.abs() < 4 * observed_information.PRECISE).all())
