"""The tests of ranks under uniform ranks, and under ranks with faults."""

import numpy as np
import pytest

from bayesfed.calibration import uniformity

L = uniformity.DRAWS


def uniform(n, sets, seed=0):
    return np.random.default_rng(seed).integers(0, L + 1, (n, sets))


@pytest.mark.parametrize("n", [20, 200])
def test_the_level_of_the_test_and_of_the_bands(n):
    """Of 4000 sets of uniform ranks 5 % have p up to 0.05, and leave the bands; statistics are discrete."""
    ranks = uniform(n, 4000, seed=1)
    p = uniformity.p_uniform(ranks, L)
    assert abs((p <= 0.05).mean() - 0.05) < 0.015
    assert abs((p <= 0.5).mean() - 0.5) < 0.04
    lower, upper = uniformity.bands(n, L)
    counts = uniformity.below(ranks, L)
    inside = ((counts >= lower) & (counts <= upper)).all(1)
    assert abs(inside.mean() - 0.95) < 0.015


def test_the_level_of_the_test_of_symmetry():
    p = np.array([uniformity.p_symmetric(uniform(30, 1, seed), L) for seed in range(80)])
    assert (p <= 0.05).mean() < 0.12 and (p <= 0.5).mean() > 0.35


def test_symmetry_of_entries_that_are_equal():
    """Eight copies of the ranks are no more evidence than one."""
    ranks = uniform(30, 1)
    assert uniformity.p_symmetric(np.repeat(ranks, 8, 1), L) == uniformity.p_symmetric(ranks, L)


def test_that_equal_entries_have_one_p_value():
    p = uniformity.p_uniform(np.repeat(uniform(30, 1), 5, 1), L)
    assert uniformity.combine(p) == pytest.approx(float(p[0]))


def test_that_ranks_at_one_end_are_no_wide_intervals():
    ranks = np.random.default_rng(0).integers(0, 3, (60, 1))
    words = uniformity.in_words(*uniformity.shift_and_spread(ranks, L))
    assert words == "estimates too high"


def test_standard_errors_of_few_replications():
    """Three ranks that are almost equal, in the middle, are no clear shift."""
    shift, _ = uniformity.shift_and_spread(np.array([[110], [111], [112]]), L)
    assert abs(shift) < 1
