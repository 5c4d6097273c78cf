import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

import bayesfed as bf
from bayesfed.functional.multivariate_normal import Gaussian
from tests.scenarios import conjugate_hierarchy

NAMES = ("north", "south", "Øst", "west")
DRAWS = 800


def federation():
    generator = torch.Generator().manual_seed(0)
    clients = {}
    for i, name in enumerate(NAMES):
        n = 5 + 2 * i
        x = torch.randn(n, 2, generator=generator)
        y = 0.7 * i + 0.5 * torch.randn(n, generator=generator)
        clients[name] = {"x": x, "y": y}
    return bf.Federation.from_arrays(clients, client_dim="county")


def with_slopes(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            mean = alpha + (beta * obs["x"]).sum(-1)
            pyro.sample("y", dist.Normal(mean, 0.5), obs=obs.get("y"))


def fitted(model):
    algorithm = bf.SFVI(local_steps=3, draws=4, lr=0.1, local_lr=0.1, corrected=False)
    return bf.fit(model, federation(), algorithm, rounds=60, seed=3)


@pytest.fixture(scope="module")
def posterior():
    return fitted(with_slopes)


@pytest.fixture(scope="module")
def idata(posterior):
    return posterior.to_arviz(DRAWS, seed=5)


def groups(idata):
    """Group names under ArviZ 0.2x and 1.x."""
    names = idata.groups() if callable(idata.groups) else idata.groups[1:]
    return [name.strip("/") for name in names]


def test_groups_dims_and_coordinates(idata):
    assert groups(idata) == [
        "posterior",
        "posterior_predictive",
        "log_likelihood",
        "log_prior",
        "sample_stats",
        "prior",
        "prior_predictive",
        "observed_data",
        "constant_data",
        "history",
    ]
    dims = {
        group: {n: v.dims for n, v in idata[group].data_vars.items()} for group in groups(idata)
    }
    draw = ("chain", "draw")
    latent = {"mu": draw, "beta": (*draw, "beta_dim_0"), "alpha": (*draw, "client")}
    rows = {"y": (*draw, "observation")}
    assert dims == {
        "posterior": latent,
        "posterior_predictive": rows,
        "log_likelihood": rows,
        "sample_stats": {"log_p": draw, "log_q": draw},
        "log_prior": {"mu": draw, "beta": draw},
        "prior": latent,
        "prior_predictive": rows,
        "observed_data": {"y": ("observation",)},
        "constant_data": {"x": ("observation", "x_dim_0")},
        "history": {name: ("chain", "round") for name in ("elbo", "seconds", "clients")},
    }
    assert dict(idata.posterior.sizes) == {"chain": 1, "draw": DRAWS, "beta_dim_0": 2, "client": 4}
    assert idata.posterior["client"].values.tolist() == list(NAMES)
    owners = np.repeat(NAMES, [5, 7, 9, 11]).tolist()
    for group in ("observed_data", "constant_data", "log_likelihood", "posterior_predictive"):
        assert idata[group]["observation"].values.tolist() == list(range(32))
        if "data" in group:
            assert idata[group]["observation_client"].values.tolist() == owners


def test_values_are_those_of_the_posterior(idata, posterior):
    data = posterior.federation
    for group, values in (
        ("posterior", posterior.sample(DRAWS, seed=5)),
        ("posterior_predictive", posterior.predict(num_samples=DRAWS, seed=5)),
        ("log_likelihood", posterior.log_likelihood(num_samples=DRAWS, seed=5)),
    ):
        for name, value in values.items():
            assert np.array_equal(idata[group][name].values[0], value.numpy())
    assert np.array_equal(idata.observed_data["y"], data["y"])
    assert np.array_equal(idata.constant_data["x"], data["x"])


def test_history(idata, posterior):
    assert idata.history["round"].values.tolist() == list(range(1, 61))
    assert np.array_equal(idata.history["elbo"][0], posterior.history["elbo"])
    assert (idata.history["clients"] == 4).all()
    assert (idata.history["seconds"] > 0).all()
    assert idata.history["elbo"][0, -1] > idata.history["elbo"][0, 0]


def test_attributes_name_the_algorithm(idata):
    attrs = idata.posterior.attrs
    assert {n: attrs[n] for n in ("inference_library", "algorithm", "seed")} == {
        "inference_library": "bayesfed",
        "algorithm": "SFVI",
        "seed": 3,
    }


def test_the_prior_densities_of_draws_serve_power_scaling(idata):
    """By scipy: mu ~ N(0, 2), beta ~ N(0, 1). The prior of mu, of four clients, informs more than that of beta."""
    mu, beta = idata.posterior["mu"].values, idata.posterior["beta"].values
    log_prior = idata["log_prior"]
    np.testing.assert_allclose(log_prior["mu"], stats.norm.logpdf(mu, 0, 2), rtol=1e-5)
    np.testing.assert_allclose(log_prior["beta"], stats.norm.logpdf(beta).sum(-1), rtol=1e-5)
    found = (
        az.psens(idata, component="prior")
        if az.__version__.startswith("0.")
        else az.psense(idata, group="prior")
    )
    assert 0 < float(found["beta"].max()) < float(found["mu"]) < 1


def test_prior_draws_are_the_models(idata):
    """mu ~ N(0, 2), alpha_i ~ N(mu, 1), beta ~ N(0, 1); four Monte Carlo errors."""
    prior = idata.prior
    error = 4 / DRAWS**0.5
    for value, sd in (
        (prior["mu"], 2.0),
        (prior["beta"][..., 0], 1.0),
        (prior["alpha"][..., 2], 5**0.5),
        (prior["alpha"][..., 1] - prior["mu"], 1.0),
    ):
        assert abs(float(value.mean())) < error * sd
        assert abs(np.log(float(value.std()) / sd)) < error / 2**0.5
    assert np.ptp(prior["alpha"].values, axis=-1).min() > 0  # clients differ in every draw


def test_the_prior_predictive(idata):
    """y ~ N(alpha + beta·x, 0.5), alpha ~ N(0, √5): each row has variance 5 + |x|² + 0.25; five Monte Carlo errors."""
    imagined, x = idata.prior_predictive["y"].values[0], idata.constant_data["x"].values
    sd = np.sqrt(5.25 + (x**2).sum(-1))
    assert (np.abs(imagined.mean(0)) < 5 * sd / DRAWS**0.5).all()
    assert (np.abs(np.log(imagined.std(0) / sd)) < 5 / (2 * DRAWS) ** 0.5).all()
    prior = idata.prior
    alpha = prior["alpha"].sel(client=idata.observed_data["observation_client"]).values[0]
    noise = imagined - alpha - prior["beta"].values[0] @ x.T  # the draws are those of the prior
    assert abs(np.log(noise.std() / 0.5)) < 5 / (2 * noise.size) ** 0.5


def test_densities_are_those_of_the_draws(idata, posterior):
    """log p(D, θ, w) by hand, and the mean of log p − log q is the ELBO."""
    draws = idata.posterior
    x, y = idata.constant_data["x"].values, idata.observed_data["y"].values
    owner = posterior.federation.owner.numpy()
    mu, beta, alpha = (draws[name].values[0].astype(float) for name in ("mu", "beta", "alpha"))

    def normal(value, loc, scale):
        return -0.5 * ((value - loc) / scale) ** 2 - np.log(scale) - 0.5 * np.log(2 * np.pi)

    expected = normal(mu, 0, 2) + normal(beta, 0, 1).sum(-1) + normal(alpha, mu[:, None], 1).sum(-1)
    expected += normal(y, alpha[:, owner] + beta @ x.T, 0.5).sum(-1)
    stats = idata.sample_stats
    np.testing.assert_allclose(stats["log_p"].values[0], expected, rtol=1e-5, atol=1e-3)
    ratio = (stats["log_p"] - stats["log_q"]).values
    elbo = posterior.elbo(4000)
    error = 5 * float(ratio.std()) / DRAWS**0.5 + 1e-3
    assert float(ratio.mean()) == pytest.approx(float(elbo.mean()), abs=error)


def test_summary_names_the_clients(idata):
    table = az.summary(idata)
    assert list(table.index) == ["mu", "beta[0]", "beta[1]", *(f"alpha[{n}]" for n in NAMES)]
    alpha = idata.posterior["alpha"].sel(client="Øst")
    assert table.loc["alpha[Øst]", "mean"] == pytest.approx(float(alpha.mean()), abs=6e-4)
    assert table["r_hat"].isna().all()  # of one chain: independent draws agree whatever q is


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # ArviZ to pandas
@pytest.mark.filterwarnings(
    "ignore:(Estimated shape parameter|Pareto k is above)"
)  # few rows a client
def test_model_comparison(idata):
    """The true slopes are zero: a model without them predicts as well, with fewer parameters."""
    without = fitted(conjugate_hierarchy).to_arviz(DRAWS)
    loo = az.loo(idata)
    assert loo.n_data_points == 32
    ranks = az.compare({"with": idata, "without": without})
    p = "p_loo" if "p_loo" in ranks else "p"
    assert set(ranks.index) == {"with", "without"}
    assert ranks.loc["with", p] > ranks.loc["without", p]


def test_netcdf(idata, tmp_path):
    idata.to_netcdf(tmp_path / "idata.nc")
    again = az.from_netcdf(tmp_path / "idata.nc")
    assert groups(again) == groups(idata)
    assert again.posterior["client"].values.tolist() == list(NAMES)


def test_the_observed_field_is_no_constant_whatever_its_name():
    """A field that a site observes under another name, and a covariate that is not observed."""

    def model(federation):
        with federation.clients():
            alpha = pyro.sample("alpha", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                pyro.sample("height", dist.Normal(alpha + 0 * obs["age"], 1.0), obs=obs["cm"])

    data = bf.Federation.from_arrays(
        {"a": {"age": [1.0, 2.0], "cm": [3.0, 4.0]}, "b": {"age": [5.0], "cm": [6.0]}}
    )
    algorithm = bf.SFVI(local_steps=1, draws=1, conditioned=False)
    idata = bf.fit(model, data, algorithm, rounds=1).to_arviz(4)
    assert list(idata.constant_data.data_vars) == ["age"]
    assert idata.observed_data["height"].values.tolist() == [3.0, 4.0, 6.0]


def test_without_covariates_there_is_no_constant_data():
    data = bf.Federation.from_arrays({"a": {"y": [1.0]}, "b": {"y": [2.0]}})
    algorithm = bf.SFVI(local_steps=1, draws=1)
    idata = bf.fit(conjugate_hierarchy, data, algorithm, rounds=1).to_arviz(4)
    assert "constant_data" not in groups(idata)


def test_a_gaussian_process_has_predictions_by_row_and_evidence_by_client():
    data = bf.Federation.from_arrays(
        {f"client {i}": {"x": torch.randn(n), "y": torch.randn(n)} for i, n in enumerate((3, 5, 2))}
    )
    posterior = bf.fit(bf.models.GaussianProcess(), data, bf.PACPFL(particles=2), rounds=2)
    idata = posterior.to_arviz(8)
    assert idata.posterior_predictive["y"].dims == ("chain", "draw", "observation")
    assert idata.log_likelihood["y"].dims == ("chain", "draw", "client")
    np.testing.assert_array_equal(idata.observed_data["y"], data["y"])
    model, params = posterior.program.model, posterior.params["particles"]
    batch = data.batch()
    joint = Gaussian(*model.marginal(params[:, None, None], batch.fields["x"], batch.mask))
    evidence = joint.log_prob(torch.where(batch.mask, batch.fields["y"], 0.0)).detach()
    found = torch.tensor(idata.log_likelihood["y"].values).reshape(-1, 3)
    for row in found:  # each draw is one of the particles
        assert min((row - e).abs().max() for e in evidence) < 1e-4


def test_a_posterior_with_particles_is_saved_and_loaded(tmp_path):
    data = bf.Federation.from_arrays(
        {f"client {i}": {"x": torch.randn(4), "y": torch.randn(4)} for i in range(3)}
    )
    model = bf.models.GaussianProcess()
    posterior = bf.fit(model, data, bf.PACPFL(particles=3), rounds=2)
    posterior.save(tmp_path / "particles.safetensors")
    loaded = bf.Posterior.load(tmp_path / "particles.safetensors", model, data)
    torch.testing.assert_close(loaded.predictive().mean, posterior.predictive().mean)
