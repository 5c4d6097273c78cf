"""mi(), me() and mo(): predictors and densities against the same computed by hand, and what is refused."""

import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy import special, stats

import bayesfed as bf
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.log_density import log_density

EAGER = bf.Execution(compile=False)


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    n = 48
    frame = pd.DataFrame({"hospital": np.repeat(list("ABC"), n // 3), "x": rng.normal(size=n)})
    frame["z"] = 50.0 + 10.0 * (frame.x + rng.normal(size=n))
    frame["s"] = rng.uniform(3.0, 8.0, n)
    frame["level"] = rng.integers(0, 4, n)
    frame["pain"] = pd.Categorical.from_codes(
        frame.level, ["none", "mild", "severe", "worst"], ordered=True
    )
    frame["y"] = 100.0 + frame.x + frame.z + 5.0 * rng.normal(size=n)
    frame["died"] = rng.integers(0, 2, n)
    frame["gap"] = frame.z.where(rng.random(n) < 0.6)
    frame["gap_s"] = frame.s.where(frame.gap.notna())
    frame["kind"] = rng.choice(["a", "b"], n)
    return frame


def drawn(model, seed=1):
    """Values in the data's units of one draw of the program, and the distributions of its sites by row."""
    with noise.seeded(seed):
        nodes = poutine.trace(model).get_trace(model.federation).nodes
    return {
        name: node["value"].double().numpy()
        for name, node in nodes.items()
        if isinstance(node.get("value"), torch.Tensor)
    }, nodes


def rows_of(model, value):
    mask = model.federation.batch().mask
    return value.expand(mask.shape)[mask].double().numpy()


def marginal(model, outcome, seed=1):
    """One draw of the variables, and the log density of each row's data, unknown values integrated out."""
    program, batch = bf.start(model, model.federation).program, model.federation.batch()
    with (
        noise.seeded(seed),
        handlers.given(batch.device, draws=1),
        handlers.Derived() as derived,
        poutine.trace() as tracer,
    ):
        program.model(batch)
    nodes = handlers.sample_sites(tracer.trace)
    observed = [node for node in nodes.values() if node["is_observed"]]
    total = sum(log_density(node).double() for node in observed)
    values = {
        name: one.value.double().reshape(one.value.shape[1], -1).numpy()
        for name, one in derived.found.items()
    }
    return values, total[0][batch.mask].numpy()


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("y ~ x + mi(z) + (1 | hospital)\nz | mi() ~ x + kind + (1 | hospital)", "gaussian"),
        ("died ~ mi(z) + x + (1 | hospital)\nz | mi() ~ 1", "bernoulli"),
        ("level ~ mi(z) + x + (1 | hospital)\nz | mi() ~ 0 + x", "cumulative"),
        ("kind ~ mi(z)\nz | mi() ~ x", "categorical"),
    ],
)
def test_a_covariate_is_a_term_in_the_datas_units(frame, text, family):
    model = bf.formula(text, frame, client="hospital", family=family)
    v, nodes = drawn(model)
    own = np.repeat(np.arange(3), 16)
    z = frame.z.to_numpy()
    mean = (
        v.get("z_Intercept", 0.0)
        + v.get("z_x", 0.0) * frame.x
        + v.get("z_kind[b]", 0.0) * (frame.kind == "b")
    )
    mean += v["z_1|hospital"].reshape(-1)[own] if "z_1|hospital" in v else 0.0
    np.testing.assert_allclose(rows_of(model, nodes["z"]["fn"].loc), mean, rtol=2e-4, atol=1e-3)
    np.testing.assert_allclose(rows_of(model, nodes["z"]["fn"].scale), v["z_sigma"], rtol=1e-5)
    if family == "categorical":
        eta = v["mub_Intercept"] + v["mub_mi(z)"] * z
        found = nodes["kind"]["fn"].logits
        found = found[..., 1] - found[..., 0]
    else:
        eta = v["mi(z)"] * z + v["x"] * frame.x + v["1|hospital"].reshape(-1)[own]
    if family == "cumulative":
        fn = nodes["level"]["fn"]
        below = fn.log_prob(torch.zeros(())).exp()
        np.testing.assert_allclose(
            rows_of(model, below),
            special.expit(v["threshold"].reshape(-1)[0] - eta),
            rtol=2e-3,
            atol=1e-4,
        )
        return
    if family == "gaussian":
        found = nodes["y"]["fn"].loc
    elif family == "bernoulli":
        found = nodes["died"]["fn"].logits
    eta = eta + v.get("Intercept", 0.0)
    np.testing.assert_allclose(rows_of(model, found), eta, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("column", ["level", "pain"])
@pytest.mark.parametrize("family", ["gaussian", "cumulative"])
def test_monotonic_effects_are_sums_of_a_simplex(frame, column, family):
    outcome = "y" if family == "gaussian" else "died"
    text = f"{outcome} ~ x + mo({column}) + (1 | hospital)"
    model = bf.formula(text, frame, family=family)
    v, nodes = drawn(model)
    label = f"mo({column})"
    simplex = v[f"{label}_simplex"].reshape(-1)
    assert simplex.shape == (3,) and simplex.sum() == pytest.approx(1.0, abs=1e-6)
    reached = 3 * np.concatenate([[0.0], simplex.cumsum()])[frame.level]
    eta = v["x"] * frame.x + v[label] * reached
    eta = eta + v["1|hospital"].reshape(-1)[np.repeat(np.arange(3), 16)]
    if family == "gaussian":
        found, expected = nodes["y"]["fn"].loc, v["Intercept"] + eta
    else:
        found = nodes["died"]["fn"].log_prob(torch.zeros(())).exp()
        expected = special.expit(v["threshold"].reshape(-1)[0] - eta)
    np.testing.assert_allclose(rows_of(model, found), expected, rtol=1e-4, atol=1e-3)


def test_monotonic_priors_are_in_standard_deviations_of_the_levels_number(frame):
    model = bf.formula("y ~ mo(level) + (1 | hospital)\nsigma ~ mo(pain)", frame)
    v, nodes = drawn(model)
    for label, unit in (("mo(level)", frame.y.std(ddof=0)), ("sigma_mo(pain)", 1.0)):
        slope = nodes[f"_slope|{label}"]
        scale = float(slope["fn"].base_dist.scale) * unit / frame.level.std(ddof=0)
        wide = 2.5 if label == "mo(level)" else 1.0
        assert scale == pytest.approx(wide * unit / frame.level.std(ddof=0), rel=1e-5)
        assert float(v[label]) == pytest.approx(
            float(slope["value"]) * unit / frame.level.std(ddof=0), rel=1e-4
        )


@pytest.mark.parametrize(
    ("family", "term"),
    [("gaussian", "mi"), ("bernoulli", "mi"), ("gaussian", "mi with errors"), ("bernoulli", "me")],
)
def test_unknown_values_are_integrated_out(frame, family, term):
    """Beside closed forms, and Gauss-Hermite quadrature with 120 nodes."""
    outcome = "y" if family == "gaussian" else "died"
    column, error = ("z", "s") if term == "me" else ("gap", "gap_s" if "errors" in term else "")
    text = f"{outcome} ~ x + me(z, s) + (1 | hospital)"
    if term != "me":
        text = f"{outcome} ~ x + mi(gap) + (1 | hospital)\ngap | mi({error}) ~ x"
    model = bf.formula(text, frame, family=family, client="hospital")
    v, found = marginal(model, outcome)
    v = {name: value.reshape(-1) for name, value in v.items()}
    own = np.repeat(np.arange(3), 16)
    slope = v["me(z, s)" if term == "me" else "mi(gap)"][0]
    z = frame[column].to_numpy()
    mean = v[f"{column}_Intercept"][0] + (
        v[f"{column}_x"][0] * frame.x.to_numpy() if term != "me" else 0.0
    )
    sd, known = np.full(len(z), v[f"{column}_sigma"][0]), np.isfinite(z)
    expected = np.zeros(len(z))
    if error:  # the distribution of the true value given that which is measured
        s = np.where(known, frame[error], np.inf)
        expected += np.where(
            known, stats.norm.logpdf(z, mean, np.hypot(sd, np.where(known, s, 1.0))), 0.0
        )
        mean, sd = (
            mean + np.where(known, (z - mean) * sd**2 / (sd**2 + s**2), 0.0),
            sd / np.sqrt(1 + sd**2 / s**2),
        )
        z = np.full(len(z), np.nan)
        known[:] = False
    else:
        expected += np.where(known, stats.norm.logpdf(z, mean, sd), 0.0)
    rest = v["Intercept"][0] + v["x"][0] * frame.x.to_numpy() + v["1|hospital"][own]
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    points = np.where(known[:, None], z[:, None], mean[:, None] + sd[:, None] * nodes)
    eta = rest[:, None] + slope * points
    if family == "gaussian":
        at = rest + slope * np.where(known, z, mean)
        spread = np.hypot(v["sigma"][0], np.where(known, 0.0, slope * sd))
        expected += stats.norm.logpdf(frame.y, at, spread)
    else:
        sign = np.where(frame.died == 1, 1.0, -1.0)[:, None]
        expected += np.log((special.expit(sign * eta) * weights / weights.sum()).sum(1))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-2)


def test_effects_and_new_rows_may_lack_the_covariate(frame):
    text = "died ~ x + mi(gap) + mo(level) + (1 | hospital)\ngap | mi() ~ x"
    model = bf.formula(text, frame, family="bernoulli", client="hospital")
    algorithm = bf.SFVI(corrected=False, local_steps=1)
    posterior = bf.fit(model, model.federation, algorithm, rounds=1, execution=EAGER)
    found = bf.effects.comparisons(posterior, {"x": [0, 1], "level": [0, 3]}, num_samples=20)
    assert found.labels["contrast"].tolist() == ["1 - 0", "3 - 0"]
    assert found.estimand == "Difference of E[died]"
    link = bf.effects.comparisons(posterior, {"level": [0, 3]}, scale="link", num_samples=20)
    steps = 3 * posterior.derived(num_samples=20)["mo(level)"]
    torch.testing.assert_close(link.draws[:, 0].float(), steps, rtol=1e-3, atol=1e-3)
    slope = bf.effects.slopes(posterior, "gap", num_samples=20)
    moved = bf.effects.comparisons(posterior, {"gap": 0.01}, num_samples=20)
    torch.testing.assert_close(slope.draws, moved.draws / 0.01, rtol=0.02, atol=1e-3)
    means = bf.effects.marginal_means(posterior, "level", num_samples=20)
    assert means.labels["level"].tolist() == [0, 1, 2, 3]
    later = model.encode(frame.drop(columns="died"))
    assert later["gap"].isnan().tolist() == frame.gap.isna().tolist()
    assert posterior.predict(later)["died"].shape[1] == len(frame)


def test_priors_of_the_users(frame):
    priors = {
        "mo(level)": dist.Normal(0.0, 7.0),
        "gap_sigma": dist.HalfNormal(9.0),
        "mi(gap)": dist.Laplace(0.0, 2.0),
    }
    text = "y ~ x + mi(gap) + mo(level) + (1 | hospital)\ngap | mi() ~ x"
    model = bf.formula(text, frame, priors=priors, client="hospital")
    _, nodes = drawn(model)
    scales = [float(nodes[f"_prior|{name}"]["fn"].scale) for name in ("mo(level)", "mi(gap)")]
    assert scales == [7.0, 2.0] and "dist.HalfNormal(scale=9.0)" in str(model)


REFUSED = {
    "y ~ mi(gap)": r"mi\(gap\): add a line with the predictors of gap, gap \| mi\(\) ~ x",
    "y ~ x\ngap | mi() ~ x": r"the outcome has no term mi\(gap\)",
    "y ~ mi(gap)*x\ngap | mi() ~ x": "is a term of its own, without interactions",
    "y ~ mi(gap) + (1 + mi(gap) | hospital)\ngap | mi() ~ x": "is a term of its own",
    "y ~ mi(gap) + gap\ngap | mi() ~ x": "'gap' is in mi(gap) and elsewhere",
    "y ~ mi(gap)\ngap | mi() ~ y": "leave y out of the predictor of 'gap'",
    "y ~ mi(gap) + me(z, s)\ngap | mi() ~ x": "one covariate .* is integrated out, not 2",
    "y ~ mi(gap)\ngap | mi() ~ x\nsigma ~ mi(gap)": "is a term of the outcome's own predictor alone",
    "y ~ mi(pain)\npain | mi() ~ x": "'pain' holds text",
    "y ~ me(z)": "me() takes a column and that of its standard errors",
    "y ~ me(z, x)": "the standard error 'x' is .*, not above 0",
    "y ~ mo(kind)": "'kind' is text, which has no order",
    "y ~ mo(x + 1)": r"mo\(\) takes a column",
    "y ~ mo(level):x": "is a term of its own",
    "y ~ mi(none)\nnone | mi() ~ x": "'none' is missing or the same in all rows",
    "y ~ mo(one)": "'one' is the same in all rows",
    "y ~ mi(sigma)\nsigma | mi() ~ x": "'sigma' is a parameter of the gaussian family",
    "y ~ gap": "'gap' is missing",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(frame, text):
    rows = frame.assign(none=np.nan, one=1, sigma=frame.gap)
    pattern = (
        REFUSED[text].replace("(gap) and", r"\(gap\) and").replace("me() takes", r"me\(\) takes")
    )
    with pytest.raises(ValueError, match=pattern) as error:
        bf.formula(text, rows, client="hospital")
    assert "\n" not in str(error.value)


def test_the_notation_of_brms(frame):
    one = bf.formula(
        "bf(y ~ mi(gap) + (1 | hospital)) + bf(gap | mi() ~ x) + set_rescor(FALSE)", frame
    )
    other = bf.formula("y ~ mi(gap) + (1 | hospital)\ngap | mi() ~ x", frame)
    assert str(one).partition('."""')[2] == str(other).partition('."""')[2]
