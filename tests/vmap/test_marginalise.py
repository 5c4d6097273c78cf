"""Densities with continuous variables of a row integrated out equal closed forms and scipy's quadrature."""

import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy import integrate, stats

import bayesfed as bf
from bayesfed import datasets
from bayesfed.elbo import handlers
from bayesfed.vmap.choose import for_batches


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def data(seed=0, **kwargs):
    generator = np.random.default_rng(seed)
    rows = {}
    for i in range(4):
        x, n = generator.normal(size=5 + i), generator.poisson(3.0, size=5 + i)
        y = x + generator.normal(size=5 + i)
        rows[f"c{i}"] = {"x": x, "y": y, "n": n.astype(float), "hit": (n > 2).astype(float)}
    rows["c1"]["x"][2] = 40.0  # far from what any prior has
    return rows


def run(program, federation, latent, draws=3, noise=1):
    """Log densities ``(S, K, B)`` of all observed sites, at given values of the latent ones."""
    batch, model = federation.batch(), for_batches(program, federation)
    torch.manual_seed(noise)
    with handlers.given(batch.device, values=latent, draws=draws), poutine.trace() as tracer:
        model(batch)
    nodes = handlers.sample_sites(tracer.trace)
    assert nodes.keys() - {"x", "y", "n", "hit"} == latent.keys()
    return sum(
        torch.where(n["mask"], n["fn"].log_prob(n["value"]), 0.0)
        for n in nodes.values()
        if n["is_observed"]
    )


def local(*values):
    """One draw of a variable for each of the four clients."""
    return torch.tensor(values).reshape(1, 4, 1)


A = {"a": local(0.3, -1.0, 2.0, 0.0)}


def effect(distribution, outcome, field="n"):
    """A model whose rows have a latent variable of their own."""

    def model(federation):
        with federation.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                u = pyro.sample("u", distribution)
                pyro.sample(field, outcome(a, u), obs=obs.get(field))

    return model


def rows_of(found, federation):
    """The rows of ``(1, K, B)`` that are not padding, by client."""
    return [found[0, i, :n] for i, n in enumerate(federation.lengths.tolist())]


@pytest.mark.parametrize("noise", [1.0, 1 / 30, 1 / 1000])
def test_measurement_error(noise):
    """Normal rows are exact, however narrow and however far from the prior, and so is a covariate's own density."""
    mu, tau, slope, sigma = 0.4, 0.8, -1.5, 0.5

    def model(federation):
        with federation.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                x = pyro.sample("true", dist.Normal(mu, tau))
                pyro.sample("x", dist.Normal(x, noise), obs=obs["x"])
                pyro.sample("y", dist.Normal(a + slope * x, sigma), obs=obs["y"])

    rows = data()
    federation = bf.Federation.from_arrays(rows)
    found = rows_of(run(model, federation, A, 1), federation)
    for a, mine, log_prob in zip(A["a"].flatten(), rows.values(), found, strict=True):
        mean = torch.tensor([mu, float(a) + slope * mu])
        covariance = tau**2 * torch.tensor([[1.0, slope], [slope, slope**2]])
        covariance += torch.tensor([noise**2, sigma**2]).diag()
        distribution = dist.MultivariateNormal(mean, covariance)
        expected = distribution.log_prob(torch.as_tensor(np.stack([mine["x"], mine["y"]], 1)))
        torch.testing.assert_close(log_prob, expected, rtol=1e-8, atol=1e-6)


@pytest.mark.parametrize("scale", [0.1, 0.7, 2.0])
def test_overdispersed_counts_and_their_gradients(scale):
    """Densities of a log-Normal-Poisson, and their gradients in a and in the scale, agree with scipy."""
    spread = torch.tensor(scale, requires_grad=True)
    model = effect(dist.Normal(0.0, spread), lambda a, e: dist.Poisson((a + e).exp()))
    rows = {f"c{i}": {"n": np.array([n])} for i, n in enumerate([0.0, 3.0, 400.0, 7.0])}
    federation = bf.Federation.from_arrays(rows)
    at = {"a": A["a"].clone().requires_grad_()}
    found = run(model, federation, at, 1)
    for i, mine in enumerate(rows.values()):
        a = float(A["a"][0, i, 0])
        for j, n in enumerate(mine["n"]):

            def log_f(e, a=a, n=n):
                return stats.norm.logpdf(e, 0, scale) + stats.poisson.logpmf(n, np.exp(a + e))

            mode = max(np.linspace(-40 * scale, 40 * scale, 4001), key=log_f)
            top, ends = log_f(mode), (mode - 12 * scale, mode + 12 * scale)

            def mean(g, log_f=log_f, top=top, ends=ends, mode=mode):
                f = lambda e: g(e) * np.exp(log_f(e) - top)  # noqa: E731
                return integrate.quad(f, *ends, points=[mode], epsabs=1e-13, limit=400)[0]

            total = mean(lambda e: 1.0)
            slopes = (
                mean(lambda e, a=a, n=n: n - np.exp(a + e)) / total,
                mean(lambda e: e**2 / scale**3 - 1 / scale) / total,
            )
            grads = torch.autograd.grad(found[0, i, j], [at["a"], spread], retain_graph=True)
            assert abs(found[0, i, j].item() - top - np.log(total)) < 1e-4
            for grad, slope in zip((grads[0][0, i, 0], grads[1]), slopes, strict=True):
                assert abs(float(grad) - slope) < 1e-3 * (1 + abs(slope))


def test_other_supports():
    """Variables over the positive numbers and the unit interval: a Gamma-Poisson and a Beta-binomial."""
    rows = data()
    federation = bf.Federation.from_arrays(rows)
    gamma = effect(dist.Gamma(3.0, 2.0), lambda a, u: dist.Poisson(u * a.exp()))
    found = rows_of(run(gamma, federation, A, 1), federation)
    for a, mine, log_prob in zip(A["a"].flatten(), rows.values(), found, strict=True):
        distribution = stats.nbinom(3, 2 / (2 + np.exp(float(a))))
        np.testing.assert_allclose(log_prob, distribution.logpmf(mine["n"]), atol=1e-5)
    beta = effect(dist.Beta(2.0, 3.0), lambda a, p: dist.Binomial(30, p))
    found = rows_of(run(beta, federation, A, 1), federation)
    for mine, log_prob in zip(rows.values(), found, strict=True):
        np.testing.assert_allclose(log_prob, stats.betabinom(30, 2, 3).logpmf(mine["n"]), atol=1e-5)


def test_beside_a_discrete_variable():
    """A discrete and a continuous variable at once: a mixture of two Normals, each wider by the row's own variable."""

    def model(federation):
        with federation.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                z = pyro.sample("z", dist.Bernoulli(0.3))
                u = pyro.sample("u", dist.Normal(2.0 * z, 0.5 + z))
                pyro.sample("y", dist.Normal(a + u, 0.6), obs=obs["y"])

    rows = data()
    federation = bf.Federation.from_arrays(rows)
    found = rows_of(run(model, federation, A, 1), federation)
    for a, mine, log_prob in zip(A["a"].flatten(), rows.values(), found, strict=True):
        parts = [
            np.log(share) + stats.norm.logpdf(mine["y"], float(a) + 2 * z, np.hypot(0.5 + z, 0.6))
            for z, share in enumerate((0.7, 0.3))
        ]
        np.testing.assert_allclose(log_prob, np.logaddexp(*parts), atol=1e-6)


def with_gaps():
    rows = data()
    for mine in rows.values():
        mine["x"][1::2] = np.nan
        mine["hit"][::3] = np.nan
    rows["c3"]["y"][3:5] = np.nan
    return rows


def covariates(federation):
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            hit = pyro.sample("hit", dist.Bernoulli(0.3), obs=obs["hit"])
            x = pyro.sample("x", dist.Normal(0.5 + hit, 0.8), obs=obs["x"])
            pyro.sample("y", dist.Normal(a - 1.5 * x, 0.5), obs=obs.get("y"))


def test_missing_covariates_that_have_a_prior():
    """Two covariates with gaps, the second given the first: a row's density is that of its observed values."""
    rows = with_gaps()
    federation = bf.Federation.from_arrays(rows, missing="keep")
    found = rows_of(run(covariates, federation, A, 1), federation)
    for a, mine, log_prob in zip(A["a"].flatten().tolist(), rows.values(), found, strict=True):
        for j in range(len(log_prob)):
            hit, x, y = mine["hit"][j], mine["x"][j], mine["y"][j]
            parts = []
            for value, share in enumerate((0.7, 0.3)):
                if not np.isnan(hit) and hit != value:
                    continue
                at = np.log(share)
                if np.isnan(x):
                    mean, spread = a - 1.5 * (0.5 + value), np.hypot(1.5 * 0.8, 0.5)
                else:
                    at, mean, spread = at + stats.norm.logpdf(x, 0.5 + value, 0.8), a - 1.5 * x, 0.5
                parts.append(at + (0.0 if np.isnan(y) else stats.norm.logpdf(y, mean, spread)))
            np.testing.assert_allclose(log_prob[j], np.logaddexp.reduce(parts), atol=1e-6)


def test_a_fit_is_the_exact_posterior():
    """The posterior of a linear Gaussian hierarchy by linear algebra: means to 0.15 sd, sds to 10 %."""

    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                u = pyro.sample("u", dist.Normal(0.0, 0.7))
                pyro.sample("x", dist.Normal(u, 0.3), obs=obs["x"])
                pyro.sample("y", dist.Normal(a + 2.0 * u, 0.5), obs=obs.get("y"))

    rows = data()
    rows["c1"]["x"][2] = 1.0
    federation = bf.Federation.from_arrays(rows)
    draws = bf.fit(model, federation, bf.SFVI(corrected=False), rounds=8).sample(4000)
    # y - slope x has variance v given a, and mean a
    slope = 2.0 * 0.49 / (0.49 + 0.09)
    v = 4.0 * 0.49 * 0.09 / (0.49 + 0.09) + 0.25
    n = np.array([len(mine["x"]) for mine in rows.values()])
    total = np.array([(mine["y"] - slope * mine["x"]).sum() for mine in rows.values()])
    precision = np.diag([0.25 + 4.0, *(1.0 + n / v)])
    precision[0, 1:] = precision[1:, 0] = -1.0
    covariance = np.linalg.inv(precision)
    mean, sd = covariance @ np.array([0.0, *total / v]), np.sqrt(np.diag(covariance))
    found = np.column_stack([draws["mu"], draws["a"]])
    assert (abs(found.mean(0) - mean) < 0.15 * sd).all()
    assert (abs(np.log(found.std(0) / sd)) < np.log(1.1)).all()


def test_what_is_predicted():
    """Predictions of y given the row's x, and of counts in rows without x: moments to five errors of 4000 draws."""
    slope = 1.5

    def model(federation):
        with federation.clients():
            a = pyro.sample("a", dist.Normal(1.0, 1e-3))
            with federation.observations() as obs:
                true = pyro.sample("true", dist.Normal(0.0, 1.0))
                pyro.sample("x", dist.Normal(true, 0.5), obs=obs["x"])
                pyro.sample("y", dist.Normal(a + slope * true, 0.2), obs=obs.get("y"))

    rows = {"c": {"x": np.array([-2.0, 0.0, 3.0]), "y": np.array([-1.0, 1.0, 4.0])}}
    posterior = bf.fit(model, bf.Federation.from_arrays(rows), rounds=2)
    new = bf.Federation.from_arrays({"c": {"x": np.array([-2.0, 0.0, 3.0])}})
    for federation in (None, new):
        y = posterior.predict(federation, num_samples=4000)["y"]
        mean = 1.0 + slope * torch.tensor([-2.0, 0.0, 3.0]) / 1.25
        spread = (slope**2 * 0.25 / 1.25 + 0.04) ** 0.5
        torch.testing.assert_close(y.mean(0), mean, rtol=0, atol=5 * spread / 4000**0.5)
        torch.testing.assert_close(y.std(0) / spread, torch.ones(3), rtol=0, atol=5 / 8000**0.5)
    counts = effect(dist.Normal(0.0, 0.5), lambda a, e: dist.Poisson((1e-3 * a + e).exp()))
    posterior = bf.fit(counts, bf.Federation.from_arrays(data()), rounds=2)
    n = posterior.predict(bf.Federation.from_arrays({"c0": {"x": np.zeros(5)}}), 4000)["n"]
    mean = np.exp(0.125)
    spread = (mean + mean**2 * (np.exp(0.25) - 1)) ** 0.5
    assert n.shape == (4000, 5)
    assert abs(float(n.mean()) - mean) < 5 * spread / 20_000**0.5
    assert abs(float(n.std()) / spread - 1) < 0.1
    density = posterior.log_likelihood(num_samples=10)["n"]
    assert density.shape == (10, 26)
    assert density.isfinite().all()


def test_what_cannot_be_integrated_out_is_refused():
    def two(federation):
        with federation.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                u = pyro.sample("u", dist.Normal(0.0, 1.0))
                v = pyro.sample("v", dist.Normal(0.0, 1.0))
                pyro.sample("y", dist.Normal(a + u * v, 1.0), obs=obs["y"])

    federation = bf.Federation.from_arrays(data())
    with pytest.raises(ValueError, match="sites 'u' and 'v' are continuous, and of a row: one"):
        bf.fit(two, federation)
    vector = effect(
        dist.Normal(torch.zeros(2), 1.0).to_event(1),
        lambda a, u: dist.Normal(a + u.sum(-1), 1.0),
        "y",
    )
    with pytest.raises(ValueError, match="site 'u' is of a row, and .* it is a vector"):
        bf.fit(vector, federation)

    def idle(federation):
        with federation.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                pyro.sample("cost", dist.Normal(0.0, 1.0), obs=obs.get("cost"))
                pyro.sample("y", dist.Normal(a, 1.0), obs=obs["y"])

    with pytest.raises(ValueError, match="no outcome depends on latent site 'cost', .* its field"):
        bf.fit(idle, federation)

    def beyond(what):
        def model(federation):
            with federation.clients():
                a = pyro.sample("a", dist.Normal(0.0, 1.0))
                with federation.observations() as obs:
                    u = pyro.sample("u", dist.Normal(0.0, 1.0))
                    pyro.sample("y", dist.Normal(a + u, 1.0), obs=obs["y"])
                what("more", u.sum(-1, keepdim=True))

        return model

    for what in (pyro.deterministic, pyro.factor):
        with pytest.raises(ValueError, match="'more' depends on site 'u', which is of a row"):
            bf.fit(beyond(what), federation)


def test_a_model_of_row_variables_alone_is_refused():
    def alone(federation):
        with federation.clients(), federation.observations() as obs:
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=obs.get("y"))

    for algorithm in (bf.SFVI(), bf.SFVIAvg()):
        with pytest.raises(
            ValueError, match="nothing to learn: variables of an observation are integrated"
        ):
            bf.start(alone, datasets.eight_schools(), algorithm, rounds=1)


def test_a_factor_of_a_rows_variable_is_integrated_as_an_outcome_is():
    """y | e with scale 0.5 and e with scale 1 give y the scale √1.25, also with pyro.factor, and the model fits."""

    def model(federation):
        with federation.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                e = pyro.sample("e", dist.Normal(0.0, 1.0))
                pyro.factor("n", dist.Normal(a + e, 0.5).log_prob(obs["y"]))

    rows = data()
    federation = bf.Federation.from_arrays(rows)
    found = rows_of(run(model, federation, A, 1), federation)
    for a, mine, log_prob in zip(A["a"].flatten(), rows.values(), found, strict=True):
        expected = dist.Normal(a, 1.25**0.5).log_prob(torch.as_tensor(mine["y"]))
        torch.testing.assert_close(log_prob, expected, rtol=1e-8, atol=1e-6)
    assert bf.fit(model, federation, rounds=2).sample(3)["a"].shape == (3, 4)


def test_an_integrand_with_a_kink():
    """A clamp in the outcome's mean agrees with scipy; a staircase, for which no number of nodes suffices, warns."""

    def clamped(federation):
        with federation.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                e = pyro.sample("e", dist.Normal(0.0, 2.0))
                pyro.sample("n", dist.Poisson((a + e).clamp(-5, 3).exp()), obs=obs["n"])

    federation = bf.Federation.from_arrays(data())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = run(clamped, federation, A)
    for client, a in enumerate(A["a"].flatten().tolist()):
        for row, n in enumerate(federation.select([f"c{client}"])["n"].tolist()):

            def joint(e, a=a, n=n):
                rate = np.exp(np.clip(a + e, -5, 3))
                return stats.poisson.pmf(n, rate) * stats.norm.pdf(e, 0, 2)

            expected = integrate.quad(joint, -16, 16, points=[-5 - a, 3 - a], limit=200)[0]
            assert abs(float(found[0, client, row]) - np.log(expected)) < 2e-3

    def stairs(federation):
        with federation.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                e = pyro.sample("e", dist.Normal(0.0, 1.0))
                pyro.sample("y", dist.Normal(a + (5 * e).floor(), 0.3), obs=obs["y"])

    with pytest.warns(UserWarning, match="has not converged with 81 nodes: a clamp, a step"):
        for_batches(stairs, federation)
