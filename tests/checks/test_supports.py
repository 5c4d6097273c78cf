"""Outcomes outside the support of their distribution, or at an end without density, are refused by client and row."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import transforms

import bayesfed as bf

ROWS = [0.25, 0.5, 0.75]


def program(make):
    def model(federation):
        level = pyro.sample("level", dist.LogNormal(0.0, 1.0))
        with federation.clients():
            own = pyro.sample("own", dist.LogNormal(level.log(), 0.5))
            with federation.observations() as obs:
                pyro.sample("y", make(own), obs=obs.get("y"))

    return model


def start(make, value, algorithm, like=ROWS):
    rows = {"north": {"y": like}, "south": {"y": [like[0], value, like[2]]}}
    return bf.start(program(make), bf.Federation.from_arrays(rows), algorithm, rounds=1)


ENDS = {
    "Beta 0": (lambda a: dist.Beta(a, 2.0), 0.0),
    "Beta 1": (lambda a: dist.Beta(2.0, a), 1.0),
    "Gamma 0": (lambda a: dist.Gamma(a, 1.0), 0.0),
    "Kumaraswamy 1": (lambda a: dist.Kumaraswamy(2.0, a + 0.5), 1.0),
    "Uniform 1": (lambda a: dist.Uniform(0.0 * a, 1.0), 1.0),
    "logit-Normal 0": (
        lambda a: dist.TransformedDistribution(dist.Normal(a, 1.0), transforms.SigmoidTransform()),
        0.0,
    ),
    "RelaxedBernoulli 1": (lambda a: dist.RelaxedBernoulli(torch.tensor(0.7), logits=a), 1.0),
    "mixture of Gammas 0": (
        lambda a: dist.MixtureSameFamily(
            dist.Categorical(logits=torch.zeros(2)), dist.Gamma(torch.stack([a, a + 1], -1), 1.0)
        ),
        0.0,
    ),
}


@pytest.mark.parametrize("algorithm", [bf.SFVI(), bf.FedAvg()], ids=["SFVI", "FedAvg"])
@pytest.mark.parametrize(("make", "value"), ENDS.values(), ids=ENDS)
def test_an_end_without_density_is_refused(make, value, algorithm):
    with pytest.raises(
        ValueError, match=rf"client 'south', row 1: .*'y' is {value}.* an end of its"
    ):
        start(make, value, algorithm)


WITH_DENSITY = {
    "Exponential 0": (lambda a: dist.Exponential(a), 0.0),
    "HalfNormal 0": (lambda a: dist.HalfNormal(a), 0.0),
    "constant Gamma of 1": (lambda a: dist.Gamma(1.0, a), 0.0),
    "ContinuousBernoulli 1": (lambda a: dist.ContinuousBernoulli(logits=a), 1.0),
    "zero-inflated": (
        lambda a: dist.ZeroInflatedDistribution(dist.Gamma(a + 1, 1.0), gate=torch.tensor(0.3)),
        0.0,
    ),
    "Poisson 0": (lambda a: dist.Poisson(a), 0.0),
}


@pytest.mark.parametrize(("make", "value"), WITH_DENSITY.values(), ids=WITH_DENSITY)
def test_an_end_with_density_is_taken(make, value):
    like = [1.0, 2.0, 0.0] if "Poisson" in str(make(torch.tensor(1.0))) else ROWS
    start(make, value, bf.SFVI(), like)


def test_a_share_of_zero_under_a_dirichlet():
    def make(a):
        return dist.Dirichlet(torch.stack([a, a, a], -1))

    like = [[0.2, 0.3, 0.5]] * 3
    with pytest.raises(
        ValueError, match=r"client 'south', row 1: .*'y' is \[0.0, 0.5, 0.5\].* an end"
    ):
        start(make, [0.0, 0.5, 0.5], bf.SFVI(), like)


def counts(a):
    return dist.Multinomial(logits=torch.stack([a, 0 * a], -1), validate_args=False)


def test_counts_without_a_total_are_whole_numbers_of_any_sum():
    like = [[2.0, 1.0], [0.0, 0.0], [1.0, 5.0]]
    start(counts, [3.0, 9.0], bf.SFVI(), like)
    with pytest.raises(
        ValueError, match=r"client 'south', row 1: .*'y' is \[0.5, 0.5\].* outside its"
    ):
        start(counts, [0.5, 0.5], bf.SFVI(), like)


def test_more_than_the_total():
    def make(a):
        return dist.Multinomial(4, logits=torch.stack([a, 0 * a], -1))

    like = [[2.0, 1.0], [0.0, 4.0], [1.0, 3.0]]
    with pytest.raises(ValueError, match="client 'south', row 1: .*outside its support"):
        start(make, [3.0, 9.0], bf.SFVI(), like)
