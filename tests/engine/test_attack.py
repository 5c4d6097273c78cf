"""The membership game of ``experiments/attack.py``: what a run claims is not exceeded, and faults are found."""

import dataclasses

import pytest
import torch

import bayesfed as bf
from tests.scripts import load

attack = load("experiments/attack.py")

pytestmark = pytest.mark.filterwarnings("ignore:the noise that privacy adds")
TRIALS = 80
"""Of which half give a bound: at most ln(.88 / .12) = 1.9, in which an ε of 1 has room to be exceeded."""


def measured(name, trials=TRIALS):
    zeros, ones = map(list, zip(*attack.played(name, 0, trials), strict=True))
    return attack.lower_bound(zeros, ones, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedAvg, Laplace", "PACPFL, Laplace", "SFVI, Laplace"])
def test_the_claimed_epsilon_is_not_exceeded(name):
    """In one of 200 runs of an honest mechanism the limits are passed, and then by little."""
    assert attack.GAMES[name].start(0).epsilon == pytest.approx(1.0)
    assert measured(name, 40) <= 1.0


@pytest.mark.slow
def test_the_adversary_has_power():
    """Of a mechanism that tells a lot, most is found: ε = 100, of which 80 trials can show 1.9."""
    loud = dataclasses.replace(
        attack.GAMES["FedAvg, Laplace"],
        privacy=bf.Privacy(clip=0.5, noise=0.02, mechanism="laplace"),
    )
    starts = loud.start(0), loud.start(1)
    pairs = [[attack.ratio(loud, starts, bit) for _ in range(TRIALS)] for bit in (0, 1)]
    assert attack.lower_bound(*pairs, 0.0) > 1.5


def by_seed(self, *arguments, draw=bf.Privacy._draw):
    return draw(dataclasses.replace(self, seed=0), *arguments)


def faint(self, scale, *arguments, draw=bf.Privacy._draw):
    return draw(self, scale / 8, *arguments)


def whole(self, upload, clip):
    return dict(upload), torch.ones(len(next(iter(upload.values()))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "instead"),
    [("_draw", by_seed), ("_draw", faint), ("clip_uploads", whole)],
    ids=["noise of the run's seed", "an eighth of the noise", "no clipping"],
)
def test_faults_are_found(fault, instead, monkeypatch):
    monkeypatch.setattr(bf.Privacy, fault, instead)
    assert measured("PACPFL, Laplace") > 1.0


def test_the_last_bits_of_noise():
    """One noisy number in five excludes one of two sums under floating-point noise, none under discrete noise.

    So of ε = 1 more than 2 are shown, where 500 trials can show up to 4.
    """
    found = {}
    for name, noise in attack.BITS.items():
        zeros, ones = map(list, zip(*attack.last_bits(noise, 1000), strict=True))
        sure = sum(abs(value) == float("inf") for value in zeros + ones) / 2000
        found[name] = sure, attack.lower_bound(zeros, ones, 0.0)
    before, after = found.values()
    assert before[0] > 0.1 and before[1] > 2.0
    assert after[0] == 0
