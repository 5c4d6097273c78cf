"""FOLA on hierarchies: clients' variables are integrated out, and draws stay in their supports."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

import bayesfed as bf
from bayesfed import datasets, models
from tests.algorithms.fola_rounds import EAGER, PAPER


def ragged_groups():
    rng = torch.Generator().manual_seed(5)
    return {
        f"g{i}": {"y": 2.0 + torch.randn((), generator=rng) + 0.8 * torch.randn(n, generator=rng)}
        for i, n in enumerate((2, 3, 5, 8, 4))
    }


def normal_normal(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    tau = pyro.param("tau", torch.tensor(0.7), constraint=constraints.positive)
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(alpha, 0.8), obs=obs.get("y"))


def marginal_likelihood(groups, mu, log_tau):
    total = 0.0
    for rows in groups.values():
        n = len(rows["y"])
        covariance = 0.64 * torch.eye(n) + (2 * log_tau).exp()
        marginal = torch.distributions.MultivariateNormal(mu.expand(n), covariance)
        total = total + marginal.log_prob(rows["y"])
    return total


def test_clients_variables_are_integrated_out_exactly(float64):
    """Value, gradient and Hessian of the normal-normal hierarchy's marginal likelihood, random and param globals."""
    groups = ragged_groups()
    federation = bf.Federation.from_arrays(groups)
    guide = bf.FOLA().program(normal_normal, federation).guide
    assert guide.integrated and list(guide.globals) == ["mu", "tau"]
    at = torch.tensor([1.5, -0.4])

    def ours(z):
        return guide.log_likelihood(z.expand(1, 5, 1, 2), federation.batch()).sum()

    def truth(z):
        return marginal_likelihood(groups, z[0], z[1])

    torch.testing.assert_close(ours(at), truth(at))
    found, exact = (torch.autograd.functional.jacobian(f, at) for f in (ours, truth))
    torch.testing.assert_close(found, exact)
    found, exact = (torch.autograd.functional.hessian(f, at) for f in (ours, truth))
    torch.testing.assert_close(found, exact)


def pooled_laplace(groups):
    """Mode and covariance of log p(θ) + log p(D | θ), by Newton's method on all rows; w_i given θ in closed form."""

    def pooled_density(z):
        prior = torch.distributions.Normal(0.0, 3.0).log_prob(z[0])
        prior = prior + torch.distributions.Normal(torch.tensor(0.7).log(), 1.0).log_prob(z[1])
        return prior + marginal_likelihood(groups, z[0], z[1])

    z = torch.tensor([1.5, -0.4])
    for _ in range(30):
        hessian = torch.autograd.functional.hessian(pooled_density, z)
        z = z - torch.linalg.solve(hessian, torch.autograd.functional.jacobian(pooled_density, z))
    return z, -torch.linalg.inv(torch.autograd.functional.hessian(pooled_density, z))


def test_as_it_comes_it_is_laplaces_method_of_the_pooled_hierarchy(float64):
    groups = ragged_groups()
    posterior = bf.fit(normal_normal, bf.Federation.from_arrays(groups), bf.FOLA(), rounds=30)
    mode, covariance = pooled_laplace(groups)
    loc, root = posterior.program.guide.family.normal(posterior.params)
    torch.testing.assert_close(loc, mode, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(root @ root.mT, covariance, atol=1e-6, rtol=1e-6)
    draws = posterior.sample(20_000)
    mu, tau, alpha = (draws[name] for name in ("mu", "tau", "alpha"))
    sd = covariance.diagonal().sqrt()
    assert abs(float(mu.std() / sd[0]) - 1) < 0.03
    assert abs(float(tau.log().std() / sd[1]) - 1) < 0.03
    # alpha of a group given draws of θ: N((mu / tau² + Σ y / .64) / h, 1 / h), h = 1 / tau² + n / .64
    for i, rows in enumerate(groups.values()):
        h = tau.flatten() ** -2 + len(rows["y"]) / 0.64
        centre = (mu.flatten() / tau.flatten() ** 2 + rows["y"].sum() / 0.64) / h
        standard = (alpha[:, i].flatten() - centre) * h.sqrt()
        assert abs(float(standard.mean())) < 0.03
        assert abs(float(standard.std()) - 1) < 0.03


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_it_stops_at_laplaces_method_of_the_pooled_hierarchy(float64, share):
    """Without a number of rounds, with all clients and with two of five in a round."""
    groups = ragged_groups()
    posterior = bf.fit(
        normal_normal, bf.Federation.from_arrays(groups), bf.FOLA(), clients_per_round=share
    )
    assert posterior.converged
    assert len(posterior.history["elbo"]) < 20 / share
    mode, covariance = pooled_laplace(groups)
    loc, root = posterior.program.guide.family.normal(posterior.params)
    sd = covariance.diagonal().sqrt()
    torch.testing.assert_close((loc - mode) / sd, torch.zeros(2), atol=0.05, rtol=0.0)
    torch.testing.assert_close(
        (root @ root.mT).diagonal().sqrt() / sd, torch.ones(2), atol=0.05, rtol=0.0
    )


@pytest.mark.slow
def test_it_finds_its_way_where_clients_say_little(float64):
    """Log-odds that differ between small clients, spreads near 0: no Hessian of theirs is definite at first."""
    federation = datasets.china_smoking()
    run = bf.start(models.hierarchical_logistic, federation, bf.FOLA(), rounds=12)
    for _ in range(12):
        bf.step(run)
    guide, rows = run.program.guide, federation.batch()
    z = run.server.loc.clone().requires_grad_()
    total = guide.log_likelihood(z.expand(1, len(federation), 1, len(z)), rows).sum()
    total = total + guide.log_prior(z[None], run.program.schema).sum()
    (grad,) = torch.autograd.grad(total, z)
    posterior = guide.family.normal(run.plan.algorithm.params(run.server))[1]
    assert float((posterior.mT @ grad).norm()) < 0.02  # in posterior standard deviations


def supports(federation):
    shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
    root = pyro.sample("root", dist.LKJCholesky(2, 2.0))
    tau = pyro.param("tau", torch.ones(2), constraint=constraints.interval(0.1, 5.0))
    with federation.clients():
        w = pyro.sample(
            "w", dist.MultivariateNormal(torch.zeros(2), scale_tril=tau[..., None] * root)
        )
        with federation.observations() as obs:
            pyro.sample("kind", dist.Categorical(shares), obs=obs.get("kind"))
            mean = w[..., 0] + w[..., 1] * obs["x"]
            pyro.sample("y", dist.Normal(mean, 0.5), obs=obs.get("y"))


@pytest.mark.parametrize("settings", [{}, PAPER | {"fisher": "hessian"}], ids=["default", "paper"])
def test_draws_stay_in_any_support(float64, settings):
    rng = torch.Generator().manual_seed(0)
    federation = bf.Federation.from_arrays(
        {
            f"c{i}": {
                "x": torch.randn(n, generator=rng),
                "y": torch.randn(n, generator=rng),
                "kind": torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), n, True, generator=rng),
            }
            for i, n in enumerate((6, 9, 12, 20))
        }
    )
    posterior = bf.fit(supports, federation, bf.FOLA(**settings), rounds=3, execution=EAGER)
    draws = posterior.sample(500)
    torch.testing.assert_close(draws["shares"].sum(-1), torch.ones_like(draws["shares"][..., 0]))
    assert (draws["shares"] > 0).all()
    matrix = draws["root"] @ draws["root"].mT
    torch.testing.assert_close(matrix.diagonal(0, -2, -1), torch.ones_like(matrix[..., 0]))
    assert (draws["tau"] > 0.1).all() and (draws["tau"] < 5).all()
    assert all((value.std(0) > 0).any() for value in draws.values())
    if (
        not settings
    ):  # shares alone: a Dirichlet posterior, of which this is Laplace's approximation
        counts = torch.stack([(federation["kind"] == k).sum() for k in range(3)])
        share = (counts + 1) / (counts + 1).sum()
        assert ((draws["shares"].reshape(-1, 3).mean(0) - share).abs() < 0.02).all()


def skewed(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with federation.clients():
        rate = pyro.sample("rate", dist.Gamma(4.0, 4.0 / mu.exp()))
        with federation.observations() as obs:
            pyro.sample("y", dist.Poisson(rate), obs=obs.get("y"))


def test_few_variables_with_another_prior_are_approximated_by_themselves(float64):
    """A Gamma prior of Poisson rates: in log rate the posterior Gamma(a, b) has its mode at log a / b, curvature a."""
    counts = {"a": [0.0, 2.0, 1.0], "b": [4.0, 6.0, 5.0, 3.0], "c": [1.0, 1.0]}
    federation = bf.Federation.from_arrays({n: {"y": torch.tensor(y)} for n, y in counts.items()})
    posterior = bf.fit(skewed, federation, bf.FOLA(), rounds=15)
    guide = posterior.program.guide
    assert str(guide) == "FullRank globals, mean-field locals"
    loc = guide.family.normal(posterior.params)[0]
    rate = posterior.sample(20_000)["rate"].log()
    for i, y in enumerate(counts.values()):
        a, b = 4 + sum(y), len(y) + 4 / loc.exp()
        assert abs(float(rate[:, i].mean() - (a / b).log())) < 5 * a**-0.5 / 20_000**0.5
        assert abs(float(rate[:, i].std()) * a**0.5 - 1) < 0.03

    def marginal(mu):  # of counts whose rate is Gamma: a sum of log Gamma functions
        total = torch.distributions.Normal(0.0, 2.0).log_prob(mu)
        for y in counts.values():
            a, b = 4 + sum(y), len(y) + 4 / mu.exp()
            total = total + 4 * (4 / mu.exp()).log() - a * b.log()
        return total

    mu = loc[0].clone()
    for _ in range(20):
        slope = torch.autograd.functional.jacobian(marginal, mu)
        curvature = torch.autograd.functional.hessian(marginal, mu)
        mu = mu - slope / curvature
    torch.testing.assert_close(loc[0], mu)  # Laplace's method is out by a constant here
    sd = posterior.sample(20_000)["mu"].std()
    assert abs(float(sd) * float(-curvature) ** 0.5 - 1) < 0.03
