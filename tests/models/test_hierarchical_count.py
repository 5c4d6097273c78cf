import math

import pytest
import torch
from scipy.stats import halfnorm, norm, poisson

from bayesfed.data.federation import Federation
from bayesfed.models import hierarchical_count


def test_sites(check_sites):
    check_sites(hierarchical_count, {"mu": (), "tau": (), "beta": (2,)}, {"alpha": ()})


def test_batched_draws_agree_with_single_draws(check_draws):
    check_draws(hierarchical_count)


@pytest.mark.parametrize("exposure", [None, (2.5, 1.0, 0.3)], ids=["without", "with exposure"])
def test_log_joint_by_hand(log_joint, exposure):
    clients = {
        "A": {"x": [[1.0, -2.0], [0.5, 0.0]], "y": [3, 0]},
        "B": {"x": [[3.0, 1.0]], "y": [7]},
    }
    if exposure:
        clients["A"]["exposure"], clients["B"]["exposure"] = exposure[:2], exposure[2:]
    a, b, c = exposure or (1.0, 1.0, 1.0)
    expected = (
        norm(0, 5).logpdf(0.5)  # mu
        + halfnorm(0, 1).logpdf(0.75)  # tau
        + norm(0, 1).logpdf([0.4, -1.1]).sum()  # beta
        + norm(0.5, 0.75).logpdf([1.2, -0.3]).sum()  # alpha
        + poisson(a * math.exp(1.2 + 0.4 * 1.0 - 1.1 * -2.0)).logpmf(3)
        + poisson(b * math.exp(1.2 + 0.4 * 0.5)).logpmf(0)
        + poisson(c * math.exp(-0.3 + 0.4 * 3.0 - 1.1 * 1.0)).logpmf(7)
    )
    values = {
        "mu": torch.tensor(0.5),
        "tau": torch.tensor(0.75),
        "beta": torch.tensor([0.4, -1.1]),
        "alpha": torch.tensor([[1.2], [-0.3]]),
    }
    federation = Federation.from_arrays(clients)
    assert log_joint(hierarchical_count, federation, values) == pytest.approx(expected, abs=1e-10)
