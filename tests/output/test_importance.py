"""Diagnostics of importance weights."""

import arviz as az
import numpy as np
import pytest
import torch

from bayesfed.output.importance import (
    effective_sample_size,
    pareto_smooth,
    tail_share,
    truncate_weights,
)


def test_the_share_of_weight_beyond_the_largest():
    """The part beyond x of the mean of a Pareto distribution with shape k is (x / x₀)^(1 − 1/k)."""
    for k in (0.5, 0.7):
        draws = torch.arange(1, 10_001, dtype=torch.float64).div(10_001).pow(-k)  # quantiles
        beyond = float(draws.max()) ** (1 - 1 / k)
        assert tail_share(draws.log(), k) == pytest.approx(beyond, rel=0.2)
    assert tail_share(draws.log(), 1.2) == float("inf")


def test_the_effective_sample_size_counts_equal_weights():
    assert effective_sample_size(torch.tensor([0.5, 0.5, 0.0, 0.0])) == pytest.approx(2.0)
    assert effective_sample_size(torch.ones(7)) == pytest.approx(7.0)


def test_weights_are_truncated_at_the_root_of_their_number_times_the_mean():
    raw = torch.cat([torch.ones(99), torch.tensor([1000.0])]).double()
    weights = truncate_weights(raw.log())
    assert float(weights.sum()) == pytest.approx(1.0)
    assert float(weights[99] / weights[0]) == pytest.approx(10 * float(raw.mean()))


def test_a_log_weight_that_is_nan_counts_as_no_weight():
    weights = truncate_weights(torch.tensor([0.0, torch.nan, 0.0]))
    assert weights.tolist() == [0.5, 0.0, 0.5]


@pytest.mark.skipif(not az.__version__.startswith("0."), reason="ArviZ 0.2x has psislw")
@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_smoothed_weights_are_those_of_arviz(scale):
    log_weights = scale * torch.randn(
        2000, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    found, k = pareto_smooth(log_weights)
    theirs, their_k = az.psislw(log_weights.numpy())
    assert k == pytest.approx(float(their_k), abs=0.02)
    np.testing.assert_allclose(found.log_softmax(0).numpy(), theirs, atol=0.03)


def test_weights_without_a_tail_are_not_smoothed():
    equal = torch.full((500,), -3.0)
    assert torch.equal(pareto_smooth(equal)[0], equal.double())
    assert pareto_smooth(equal)[1] == 0.0
    assert pareto_smooth(torch.tensor([0.0] + 499 * [-1000.0]))[1] == float("inf")
