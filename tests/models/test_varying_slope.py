import pytest
import torch
from scipy.stats import halfnorm, norm

from bayesfed.data.federation import Federation
from bayesfed.models import varying_slope


def test_sites(check_sites):
    check_sites(
        varying_slope,
        {"mu_alpha": (), "tau_alpha": (), "mu_beta": (2,), "tau_beta": (2,), "sigma": ()},
        {"alpha": (), "beta": (2,)},
    )


def test_batched_draws_agree_with_single_draws(check_draws):
    check_draws(varying_slope)


def test_log_joint_by_hand(log_joint):
    federation = Federation.from_arrays(
        {
            "A": {"x": [[1.0, -2.0], [0.5, 0.0]], "y": [0.25, -1.0]},
            "B": {"x": [[3.0, 1.0]], "y": [2.0]},
        }
    )
    expected = (
        norm(0, 2).logpdf(0.5)  # mu_alpha
        + halfnorm(0, 1).logpdf(0.75)  # tau_alpha
        + norm(0, 2).logpdf([0.4, -1.1]).sum()  # mu_beta
        + halfnorm(0, 1).logpdf([0.3, 1.5]).sum()  # tau_beta
        + halfnorm(0, 1).logpdf(0.6)  # sigma
        + norm(0.5, 0.75).logpdf([1.2, -0.3]).sum()  # alpha
        + norm(0.4, 0.3).logpdf([0.1, 0.9]).sum()  # beta[:, 0]
        + norm(-1.1, 1.5).logpdf([-2.0, 0.7]).sum()  # beta[:, 1]
        + norm(1.2 + 0.1 * 1.0 - 2.0 * -2.0, 0.6).logpdf(0.25)
        + norm(1.2 + 0.1 * 0.5, 0.6).logpdf(-1.0)
        + norm(-0.3 + 0.9 * 3.0 + 0.7 * 1.0, 0.6).logpdf(2.0)
    )
    values = {
        "mu_alpha": torch.tensor(0.5),
        "tau_alpha": torch.tensor(0.75),
        "mu_beta": torch.tensor([0.4, -1.1]),
        "tau_beta": torch.tensor([0.3, 1.5]),
        "sigma": torch.tensor(0.6),
        "alpha": torch.tensor([[1.2], [-0.3]]),
        "beta": torch.tensor([[[0.1, -2.0]], [[0.9, 0.7]]]),
    }
    assert log_joint(varying_slope, federation, values) == pytest.approx(expected, abs=1e-10)
