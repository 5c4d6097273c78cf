"""Tests of ranks, exceedance and centiles: closed forms of a conjugate model, and NumPy and SciPy on the draws."""

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

import bayesfed as bf
from bayesfed import effects

TAU, SIGMA = 2.0, 3.0
SIZES = {"a": 4, "b": 9, "c": 25, "d": 2, "e": 60}
SLOW = bf.Execution(compile=False)


def conjugate(federation):
    base = pyro.sample("base", dist.Normal(0.0, 1e-4))
    with federation.clients():
        own = pyro.sample("own", dist.Normal(base, TAU))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(own, SIGMA), obs=obs.get("y"))


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(3)
    return {name: rng.normal(rng.normal(0, TAU), SIGMA, n) for name, n in SIZES.items()}


@pytest.fixture(scope="module")
def posterior(data):
    federation = bf.Federation.from_arrays(
        {name: {"y": torch.tensor(y, dtype=torch.float32)} for name, y in data.items()}
    )
    return bf.fit(conjugate, federation, bf.SFVI(corrected=False), rounds=30, execution=SLOW)


@pytest.fixture(scope="module")
def exact(data):
    """The posterior means and standard deviations of the clients' variables."""
    n = np.array(list(SIZES.values()))
    precision = 1 / TAU**2 + n / SIGMA**2
    mean = np.array([y.sum() / SIGMA**2 for y in data.values()]) / precision
    return mean, precision**-0.5


def test_exceedance_and_ranks_are_those_of_the_conjugate_posterior(posterior, exact):
    mean, sd = exact
    found = effects.random_effects(posterior, "own", benchmark=0.5, num_samples=20_000)
    assert found.labels["client"].tolist() == list(SIZES)
    table = found.to_frame()
    np.testing.assert_allclose(table["mean"], mean - 0.5, atol=0.05)
    np.testing.assert_allclose(table["P(>0)"], stats.norm.cdf((mean - 0.5) / sd), atol=0.02)
    above = stats.norm.cdf((mean[:, None] - mean) / np.hypot(sd[:, None], sd))
    ranks = found.ranks()
    np.testing.assert_allclose(ranks.to_frame()["mean"], 0.5 + above.sum(1), atol=0.04)
    assert ranks.estimand == "Rank, from the smallest, of own - 0.5"
    both = ranks.to_frame()[["P(lowest)", "P(highest)"]].sum().to_numpy()
    np.testing.assert_allclose(both, 1.0)


def test_ranks_are_those_of_scipy_with_ties(posterior):
    draws = torch.tensor([[1.0, 2.0, 2.0, 0.0], [3.0, 3.0, 3.0, 3.0]])
    labels = pd.DataFrame({"client": list("abcd")})
    found = effects.Effects(labels, draws, "E[y]", "").ranks()
    np.testing.assert_array_equal(found.draws, stats.rankdata(draws, axis=1))
    assert found.to_frame()["P(lowest)"].tolist() == [0.5, 0.5, 0.5, 1.0]


def test_rows_are_ranked_among_those_of_equal_other_labels(posterior):
    labels = pd.DataFrame({"arm": list("xxyy"), "client": list("abab")})
    draws = torch.tensor([[1.0, 2.0, 9.0, 8.0]])
    found = effects.Effects(labels, draws, "E[y]", "")
    assert found.ranks("client").draws.tolist() == [[1.0, 2.0, 2.0, 1.0]]
    assert found.ranks("arm").draws.tolist() == [[1.0, 1.0, 2.0, 2.0]]
    with pytest.raises(ValueError, match="no label 'hospital' to rank: arm, client"):
        found.ranks("hospital")
    with pytest.raises(ValueError, match="nothing to rank"):
        effects.Effects(labels.head(1), draws[:, :1], "E[y]", "").ranks()


def test_a_benchmark_is_a_function_of_global_variables(posterior):
    base, own = (posterior.sample(num_samples=50)[n].double().numpy() for n in ("base", "own"))
    found = effects.random_effects(posterior, "own", benchmark="base + 1", num_samples=50)
    np.testing.assert_allclose(found.draws, own - (base + 1)[:, None], atol=1e-6)
    with pytest.raises(KeyError, match="no variable 'own'"):
        effects.random_effects(posterior, "own", benchmark="own")
    with pytest.raises(KeyError, match="the clients have no variable 'base': own"):
        effects.random_effects(posterior, "base")


@pytest.mark.parametrize("level", ["clients", "average", "new"])
def test_centiles_of_means_are_those_of_the_conjugate_predictive(posterior, exact, data, level):
    mean, sd = exact
    n = np.array(list(SIZES.values()))
    between = {"clients": sd, "average": 0.0, "new": TAU}[level]
    centre = mean if level == "clients" else 0.0
    scale = np.sqrt(SIGMA**2 / n + between**2)
    observed = np.array([y.mean() for y in data.values()])
    found = effects.centiles(posterior, by="client", level=level, num_samples=8000).to_frame()
    assert found["rows"].tolist() == list(SIZES.values())
    np.testing.assert_allclose(found["observed"], observed, rtol=1e-5)
    np.testing.assert_allclose(
        found["centile"], stats.norm.cdf((observed - centre) / scale), atol=0.02
    )
    np.testing.assert_allclose(found["sd"], scale, rtol=0.05)


def test_centiles_of_rows_of_a_client_that_was_not_in_the_fit(posterior):
    y = [-7.0, 0.0, 4.0, torch.nan]
    rows = bf.Federation.from_arrays({"z": {"y": y}}, missing="keep")
    found = effects.centiles(posterior, rows=rows, level="new", num_samples=8000)
    expected = stats.norm.cdf(np.array(y[:3]) / np.hypot(TAU, SIGMA))
    np.testing.assert_allclose(found.to_frame()["centile"], expected, atol=0.02)
    found.plot()
    with pytest.raises(KeyError, match="client 'z' took no part"):
        effects.centiles(posterior, rows=rows)


def test_centiles_of_counts_are_mid_p_values_of_all_trials():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"g": list("aabb"), "n": [30, 10, 20, 20], "x": rng.normal(size=4)})
    frame["y"] = [6, 5, 19, 12]
    model = bf.formula("p(y, n) ~ 1 + (1 | g)", frame, family="binomial")
    posterior = bf.fit(model, model.federation, rounds=3, execution=SLOW)
    p = posterior.derived(num_samples=4000)
    p = 1 / (1 + np.exp(-(p["Intercept"][:, None] + p["1|g"]).numpy()))
    found = effects.centiles(posterior, by="g", num_samples=4000).to_frame()
    np.testing.assert_allclose(found["observed"], [11 / 40, 31 / 40])
    for i, (total, seen) in enumerate([(40, 11), (40, 31)]):
        below = (
            stats.binom.cdf(seen - 1, total, p[:, i]) + stats.binom.pmf(seen, total, p[:, i]) / 2
        )
        assert found["centile"][i] == pytest.approx(below.mean(), abs=0.03)


def test_that_outcomes_without_centiles_are_refused():
    frame = pd.DataFrame({"g": list("aabb"), "t": [1.0, 2.0, 3.0, 1.0], "c": [0, 1, 0, 0]})
    model = bf.formula("t | cens(c) ~ 1 + (1 | g)", frame, family="weibull")
    posterior = bf.fit(model, model.federation, rounds=2, execution=SLOW)
    with pytest.raises(ValueError, match="'t' has censored rows"):
        effects.centiles(posterior, num_samples=5)
    with pytest.raises(ValueError, match="no variance, which R² needs"):
        effects.bayes_r2(posterior, num_samples=5)


def test_random_effects_of_clients_that_are_here_by_their_moments(posterior, exact):
    """A server to which institutions send moments ranks all of their hospitals."""
    moments = bf.Moments.of(posterior.federation, fewest_rows=1)
    fitted = bf.fit(conjugate, moments.federation(), rounds=20, execution=SLOW)
    found = effects.random_effects(fitted, "own", num_samples=8000).to_frame()
    np.testing.assert_allclose(found["mean"], exact[0], atol=0.06)
    with pytest.raises(ValueError, match="centiles needs the clients' rows"):
        effects.centiles(fitted)


def test_that_what_needs_rows_is_named_where_they_are_elsewhere(posterior, tmp_path):
    from bayesfed.output import checkpoint

    checkpoint.save(posterior, tmp_path / "p.safetensors", globals_only=True)
    server = bf.Posterior.load(tmp_path / "p.safetensors", conjugate)
    for name, given in (("random_effects", ["own"]), ("centiles", []), ("bayes_r2", [])):
        with pytest.raises(
            ValueError, match=f"effects.{name} needs the clients' rows or variables"
        ):
            getattr(effects, name)(server, *given)
    rows = bf.Federation.from_arrays({"z": {"y": [0.0]}})
    assert len(effects.centiles(server, rows=rows, level="new", num_samples=10).draws) == 10
