"""The program of a run: its initial values follow from the seed, its settings are checked."""

import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.engine.program import build_program
from bayesfed.guides.particles import PARTICLES

SCHOOLS = datasets.eight_schools()


def particles(seed):
    return build_program(models.eight_schools, SCHOOLS, bf.PACPFL(), seed).init[PARTICLES]


def test_the_seed_determines_the_initial_particles():
    assert torch.equal(particles(1), particles(1))
    assert not torch.equal(particles(1), particles(2))


def test_settings_are_checked():
    with pytest.raises(ValueError, match="local_steps is 0; it must be at least 1"):
        build_program(models.eight_schools, SCHOOLS, bf.SFVI(local_steps=0), seed=0)
