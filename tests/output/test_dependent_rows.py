"""Models whose rows are one event, against the same model with the dependence written as a local variable."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import Normal

import bayesfed as bf
from bayesfed.elbo import noise
from bayesfed.functional.multivariate_normal import Gaussian
from bayesfed.output import bounds, dependent_rows
from bayesfed.output.draws import draw_clients, theta_support

pytestmark = pytest.mark.usefixtures("float64")
QUIET = {"progress": False, "execution": bf.Execution(compile=False)}
TAU, SIGMA = 0.8, 0.5


def integrated(family=dist.MultivariateNormal, correlation=0.0):
    """y_i ~ N(mu + x, τ² 11ᵀ + σ² I): every client has a level of its own, integrated out."""

    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        with federation.clients(), federation.jointly() as (obs, mask):
            pairs = mask[..., None, :] & mask[..., None]
            own = torch.eye(mask.shape[-1], dtype=torch.get_default_dtype())
            at = torch.arange(mask.shape[-1])
            own = own + correlation * ((at[:, None] - at).abs() == 1)
            covariance = (TAU**2 * pairs + SIGMA**2 * own).unsqueeze(-3)
            mean = ((mu + obs["x"]) * mask).unsqueeze(-2)
            seen = obs.get("y")
            seen = None if seen is None else torch.where(mask, seen, 0.0).unsqueeze(-2)
            pyro.sample("y", family(mean, covariance), obs=seen)

    return model


def explicit(federation):
    """The same with the level as a local variable."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with federation.clients():
        level = pyro.sample("level", dist.Normal(mu, TAU))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(level + obs["x"], SIGMA), obs=obs.get("y"))


def data(fields=("x", "y"), seed=0, lengths=(4, 1, 6)):
    generator = torch.Generator().manual_seed(seed)
    clients = {}
    for i, n in enumerate(lengths):
        x = torch.randn(n, generator=generator)
        y = i + x + SIGMA * torch.randn(n, generator=generator)
        clients[f"c{i}"] = {name: {"x": x, "y": y}[name] for name in fields}
    return bf.Federation.from_arrays(clients)


def by_hand(own, there, mu):
    """Mean ``(S, rows)`` and variance of rows of ``there`` given μ ``(S,)``: a level is Normal given its rows."""
    means, variances = [], []
    for name in there.names:
        mine, new = own.select([name]), there.select([name])
        precision = 1 / TAU**2 + mine.rows / SIGMA**2
        total = (mine["y"] - mine["x"]).sum() / SIGMA**2
        level = (mu / TAU**2 + total) / precision
        means.append(level[:, None] + new["x"])
        variances.append((1 / precision + SIGMA**2) * torch.ones(new.rows))
    return torch.cat(means, 1), torch.cat(variances)


@pytest.mark.parametrize("family", [dist.MultivariateNormal, Gaussian])
@pytest.mark.parametrize(
    "algorithm", [bf.SFVI(local_steps=1), bf.FedAvg(), bf.PACPFL(particles=3)], ids=str
)
def test_rows_are_predicted_given_the_clients_own(family, algorithm):
    """The rows to predict may lack the observed field, and be those of some clients in another order."""
    own = data()
    posterior = bf.fit(integrated(family), own, algorithm, rounds=2, **QUIET)
    there = data(("x",), seed=1, lengths=(3, 150, 2)).select(["c2", "c1"])
    mixture = posterior.predictive(there, 20)
    size = mixture.component_distribution.mean.shape[1]
    assert size == {"SFVI": 20, "FedAvg": 1, "PACPFL": 3}[algorithm.name]
    theta = theta_support(posterior)
    if theta is None:
        mu = posterior.sample(20)["mu"]
    else:
        mu = draw_clients(posterior, *theta, torch.arange(1), noise.key(0)).values["mu"].flatten()
    mean, variance = by_hand(own, there, mu)
    torch.testing.assert_close(mixture.component_distribution.mean.T, mean)
    torch.testing.assert_close(
        mixture.component_distribution.variance, variance[:, None].expand(-1, size)
    )


def test_particles_are_weighted_by_the_joint_density():
    own = data()
    posterior = bf.fit(integrated(), own, bf.PACPFL(particles=3), rounds=1, **QUIET)
    weights = posterior.predictive(own).mixture_distribution.probs
    for i, name in enumerate(own.names):
        mine = own.select([name])
        covariance = TAU**2 + SIGMA**2 * torch.eye(mine.rows)
        residual = mine["y"] - mine["x"] - posterior.params["particles"]
        joint = dist.MultivariateNormal(torch.zeros(mine.rows), covariance)
        expected = joint.log_prob(residual).softmax(0)
        torch.testing.assert_close(weights[int(own.offsets[i])], expected)


def test_predictions_are_those_of_the_model_with_levels():
    """The mean over draws of q(μ), fitted alike; 4000 draws have an error of 0.016 sd of a row."""
    own, there = data(), data(seed=1)
    algorithm = bf.SFVI(local_steps=4, draws=4)
    one = bf.fit(integrated(), own, algorithm, rounds=60, progress=False)
    other = bf.fit(explicit, own, algorithm, rounds=60, progress=False)
    first, second = (p.predict(there, 4000)["y"] for p in (one, other))
    sd = second.std(0)
    assert first.shape == second.shape == (4000, there.rows)
    assert ((first.mean(0) - second.mean(0)).abs() / sd).max() < 0.1
    assert (first.std(0) / sd).log().abs().max() < 0.1
    idata = one.to_arviz(8)
    assert idata.posterior_predictive["y"].shape == (1, 8, own.rows)
    assert idata.log_likelihood["y"].shape == (1, 8, 3)


def test_new_clients_condition_too():
    own = data()
    posterior = bf.fit(integrated(), own.select(["c0", "c1"]), bf.FedAvg(), rounds=2, **QUIET)
    new = posterior.personalize(own.select(["c2"]))
    there = data(seed=1).select(["c2"])
    mean, _ = by_hand(own, there, posterior.params["mu.loc"][None])
    torch.testing.assert_close(new.predictive(there).mean, mean[0])


def test_other_distributions_are_refused_by_name(tmp_path):
    def student(mean, covariance):
        return dist.MultivariateStudentT(4.0, mean, torch.linalg.cholesky(covariance))

    own, model = data(lengths=(4, 4, 4)), integrated(student)  # its density depends on padding
    posterior = bf.fit(model, own, bf.FedAvg(), rounds=2, **QUIET)
    for method in (posterior.predict, posterior.predictive):
        with pytest.raises(
            ValueError, match="site 'y' is all rows of a client as one Multivariate"
        ):
            method(own, 3)
    assert posterior.sample(3)["mu"].shape == (3,)
    assert posterior.log_likelihood(num_samples=3)["y"].shape == (3, 3)
    groups = set(posterior.to_arviz(8))
    assert "log_likelihood" in groups and "posterior_predictive" not in groups


def test_two_observations_of_a_row_share_the_function():
    """Here the function is the client's level, a constant. 4000 functions."""
    own = data()
    posterior = bf.fit(integrated(), own, bf.PACPFL(particles=2), rounds=1, **QUIET)
    theta, chunk, key = theta_support(posterior), torch.tensor([2]), noise.key(0)
    draws = draw_clients(posterior, *theta, chunk, key)
    batch = own.batch(chunk)
    keys = noise.fold(key, own.stream_ids[chunk])
    first, again = dependent_rows.log_likelihoods_of_functions(
        posterior, draws, chunk, batch, batch, 4000, keys
    )
    assert first.shape == (4000, 2, 6)
    torch.testing.assert_close(first, again, rtol=0.02, atol=0.02)  # the jitter is 1e-3 sd
    mu = draws.values["mu"].flatten()
    y = own.select(["c2"])["y"] - own.select(["c2"])["x"]
    expected = Normal(mu[:, None], SIGMA).log_prob(y) - TAU**2 / (2 * SIGMA**2)  # E over the level
    error = 4 * first.std(0) / 4000**0.5
    assert ((first.mean(0) - expected).abs() < error).all()


def test_the_bounds_report_accepts_a_model_of_the_users_own():
    own, there = data(lengths=(30, 20, 25)), data(seed=1)
    posterior = bf.fit(integrated(), own, bf.PACPFL(particles=2, tau=1e-3), rounds=2, **QUIET)
    table = bounds.report(posterior, there, low=0.0, high=4.0, draws=200)
    assert (table["risk"] <= table["bound"]).all()
    assert table["epsilon"].to_list() == pytest.approx([2e-3 * 4.0] * 3)
    for name, losses, _ in bounds.prior_losses(posterior, there, 5000, 0, -math.inf, math.inf):
        mine = own.select([name])
        covariance = TAU**2 + SIGMA**2 * torch.eye(mine.rows)
        residual = mine["y"] - mine["x"] - posterior.params["particles"]
        exact = dist.MultivariateNormal(torch.zeros(mine.rows), covariance).log_prob(residual)
        log_z = bounds.log_partition(losses, mine.rows)
        best = exact.argmax()  # a prior that is far off needs draws from its far tail
        assert abs(float(log_z[best] - exact[best])) < 0.5


def test_correlated_noise_is_refused():
    own = data(lengths=(4, 4, 4))  # padding would be correlated with the last row
    model = integrated(correlation=0.3)
    posterior = bf.fit(model, own, bf.PACPFL(particles=2), rounds=1, **QUIET)
    with pytest.raises(ValueError, match="not a function plus noise that is independent"):
        bounds.report(posterior, own, low=0.0, high=4.0, draws=10)
