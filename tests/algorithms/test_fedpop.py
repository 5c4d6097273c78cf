"""FedPop against the maximum of a marginal likelihood that is known in closed form."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf


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


def best(federation):
    """Return (μ, log τ, slope) at the maximum of log p(θ) + Σ log N(y_i; μ + slope x_i, τ² 1 1ᵀ + 0.49 I)."""
    theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([theta], max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        search.zero_grad()
        mu, log_tau, slope = theta
        value = -dist.Normal(0.0, 10.0).log_prob(theta[[0, 2]]).sum() + log_tau**2 / 2
        for name in federation.names:
            own = federation.select([name])
            x, y = own["x"].double(), own["y"].double()
            covariance = (2 * log_tau).exp() + 0.49 * torch.eye(len(x), dtype=torch.float64)
            value = value - dist.MultivariateNormal(mu + slope * x, covariance).log_prob(y)
        value.backward()
        return value

    search.step(closure)
    return theta.detach()


@pytest.fixture(scope="module")
def fitted():
    federation = data()
    return federation, bf.fit(
        hierarchy, federation, bf.FedPop(), rounds=200, seed=0, progress=False
    )


def test_theta_is_at_the_maximum_of_the_marginal_likelihood(fitted):
    federation, posterior = fitted
    mu, log_tau, slope = best(federation)
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
