"""Leave-one-out against the closed form of a conjugate hierarchy; bf.loo corrects for q, az.loo does not."""

from __future__ import annotations

from dataclasses import replace

import arviz as az
import numpy as np
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models
from tests.scenarios import conjugate_hierarchy

DRAWS = 4000
OLD = az.__version__.startswith("0.")


def two_clients():
    generator = torch.Generator().manual_seed(0)
    return bf.Federation.from_arrays(
        {c: {"y": m + 0.5 * torch.randn(15, generator=generator)} for c, m in (("a", 0), ("b", 1))}
    )


def exact(data):
    """log p(y_i | the others) of mu ~ N(0, 2), alpha ~ N(mu, 1), y ~ N(alpha, 0.5)."""
    owner, y = data.owner.numpy(), data["y"].double().numpy()
    covariance = 4.0 + (owner[:, None] == owner) + 0.25 * np.eye(len(y))
    precision = np.linalg.inv(covariance)
    variance = 1 / precision.diagonal()
    gap = precision @ y * variance
    return -0.5 * gap**2 / variance - 0.5 * np.log(2 * np.pi * variance)


def pointwise(found):
    """Fields under ArviZ 0.2x and 1.x."""
    return (found.loo_i if OLD else found.elpd_i).values


@pytest.fixture(scope="module")
def fitted():
    """Without importance weights, which would be of q as it was before it is moved."""
    return bf.fit(conjugate_hierarchy, two_clients(), bf.SFVI(corrected=False))


def moved(posterior, sds=0.0, wider=1.0):
    """Move every client's Normal by some of its standard deviations, and make it wider by a factor."""
    own = posterior.local_params
    sd = (-own["local.log_precision"] / 2).exp()
    wrong = {
        "local.loc": own["local.loc"] + sds * sd,
        "local.log_precision": own["local.log_precision"] - 2 * np.log(wider),
    }
    return replace(posterior, local_params={**own, **wrong})


@pytest.mark.parametrize(
    ("sds", "wider"), [(0.0, 1.0), (0.0, 1.8), (0.7, 1.6)], ids=["exact", "wide", "off and wide"]
)
def test_loo_is_the_closed_form_for_any_q(fitted, sds, wider):
    """The sum of 30 rows is right to about 0.02 nats with 4000 draws. az.loo is off by 0.5 in a row, 4 in the sum."""
    idata = moved(fitted, sds, wider).to_arviz(DRAWS)
    truth = exact(fitted.federation)
    found = pointwise(bf.loo(idata))
    assert np.abs(found - truth).max() < 0.06
    assert abs(found.sum() - truth.sum()) < 0.15
    plain = pointwise(az.loo(idata, pointwise=True))
    if (sds, wider) == (0.0, 1.0):
        np.testing.assert_allclose(plain, found, atol=5e-3)
    else:
        assert plain.sum() < truth.sum() - 3


def test_the_fields_are_consistent(fitted):
    found = bf.loo(moved(fitted, 0.0, 1.8).to_arviz(DRAWS))
    each = pointwise(found)
    total, p = (found.elpd_loo, found.p_loo) if OLD else (found.elpd, found.p)
    assert float(total) == pytest.approx(each.sum())
    ddof = 0 if OLD else 1
    assert float(found.se) == pytest.approx((len(each) * each.var(ddof=ddof)) ** 0.5)
    assert found.n_data_points == 30
    assert float(found.pareto_k.max()) < 0.7
    assert not found.warning
    assert np.isfinite(p)


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # ArviZ 0.2x to pandas
def test_compare_accepts_it(fitted):
    """A model with an inaccurate q is not ranked lower."""
    found = {
        name: bf.loo(posterior.to_arviz(DRAWS))
        for name, posterior in {"as fitted": fitted, "off": moved(fitted, 0.5, 1.5)}.items()
    }
    ranks = az.compare(found)
    assert set(ranks.index) == set(found)
    assert float(ranks["elpd_diff"].abs().max()) < 0.2


def test_loo_of_a_file(fitted, tmp_path):
    idata = fitted.to_arviz(400)
    idata.to_netcdf(tmp_path / "idata.nc", engine="h5netcdf")
    again = bf.loo(az.from_netcdf(tmp_path / "idata.nc"))
    np.testing.assert_allclose(pointwise(again), pointwise(bf.loo(idata)))


@pytest.mark.filterwarnings(
    "ignore:(Estimated shape parameter|Pareto k is above)"
)  # each row is all of its client
def test_loo_of_a_corrected_posterior_is_arvizs():
    posterior = bf.fit(models.eight_schools, datasets.eight_schools())
    assert posterior.correction is not None
    idata = posterior.to_arviz(400)
    assert "sample_stats" not in idata
    np.testing.assert_array_equal(
        pointwise(bf.loo(idata)), pointwise(az.loo(idata, pointwise=True))
    )


def test_a_large_k_is_warned_of():
    """In eight schools each row is the only one of its client."""
    idata = bf.fit(
        models.eight_schools, datasets.eight_schools(), bf.SFVI(corrected=False), rounds=5
    ).to_arviz(400)
    with pytest.warns(
        UserWarning, match="Pareto k is above .* observations, of .* clients .most of '"
    ):
        assert bf.loo(idata).warning


@pytest.mark.parametrize("algorithm", [bf.FedAvg(), bf.PACPFL()], ids=str)
def test_point_estimates_and_particles_have_no_density(algorithm):
    idata = bf.fit(models.eight_schools, datasets.eight_schools(), algorithm, rounds=1).to_arviz(8)
    name = algorithm.name
    with pytest.raises(
        ValueError, match=rf"have no log_q, which the correction needs \({name}: point est"
    ):
        bf.loo(idata)
