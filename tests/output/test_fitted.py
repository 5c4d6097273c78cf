"""The value that all functions of output take, without the methods of a posterior."""

from dataclasses import fields

import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.output import predictions
from bayesfed.output.fitted import Correction, Fitted


@pytest.fixture(scope="module")
def posterior():
    return bf.fit(models.eight_schools, datasets.eight_schools(), bf.PVI(), rounds=2)


def plain(posterior):
    """The value without a posterior's methods and what they have computed."""
    return Fitted(**{field.name: getattr(posterior, field.name) for field in fields(Fitted)})


def test_functions_need_no_posterior(posterior):
    fitted = plain(posterior)
    for name, value in predictions.sample(fitted, 10, seed=1).items():
        assert torch.equal(value, posterior.sample(10, seed=1)[name])


def test_selecting_clients_keeps_the_type(posterior):
    assert type(posterior.select(["A"])) is bf.Posterior
    assert type(plain(posterior).select(["A"])) is Fitted


def test_draws_of_a_correction_are_chosen_by_the_key(posterior):
    theta = torch.arange(100.0)[:, None, None, None]
    correction = Correction({"global": theta}, khat=0.1)
    first, again = (correction.sample(20, posterior.key(0))["global"] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, correction.sample(20, posterior.key(1))["global"])
    assert set(first.flatten().tolist()) <= set(range(100))
