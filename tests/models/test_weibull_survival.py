import math

import numpy as np
import pytest
import torch
from scipy.stats import halfnorm, kstest, lognorm, norm, weibull_min

import bayesfed as bf
from bayesfed import models
from bayesfed.data.federation import Federation
from bayesfed.models.weibull_survival import CensoredWeibull


def test_sites(check_sites):
    globals_ = {"mu": (), "tau": (), "beta": (2,), "shape": ()}
    check_sites(models.weibull_survival, globals_, {"alpha": ()}, outcome="time")


def test_batched_draws_agree_with_single_draws(check_draws):
    check_draws(models.weibull_survival, outcome="time")


@pytest.mark.parametrize("censored", [True, False])
def test_log_joint_by_hand(log_joint, censored):
    clients = {
        "A": {"x": [[1.0, -2.0], [0.5, 0.0]], "time": [3.0, 0.2]},
        "B": {"x": [[3.0, 1.0]], "time": [7.0]},
    }
    if censored:
        clients["A"]["event"], clients["B"]["event"] = [0, 1], [1]
    first = weibull_min(1.3, scale=math.exp(1.2 + 0.4 * 1.0 - 1.1 * -2.0))
    expected = (
        norm(0, 2).logpdf(0.5)  # mu
        + halfnorm(0, 1).logpdf(0.75)  # tau
        + norm(0, 1).logpdf([0.4, -1.1]).sum()  # beta
        + lognorm(0.5).logpdf(1.3)  # shape
        + norm(0.5, 0.75).logpdf([1.2, -0.3]).sum()  # alpha
        + (first.logsf(3.0) if censored else first.logpdf(3.0))
        + weibull_min(1.3, scale=math.exp(1.2 + 0.4 * 0.5)).logpdf(0.2)
        + weibull_min(1.3, scale=math.exp(-0.3 + 0.4 * 3.0 - 1.1 * 1.0)).logpdf(7.0)
    )
    values = {
        "mu": torch.tensor(0.5),
        "tau": torch.tensor(0.75),
        "beta": torch.tensor([0.4, -1.1]),
        "shape": torch.tensor(1.3),
        "alpha": torch.tensor([[1.2], [-0.3]]),
    }
    federation = Federation.from_arrays(clients)
    assert log_joint(models.weibull_survival, federation, values) == pytest.approx(
        expected, abs=1e-10
    )


def test_draws_are_weibull_whether_censored_or_not():
    """Kolmogorov's test of 4000 draws has a p-value below 0.001 once in a thousand seeds."""
    distribution = CensoredWeibull(
        torch.tensor([0.7, -1.0]), torch.tensor(1.6), torch.tensor([0.0, 1.0])
    )
    draws = distribution.sample((4000,)).numpy()
    for column, log_scale in zip(draws.T, (0.7, -1.0), strict=True):
        assert kstest(column, weibull_min(1.6, scale=np.exp(log_scale)).cdf).pvalue > 1e-3


def test_censored_times_are_predicted_beyond_the_censoring():
    """Five patients of six are at risk at time 1, so the posterior's times are mostly longer.

    If all had an event at 1, at most half of them would be.
    """
    rows = {"x": [[0.0]] * 6, "time": [1.0] * 6, "event": [1, 0, 0, 0, 0, 0]}
    federation = Federation.from_arrays({f"hospital {i}": rows for i in range(4)})
    posterior = bf.fit(models.weibull_survival, federation)
    times = posterior.predict()["time"]
    assert times.min() > 0
    assert (times > 1).double().mean() > 0.7
