"""FedABML on models of all kinds, on the toy of its paper, and on images of digits."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

import bayesfed as bf
from bayesfed import datasets, models
from tests.algorithms.test_fedabml import rms

float64 = pytest.mark.usefixtures("float64")


def groups(clients=8, rows=12, seed=0):
    """Levels that differ by 0.7 around 1.5, noise 0.5."""
    generator = torch.Generator().manual_seed(seed)
    level = 1.5 + 0.7 * torch.randn(clients, generator=generator)
    return bf.Federation.from_arrays(
        {
            f"client {i}": {
                "y": level[i] + 0.5 * torch.randn(rows, generator=generator),
                "kind": torch.randint(0, 3, (rows,), generator=generator),
            }
            for i in range(clients)
        }
    )


def by_parameters(federation):
    mu = pyro.param("mu", torch.tensor(0.0))
    tau = pyro.param("tau", torch.tensor(1.0), constraint=constraints.positive)
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, 0.5), obs=obs.get("y"))


def random_globals(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, 0.5), obs=obs.get("y"))


def with_noise_and_shares(federation):
    """A global that the likelihood reads, a simplex, a Student-t local prior and a positive local site."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
    rate = pyro.sample("rate", dist.LogNormal(0.0, 1.0))
    with federation.clients():
        a = pyro.sample("a", dist.StudentT(4.0, mu, 0.7))
        sigma = pyro.sample("sigma", dist.Gamma(4.0, 4.0 * rate))
        with federation.observations() as obs:
            pyro.sample("kind", dist.Categorical(shares), obs=obs.get("kind"))
            pyro.sample("y", dist.Normal(a, sigma), obs=obs.get("y"))


def marginal_likelihood(data):
    """The maximum of Σ log N(ȳ_i; μ, τ² + .25 / n), over a grid; and the clients' posteriors there."""
    means = torch.stack([data.select([name])["y"].mean() for name in data.names])
    n = data.rows / len(data)
    taus = torch.linspace(0.1, 3.0, 3000)
    fit = dist.Normal(means.mean(), (taus[:, None] ** 2 + 0.25 / n).sqrt()).log_prob(means).sum(1)
    tau = taus[fit.argmax()]
    precision = tau**-2 + n / 0.25
    return (
        means.mean(),
        tau,
        (means.mean() * tau**-2 + means * n / 0.25) / precision,
        precision**-0.5,
    )


@pytest.mark.slow
@float64
@pytest.mark.parametrize("batch_size", [None, 4])
def test_parameters_reach_the_maximum_marginal_likelihood(batch_size):
    """q is exact here, so that the ELBO's maximum is the marginal likelihood's; clients' posteriors as well."""
    data = groups()
    mu, tau, means, sd = marginal_likelihood(data)
    posterior = bf.fit(by_parameters, data, bf.FedABML(), rounds=100, batch_size=batch_size)
    assert abs(posterior.params["mu"] - mu) < 0.1 * tau
    assert abs(posterior.params["tau"].exp() - tau) < 0.15 * tau
    local = posterior.local_params
    assert rms((local["a.loc"][:, 0] - means) / sd) < (0.3 if batch_size is None else 0.8)
    torch.testing.assert_close(
        local["a.log_scale"][:, 0].exp(),
        sd.expand(8),
        rtol=0.15 if batch_size is None else 0.4,
        atol=0,
    )


@pytest.mark.slow
@float64
def test_random_globals_are_fitted_alike():
    data = groups()
    mu, tau, *_ = marginal_likelihood(data)
    posterior = bf.fit(random_globals, data, bf.FedABML(), rounds=100)
    draws = posterior.sample(500)
    assert abs(draws["mu"].mean() - mu) < 0.15 * tau
    assert abs(draws["tau"].mean() - tau) < 0.2 * tau
    assert draws["mu"].std() < 1e-9  # a point
    assert draws["a"].std(0).min() > 0.1


def test_a_prior_of_fixed_width_is_the_penalty_of_pfedme():
    """The paper's eq. 3.7: λ = 1 / (n s²) per row of n; clients shrink to the mean by n / (n + 1 / s²)."""
    width, rows, generator = 0.7, 5, torch.Generator().manual_seed(0)

    def program(federation):
        mu = pyro.param("mu", torch.tensor(0.5))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(mu, width))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))

    clients = {f"{i}": {"y": i + torch.randn(rows, generator=generator)} for i in range(6)}
    data = bf.Federation.from_arrays(clients)
    means = data["y"].reshape(6, rows).mean(1)
    shrunk = (rows * means + means.mean() / width**2) / (rows + 1 / width**2)
    for algorithm in (bf.FedABML(), bf.PFedMe(lam=1 / (rows * width**2))):
        posterior = bf.fit(program, data, algorithm)
        assert posterior.converged
        assert float(posterior.params["mu"]) == pytest.approx(float(means.mean()), abs=1e-3)
        found = posterior.sample(20_000)["a"].mean(0).reshape(-1)
        torch.testing.assert_close(found, shrunk, atol=0.015, rtol=0)


@pytest.mark.slow
@float64
def test_priors_that_are_not_normal_and_a_simplex():
    data = groups()
    posterior = bf.fit(with_noise_and_shares, data, bf.FedABML(), rounds=60)
    draws = posterior.sample(500)
    counts = torch.bincount(data["kind"], minlength=3) + 1.0  # and the Jacobian of the point
    shares = draws["shares"].mean(0).reshape(-1)
    assert (shares - counts / counts.sum()).abs().max() < 0.05
    levels = torch.stack([data.select([name])["y"].mean() for name in data.names])
    assert (draws["a"].mean(0).reshape(-1) - levels).abs().max() < 0.3
    spreads = torch.stack([data.select([name])["y"].std() for name in data.names])
    assert (draws["sigma"].mean(0).reshape(-1) / spreads - 1).abs().max() < 0.3


@pytest.mark.slow
@float64
def test_the_toy_of_the_paper():
    """Two clients with losses ½ (w − μ_i)ᵀ Σ_i⁻¹ (w − μ_i) and the same Σ: θ comes to the pooled posterior's mean."""
    truth = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    root = torch.tensor([[1.0, 0.0], [0.6, 0.8]])

    def model(federation):
        m = pyro.param("m", torch.zeros(2), event_dim=1)
        with federation.clients():
            w = pyro.sample("w", dist.Normal(m, 0.3 * torch.ones(2)).to_event(1))
            with federation.observations() as obs:
                y = dist.MultivariateNormal(w, scale_tril=root)
                pyro.sample("y", y, obs=obs["y"])

    data = bf.Federation.from_arrays({f"{i}": {"y": truth[i : i + 1]} for i in range(2)})
    algorithm = bf.FedABML(local_steps=10)
    before, after = (
        float((bf.fit(model, data, algorithm, rounds=r).params["m"] - truth.mean(0)).norm())
        for r in (1, 60)
    )
    assert after < 0.2 < before


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"spread": "learnt"}, {"hyper_scale": 1.0}], ids=["fixed", "learnt", "hyper"]
)
def test_it_learns_digits_as_it_ships(settings):
    """FedAvg's 20 rounds and fine-tuning reach 96.9 %, with an NLL of .18."""
    train, test = datasets.digits(clients=8)
    torch.manual_seed(0)
    model = models.Network(models.mlp(64, 10), **settings)
    posterior = bf.fit(model, train, bf.FedABML(), rounds=10, batch_size=10)
    probabilities = posterior.probabilities(test, 50)["y"]
    assert (probabilities.argmax(1) == test["y"]).float().mean() > 0.92  # 160 rows: s.e. .017
    assert -probabilities.gather(1, test["y"][:, None]).log().mean() < 0.35
