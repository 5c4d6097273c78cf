"""Power-scaling by ArviZ from ``log_prior`` and ``log_likelihood``, against the conjugate hierarchy."""

import arviz as az
import matplotlib
import numpy as np
import pytest
import torch
from scipy.stats import norm

import bayesfed as bf
from bayesfed import datasets
from tests.scenarios import conjugate_hierarchy, known_scales, ragged

OLD = az.__version__.startswith("0.")
STEP = 1.01


@pytest.fixture(scope="module")
def federation():
    return ragged(6)


@pytest.fixture(scope="module")
def idata(federation):
    torch.set_num_threads(1)
    return bf.fit(conjugate_hierarchy, federation).to_arviz(8000)


def of_mu(federation, prior=1.0, likelihood=1.0):
    """The posterior of mu ~ N(0, 2) if the density of the prior, or of the rows, is raised to a power."""
    n = federation.lengths.double()
    total = torch.zeros(len(federation), dtype=torch.float64)
    total.index_add_(0, federation.owner, federation["y"].double())
    precision = 1 / (1 + 0.25 / (likelihood * n))
    whole = prior / 4 + precision.sum()
    return norm(float((precision * total / n).sum() / whole), float(whole.rsqrt()))


@pytest.mark.parametrize("part", ["prior", "likelihood"])
@pytest.mark.parametrize("power", [0.8, 1.25])
def test_weighted_draws_are_the_power_scaled_posterior(federation, idata, part, power):
    mu = idata.posterior["mu"].values.ravel()
    group = idata[f"log_{part}"]
    logs = sum(
        v.sum([d for d in v.dims if d not in ("chain", "draw")]) for v in group.data_vars.values()
    )
    log_weights = (power - 1) * logs.values.ravel()
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    truth = of_mu(federation, **{part: power})
    mean = weights @ mu
    error = np.square(weights).sum() ** 0.5  # of a mean, in standard deviations
    assert abs(mean - truth.mean()) < 4 * error * truth.std()
    assert abs(np.sqrt(weights @ (mu - mean) ** 2) / truth.std() - 1) < 4 * error / 2**0.5


def distance(p, q, width):
    """The cumulative Jensen-Shannon distance of two distribution functions (Kallioinen et al. 2024, appendix A)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        middle = np.log2((p + q) / 2)
        one = np.where(p > 0, p * (np.log2(p) - middle), 0).sum() * width
        other = np.where(q > 0, q * (np.log2(q) - middle), 0).sum() * width
    return np.sqrt((one + other) / ((p + q).sum() * width))


@pytest.mark.parametrize(("part", "error"), [("prior", 0.002), ("likelihood", 0.012)])
def test_sensitivity_is_that_of_the_closed_form(federation, idata, part, error):
    """That of the prior, 0.016, is four times that of the likelihood, which is mostly of the clients' own variables."""
    mu = idata.posterior["mu"].values
    grid = np.linspace(mu.min(), mu.max(), 4001)
    base, total = of_mu(federation), 0.0
    for power in (1 / STEP, STEP):
        other = of_mu(federation, **{part: power})
        found = [
            distance(base.cdf(grid), other.cdf(grid), grid[1] - grid[0]),
            distance(base.sf(grid), other.sf(grid), grid[1] - grid[0]),
        ]
        total += max(found)
    expected = total / (2 * np.log2(STEP))
    found = az.psens(idata, component=part) if OLD else az.psense(idata, group=part)
    assert float(found["mu"]) == pytest.approx(expected, abs=error)


@pytest.mark.skipif(OLD, reason="ArviZ 0.2x has no psense_summary and no plots of it")
def test_the_summary_and_the_plots_of_arviz_1():
    """The plots have a dimension alpha of their own, so that no variable may have that name."""
    matplotlib.use("Agg")
    idata = bf.fit(known_scales, datasets.eight_schools()).to_arviz()
    table = az.psense_summary(idata, var_names=["mu", "theta"])
    assert table.index[0] == "mu"
    assert (table[["prior", "likelihood"]].to_numpy() > 0).all()
    az.plot_psense_dist(idata, var_names=["mu"])
    az.plot_psense_quantities(idata, var_names=["mu"])
