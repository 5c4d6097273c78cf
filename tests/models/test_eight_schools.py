import pytest
import torch
from scipy.stats import halfcauchy, multivariate_normal, norm

from bayesfed import datasets
from bayesfed.data.federation import Federation
from bayesfed.models import eight_schools


def test_sites(check_sites):
    check_sites(eight_schools, {"mu": (), "tau": ()}, {"theta": ()})


def test_batched_draws_agree_with_single_draws(check_draws):
    check_draws(eight_schools)


def test_log_joint_by_hand(log_joint):
    federation = Federation.from_arrays(
        {"A": {"y": [28.0, 5.0], "sigma": [15.0, 4.0]}, "B": {"y": [-3.0], "sigma": [16.0]}}
    )
    mu, tau, theta = 4.0, 3.0, [6.5, -1.25]
    expected = (
        norm(0, 5).logpdf(mu)
        + halfcauchy(0, 5).logpdf(tau)
        + norm(mu, tau).logpdf(theta[0])
        + norm(mu, tau).logpdf(theta[1])
        + norm(theta[0], 15).logpdf(28)
        + norm(theta[0], 4).logpdf(5)
        + norm(theta[1], 16).logpdf(-3)
    )
    values = {
        "mu": torch.tensor(mu),
        "tau": torch.tensor(tau),
        "theta": torch.tensor(theta)[:, None],
    }
    assert log_joint(eight_schools, federation, values) == pytest.approx(expected, abs=1e-10)


def test_the_effects_integrate_out_to_the_known_marginal(log_joint):
    # p(y, θ | μ, τ) / p(θ | y, μ, τ) is Normal(y; μ, σ² + τ²), whatever θ
    federation = datasets.eight_schools()
    mu, tau = torch.tensor(7.0), torch.tensor(6.0)
    y, sigma = federation["y"], federation["sigma"]
    theta = torch.randn(8) * 10
    precision = 1 / tau**2 + 1 / sigma**2
    posterior = norm(((mu / tau**2 + y / sigma**2) / precision), precision.rsqrt())
    joint = log_joint(eight_schools, federation, {"mu": mu, "tau": tau, "theta": theta[:, None]})
    marginal = joint - posterior.logpdf(theta).sum()
    cov = torch.diag(sigma**2 + tau**2).numpy()
    expected = (
        norm(0, 5).logpdf(7)
        + halfcauchy(0, 5).logpdf(6)
        + multivariate_normal(torch.full((8,), 7.0).numpy(), cov).logpdf(y.numpy())
    )
    assert marginal == pytest.approx(expected, abs=1e-10)
