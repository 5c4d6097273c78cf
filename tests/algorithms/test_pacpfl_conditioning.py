"""Draws and predictions of PAC-PFL: particles and draws from the prior, conditioned on the rows of a client."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import Normal

import bayesfed as bf
from bayesfed import datasets, metrics, models, simulations
from bayesfed.guides.particles import PARTICLES
from tests.algorithms.test_pacpfl import data, line, shared

float64 = pytest.mark.usefixtures("float64")


def positive(federation):
    """A scale on the half line and a line's mean: two global sites, one constrained."""
    sd = pyro.sample("sd", dist.HalfNormal(2.0))
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with federation.clients(), federation.observations() as obs:
        pyro.sample("y", dist.Normal(mu.sum(-1), sd), obs=obs.get("y"))


@float64
def test_beta_predicts_with_the_posterior_that_it_trains():
    """Eq. 5: given μ a client's variable is N((β ȳ + 4 μ) / (β + 4), 1 / (β + 4)), whatever n_i; draws are of it."""
    federation = data(20, 7)
    algorithm = bf.PACPFL(particles=1, beta=1.0, draws=100, lr=1e-6)
    posterior = bf.fit(line, federation, algorithm, rounds=1)
    mu = float(posterior.params[PARTICLES])
    mixture, a = posterior.predictive(federation, 50_000), posterior.sample(1000)["a"]
    for k, name in enumerate(federation.names):
        y = federation.select([name])["y"]
        mean, sd = (float(y.mean()) + 4 * mu) / 5, 5**-0.5
        row = int(federation.offsets[k])
        assert abs(float(mixture.mean[row]) - mean) < 0.01  # standard error 0.003
        assert abs(float(a[:, k].mean()) - mean) < 4 * sd / 1000**0.5 + 0.02 * sd
        assert abs(float(a[:, k].std()) / sd - 1) < 4 / 2000**0.5 + 0.02


@float64
def test_particles_count_by_their_evidence():
    federation = data(4, 3)
    posterior = bf.fit(shared, federation, bf.PACPFL(particles=3), rounds=1)
    mixture = posterior.predictive(federation)
    particles = posterior.params[PARTICLES].squeeze()
    for k, name in enumerate(federation.names):
        y = federation.select([name])["y"]
        weight = Normal(particles[:, None], 1.0).log_prob(y).sum(1).softmax(0)
        row = int(federation.offsets[k])
        torch.testing.assert_close(mixture.mixture_distribution.probs[row], weight)
        torch.testing.assert_close(mixture.mean[row], (weight * particles).sum())
        second = (weight * (particles**2 + 1)).sum()
        torch.testing.assert_close(mixture.variance[row], second - mixture.mean[row] ** 2)


@float64
def test_prior_draws_count_by_their_likelihood():
    """A client's variable given μ: Gaussian in closed form, to four standard errors of the weighted draws."""
    federation = data(4, 3)
    algorithm = bf.PACPFL(particles=1, lr=0.1, integrated=False)
    posterior = bf.fit(line, federation, algorithm, rounds=50)
    mu = float(posterior.params[PARTICLES])
    mixture = posterior.predictive(federation, 100_000)
    for k, name in enumerate(federation.names):
        y = federation.select([name])["y"]
        precision = len(y) + 4
        mean = (float(y.sum()) + 4 * mu) / precision
        row = int(federation.offsets[k])
        effective = 1 / float(mixture.mixture_distribution.probs[row].square().sum())
        assert effective > 10_000
        assert abs(float(mixture.mean[row]) - mean) < 4 / (precision * effective) ** 0.5
        error = 4 * (2 / effective) ** 0.5 / precision
        assert abs(float(mixture.variance[row]) - 1 - 1 / precision) < error


@float64
def test_draws_of_a_clients_variable_are_conditioned_on_its_rows():
    """Sampling importance resampling with 200 candidates each: the Gaussian posterior given μ, to four standard errors
    of 2000 draws and a bias of the order of 1/200."""
    federation = data(4, 3)
    algorithm = bf.PACPFL(particles=1, lr=0.1, draws=200, integrated=False)
    posterior = bf.fit(line, federation, algorithm, rounds=50)
    draws = posterior.sample(2000)
    mu = float(posterior.params[PARTICLES])
    torch.testing.assert_close(draws["mu"], torch.full((2000,), mu))
    for k, name in enumerate(federation.names):
        y = federation.select([name])["y"]
        precision = len(y) + 4
        mean, sd = (float(y.sum()) + 4 * mu) / precision, precision**-0.5
        assert abs(float(draws["a"][:, k].mean()) - mean) < 4 * sd / 2000**0.5 + 0.01 * sd
        assert abs(float(draws["a"][:, k].std()) / sd - 1) < 4 / 4000**0.5 + 0.01


@float64
def test_a_new_client_only_conditions():
    train, test = simulations.polynomials(clients=6, rows=5, test_rows=20)
    model = models.GaussianProcess()
    posterior = bf.fit(model, train.select(train.names[:4]), bf.PACPFL(), rounds=3)
    new = posterior.personalize(train.select(train.names[4:]))
    assert torch.equal(new.params[PARTICLES], posterior.params[PARTICLES])
    assert new.local_params == {}
    mixture = new.predictive(test.select(train.names[4:]))
    own, there = (data.select(train.names[4:]).batch() for data in (train, test))
    phi = posterior.params[PARTICLES][:, None, None]
    x = torch.cat([own.fields["x"], there.fields["x"]], 1)
    centre, covariance = model.marginal(phi, x, torch.ones(2, 25, dtype=torch.bool))
    residual = own.fields["y"] - centre[..., :5]
    gain = torch.linalg.solve(covariance[..., :5, :5], covariance[..., :5, 5:]).mT
    mean = centre[..., 5:] + (gain @ residual[..., None]).squeeze(-1)
    first = dist.MultivariateNormal(centre[..., :5], covariance[..., :5, :5])
    weights = first.log_prob(own.fields["y"]).softmax(0)
    expected = (weights[..., None] * mean).sum(0).flatten()
    torch.testing.assert_close(mixture.mean, expected, rtol=1e-8, atol=1e-8)
    with pytest.raises(KeyError, match="took no part"):
        posterior.predictive(test)


@float64
def test_two_global_sites_one_constrained():
    federation = data(4, 3)
    posterior = bf.fit(positive, federation, bf.PACPFL(particles=3), rounds=2)
    particles = posterior.params[PARTICLES]
    draws = posterior.sample(50)
    which = (draws["sd"][:, None] - particles[:, 0].exp()).abs().argmin(1)
    assert set(which.tolist()) == {0, 1, 2}
    torch.testing.assert_close(draws["sd"], particles[which, 0].exp())
    torch.testing.assert_close(draws["mu"], particles[which, 1:])


def test_a_mixture_over_draws_has_the_mean_of_predictions():
    federation = data(4, 3, 6)
    posterior = bf.fit(line, federation, rounds=20)
    mixture = posterior.predictive(federation, 400)
    drawn = posterior.predict(federation, 4000)["y"]
    error = 4 * (drawn.std(0) / 4000**0.5 + drawn.std(0) / 400**0.5)
    assert ((mixture.mean - drawn.mean(0)).abs() < error).all()


def test_priors_over_networks_learn_digits():
    """20 clients with three digits each; chance is 10 %, the most frequent of a client's own 33 %."""
    torch.manual_seed(0)
    train, test = datasets.digits()
    model = models.Network(models.mlp(64, 16, 10), hyper_scale=0.3, spread="learnt", scale=0.05)
    algorithm = bf.PACPFL(particles=2, draws=5, lr=0.03)
    posterior = bf.fit(model, train, algorithm, rounds=60, clients_per_round=5)
    probabilities = posterior.probabilities(test, 100)["y"]
    overall = metrics.classification(probabilities, test["y"], test.owner, test.names).overall
    assert overall["accuracy"] > 0.85
    assert overall["nll"] < 0.8


def rates(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 3.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Bernoulli(logits=a), obs=obs.get("y"))


def test_clients_whose_rows_say_far_more_than_the_prior():
    """Against integrals on a grid at each particle. Ten draws from the prior were 0.5 to 2 standard deviations off."""
    counts = {"a": (180, 200), "b": (30, 60), "c": (5, 300)}
    data = bf.Federation.from_arrays(
        {name: {"y": (torch.arange(n) < k).float()} for name, (k, n) in counts.items()}
    )
    posterior = bf.fit(rates, data, bf.PACPFL(particles=4), rounds=3, progress=False)
    draws = posterior.sample(4000)
    at = torch.linspace(-8, 8, 8001, dtype=torch.float64)
    for i, (k, n) in enumerate(counts.values()):
        log_p = Normal(draws["mu"].double().unique()[:, None], 3.0).log_prob(at)
        log_p = log_p + k * torch.nn.functional.logsigmoid(at)
        p = (log_p + (n - k) * torch.nn.functional.logsigmoid(-at)).softmax(1).mean(0)
        mean = float(p @ at)
        sd = float(p @ (at - mean) ** 2) ** 0.5
        assert abs(float(draws["a"][:, i].mean()) - mean) < 0.08 * sd
        assert abs(float(draws["a"][:, i].std()) / sd - 1) < 0.06
