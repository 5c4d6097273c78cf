"""Control variates against expectations that are known."""

import pytest
import torch

from bayesfed.steps.control_variates import controls, expectation

D = torch.float64


def test_quadratic_functions_of_a_normal_are_exact_from_few_draws_of_anything():
    g = torch.Generator().manual_seed(0)
    loc = torch.randn(3, 2, generator=g, dtype=D)
    root = torch.tensor([[0.8, 0.0], [0.5, 1.2]], dtype=D)
    covariance = root @ root.mT
    w = loc + torch.rand(20, 3, 2, generator=g, dtype=D)  # uniform draws beside the mean
    slope = -(w - loc) @ torch.linalg.inv(covariance)
    terms = controls(w, slope)
    assert terms.shape == (20, 3, 5)
    products = (w[..., None] * w[..., None, :]).flatten(2)
    torch.testing.assert_close(expectation(w, terms), loc, atol=1e-8, rtol=0)
    expected = (covariance + loc[..., None] * loc[..., None, :]).flatten(1)
    torch.testing.assert_close(expectation(products, terms), expected, atol=1e-7, rtol=0)


def test_the_means_of_a_skewed_density_vary_less_than_averages():
    """w = log of a Gamma(5) variable: log π = 5 w - e^w, E[w] = digamma(5), over 200 sets of 40 draws."""
    g = torch.Generator().manual_seed(0)
    w = torch._standard_gamma(torch.full((40, 200, 1), 5.0, dtype=D), generator=g).log()
    mean = torch.digamma(torch.tensor(5.0, dtype=D))
    found = expectation(w, controls(w - w.mean(0), 5 - w.exp()))
    plain = w.mean(0)
    assert abs(float((found - mean).mean())) < 4 * float(found.std()) / 200**0.5 + 0.002
    assert float(found.std()) < 0.25 * float(plain.std())


@pytest.mark.parametrize(("draws", "terms"), [(18, 5), (17, 2), (9, 2), (8, 0)])
def test_few_draws_have_fewer_terms(draws, terms):
    w = torch.randn(draws, 1, 2)
    assert controls(w, -w).shape[-1] == terms
