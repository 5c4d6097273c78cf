"""Effects of Pyro programs, hypotheses, and effects of covariates with missing values."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.special import expit

import bayesfed as bf
from bayesfed import effects, models
from tests.effects.by_hand import S, as_numpy, check

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
