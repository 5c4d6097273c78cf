"""Highest-density intervals, against ArviZ's."""

import arviz as az
import numpy as np
import pytest

from bayesfed.report.numbers import highest_density


@pytest.mark.parametrize("prob", [0.5, 0.94])
@pytest.mark.parametrize("kind", ["skewed", "counts"])
def test_they_are_those_of_arviz(kind, prob):
    generator = np.random.default_rng(0)
    draws = (
        generator.gamma(2.0, size=(301, 4))
        if kind == "skewed"
        else generator.poisson(3.0, (301, 4))
    )
    name = "hdi_prob" if az.__version__.startswith("0.") else "prob"
    expected = np.stack([az.hdi(np.asarray(one), **{name: prob}) for one in draws.T])
    np.testing.assert_array_equal(highest_density(draws, prob), expected)
