"""Programs that are correct start without a word; of 200 see experiments/attempts_programs.md."""

import pytest

import bayesfed as bf
from tests.invariants.programs import program


@pytest.mark.parametrize("seed", range(20))
def test_a_correct_program_raises_no_warning(seed):
    model, federation = program(seed)
    bf.start(model, federation, rounds=1, batch_size=2 if seed % 2 else None)
