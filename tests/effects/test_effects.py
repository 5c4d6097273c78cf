"""Tests of effects against the same quantities computed by hand, draw by draw, from pooled data and NumPy."""

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.special import expit

import bayesfed as bf
from bayesfed import effects, models

S = 200


def as_numpy(draws):
    return {name: value.double().numpy() for name, value in draws.items()}


def fitted(text, frame, **settings):
    model = bf.formula(text, frame, **settings)
    posterior = bf.fit(model, model.federation, rounds=3, execution=bf.Execution(compile=False))
    return posterior, as_numpy(posterior.derived(num_samples=S))


def check(found, expected, tolerance=2e-5):
    expected = np.stack([np.broadcast_to(one, S) for one in expected], 1)
    np.testing.assert_allclose(found.draws.numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    rows = 120
    frame = pd.DataFrame(
        {
            "hospital": rng.choice(list("BACD"), rows),
            "kind": rng.choice(["b", "a", "c"], rows),
            "x": rng.normal(5.0, 2.0, rows),
            "treated": rng.integers(0, 2, rows),
            "years": rng.uniform(1.0, 9.0, rows),
            "n": rng.integers(1, 9, rows),
        }
    )
    eta = 0.3 * (frame.x - 5.0) * (1.0 + 0.5 * (frame.kind == "b")) - 0.7 * frame.treated
    frame["y"] = 3.0 + eta + rng.normal(size=rows)
    frame["died"] = (rng.random(rows) < expit(eta)).astype(float)
    frame["falls"] = rng.poisson(frame.years * np.exp(0.3 * eta))
    frame["cured"] = rng.binomial(frame.n, expit(eta))
    return frame


@pytest.fixture(scope="module")
def gaussian(frame):
    return fitted("y ~ x * kind + (1 | hospital)", frame)


@pytest.fixture(scope="module")
def logistic(frame):
    posterior, draws = fitted("died ~ x * treated + (x | hospital)", frame, family="bernoulli")
    place = [posterior.federation.names.index(name) for name in frame.hospital]

    def predictor(x, treated, own=True):
        """The linear predictor of all rows at all draws, ``(S, rows)``."""
        eta = draws["Intercept"][:, None] + draws["x"][:, None] * x
        eta = eta + (draws["treated"][:, None] + draws["x:treated"][:, None] * x) * treated
        if own:
            eta = eta + draws["1|hospital"][:, place] + draws["x|hospital"][:, place] * x
        return eta

    return posterior, draws, predictor


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


CLIENTS = {
    name: {
        "beds": [beds] * 3,
        "x": [[0.0, 1.0], [1.0, 3.0], [2.0, 0.0]],
        "y": [beds, beds + 1, beds],
    }
    for name, beds in {"a": 1.0, "b": 2.0, "c": 4.0}.items()
}


def with_predictor_of_clients(centred):
    def model(federation):
        gamma = pyro.sample("gamma", dist.Normal(0.0, 2.0))
        beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with federation.clients():
            mean = gamma * federation.of_clients("beds")
            if centred:
                a = pyro.sample("a", dist.Normal(mean, 0.5))
            else:
                a = mean + 0.5 * pyro.sample("a", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                eta = a + (beta * obs["x"]).sum(-1)
                pyro.deterministic("hazard", eta.exp())
                pyro.sample("y", dist.Normal(eta, 1.0), obs=obs.get("y"))

    return bf.fit(model, bf.Federation.from_arrays(CLIENTS), rounds=3)


def test_fields_of_a_pyro_program():
    posterior = with_predictor_of_clients(centred=True)
    draws = as_numpy(posterior.sample(S))
    check(
        effects.comparisons(posterior, {"x[1]": 2.0}, num_samples=S),
        [2 * draws["beta"][:, 1]],
        1e-4,
    )
    check(effects.slopes(posterior, "x[0]", num_samples=S), [draws["beta"][:, 0]], 1e-3)
    means = effects.predictions(posterior, {"x": [0.0]}, by="client", num_samples=S)
    check(means, list(draws["a"].T), 1e-4)
    hazard = effects.comparisons(
        posterior, "x[1]", outcome="hazard", comparison="ratio", num_samples=S
    )
    check(hazard, [np.exp(draws["beta"][:, 1])], 1e-4)
    assert hazard.estimand == "Ratio of hazard"
    rows = bf.Federation.from_arrays({"grid": {"x": [[1.0, 1.0]], "beds": [3.0]}})
    found = effects.predictions(posterior, rows=rows, level="average", num_samples=S)
    check(found, [3 * draws["gamma"] + draws["beta"].sum(1)], 1e-4)


def test_a_predictor_of_clients_needs_another_level_where_it_moves_their_prior():
    posterior = with_predictor_of_clients(centred=True)
    gamma = posterior.sample(S)["gamma"].double().numpy()
    for level in ("average", "new"):
        found = effects.comparisons(posterior, {"beds": [1.0, 3.0]}, level=level, num_samples=S)
        check(found, [2 * gamma], 1e-4)
    with pytest.raises(
        ValueError, match="the prior of 'a' depends on the fields of the clients' own rows"
    ):
        effects.comparisons(posterior, {"beds": [1.0, 3.0]}, num_samples=S)
    with pytest.raises(ValueError, match="the prior of 'a' depends on fields of the client"):
        effects.comparisons(posterior, "x[0]", level="new", num_samples=S)
    other = with_predictor_of_clients(centred=False)
    found = effects.comparisons(other, {"beds": [1.0, 3.0]}, num_samples=S)
    check(found, [2 * other.sample(S)["gamma"].double().numpy()], 1e-4)


def test_categories_have_probabilities():
    rng = np.random.default_rng(1)
    rows = {
        name: {"x": rng.normal(size=(20, 1)), "y": rng.integers(0, 3, 20).astype(float)}
        for name in "abc"
    }
    posterior = bf.fit(models.OrderedLogistic(3), bf.Federation.from_arrays(rows), rounds=3)
    found = effects.predictions(posterior, {"x[0]": [0.0, 1.0]}, num_samples=S)
    assert found.labels["category"].tolist() == [0, 1, 2] * 2
    torch.testing.assert_close(
        found.draws.reshape(S, 2, 3).sum(2), torch.ones(S, 2).double(), rtol=1e-5, atol=1e-5
    )
    own = posterior.probabilities(num_samples=S)["y"].double().mean(0)
    check_mean = effects.predictions(posterior, num_samples=S).draws.mean(0)
    torch.testing.assert_close(check_mean, own, rtol=1e-4, atol=1e-4)
    assert found.pairs().labels.values.tolist() == [["1 - 0", c] for c in range(3)]


def with_kinds(federation):
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with federation.clients():
        high = pyro.sample("high", dist.Bernoulli(0.5))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(level + 3 * high * obs["x"], 1.0), obs=obs.get("y"))


def with_zeros(federation):
    mu, p = pyro.sample("mu", dist.Normal(0.0, 1.0)), pyro.sample("p", dist.Beta(2.0, 2.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 0.5))
        with federation.observations() as obs:
            z = pyro.sample("z", dist.Bernoulli(p))
            rate = (a + obs["x"]).exp() * z + 1e-6
            pyro.sample("y", dist.Poisson(rate), obs=obs.get("y"))


@pytest.mark.parametrize("model", [with_kinds, with_zeros])
def test_expectations_are_the_means_of_predictions(model):
    """Also where variables of clients or rows are summed out."""
    rng = np.random.default_rng(0)
    rows = {n: {"x": rng.uniform(0, 1, 8), "y": rng.poisson(2.0, 8).astype(float)} for n in "abc"}
    data = bf.Federation.from_arrays(rows)
    posterior = bf.fit(model, data, rounds=2, execution=bf.Execution(compile=False))
    found = effects.predictions(posterior, num_samples=4000).draws[:, 0]
    drawn = posterior.predict(num_samples=4000)["y"].double().mean(1)
    gap = drawn - found  # noise of the outcome, given the same draws
    assert gap.mean().abs() < 4 * gap.std() / 4000**0.5
    if model is with_kinds:
        with pytest.raises(ValueError, match="not summed or integrated out"):
            effects.predictions(posterior, level="average")


def test_means_do_not_depend_on_the_chunks_of_clients(logistic, monkeypatch):
    posterior, _, _ = logistic
    asked = [
        {"level": level, "by": "hospital", "num_samples": S}
        for level in ("clients", "average", "new")
    ]
    whole = [effects.comparisons(posterior, "treated", **one).draws for one in asked]
    monkeypatch.setattr(
        "bayesfed.output.draws.chunks", lambda lengths, *_: torch.arange(len(lengths)).split(1)
    )
    for one, expected in zip(asked, whole, strict=True):
        found = effects.comparisons(posterior, "treated", **one).draws
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_hypotheses_have_the_share_of_draws_in_which_they_are_true(logistic):
    posterior, draws, _ = logistic
    texts = [
        "treated > 0",
        "exp(treated) - 1 < -x",
        "`x:treated` / 2",
        "`1|hospital`['A'] > `1|hospital`['B']",
    ]
    found = effects.hypotheses(posterior, *texts, num_samples=S)
    a, b = (draws["1|hospital"][:, posterior.federation.names.index(name)] for name in "AB")
    gap = np.exp(draws["treated"]) - 1 + draws["x"]
    check(found, [draws["treated"], gap, draws["x:treated"] / 2, a - b])
    shares = np.array([(draws["treated"] > 0).mean(), (gap < 0).mean(), np.nan, (a > b).mean()])
    table = found.to_frame()
    np.testing.assert_allclose(table["probability"], shares)
    np.testing.assert_allclose(table["evidence_ratio"], shares / (1 - shares))
    risks = effects.predictions(posterior, "treated", num_samples=S)
    found = effects.hypotheses(risks, "b1 - b2 > 0.1")
    share = (risks.draws[:, 0] - risks.draws[:, 1] > 0.1).double().mean().item()
    assert found.to_frame()["probability"].item() == share
    for text, reason in {
        "treated = 0": "cannot be read",
        "treated == 0": "not one < or >",
        "absent > 0": "no variable 'absent'",
        "`1|hospital` > 0": "not of one number",
        "`1|hospital`['Z'] > 0": "no entry or client 'Z'",
        "__import__('os') > 0": "not supported",
    }.items():
        with pytest.raises((ValueError, KeyError), match=reason):
            effects.hypotheses(posterior, text, num_samples=S)


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


def test_an_outcome_without_a_mean_is_refused_by_name():
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                pyro.deterministic("middle", a + 0 * obs["z"])
                pyro.sample("y", dist.Cauchy(a, 1.0), obs=obs.get("y"))

    rows = {"y": [0.0, 1.0], "z": [0.0, 1.0]}
    posterior = bf.fit(model, bf.Federation.from_arrays({"a": rows, "b": rows}), rounds=2)
    with pytest.raises(
        ValueError, match=r"'y' is Cauchy, which has no finite expectation .* pyro.deterministic"
    ):
        effects.predictions(posterior)
    with pytest.warns(UserWarning, match="'z' changes the outcome in no row"):
        effects.comparisons(posterior, "z", outcome="middle")


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


@pytest.mark.parametrize("family", ["normal", "binomial"])
def test_a_missing_covariate_is_averaged_over_its_prior_whatever_the_rows_outcome(family):
    """With precise outcomes nodes around the mode of a row's integrand cover a small part of the prior."""

    def model(federation):
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        c = pyro.sample("c", dist.Normal(0.0, 2.0))
        with federation.clients():
            u = pyro.sample("u", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                z = pyro.sample("z", dist.Normal(c * obs["x"], 1.0), obs=obs["z"])
                normal, binomial = (
                    dist.Normal(u + b * z, 0.05),
                    dist.Binomial(50.0, logits=u + b * z),
                )
                fn = normal if family == "normal" else binomial
                pyro.sample("y", fn, obs=obs.get("y"))

    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(2, 2, 8))
    z += x
    y = 2 * z if family == "normal" else rng.binomial(50, expit(2 * z))
    z[:, ::2] = np.nan
    rows = {name: {"x": x[i], "z": z[i], "y": y[i]} for i, name in enumerate("ab")}
    data = bf.Federation.from_arrays(rows, missing="keep")
    posterior = bf.fit(model, data, rounds=3, execution=bf.Execution(compile=False))
    draws = as_numpy(posterior.sample(S))
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)

    def mean(at):
        """E[y] given x = at in all rows, at each draw."""
        found = []
        for i in range(2):
            own, slope = draws["u"][:, i], draws["b"]
            for known in z[i]:
                if np.isfinite(known):
                    eta = (own + slope * known)[:, None]
                else:
                    prior = (draws["c"] * at)[:, None] + nodes
                    eta = own[:, None] + slope[:, None] * prior
                value = eta if family == "normal" else expit(eta)
                share = weights / weights.sum() if eta.shape[1] > 1 else 1.0
                found.append((value * share).sum(1))
        return np.mean(found, 0)

    found = effects.predictions(posterior, {"x": [0.0, 1.0]}, outcome="y", num_samples=S)
    check(found, [mean(0.0), mean(1.0)], 2e-3)
