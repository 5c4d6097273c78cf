"""The properties of particles that predictions depend on, and their defaults for all other guides."""

import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models

SCHOOLS = datasets.eight_schools()


@pytest.mark.parametrize("algorithm", [bf.FedAvg(), bf.SFVI()], ids=str)
def test_other_guides_draw_from_q_with_equal_weights(algorithm):
    program = algorithm.program(models.eight_schools, SCHOOLS)
    batch = SCHOOLS.batch()
    assert (program.particles, program.local_draws, program.weights_draws) == (1, 1, False)
    assert program.temper(batch) is batch


def test_particles_take_the_settings_of_the_algorithm():
    algorithm = bf.PACPFL(particles=3, draws=7, beta=2.0)
    program = algorithm.program(models.eight_schools, SCHOOLS)
    assert (program.particles, program.local_draws, program.weights_draws) == (3, 7, True)
    batch = SCHOOLS.batch()
    torch.testing.assert_close(program.temper(batch).scale, torch.full_like(batch.scale, 2.0))


def test_without_beta_every_row_counts_once():
    program = bf.PACPFL().program(models.eight_schools, SCHOOLS)
    batch = SCHOOLS.batch()
    assert program.temper(batch) is batch
