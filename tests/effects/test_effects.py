"""Tests of effects against the same quantities computed by hand, draw by draw, from pooled data and NumPy."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

import bayesfed as bf
from bayesfed import effects, models
from tests.effects.by_hand import S, as_numpy, check, fitted


@pytest.fixture(scope="module")
def gaussian(frame):
    return fitted("y ~ x * kind + (1 | hospital)", frame)


def test_levels_are_compared_with_the_reference_of_the_formula(frame):
    posterior, draws = fitted("y ~ T(kind, ref='b') + x + (1 | hospital)", frame)
    found = effects.comparisons(posterior, "kind", num_samples=S)
    assert found.labels.values.tolist() == [["kind", "a - b"], ["kind", "c - b"]]
    check(found, [draws[f"T(kind, ref='b')[{k}]"] for k in "ac"])
    summed = bf.formula("y ~ S(kind) + (1 | hospital)", frame)
    assert summed.coding.reference("kind") is None and summed.coding.reference("x") is None


def test_comparisons_and_slopes_of_a_gaussian_interaction(gaussian, frame):
    posterior, draws = gaussian
    mean = frame.x.mean()
    found = effects.comparisons(posterior, "kind", num_samples=S)
    assert found.labels.values.tolist() == [["kind", "b - a"], ["kind", "c - a"]]
    check(found, [draws[f"kind[{k}]"] + draws[f"x:kind[{k}]"] * mean for k in "bc"])
    found = effects.slopes(posterior, "x", by="kind", num_samples=S)
    own = [0.0, draws["x:kind[b]"], draws["x:kind[c]"]]
    check(found, [draws["x"] + one for one in own], 1e-3)
    assert found.labels["kind"].tolist() == ["a", "b", "c"]


def test_marginal_means_are_those_of_the_balanced_grid(gaussian, frame):
    posterior, draws = gaussian
    mean = frame.x.mean()
    by_hand = {"a": draws["Intercept"] + draws["x"] * mean}
    for k in "bc":
        by_hand[k] = by_hand["a"] + draws[f"kind[{k}]"] + draws[f"x:kind[{k}]"] * mean
    found = effects.marginal_means(posterior, "kind", num_samples=S)
    assert "at the average client" in found.level
    assert "a balanced grid of 3 rows" in found.level
    check(found, [by_hand[k] for k in "abc"])
    pairs = found.pairs()
    assert pairs.labels["contrast"].tolist() == ["b - a", "c - a", "c - b"]
    check(pairs, [by_hand[j] - by_hand[i] for i, j in ("ab", "ac", "bc")], 1e-4)
    found = effects.marginal_means(posterior, {"x": [2.0]}, num_samples=S)
    check(
        found,
        [
            draws["Intercept"]
            + 2 * draws["x"]
            + (draws["kind[b]"] + draws["kind[c]"] + 2 * (draws["x:kind[b]"] + draws["x:kind[c]"]))
            / 3
        ],
    )


def test_a_column_of_0_and_1_has_both_in_the_balanced_grid(logistic):
    posterior, draws, _ = logistic
    found = effects.marginal_means(posterior, "treated", at={"x": 0.0}, num_samples=S)
    check(found, [expit(draws["Intercept"] + value * draws["treated"]) for value in (0, 1)])
    found = effects.marginal_means(posterior, {"x": [0.0]}, scale="link", num_samples=S)
    check(found, [draws["Intercept"] + draws["treated"] / 2], 1e-4)


def test_a_point_estimate_is_named():
    point = bf.fit(models.varying_intercept, bf.datasets.grunfeld(), bf.FedAvg(), rounds=2)
    assert "θ is a point estimate" in repr(effects.comparisons(point, "x[0]", num_samples=4))


def test_standardised_risks_of_a_logistic_model_at_its_clients(logistic, frame):
    posterior, _, predictor = logistic
    x = frame.x.to_numpy()
    risk = [expit(predictor(x, value)).mean(1) for value in (0, 1)]
    check(effects.predictions(posterior, "treated", num_samples=S), risk)
    check(effects.comparisons(posterior, "treated", num_samples=S), [risk[1] - risk[0]])
    odds = [one / (1 - one) for one in risk]
    for comparison, by_hand in (("ratio", risk[1] / risk[0]), ("odds_ratio", odds[1] / odds[0])):
        found = effects.comparisons(posterior, "treated", comparison=comparison, num_samples=S)
        check(found, [by_hand], 2e-4)
        assert found.to_frame()["P(>1)"].item() == (by_hand > 1).mean()
        assert "over these 4 clients" in repr(found)
    p = expit(predictor(x, frame.treated.to_numpy()))
    eta = predictor(x + 1e-4, frame.treated.to_numpy()) - predictor(
        x - 1e-4, frame.treated.to_numpy()
    )
    by_hand = (p * (1 - p) * eta / 2e-4).mean(1)
    check(effects.slopes(posterior, "x", num_samples=S), [by_hand], 1e-3)
    own = [(frame.hospital == name).to_numpy() for name in "ABCD"]
    differences = expit(predictor(x + 2, 0)) - expit(predictor(x, 0))
    found = effects.comparisons(
        posterior, {"x": 2}, by="hospital", at={"treated": 0}, num_samples=S
    )
    check(found, [differences[:, rows].mean(1) for rows in own])
    assert found.labels["hospital"].tolist() == list("ABCD")
    assert found.labels["contrast"].tolist() == ["(x + 2) - x"] * 4


def test_the_average_client_has_no_effects_of_its_own(logistic, frame):
    posterior, draws, predictor = logistic
    x = frame.x.to_numpy()
    risk = [expit(predictor(x, value, own=False)).mean(1) for value in (0, 1)]
    found = effects.comparisons(posterior, "treated", level="average", num_samples=S)
    check(found, [risk[1] - risk[0]])
    found = effects.comparisons(
        posterior, "treated", level="average", scale="link", comparison="ratio", num_samples=S
    )
    check(found, [np.exp(draws["treated"] + draws["x:treated"] * x.mean())], 2e-4)
    assert found.estimand.startswith("Odds ratio")


def test_a_new_client_is_drawn_from_the_prior_once_for_all_rows(logistic):
    posterior, _, _ = logistic
    count, grid = 20_000, pd.DataFrame({"x": [0.0, 10.0], "treated": [0, 0]})
    asked = {"rows": grid, "scale": "link", "num_samples": count, "by": "x"}
    at_average = effects.predictions(posterior, level="average", **asked)
    at_new = effects.predictions(posterior, level="new", **asked)
    own = (at_new.draws - at_average.draws).numpy()
    draws = as_numpy(posterior.derived(num_samples=count))
    tau, slope = draws["1|hospital_sigma"], draws["x|hospital_sigma"]
    both = draws["cor(1, x)|hospital"] * tau * slope
    variance = [tau**2, tau**2 + 100 * slope**2 + 20 * both]
    for k in range(2):  # the variance of a draw from the prior given θ is that of the prior
        gap = own[:, k] ** 2 - variance[k]
        assert abs(gap.mean()) < 5 * gap.std() / np.sqrt(count)
    assert np.corrcoef(own.T)[0, 1] != pytest.approx(1.0, abs=1e-3)
    one_client = effects.predictions(posterior, level="new", num_samples=count).draws
    assert (
        one_client.std()
        > effects.predictions(posterior, level="average", num_samples=count).draws.std()
    )


def test_rates_of_a_poisson_model_with_an_offset(frame):
    posterior, draws = fitted(
        "falls ~ treated + offset(np.log(years)) + (1 | hospital)", frame, family="poisson"
    )
    place = [posterior.federation.names.index(name) for name in frame.hospital]
    eta = draws["Intercept"][:, None] + draws["1|hospital"][:, place]
    rate = [np.exp(eta + draws["treated"][:, None] * value) for value in (0, 1)]
    years = frame.years.to_numpy()
    check(
        effects.predictions(posterior, "treated", num_samples=S),
        [(r * years).mean(1) for r in rate],
        1e-4,
    )
    found = effects.predictions(
        posterior, "treated", at={"years": 1.0}, weights="years", num_samples=S
    )
    check(found, [(r * years).sum(1) / years.sum() for r in rate], 1e-4)
    assert "years = 1" in found.level
    found = effects.comparisons(posterior, "treated", comparison="ratio", num_samples=S)
    check(found, [np.exp(draws["treated"])], 1e-4)


def test_a_binomial_row_counts_as_its_trials(frame):
    posterior, draws = fitted("p(cured, n) ~ x + (1 | hospital)", frame, family="binomial")
    place = [posterior.federation.names.index(name) for name in frame.hospital]
    risk = expit(
        draws["Intercept"][:, None]
        + draws["1|hospital"][:, place]
        + draws["x"][:, None] * frame.x.to_numpy()
    )
    n = frame.n.to_numpy()
    check(effects.predictions(posterior, num_samples=S), [(risk * n).sum(1) / n.sum()])
    found = effects.marginal_means(posterior, {"x": [5.0]}, num_samples=S)
    check(found, [expit(draws["Intercept"] + 5 * draws["x"])])


def test_messages_name_what_to_write(logistic, gaussian, frame):
    posterior, _, _ = logistic
    for arguments, reason in [
        ((posterior, "hospital"), "'hospital' is no column of the formula's predictors: "),
        ((posterior, {"treated": [0]}), "'treated' has a single value"),
        ((gaussian[0], {"kind": ["a", "z"]}), "'kind' has the level 'z'"),
    ]:
        with pytest.raises((ValueError, KeyError), match=reason):
            effects.comparisons(*arguments)
    for settings, reason in [
        ({"level": "all"}, "level is 'all': one of 'clients', 'average', 'new'"),
        ({"by": "nobody"}, "has no column 'nobody'"),
        ({"rows": "mean"}, '"balanced", a frame, or None'),
        ({"outcome": "Intercept"}, "outcome is 'Intercept': one of died"),
        ({"prob": 95}, "prob is 95"),
        ({"scale": "link", "comparison": "odds_ratio"}, "comparison='odds_ratio'"),
    ]:
        with pytest.raises((ValueError, KeyError), match=reason):
            effects.comparisons(posterior, "treated", **settings)
    with pytest.raises(ValueError, match="by: 'treated' is set to values already"):
        effects.predictions(posterior, "treated", by="treated")
    with pytest.raises(ValueError, match="'x' holds numbers: give values"):
        effects.predictions(posterior, "x")
    with pytest.raises(ValueError, match="needs means above 0"):
        effects.comparisons(gaussian[0], "kind", comparison="ratio", at={"x": -20})
    with pytest.raises(ValueError, match="link of identity has no ratios"):
        effects.comparisons(gaussian[0], "kind", comparison="ratio", scale="link")
    few = frame.rename(columns={"x": "z"})
    with pytest.raises(KeyError, match="no column 'x'"):
        effects.comparisons(posterior, "treated", rows=few)


def test_plots(logistic):
    import matplotlib as mpl

    mpl.use("Agg")
    posterior, _, _ = logistic
    ax = effects.comparisons(posterior, "treated", by="hospital", num_samples=S).plot()
    assert next(label.get_text() for label in ax.get_yticklabels()) == "treated  1 - 0  A"
    curves = effects.predictions(
        posterior, {"x": [1.0, 2.0, 3.0]}, by="treated", num_samples=S
    ).plot()
    assert len(curves.lines) == 2
    assert curves.get_xlabel() == "x"
    assert "<br>Level: over these 4 clients" in effects.predictions(posterior)._repr_html_()
    mpl.pyplot.close("all")
