"""Tests that censored times and ordered categories run under very different algorithms, with finite results."""

import pytest
import torch

import bayesfed as bf
from bayesfed import models


@pytest.fixture
def outcomes():
    """Return six clients of eight rows."""
    generator = torch.Generator().manual_seed(0)

    def rows():
        x = torch.randn(8, 2, generator=generator)
        time = torch.exp(0.5 * x[:, 0] + 0.5 * torch.randn(8, generator=generator))
        end = 0.5 + 2 * torch.rand(8, generator=generator)
        return {
            "x": x,
            "time": time.minimum(end),
            "event": (time <= end) * 1.0,
            "y": torch.randint(0, 4, (8,), generator=generator),
        }

    return bf.Federation.from_arrays({f"hospital {i}": rows() for i in range(6)})


@pytest.mark.parametrize(
    "algorithm",
    [bf.SFVI(), bf.PVI(), bf.FedABML(), bf.PFedVEM(), bf.FOLA()],
    ids=str,
)
@pytest.mark.parametrize(
    "model",
    [models.weibull_survival, models.Cox([0.5, 1.5]), models.OrderedLogistic(4)],
    ids=["weibull_survival", "Cox", "OrderedLogistic"],
)
def test_two_rounds(model, algorithm, outcomes):
    posterior = bf.fit(model, outcomes, algorithm, rounds=2)
    draws = posterior.sample(20) | posterior.predict(num_samples=20) | posterior.log_likelihood()
    assert torch.isfinite(posterior.history["elbo"]).all()
    assert all(torch.isfinite(value).all() for value in draws.values())
