import pytest
import torch
from scipy.stats import halfnorm, norm

from bayesfed.data.federation import Federation
from bayesfed.models import varying_intercept


def test_sites(check_sites):
    check_sites(varying_intercept, {"mu": (), "tau": (), "beta": (2,), "sigma": ()}, {"alpha": ()})


def test_batched_draws_agree_with_single_draws(check_draws):
    check_draws(varying_intercept)


def test_log_joint_by_hand(log_joint):
    federation = Federation.from_arrays(
        {
            "A": {"x": [[1.0, -2.0], [0.5, 0.0]], "y": [0.25, -1.0]},
            "B": {"x": [[3.0, 1.0]], "y": [2.0]},
        }
    )
    mu, tau, beta, sigma, alpha = 0.5, 0.75, [0.4, -1.1], 0.6, [1.2, -0.3]
    expected = (
        norm(0, 2).logpdf(mu)
        + halfnorm(0, 1).logpdf(tau)
        + norm(0, 2).logpdf(0.4)
        + norm(0, 2).logpdf(-1.1)
        + halfnorm(0, 1).logpdf(sigma)
        + norm(0.5, 0.75).logpdf(1.2)
        + norm(0.5, 0.75).logpdf(-0.3)
        + norm(1.2 + 0.4 * 1.0 - 1.1 * -2.0, 0.6).logpdf(0.25)
        + norm(1.2 + 0.4 * 0.5, 0.6).logpdf(-1.0)
        + norm(-0.3 + 0.4 * 3.0 - 1.1 * 1.0, 0.6).logpdf(2.0)
    )
    values = {
        "mu": torch.tensor(mu),
        "tau": torch.tensor(tau),
        "beta": torch.tensor(beta),
        "sigma": torch.tensor(sigma),
        "alpha": torch.tensor(alpha)[:, None],
    }
    assert log_joint(varying_intercept, federation, values) == pytest.approx(expected, abs=1e-10)
