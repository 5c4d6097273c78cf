"""Tests of families against scipy's densities and means, of further predictors, and of what is behind an outcome."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy import special, stats

import bayesfed as bf
from bayesfed.effects import question
from bayesfed.effects.means import expected_outcome
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.log_density import log_density as log_density_of
from bayesfed.formulas.families import FAMILIES
from bayesfed.formulas.hurdle import Hurdle


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(1)
    rows = 72
    frame = pd.DataFrame(
        {
            "hospital": np.repeat(list("BAC"), rows // 3),
            "x": rng.normal(5.0, 2.0, rows),
            "z": rng.normal(0.0, 1.0, rows),
            "n": rng.integers(1, 20, rows),
            "w": rng.integers(1, 4, rows),
            "late": rng.choice(["none", "right"], rows),
            "grade": rng.integers(1, 5, rows),
            "kind": rng.choice(["b", "a", "c"], rows),
            "share": rng.beta(3.0, 3.0, rows),
        }
    )
    frame["y"] = 100.0 + 10.0 * rng.normal(size=rows)
    frame["time"] = rng.weibull(1.5, rows) * np.exp(0.1 * frame.x)
    frame["count"] = rng.poisson(3.0, rows) * (rng.random(rows) < 0.7)
    frame["cost"] = frame.time * (rng.random(rows) < 0.7)
    frame["part"] = frame.share * (rng.random(rows) < 0.7)
    frame["s"] = rng.binomial(frame.n, frame.share)
    frame["yes"] = (frame.share > 0.5).astype(int)
    return frame


def log_density(fn, y):
    """Compute the log density of a distribution of scipy, or of a reference below."""
    discrete = isinstance(getattr(fn, "dist", None), stats.rv_discrete)
    return fn.logpmf(y) if discrete else fn.logpdf(y)


class WithZeros:
    """A reference: a distribution of scipy with additional zeros, or with a hurdle."""

    def __init__(self, base, zeros, *, hurdle=False):
        discrete = isinstance(base.dist, stats.rv_discrete)
        at_zero = base.pmf(0) if discrete else 0.0
        self.base, self.at_zero = base, zeros if hurdle else zeros + (1.0 - zeros) * at_zero
        self.factor = (1.0 - zeros) / (1.0 - at_zero if hurdle else 1.0)

    def logpdf(self, y):
        with np.errstate(divide="ignore"):
            other = np.log(self.factor) + log_density(self.base, y)
            return np.where(y == 0, np.log(self.at_zero), other)

    def mean(self):
        return self.factor * self.base.mean()


class Categories:
    """A reference: probabilities of the categories of each row."""

    def __init__(self, p):
        self.p = p

    def logpdf(self, y):
        levels = np.unique(y)
        return np.log(self.p[np.arange(len(y)), np.searchsorted(levels, y)])

    def mean(self):
        return self.p


def gamma(v, eta):
    return stats.gamma(v["alpha"], scale=np.exp(eta) / v["alpha"])


def beta(v, eta):
    p = special.expit(eta)
    return stats.beta(v["kappa"] * p, v["kappa"] * (1.0 - p))


def nb(v, eta):
    return stats.nbinom(v["alpha"], v["alpha"] / (v["alpha"] + np.exp(eta)))


def weibull(alpha, eta):
    return stats.weibull_min(alpha, scale=np.exp(eta) / special.gamma(1.0 + 1.0 / alpha))


class Successes:
    """A reference: a distribution of scipy whose mean is divided by the trials."""

    def __init__(self, base, trials):
        self.logpdf, self.base, self.trials = base.logpmf, base, trials

    def mean(self):
        return self.base.mean() / self.trials


def ordered(v, eta):
    below = special.expit(v["threshold"] - np.asarray(eta)[:, None])
    return Categories(np.diff(below, prepend=0.0, append=1.0))


REFERENCES = {
    "gaussian": ("y", lambda v, eta, rows: stats.norm(eta, v["sigma"])),
    "student_t": ("y", lambda v, eta, rows: stats.t(v["nu"], eta, v["sigma"])),
    "lognormal": ("time", lambda v, eta, rows: stats.lognorm(v["sigma"], scale=np.exp(eta))),
    "gamma": ("time", lambda v, eta, rows: gamma(v, eta)),
    "weibull": ("time", lambda v, eta, rows: weibull(v["alpha"], eta)),
    "exponential": ("time", lambda v, eta, rows: stats.expon(scale=np.exp(eta))),
    "hurdle_gamma": ("cost", lambda v, eta, rows: WithZeros(gamma(v, eta), v["hu"], hurdle=True)),
    "beta": ("share", lambda v, eta, rows: beta(v, eta)),
    "zero_inflated_beta": ("part", lambda v, eta, rows: WithZeros(beta(v, eta), v["zi"])),
    "bernoulli": ("yes", lambda v, eta, rows: stats.bernoulli(special.expit(eta))),
    "binomial": (
        "s | trials(n)",
        lambda v, eta, rows: Successes(stats.binom(rows.n, special.expit(eta)), rows.n),
    ),
    "beta_binomial": (
        "s | trials(n)",
        lambda v, eta, rows: Successes(stats.betabinom(rows.n, *beta(v, eta).args), rows.n),
    ),
    "poisson": ("count", lambda v, eta, rows: stats.poisson(np.exp(eta))),
    "negative_binomial": ("count", lambda v, eta, rows: nb(v, eta)),
    "zero_inflated_poisson": (
        "count",
        lambda v, eta, rows: WithZeros(stats.poisson(np.exp(eta)), v["zi"]),
    ),
    "zero_inflated_negative_binomial": (
        "count",
        lambda v, eta, rows: WithZeros(nb(v, eta), v["zi"]),
    ),
    "hurdle_poisson": (
        "count",
        lambda v, eta, rows: WithZeros(stats.poisson(np.exp(eta)), v["hu"], hurdle=True),
    ),
    "hurdle_negative_binomial": (
        "count",
        lambda v, eta, rows: WithZeros(nb(v, eta), v["hu"], hurdle=True),
    ),
    "cumulative": ("grade", lambda v, eta, rows: ordered(v, eta)),
}


def nodes_of(model, seed=1):
    """Draw from the program on the pooled rows: its sites, and the value of each name without plates' dimensions."""
    pyro.set_rng_seed(seed)
    nodes = poutine.trace(model).get_trace(model.federation).nodes
    sites = {name: node for name, node in nodes.items() if node["type"] == "sample"}
    return sites, {name: sites[name]["value"].squeeze().double().numpy() for name in sites}


def pooled(model, frame):
    """The rows in the order of the federation, and the position of each row's client."""
    names = list(model.federation.names)
    rows = pd.concat([frame[frame.hospital == name] for name in names])
    return rows, rows.hospital.map(names.index).to_numpy()


def by_row(model, value):
    """Reshape ``(N, B, ...)`` to rows."""
    mask = model.federation.batch().mask
    return value.expand(*mask.shape, *value.shape[2:])[mask].double().numpy()


def predictor(values, rows, own, prefix="", variable="x"):
    """Compute a linear predictor by hand, from coefficients in the data's units."""
    intercept = values.get(f"{prefix}Intercept", 0.0)
    return (
        intercept
        + values[f"{prefix}1|hospital"][own]
        + values[f"{prefix}{variable}"] * rows[variable].to_numpy()
    )


def test_all_families_have_a_reference_and_a_row_in_the_documentation():
    assert {*REFERENCES, "categorical"} == {*FAMILIES}
    page = (Path(__file__).parents[2] / "docs/formulas.md").read_text(encoding="utf-8")
    rows = " ".join(line.split("|")[1] for line in page.split("\n") if line.startswith("| `"))
    assert not [name for name in FAMILIES if f"`{name}`" not in rows]


@pytest.mark.parametrize("family", REFERENCES)
def test_each_family_has_the_density_and_the_mean_of_scipys(frame, family):
    """At a draw of the prior; the expectation is that of predictions and effects."""
    outcome, reference = REFERENCES[family]
    model = bf.formula(f"{outcome} ~ x + (1 | hospital)", frame, family=family)
    sites, values = nodes_of(model)
    rows, own = pooled(model, frame)
    found = reference(values, predictor(values, rows, own), rows)
    y = rows[model.coding.outcome].to_numpy()
    node = sites[model.coding.outcome]
    log_prob = by_row(model, node["fn"].log_prob(node["value"]))
    np.testing.assert_allclose(log_prob, log_density(found, y), rtol=2e-3, atol=2e-3)
    mean = by_row(model, expected_outcome(node["fn"]))
    there = np.broadcast_to(found.mean(), mean.shape)
    finite = np.isfinite(there) & (np.abs(there) < 1e6)
    assert finite.mean() > 0.5
    if family != "student_t":
        np.testing.assert_allclose(mean[finite], there[finite], rtol=2e-3, atol=1e-4)


def test_categories_have_a_predictor_each(frame):
    model = bf.formula("kind ~ x + (1 | hospital)", frame, family="categorical")
    sites, values = nodes_of(model)
    rows, own = pooled(model, frame)
    logits = [np.zeros(len(rows))] + [predictor(values, rows, own, f"mu{k}_") for k in "bc"]
    p = special.softmax(np.stack(logits, 1), 1)
    node = sites["kind"]
    found = by_row(model, node["fn"].log_prob(node["value"]))
    np.testing.assert_allclose(found, Categories(p).logpdf(rows.kind), rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(by_row(model, expected_outcome(node["fn"])), p, atol=1e-4)


@pytest.mark.parametrize(
    "base",
    [dist.Poisson(torch.tensor(0.7)), dist.NegativeBinomial(torch.tensor(0.8), torch.tensor(0.6))],
    ids=["Poisson", "negative binomial"],
)
def test_draws_of_a_hurdle_have_its_probabilities(base):
    """Of 40,000 draws, shares within four Monte Carlo errors; the variance within 5 %."""
    torch.manual_seed(0)
    hurdle = Hurdle(base, torch.tensor(0.3))
    draws = hurdle.sample((40_000,))
    for k in range(5):
        p = float(hurdle.log_prob(torch.tensor(float(k))).exp())
        assert float((draws == k).double().mean()) == pytest.approx(
            p, abs=4 * (p * (1 - p) / 40_000) ** 0.5
        )
    assert float(draws.var()) == pytest.approx(float(hurdle.variance), rel=0.05)
    assert float(draws.mean()) == pytest.approx(float(hurdle.mean), rel=0.03)


TWO_PARTS = "bf(y ~ x + (1 | hospital), sigma ~ z + (1 | hospital))"


@pytest.mark.parametrize(
    "text", [TWO_PARTS, "y ~ x +\n (1 | hospital)\nsigma ~ z + (1 | hospital)"]
)
def test_a_parameter_has_a_predictor_of_its_own(frame, text):
    model = bf.formula(text, frame)
    sites, values = nodes_of(model)
    rows, own = pooled(model, frame)
    sigma = np.exp(predictor(values, rows, own, "sigma_", "z"))
    np.testing.assert_allclose(by_row(model, sites["y"]["fn"].scale), sigma, rtol=1e-4)
    mean = predictor(values, rows, own)
    np.testing.assert_allclose(by_row(model, sites["y"]["fn"].loc), mean, rtol=1e-4)
    assert "sigma" not in values
    assert model.effects == ["1|hospital", "sigma_1|hospital"]
    assert model.encode(frame.drop(columns="y")).event_shape("sigma.X") == (1,)


def test_parameters_have_brms_names_too(frame):
    one = bf.formula("time ~ 1 + (1 | hospital)\nshape ~ x", frame, family="gamma")
    other = bf.formula("time ~ 1 + (1 | hospital)\nalpha ~ x", frame, family="gamma")
    assert one.source.split('"""')[2] == other.source.split('"""')[2]


def test_priors_of_a_parameters_predictor(frame):
    priors = {"sigma_z": dist.Normal(0.0, 0.5), "sigma_Intercept": dist.Normal(2.0, 0.1)}
    sites, values = nodes_of(bf.formula("y ~ x + (1 | hospital)\nsigma ~ z", frame, priors=priors))
    assert sites["_prior|sigma_z"]["fn"].scale == 0.5
    assert sites["_intercept_sigma"]["fn"].loc == 2.0
    found = float(values["sigma_Intercept"] + values["sigma_z"] * frame.z.mean())
    assert found == pytest.approx(float(values["_intercept_sigma"]), abs=1e-4)


def test_censored_times_count_as_later(frame):
    """A censored row has the survival function of scipy; 1 and 0 are "right" and "none"."""
    for family in ("weibull", "exponential"):
        model = bf.formula("time | cens(late) ~ x + (1 | hospital)", frame, family=family)
        sites, values = nodes_of(model)
        rows, own = pooled(model, frame)
        times = weibull(values.get("alpha", 1.0), predictor(values, rows, own))
        right = rows.late == "right"
        expected = np.where(right, times.logsf(rows.time), times.logpdf(rows.time))
        found = by_row(model, sites["time"]["fn"].log_prob(sites["time"]["value"]))
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
        mean = by_row(model, expected_outcome(sites["time"]["fn"]))
        np.testing.assert_allclose(mean, times.mean(), rtol=1e-3)
        numbers = frame.assign(late=(frame.late == "right").astype(int))
        again = bf.formula("time | cens(late) ~ x + (1 | hospital)", numbers, family=family)
        assert torch.equal(again.federation["cens"], model.federation["cens"])


def test_known_standard_errors_replace_sigma(frame):
    model = bf.formula("y | se(time) ~ x + (1 | hospital)", frame)
    sites, values = nodes_of(model)
    rows, _ = pooled(model, frame)
    np.testing.assert_allclose(by_row(model, sites["y"]["fn"].scale), rows.time, rtol=1e-5)
    assert "sigma" not in values


def test_a_row_with_weight_w_counts_as_w_rows(frame):
    """By Pyro, and in the program that is fitted."""
    model = bf.formula("count | weights(w) ~ x + (1 | hospital)", frame, family="poisson")
    trace = poutine.trace(poutine.seed(model, 1)).get_trace(model.federation)
    batch, program = model.federation.batch(), bf.start(model, model.federation).program
    with noise.seeded(0), handlers.given(batch.device, draws=2), poutine.trace() as tracer:
        program.model(batch)
    rows, _ = pooled(model, frame)
    weights = torch.as_tensor(rows.w.to_numpy(float)).reshape(3, 24)
    for node in (trace.nodes["count"], tracer.trace.nodes["count"]):
        each = node["fn"].log_prob(node["value"]).double()
        torch.testing.assert_close(log_density_of(node).double(), weights * each)
    assert model.encode(frame.drop(columns=["w", "count"]))["weights"].eq(1.0).all()


def test_effects_are_on_the_scale_of_the_mean(frame):
    """Standardised means of fits of two rounds are those of hand-written means at the same draws."""
    model = bf.formula("count ~ x + (1 | hospital)\nzi ~ z", frame, family="zero_inflated_poisson")
    posterior = bf.fit(model, model.federation, rounds=2)
    rows, own = pooled(model, frame)
    v = {name: value.double().numpy() for name, value in posterior.derived(num_samples=7).items()}
    effects = v["1|hospital"].reshape(7, -1)[:, own]
    rate = np.exp(v["Intercept"][:, None] + effects + v["x"][:, None] * 4.0)
    zi = special.expit(v["zi_Intercept"][:, None] + v["zi_z"][:, None] * rows.z.to_numpy())
    found = bf.effects.predictions(posterior, {"x": [4.0]}, num_samples=7)
    np.testing.assert_allclose(found.draws[:, 0], ((1 - zi) * rate).mean(1), rtol=1e-4)
    link = bf.effects.predictions(posterior, {"x": [4.0]}, num_samples=7, scale="link")
    np.testing.assert_allclose(link.draws[:, 0], np.log(rate).mean(1), rtol=1e-3, atol=1e-4)
    assert link.estimand == "linear predictor of count"


def test_effects_have_the_names_of_the_categories(frame):
    grades = pd.Categorical(
        frame.grade.map(dict(enumerate("ABCD", start=1))), list("DCBA"), ordered=True
    )
    model = bf.formula(
        "grade ~ x + (1 | hospital)", frame.assign(grade=grades), family="cumulative"
    )
    posterior = bf.fit(model, model.federation, rounds=2)
    found = bf.effects.predictions(posterior, {"x": [4.0]}, num_samples=7)
    assert found.labels["category"].tolist() == list("DCBA")
    _, own = pooled(model, frame)
    v = {name: value.double().numpy() for name, value in posterior.derived(num_samples=7).items()}
    eta = v["1|hospital"].reshape(7, -1)[:, own] + v["x"][:, None] * 4.0
    below = special.expit(v["threshold"][:, None] - eta[..., None])
    p = np.diff(below, prepend=0.0, append=1.0).mean(1)
    np.testing.assert_allclose(found.draws, p, atol=1e-4)
    assert posterior.predict(model.encode(frame.drop(columns="grade")), 3)["grade"].max() <= 3


REFUSED = {
    ("y ~ x\nzi ~ z", "gaussian"): "zi ~ ...: the gaussian family has sigma beside the mean",
    ("y ~ x\nsigma ~ (1 + z | hospital)", "gaussian"): "sigma ~ ... has random intercepts alone",
    ("y ~ x\nsigma ~ (0 + z | hospital)", "gaussian"): "sigma ~ ... has random intercepts alone",
    ("y ~ x\nsigma ~ z\nsigma ~ x", "gaussian"): "sigma has two predictors: write one",
    ("y | se(time) ~ x\nsigma ~ z", "gaussian"): "the gaussian family has no parameter beside",
    ("y | cens(late) ~ x", "gaussian"): r"no cens\(\): weibull and exponential have",
    ("y | se(time, sigma = TRUE) ~ x", "gaussian"): r"for a sigma beside it add \(1 \| row\)",
    ("y | weights(2 * w) ~ x", "gaussian"): r"weights\(\) takes a column and nothing else",
    ("y | weights(z) ~ x", "gaussian"): r"client '.': weights\(z\) is -\S+, not above 0",
    ("y | se(kind) ~ x", "gaussian"): r"se\(kind\): 'kind' holds text",
    ("time | cens(grade) ~ x", "weibull"): r"cens\(grade\) is \d.0, not 0 or 'none' for a known",
    ("y ~ x", "poisson"): "'poisson' has outcomes that are counts: client '.' has y = ",
    ("cost ~ x", "gamma"): "outcomes that are numbers above 0: client '.' has cost = 0",
    ("kind ~ x", "cumulative"): "'kind' is text, which has no order: make it an ordered categ",
    ("grade ~ 0 + x", "cumulative"): "thresholds in place of the intercept: leave 0",
    ("I(grade + 1) ~ x", "categorical"): "the outcome is a column whose levels are the categ",
    ("y ~ x", "categorical"): "the outcome 'y' is .*, but categories are text or whole",
    ("s ~ x", "beta_binomial"): "the binomial families, and only they",
    ("y ~ x", "hurdle_lognormal"): "no family 'hurdle_lognormal': take 'hurdle_gamma'; there",
    ("y ~ bs(x, df=4)", "gaussian"): r"give the knots, as in bs\(x, knots=c\(1.0, 2.0\)",
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[1]}: {case[0]}")
def test_what_does_not_fit_is_refused_in_one_line(frame, case):
    text, family = case
    with pytest.raises(ValueError, match=REFUSED[case]) as error:
        bf.formula(text, frame, family=family, client="hospital")
    assert "\n" not in str(error.value)


def test_a_link_scale_needs_one_predictor(frame):
    model = bf.formula("kind ~ x + (1 | hospital)", frame, family="categorical")
    posterior = SimpleNamespace(program=SimpleNamespace(model=model))
    with pytest.raises(ValueError, match="the categorical family has a predictor for each"):
        question._family(posterior, None)
