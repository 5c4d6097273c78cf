"""Fits to clients' moments against fits to their rows; what the moments show, and what they are not enough for."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed.data.absent import RowsAbsent
from bayesfed.data.moments import largest_leverage, other_rows, statistics

CLIENTS = 8
EAGER = bf.Execution(compile=False)


def data(clients=CLIENTS, seed=0):
    """Rows with a number, a category as a column of 0 and 1, and a Gaussian outcome."""
    generator = np.random.default_rng(seed)
    found = {}
    for i in range(clients):
        n = 40 + 5 * i
        x, arm = generator.normal(1.0, 2.0, n), (np.arange(n) % 3 == 0).astype(float)
        y = 1.0 + generator.normal() + 0.5 * x - 0.4 * arm + 0.7 * generator.normal(size=n)
        found[f"c{i}"] = {"x": x, "arm": arm, "size": np.full(n, n / 50), "y": y}
    return bf.Federation.from_arrays(found)


def hierarchy(scale=1.0, slopes=("x", "arm"), outcome=None):
    """A random intercept, and slopes of these fields, whose prior has this scale."""

    def model(federation):
        b = pyro.sample("b", dist.Normal(torch.zeros(1 + len(slopes)), scale).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with federation.clients():
            size = federation.of_clients("size")
            u = pyro.sample("u", dist.Normal(0.3 * size, tau))
            pyro.deterministic("level", b[..., 0] + u)
            with federation.observations() as obs:
                mean = b[..., 0] + u
                for j, name in enumerate(slopes, start=1):
                    mean = mean + b[..., j] * obs[name]
                fn = outcome(mean, sigma, obs) if outcome else dist.Normal(mean, sigma)
                pyro.sample("y", fn, obs=obs.get("y"))

    return model


def intercepts_and_slopes(scale):
    """A random intercept and slope, as which the globals move the rows; None is a random scale."""

    def model(federation):
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(torch.ones(2)).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0)) if scale is None else scale
        with federation.clients():
            u = pyro.sample("u", dist.Normal(torch.zeros(2), tau).to_event(1))
            with federation.observations() as obs:
                mean = (b + u)[..., 0] + (b + u)[..., 1] * obs["x"]
                pyro.sample("y", dist.Normal(mean, sigma), obs=obs.get("y"))

    return model


@pytest.fixture(scope="module")
def moments(tmp_path_factory):
    path = tmp_path_factory.mktemp("moments") / "moments.safetensors"
    bf.Moments.of(data()).save(path)
    return bf.Moments.load(path)


def close(found, expected, sds):
    """Means and standard deviations of draws, within a part of the latter."""
    for name, value in expected.items():
        sd = value.std(0)
        assert ((found[name].mean(0) - value.mean(0)).abs() < sds * sd).all(), name
        assert ((found[name].std(0) / sd - 1).abs() < sds).all(), name


@pytest.mark.parametrize(
    ("model", "algorithm"),
    [
        (hierarchy(), bf.SFVI(corrected=False)),
        (hierarchy(scale=0.2), bf.SFVI(corrected=False)),  # another prior
        (hierarchy(slopes=("x",)), bf.PVI(corrected=False)),  # fewer predictors
    ],
)
def test_a_fit_is_that_of_the_rows(moments, model, algorithm):
    """The same algorithm and seed: the same q, up to the round-off of single precision."""
    how = {"seed": 1, "rounds": 2, "progress": False, "execution": EAGER}
    found = bf.fit(model, moments.federation(), algorithm, **how)
    expected = bf.fit(model, data(), algorithm, **how)
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=2e-3, atol=2e-3)
    close(found.sample(200), expected.sample(200), 0.02)
    close(found.derived(num_samples=200), expected.derived(num_samples=200), 0.02)
    torch.testing.assert_close(found.elbo(50), expected.elbo(50), rtol=1e-4, atol=0.02)


@pytest.mark.parametrize("scale", [1.0, None])
def test_a_corrected_fit_of_many_clients_reads_no_rows(scale):
    """So many that clients' densities at shared points would pay, if rows were here; a known or a random scale."""
    rows, model = data(60), intercepts_and_slopes(scale)
    how = {"progress": False, "execution": EAGER}
    found = bf.fit(model, bf.Moments.of(rows).federation(), **how).sample(4000)
    expected = bf.fit(model, rows, **how).sample(4000)
    close(found, {name: expected[name] for name in ("b", "tau")}, 0.1)


@pytest.fixture(scope="module")
def pair(moments):
    """A posterior of the moments, and that of the rows."""
    fits = (
        bf.fit(hierarchy(), own, progress=False, execution=EAGER)
        for own in (moments.federation(), data())
    )
    return tuple(fits)


def test_clients_are_left_out_as_with_rows(pair):
    one, other = (bf.leave_one_client_out(posterior, 500).table for posterior in pair)
    np.testing.assert_allclose(one["elpd"], other["elpd"], atol=0.05 + 3 * other["mcse"].max())
    assert one["conflict"].isna().all()
    assert (one["rows"] == other["rows"]).all()
    close(*(posterior.without("c3").sample(2000) for posterior in pair), 0.15)


def test_results_of_rows_are_refused_and_others_are_there(pair, moments, tmp_path):
    one, other = pair
    assert abs(one.log_evidence.value - other.log_evidence.value) < 0.05
    groups = one.to_arviz(20)
    assert groups.posterior["u"].shape == groups.posterior["level"].shape == (1, 20, CLIENTS)
    for call in (
        one.predict,
        one.log_likelihood,
        lambda: bf.compare({"one": one}),
        lambda: bf.effects.predictions(one, {"x": [0.0]}),
    ):
        with pytest.raises(RowsAbsent, match="clients' rows, which are not here"):
            call()
    one.save(tmp_path / "fit.safetensors")
    again = bf.Posterior.load(tmp_path / "fit.safetensors", hierarchy(), moments.federation())
    assert torch.equal(again.sample(10)["u"], one.sample(10)["u"])
    own = data().select(["c2"])  # at the client, who has its rows
    there = bf.Posterior.load(tmp_path / "fit.safetensors", hierarchy(), own, other_rows=True)
    here = one.sample(10)["u"][:, 2]  # Laplace's draws, of one client in place of eight: round-off
    torch.testing.assert_close(there.sample(10)["u"][:, 0], here, rtol=0.0, atol=1e-6)
    assert there.predict(num_samples=10)["y"].shape == (10, own.rows)


NOT_ENOUGH = {
    "Student-t": lambda m, s, o: dist.StudentT(4.0, m, s),
    "curve": lambda m, s, o: dist.Normal(m + 0.01 * o["x"] ** 2, s),
    "threshold": lambda m, s, o: dist.Normal(m + (o["x"] > 0) * s, s),
    "spread": lambda m, s, o: dist.Normal(m, s * (1 + o["arm"])),
    "log": lambda m, s, o: dist.Normal(m.exp(), s),
}


@pytest.mark.parametrize("outcome", NOT_ENOUGH.values(), ids=NOT_ENOUGH)
def test_a_likelihood_of_more_than_moments_is_refused(moments, outcome):
    with pytest.raises(ValueError, match=r"'y' depends on more than .*Gaussian outcome"):
        bf.start(hierarchy(outcome=outcome), moments.federation())


def test_discrete_outcomes_and_single_rows_are_refused(moments):
    model = hierarchy(outcome=lambda m, s, o: dist.Poisson(m.exp()))
    with pytest.raises(ValueError, match=r"'y' cannot be observed at means, .*Gaussian outcome"):
        bf.start(model, moments.federation())
    with pytest.raises(ValueError, match="FedCurv uses single rows, .* use SFVI"):
        bf.start(hierarchy(), moments.federation(), bf.FedCurv(), rounds=2)
    with pytest.raises(ValueError, match="batch_size: the clients are here by their moments"):
        bf.start(hierarchy(), moments.federation(), batch_size=5, rounds=2)


def test_fields_without_moments_are_refused():
    rows = bf.Federation.from_arrays({"a": {"ward": torch.arange(9), "y": torch.randn(9)}})
    with pytest.raises(ValueError, match="field 'ward' holds int64"):
        bf.Moments.of(rows)
    gaps = bf.Federation.from_arrays({"a": {"y": [1.0, np.nan, 2.0, 3.0]}}, missing="keep")
    with pytest.raises(ValueError, match="missing values"):
        bf.Moments.of(gaps)


def test_moments_show_n_means_and_covariances_and_do_not_determine_the_rows(moments):
    """Other rows have the same moments: an adversary who sees these cannot tell which rows they are of."""
    few = moments.federation().sufficient
    others = other_rows(few)
    x = torch.stack([data().select(["c1"])[f] for f in ("x", "arm", "size", "y")], 1).double()
    assert int(moments.counts[1]) == len(x)
    torch.testing.assert_close(moments.mean[1], x.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moments.covariance[1], x.T.cov(correction=0), rtol=1e-9, atol=1e-12)
    one, other = statistics(few.batch()), statistics(others.batch())
    torch.testing.assert_close(one.mean, other.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.covariance, other.covariance, rtol=1e-4, atol=1e-5)
    assert len(others["x"].unique()) > 3 * len(few["x"].unique()) / 2


def test_rows_that_moments_single_out_are_found():
    """An adversary computes the outcome of the only treated patient from the moments: such a client is refused."""
    generator = np.random.default_rng(0)
    y, alone = generator.normal(size=50), np.zeros(50)
    alone[7] = 1.0
    rows = bf.Federation.from_arrays({"a": {"treated": alone, "y": y}})
    found = statistics(rows.batch())
    mean, covariance = found.mean[0], found.covariance[0]
    stolen = mean[1] + covariance[0, 1] / mean[0]  # E(1y) = cov + E(1)E(y), and E(1) = 1 / n
    assert abs(float(stolen) - y[7]) < 1e-5
    assert float(largest_leverage(rows)[0]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="client 'a': its moments single out fewer than 3"):
        bf.Moments.of(rows)
    # the rest of two columns is a category, too, of two rows
    columns = np.repeat([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [28, 20, 2], 0)
    rest = bf.Federation.from_arrays({"a": {"kind": columns, "y": y}})
    assert float(largest_leverage(rest)[0]) >= 0.5
    with pytest.raises(ValueError, match="fewer than 3"):
        bf.Moments.of(rest)
    assert bf.Moments.of(rest, fewest_rows=1).names == ("a",)


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_a_client_with_few_rows_is_refused(rows):
    """With no more rows than d + 1 each has a leverage of 1."""
    few = {"x": torch.randn(rows, 3), "y": torch.randn(rows)}
    with pytest.raises(ValueError, match=f"of its {rows} row"):
        bf.Moments.of(bf.Federation.from_arrays({"a": few}))


def test_moments_are_joined(moments):
    parts = [bf.Moments.of(data().select([name])) for name in data().names]
    joined = parts[0]
    for part in parts[1:]:
        joined = joined.and_those_of(part)
    assert joined.names == moments.names
    torch.testing.assert_close(joined.covariance, moments.covariance)
    with pytest.raises(ValueError, match="'c0' in both"):
        joined.and_those_of(parts[0])
