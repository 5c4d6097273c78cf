"""Clients whose q(w_i | θ) is poor are named, and resampled: against integrals on a grid."""

import math
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed.output import modes, poor_variables
from bayesfed.output import posterior as posterior_module
from bayesfed.output.fitted import CorrectionResult

GRID = np.linspace(-25, 25, 5001)
SPREAD = 2.5


def log_odds(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        w = pyro.sample("w", dist.Normal(mu, SPREAD))
        with federation.observations() as obs:
            pyro.sample("y", dist.Bernoulli(logits=w), obs=obs["y"])


def normal(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        w = pyro.sample("w", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(w, 1.0), obs=obs["y"])


def square(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        w = pyro.sample("w", dist.Normal(mu, SPREAD))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(w.square(), 3.0), obs=obs["y"])


DEATHS = {
    "north": [1.0, 0.0, 1.0, 0.0, 0.0, 1.0],
    "south": [0.0] * 25,
    "west": [1.0] * 4 + [0.0] * 4,
}
SQUARES = {"a": [3.9, 4.1], "b": [2.0, 3.5, 1.0]}
FAR = {"a": [3.9, 4.1], "far": [9.2, 8.7, 9.0]}


def federation(rows):
    return bf.Federation.from_arrays({name: {"y": y} for name, y in rows.items()})


def integrate(rows, log_likelihood):
    """Return mean and standard deviation of each client's w, by integration over w and mu on grids."""
    mus = np.linspace(-4, 4, 161)
    prior = -0.5 * ((GRID - mus[:, None]) / SPREAD) ** 2
    joint = {name: prior + log_likelihood(np.array(y)[:, None]).sum(0) for name, y in rows.items()}
    evidence = sum(np.logaddexp.reduce(each, axis=1) for each in joint.values())
    of_mu = np.exp(evidence - mus**2 / 2 - (evidence - mus**2 / 2).max())
    of_mu /= of_mu.sum()
    found = {}
    for name, each in joint.items():
        given = np.exp(each - each.max(1, keepdims=True))
        density = of_mu @ (given / given.sum(1, keepdims=True))
        mean = density @ GRID
        found[name] = mean, np.sqrt(density @ (GRID - mean) ** 2)
    return found


def logistic(y):
    return y * GRID - np.logaddexp(0, GRID)


def squared(y):
    return -0.5 * ((y - GRID**2) / 3.0) ** 2


@pytest.fixture(scope="module")
def plain():
    return bf.fit(square, federation(FAR), bf.SFVI(corrected=False), progress=False)


def test_clients_whose_q_lacks_a_mode_are_named_with_their_distances(plain):
    right = integrate(FAR, squared)
    assert set(plain.poor_clients) == {"a", "far"}
    draws = plain.sample(20_000)["w"]
    for k, (name, (mean, sd)) in enumerate(right.items()):
        far = plain.poor_clients[name]
        assert far.site == "w"
        assert far.ratio == pytest.approx(float(draws[:, k].std()) / sd, abs=0.1)
        assert abs(far.shift) == pytest.approx(abs(float(draws[:, k].mean()) - mean) / sd, abs=0.45)
    text = poor_variables.caveat({}, plain.poor_clients)
    assert "'a' (w: mean off by" in text and "'far'" in text and "posterior.corrected()" in text


@pytest.mark.parametrize(
    ("model", "rows", "log_likelihood", "seed"),
    [
        (log_odds, DEATHS, logistic, 1),
        (square, SQUARES, squared, 0),
        (square, SQUARES, squared, 1),
        (square, SQUARES, squared, 4),
    ],
)
def test_a_corrected_fit_is_right_for_every_client(model, rows, log_likelihood, seed):
    posterior = bf.fit(model, federation(rows), seed=seed, progress=False)
    assert posterior.resampled or model is not square
    assert not posterior.poor_clients
    draws = posterior.sample(8000)["w"]
    for k, (mean, sd) in enumerate(integrate(rows, log_likelihood).values()):
        assert float(draws[:, k].mean()) == pytest.approx(mean, abs=0.15 * sd)
        assert float(draws[:, k].std()) == pytest.approx(sd, rel=0.15)


def test_a_mode_too_far_to_resample_is_found_from_other_starts(plain):
    corrected = plain.corrected()
    assert not corrected.poor_clients
    draws = corrected.sample(8000)["w"]
    for k, (mean, sd) in enumerate(integrate(FAR, squared).values()):
        assert float(draws[:, k].mean()) == pytest.approx(mean, abs=0.25 * sd)
        assert float(draws[:, k].std()) == pytest.approx(sd, rel=0.15)


def test_a_mode_too_far_to_resample_is_named_after_the_correction(plain, monkeypatch):
    """As where no other start finds it."""
    monkeypatch.setattr(modes, "_higher_modes", lambda given, u, root: (u, root))
    corrected = plain.corrected()
    assert corrected.resampled == {"a"} and list(corrected.poor_clients) == ["far"]
    assert "NUTS" in repr(corrected)
    assert corrected.to_arviz(8).posterior.attrs["caveat"] in repr(corrected)


def test_draws_of_a_resampled_client_depend_on_no_other_client(plain):
    corrected = plain.corrected()
    alone = corrected.select(["a"]).sample(50)["w"][:, 0]
    torch.testing.assert_close(corrected.sample(50)["w"][:, 0], alone)


def test_resampled_clients_are_saved(plain, tmp_path):
    corrected = plain.corrected()
    corrected.save(tmp_path / "a.safetensors")
    loaded = bf.Posterior.load(tmp_path / "a.safetensors", square, federation(FAR))
    assert loaded.resampled == {"a", "far"}
    torch.testing.assert_close(loaded.sample(20)["w"], corrected.sample(20)["w"])


def test_no_client_of_a_conjugate_model_is_named():
    rng = np.random.default_rng(0)
    clients = {f"c{i}": {"y": rng.normal(size=1 + i)} for i in range(10)}
    data = bf.Federation.from_arrays(clients)

    def eight(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            w = pyro.sample("w", dist.Normal(mu, torch.ones(8)).to_event(1))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(w.sum(-1), 1.0), obs=obs["y"])

    assert not bf.fit(eight, data, progress=False).poor_clients


def test_nothing_is_checked_where_a_client_has_no_density():
    data = federation(DEATHS)
    assert not bf.fit(log_odds, data, bf.FedAvg(), rounds=2, progress=False).poor_clients
    private = bf.fit(
        log_odds,
        data,
        bf.FedABML(),
        rounds=1,
        privacy=bf.Privacy(noise=1.0, clip=1.0),
        progress=False,
    )
    assert not private.poor_clients


def test_the_caveat_names_three_and_counts_the_others():
    far = poor_variables.Distance("w", 0.5, 0.6, 0.01)
    text = poor_variables.caveat({}, dict.fromkeys("abcde", far))
    assert "'c' (w:" in text and "'d'" not in text and "and 2 more" in text
    assert "NUTS" in text and not poor_variables.caveat({}, {})


@pytest.mark.parametrize("ratio", [0.67, 1.0])
def test_a_global_whose_standard_deviation_is_too_small_is_named(ratio):
    rows = {f"c{i}": [0.3 * i, 1.0] for i in range(6)}
    exact = bf.fit(normal, federation(rows), bf.SFVI(corrected=False), progress=False)
    narrower = exact.params["global.log_scale"] + math.log(ratio)
    posterior = replace(exact, params=exact.params | {"global.log_scale": narrower})
    assert posterior.khat < 0.65
    if ratio == 1.0:
        assert not posterior.caveat
        return
    (distance,) = posterior.poor_globals.values()
    assert distance.ratio == pytest.approx(ratio, rel=0.1)
    assert "posterior of mu (mean off by" in posterior.caveat
    assert not posterior.corrected().caveat


def test_a_fit_that_could_not_be_corrected_says_so(monkeypatch, tmp_path):
    data, plain = federation({"a": [1.0], "b": [2.0]}), bf.SFVI(corrected=False)
    posterior = bf.fit(normal, data, plain, progress=False)
    assert posterior.correctable and not posterior.caveat
    monkeypatch.setattr(posterior_module, "correct", lambda _: CorrectionResult(reliable=False))
    assert posterior.corrected().correction.rhat < 1.05
    monkeypatch.setattr("bayesfed.output.chains.takes_seconds", lambda _: False)
    failed = posterior.corrected()
    assert "too uneven to correct it by" in repr(failed)
    failed.save(tmp_path / "p")
    loaded = bf.Posterior.load(tmp_path / "p", normal, posterior.federation)
    assert loaded.caveat == failed.caveat
    refused = CorrectionResult(reliable=False, attempted=False)
    monkeypatch.setattr(posterior_module, "correct", lambda _: refused)
    assert not posterior.corrected().caveat


def heavy_tailed(federation):
    """As :func:`normal`, with a prior that is so wide that the posterior looks Normal."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        w = pyro.sample("w", dist.StudentT(3.0, mu, 1000.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(w, 1.0), obs=obs["y"])


@pytest.mark.parametrize(("model", "checked"), [(normal, False), (heavy_tailed, True)])
def test_clients_whose_posterior_is_q_by_their_log_weights_are_not_compared(
    model, checked, monkeypatch
):
    """Only where it has no other mode: rows of Gaussian outcomes, Normal priors."""
    compared, whole = [], poor_variables._distances

    def counted(fitted, theta, thetas, chunk, key, each):
        compared.extend(chunk.tolist())
        return whole(fitted, theta, thetas, chunk, key, each)

    monkeypatch.setattr(poor_variables, "_distances", counted)
    monkeypatch.setattr("bayesfed.checks.sufficient.FEWEST", 0)
    rows = federation({name: [0.1 * i for i in range(20)] for name in "abc"})
    posterior = bf.fit(model, rows, bf.SFVI(corrected=False), progress=False)
    assert posterior.federation.moments is not None
    found = poor_variables.check_clients(posterior)
    assert bool(compared) is checked
    assert checked or not (found.poor or found.doubtful)


def steps(federation):
    """Counts whose rate grows from 2 to 6 at a time of the client's own."""
    middle = pyro.sample("middle", dist.Normal(0.5, 0.2))
    with federation.clients():
        at = pyro.sample("at", dist.Normal(middle, 0.15))
        with federation.observations() as obs:
            after = torch.sigmoid((obs["t"] - at) * 20)
            pyro.sample("y", dist.Poisson(2 + 4 * after), obs=obs["y"])


def test_clients_of_small_data_are_resampled_where_a_normal_is_a_little_off():
    generator = np.random.default_rng(0)
    rows = {}
    for i in range(8):
        t = np.sort(generator.uniform(size=8))
        y = generator.poisson(np.where(t > 0.5 + 0.12 * generator.normal(), 6, 2))
        rows[f"c{i}"] = {"t": t, "y": y.astype(float)}
    posterior = bf.fit(steps, bf.Federation.from_arrays(rows), progress=False)
    draws = posterior.sample(8000)
    at = np.linspace(-1.0, 2.0, 601)
    middle = draws["middle"].numpy()[:, None]
    for i, (name, row) in enumerate(rows.items()):
        rate = 2 + 4 / (1 + np.exp(-20 * (row["t"] - at[:, None])))
        log_p = (row["y"] * np.log(rate) - rate).sum(1) - ((at - middle) / 0.15) ** 2 / 2
        weights = np.exp(log_p - log_p.max(1, keepdims=True))
        weights = (weights / weights.sum(1, keepdims=True)).mean(0)
        mean = weights @ at
        sd = (weights @ (at - mean) ** 2) ** 0.5
        assert abs(float(draws["at"][:, i].mean()) - mean) < 0.05 * sd, name
        assert 0.95 < float(draws["at"][:, i].std()) / sd < 1.05, name
