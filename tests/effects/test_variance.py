"""Tests of the Bayesian R² and of intraclass correlations: by hand from the draws, by ArviZ, and by simulation."""

import arviz as az
import numpy as np
import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from scipy.special import expit

import bayesfed as bf
from bayesfed import effects
from bayesfed.effects.variance import _mean_and_variance
from bayesfed.vmap.mixtures import Mixture

S = 300


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    rows = 200
    frame = pd.DataFrame({"g": rng.choice(list("abcdefgh"), rows), "x": rng.normal(5, 2, rows)})
    own = pd.Series(rng.normal(0, 1.0, 8), list("abcdefgh"))
    frame["w"] = rng.choice(list("pqr"), rows)
    frame["n"] = rng.integers(1, 9, rows)
    eta = 0.5 * (frame.x - 5) + frame.g.map(own)
    frame["y"] = 10 + eta + rng.normal(0, 1.5, rows)
    frame["cured"] = rng.binomial(frame.n, expit(eta))
    return frame


def fitted(text, frame, rounds=3, **settings):
    model = bf.formula(text, frame, **settings)
    plain = bf.Execution(compile=False)
    posterior = bf.fit(model, model.federation, rounds=rounds, execution=plain)
    draws = posterior.derived(num_samples=S)
    return posterior, {name: value.double().numpy() for name, value in draws.items()}


@pytest.fixture(scope="module")
def gaussian(frame):
    return fitted("y ~ x + (1 + x | g) + (1 | g:w)", frame)


@pytest.fixture(scope="module")
def binomial(frame):
    return fitted("p(cured, n) ~ x + (1 | g)", frame, family="binomial")


def of_rows(posterior, draws, frame):
    """The linear predictor without ``g:w`` of all rows at all draws, ``(S, rows)``."""
    place = [posterior.federation.names.index(name) for name in frame.g]
    eta = draws["Intercept"][:, None] + draws["x"][:, None] * frame.x.to_numpy()
    eta = eta + draws["1|g"][:, place]
    return eta + draws["x|g"][:, place] * frame.x.to_numpy() if "x|g" in draws else eta


def test_r2_of_a_gaussian_model_by_hand_and_by_arviz(frame):
    posterior, draws = fitted("y ~ x + (1 | g)", frame, rounds=None)
    mean, found = of_rows(posterior, draws, frame), effects.bayes_r2(posterior, num_samples=S)
    fit = mean.var(1, ddof=1)
    np.testing.assert_allclose(found.draws[:, 0], fit / (fit + draws["sigma"] ** 2), rtol=1e-4)
    by_arviz = az.r2_score(frame.y.to_numpy(), mean)["r2"]  # with the variance of the residuals
    assert found.to_frame()["mean"].item() == pytest.approx(by_arviz, abs=0.02)


def test_r2_of_a_binomial_model_is_that_of_its_trials(binomial, frame):
    posterior, draws = binomial
    p, n = expit(of_rows(posterior, draws, frame)), frame.n.to_numpy()
    p = np.repeat(p, n, axis=1)
    fit = p.var(1, ddof=1)
    found = effects.bayes_r2(posterior, num_samples=S).draws[:, 0]
    np.testing.assert_allclose(found, fit / (fit + (p * (1 - p)).mean(1)), rtol=1e-4)


def test_the_variance_of_a_mixture_is_within_and_between_its_components():
    parts = dist.Normal(torch.tensor([1000.0]), 1.0), dist.Normal(torch.tensor([1002.0]), 3.0)
    mean, variance = _mean_and_variance(Mixture(torch.tensor([[3.0, 1.0]]).log(), parts, {"z": 2}))[
        0
    ]
    assert float(mean) == pytest.approx(1000.5)
    assert float(variance) == pytest.approx(0.75 * 1 + 0.25 * 9 + 0.75 * 0.25 * 4, rel=1e-3)


def test_icc_of_random_intercepts_by_hand(binomial):
    posterior, draws = binomial
    found = effects.icc(posterior, num_samples=S)
    assert found.labels["variance"].tolist() == ["g", "residual"]
    between = draws["1|g_sigma"] ** 2
    np.testing.assert_allclose(found.draws[:, 0], between / (between + np.pi**2 / 3), rtol=1e-5)


@pytest.mark.slow
def test_icc_of_slopes_is_that_of_simulated_effects(gaussian, frame):
    posterior, draws = gaussian
    found = effects.icc(posterior, num_samples=S)
    assert found.labels["variance"].tolist() == ["g", "g:w", "residual"]
    np.testing.assert_allclose(found.draws.sum(1), 1.0)
    rng = np.random.default_rng(0)
    for s in range(3):
        sd = np.array([draws["1|g_sigma"][s], draws["x|g_sigma"][s]])
        cross = draws["cor(1, x)|g"][s] * sd[0] * sd[1]
        effect = rng.multivariate_normal([0, 0], [[sd[0] ** 2, cross], [cross, sd[1] ** 2]], 40_000)
        slopes = effect[:, :1] + effect[:, 1:] * frame.x.to_numpy()[None]
        parts = [slopes.var(0).mean(), draws["1|g:w_sigma"][s] ** 2, draws["sigma"][s] ** 2]
        np.testing.assert_allclose(found.draws[s], np.array(parts) / sum(parts), atol=0.01)


def test_that_a_server_has_the_icc_of_intercepts_and_names_the_rows_of_slopes(
    gaussian, binomial, tmp_path
):
    from bayesfed.output import checkpoint

    servers = []
    for one in (binomial[0], gaussian[0]):
        checkpoint.save(one, tmp_path / "p.safetensors", globals_only=True)
        servers.append(bf.Posterior.load(tmp_path / "p.safetensors", one.program.model))
    assert torch.equal(effects.icc(servers[0]).draws, effects.icc(binomial[0]).draws)
    with pytest.raises(ValueError, match=r"needs the rows for the slopes \(1, x \| g\)"):
        effects.icc(servers[1])


def test_that_formulas_without_an_icc_are_refused(frame):
    for text, family, message in (
        ("n ~ x + (1 | g)", "poisson", "poisson family has no residual variance"),
        ("y ~ x + (1 | g)\nsigma ~ x", "gaussian", "sigma of .* differs between rows"),
        ("y ~ x", "gaussian", r"has no \( ... \| g\)"),
    ):
        model = bf.formula(text, frame, family=family, client="g")
        posterior = bf.fit(model, model.federation, rounds=2, execution=bf.Execution(compile=False))
        with pytest.raises(ValueError, match=message):
            effects.icc(posterior)
    schools = bf.fit(bf.models.eight_schools, bf.datasets.eight_schools(), rounds=2)
    with pytest.raises(ValueError, match="is of a formula"):
        effects.icc(schools)
