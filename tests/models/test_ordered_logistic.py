import numpy as np
import pytest
import torch
from pyro import poutine
from scipy.special import expit
from scipy.stats import dirichlet, halfnorm, norm
from statsmodels.miscmodels.ordinal_model import OrderedModel

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.data.federation import Federation


def test_sites(check_sites):
    sites = {"cutpoints": (3,), "tau": (), "beta": (2,)}
    check_sites(models.OrderedLogistic(4), sites, {"alpha": ()})


def test_batched_draws_agree_with_single_draws(check_draws):
    check_draws(models.OrderedLogistic(4))


def test_log_joint_by_hand(log_joint):
    federation = Federation.from_arrays(
        {
            "A": {"x": [[1.0, -2.0], [0.5, 0.0]], "y": [3, 0]},
            "B": {"x": [[3.0, 1.0]], "y": [2]},
        }
    )
    cutpoints = np.array([-1.0, 0.3, 2.5])
    beyond = np.concatenate([[0.0], expit(cutpoints), [1.0]])  # P(y < k) at α + xβ = 0
    slopes = expit(cutpoints) * expit(-cutpoints)
    expected = (
        dirichlet(np.ones(4)).logpdf(np.diff(beyond))
        + np.log(slopes).sum()  # |d probabilities / d cutpoints|
        + halfnorm(0, 1).logpdf(0.75)  # tau
        + norm(0, 2.5).logpdf([0.4, -1.1]).sum()  # beta
        + norm(0, 0.75).logpdf([1.2, -0.3]).sum()  # alpha
        + np.log(expit(1.2 + 0.4 * 1.0 - 1.1 * -2.0 - cutpoints[2]))
        + np.log(expit(cutpoints[0] - (1.2 + 0.4 * 0.5)))
        + np.log(np.diff(expit(cutpoints[1:] - (-0.3 + 0.4 * 3.0 - 1.1 * 1.0)))[0])
    )
    values = {
        "cutpoints": torch.tensor(cutpoints),
        "tau": torch.tensor(0.75),
        "beta": torch.tensor([0.4, -1.1]),
        "alpha": torch.tensor([[1.2], [-0.3]]),
    }
    assert log_joint(models.OrderedLogistic(4), federation, values) == pytest.approx(
        expected, abs=1e-10
    )


def rows(federation, values, categories):
    """Return the sample site of the rows at these values."""
    model = poutine.condition(models.OrderedLogistic(categories), data=values)
    trace = poutine.trace(model).get_trace(federation)
    trace.compute_log_prob()
    return trace.nodes["y"]


def test_the_likelihood_is_that_of_statsmodels():
    """OrderedModel has the same likelihood; its thresholds are the first cutpoint and the logarithms of the gaps."""
    federation = datasets.anes96()
    generator = np.random.default_rng(0)
    beta, cutpoints = generator.normal(size=3), np.sort(generator.normal(size=6))
    theirs = OrderedModel(federation["y"].numpy(), federation["x"].numpy(), distr="logit")
    expected = theirs.loglike(np.concatenate([beta, cutpoints[:1], np.log(np.diff(cutpoints))]))
    values = {
        "cutpoints": torch.tensor(cutpoints),
        "tau": torch.tensor(1.0),
        "beta": torch.tensor(beta),
        "alpha": torch.zeros(7, 1),
    }
    assert float(rows(federation, values, 7)["log_prob_sum"]) == pytest.approx(expected, abs=1e-8)


def test_far_from_all_cutpoints_nothing_is_infinite():
    """In single precision σ(a) − σ(b) = 0 from 17 on, where the probabilities are e^(c − location)."""
    torch.set_default_dtype(torch.float32)  # the fixture restores it
    federation = Federation.from_arrays(
        {"A": {"x": [[1.0]], "y": [1]}, "B": {"x": [[1.0]], "y": [2]}}
    )
    values = {
        "cutpoints": torch.tensor([-1.0, 1.0]),
        "tau": torch.tensor(1.0),
        "beta": torch.tensor([0.0]),
        "alpha": torch.tensor([[40.0], [-40.0]], requires_grad=True),
    }
    seen = rows(federation, values, 3)["log_prob"]
    expected = [np.log(np.exp(1.0) - np.exp(-1.0)) - 40, -41]
    np.testing.assert_allclose(seen[:, 0].detach(), expected, rtol=1e-6)
    (gradient,) = torch.autograd.grad(seen.sum(), values["alpha"])
    np.testing.assert_allclose(gradient[:, 0], [-1.0, 1.0], rtol=1e-6)


def test_invalid_categories_are_refused():
    with pytest.raises(ValueError, match="it must be 2 or more"):
        models.OrderedLogistic(1)


@pytest.mark.slow
def test_predictions_have_the_frequencies():
    """Shares of 944 voters: Monte Carlo error below 0.01, the posterior's sd about 0.015; 0.06 is four of them."""
    federation = datasets.anes96()
    predicted = bf.fit(models.OrderedLogistic(7), federation, rounds=20).predict()["y"]
    assert set(predicted.unique().tolist()) == set(range(7))
    for k in range(7):
        share = (predicted == k).double().mean()
        assert share == pytest.approx(float((federation["y"] == k).double().mean()), abs=0.06)
