"""Comparison of models: beside ArviZ on the same draws, and stacking beside an independent maximiser."""

from __future__ import annotations

import warnings

import arviz as az
import numpy as np
import pytest

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.output import elpds
from bayesfed.output.comparison import compare_sums, sum_elpds
from bayesfed.output.elpds import Elpds
from bayesfed.output.stacking import mixture_sums, stack

OLD = az.__version__.startswith("0.")
MODELS = (models.varying_intercept, models.varying_slope)


@pytest.fixture(scope="module")
def fits():
    return {model.__name__: bf.fit(model, datasets.grunfeld()) for model in MODELS}


def em(elpd, steps=4000):
    """Stacking weights by expectation maximisation, which moves slowly and never down."""
    density = np.exp(elpd - elpd.max(1, keepdims=True))
    weights = np.full(elpd.shape[1], 1 / elpd.shape[1])
    for _ in range(steps):
        weights = weights * (density / (density @ weights)[:, None]).mean(0)
    return weights


@pytest.mark.parametrize(("rows", "count"), [(20, 2), (400, 3), (2000, 6)])
def test_stacking_is_the_maximum_and_takes_a_few_exchanges(rows, count):
    rng = np.random.default_rng(count)
    elpd = rng.normal(-2, 1, (rows, count)) + rng.normal(0, 2, (rows, 1))
    asked = []

    def ask(weights):
        asked.append(weights)
        return mixture_sums(elpd, weights)

    found = stack(rows, count, ask)
    np.testing.assert_allclose(found, em(elpd), atol=2e-3)
    assert ask(found).value >= ask(em(elpd)).value - 1e-6
    assert len(asked) < 12
    assert all(w.sum() == pytest.approx(1) and (w >= 0).all() for w in asked)


def test_models_that_exclude_an_observation_are_stacked():
    elpd = np.array([[0.0, -800.0], [-900.0, 0.0], [0.0, -5.0]])
    found = stack(3, 2, lambda weights: mixture_sums(elpd, weights))
    np.testing.assert_allclose(found, [2 / 3, 1 / 3], atol=5e-3)


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # ArviZ 0.2x to pandas
@pytest.mark.filterwarnings("ignore:Estimated shape parameter")
def test_the_table_is_arvizs(fits):
    """Of the same draws, but for the standard errors, whose divisor is n under ArviZ 0.2x."""
    found = bf.compare(fits)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Pareto k is above")
        loos = {name: bf.loo(fit.to_arviz(2000)) for name, fit in fits.items()}
    expected = az.compare(loos)
    names = {"elpd": "elpd_loo", "p_loo": "p_loo"} if OLD else {"elpd": "elpd", "p_loo": "p"}
    assert found.table.index.tolist() == expected.index.tolist()
    for mine, theirs in (names | {"elpd_diff": "elpd_diff"}).items():
        gap = found.table[mine].to_numpy() - expected[theirs].astype(float).to_numpy()
        assert np.abs(gap).max() < (1e-4 if OLD else 0.11)  # ArviZ 1.x rounds
    divisor = (219 / 220) ** 0.5 if OLD else 1.0
    for name in ("se", "dse"):
        theirs = expected[name].astype(float).to_numpy()
        np.testing.assert_allclose(
            found.table[name] * divisor, theirs, rtol=1e-6 if OLD else 0.01, atol=0.06 * (not OLD)
        )
    np.testing.assert_allclose(found.table["weight"], expected["weight"].astype(float), atol=0.01)
    high = [(loos[n].pareto_k.values > loos[n].good_k).sum() for n in found.table.index]
    assert found.table["high_k"].tolist() == high
    assert ("Pareto k > 0.7 without" in found.caveat) == any(high)


def test_clients_are_compared_by_what_all_others_predict_of_them():
    schools = datasets.eight_schools()
    posterior = bf.fit(models.eight_schools, schools)
    found = bf.compare({"one": posterior, "same": posterior}, "client", num_samples=500)
    each = bf.leave_one_client_out(posterior, 500)
    assert found.table["elpd"].tolist() == [pytest.approx(each.elpd)] * 2
    assert found.table["se"].tolist() == [pytest.approx(each.se)] * 2
    assert found.table["dse"].tolist() == [0, 0]
    np.testing.assert_allclose(found.table["weight"], 0.5, atol=1e-6)
    assert found.count == 8 and "p_loo" not in found.table


def test_the_sums_of_pointwise_densities_are_enough():
    rng = np.random.default_rng(0)
    elpd = rng.normal(-3, 2, (60, 3)) + np.array([0.3, 0.0, 0.1])
    khat = rng.uniform(0, 1.2, (60, 3))
    each = [Elpds(elpd[:, k], elpd[:, k] + 0.1, khat[:, k], 0.7) for k in range(3)]
    sums = sum_elpds(each)
    found = compare_sums(
        list("abc"), sums, lambda w: mixture_sums(elpd, w), "observation", 0.7, {"b": "it moves"}
    )
    order = np.argsort(-elpd.sum(0))
    assert found.table.index.tolist() == ["abc"[k] for k in order]
    difference = elpd[:, order[:1]] - elpd[:, order]
    expected = {
        "elpd": elpd.sum(0)[order],
        "se": elpd.std(0, ddof=1)[order] * 60**0.5,
        "p_loo": 6.0,
        "elpd_diff": difference.sum(0),
        "dse": difference.std(0, ddof=1) * 60**0.5,
        "high_k": (khat > 0.7).sum(0)[order],
        "very_high_k": (khat > 1).sum(0)[order],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found.table[name], value, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(found.table["weight"], em(elpd)[order], atol=2e-3)
    assert "'b': it moves" in found.caveat and found.caveat.count("Pareto k > 0.7") == 3


def test_blocks_of_clients_give_the_same(fits, monkeypatch):
    whole = elpds.leave_each_out(fits["varying_slope"], "observation", 400, 0)
    monkeypatch.setattr(elpds, "NUMBERS", 400 * 50)
    parts = elpds.leave_each_out(fits["varying_slope"], "observation", 400, 0)
    np.testing.assert_allclose(parts.elpd, whole.elpd, rtol=1e-4)


def test_other_data_are_refused():
    schools = datasets.eight_schools()
    y = schools["y"].clone()
    y[3] += 1.0
    other = bf.Federation(
        {"y": y, "sigma": schools["sigma"]}, schools.offsets, schools.names, "school"
    )
    one, two = (bf.fit(models.eight_schools, data, rounds=2) for data in (schools, other))
    with pytest.raises(ValueError, match="client 'D' has other outcomes"):
        bf.compare({"one": one, "two": two})
    with pytest.raises(ValueError, match="client 'D' has other outcomes"):
        bf.compare({"one": one, "two": two}, "client")
    with pytest.raises(ValueError, match="unit is 'rows'; it must be 'observation' or 'client'"):
        bf.compare({"one": one}, "rows")
    with pytest.raises(ValueError, match="'one' and 'few' have other clients"):
        bf.compare({"one": one, "few": one.select(["A", "B"])})
    point = bf.fit(models.eight_schools, schools, bf.FedAvg(), rounds=1)
    with pytest.raises(ValueError, match="a fit by FedAvg has none"):
        bf.compare({"one": one, "point": point})
    with pytest.raises(ValueError, match="give at least one model"):
        bf.compare({})
    with pytest.raises(ValueError, match="there is no 'z'; the model's are y"):
        bf.compare({"one": one}, outcome="z")
