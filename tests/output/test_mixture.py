"""Predictive mixtures of all kinds of observed sites, against the likelihoods of draws."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import norm
from torch.distributions import Categorical, MixtureSameFamily, Normal

import bayesfed as bf
from bayesfed.output.mixture import quantiles
from tests.scenarios import conjugate_hierarchy, ragged

pytestmark = pytest.mark.usefixtures("float64")
QUIET = {"progress": False, "execution": bf.Execution(compile=False)}
DISTRIBUTIONS = {
    "Normal": lambda a: dist.Normal(a, 0.5),
    "LogNormal": lambda a: dist.LogNormal(a, 0.5),
    "StudentT": lambda a: dist.StudentT(4.0, a, 0.5),
    "Poisson": lambda a: dist.Poisson(a.exp()),
    "GammaPoisson": lambda a: dist.GammaPoisson(2.0, (-a).exp()),
    "Bernoulli": lambda a: dist.Bernoulli(logits=a),
    "Categorical": lambda a: dist.Categorical(logits=torch.stack([a, 0 * a, -a], -1)),
    "Independent": lambda a: dist.Normal(torch.stack([a, -a], -1), 0.5).to_event(1),
    "MultivariateNormal": lambda a: dist.MultivariateNormal(
        torch.stack([a, -a], -1), scale_tril=torch.tensor([[1.0, 0.0], [0.3, 0.7]])
    ),
}


def model_of(family):
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", family(alpha + 0 * obs["x"]), obs=obs["y"])

    return model


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_mixture_is_the_mean_density_over_draws(name):
    torch.manual_seed(0)
    family, clients = DISTRIBUTIONS[name], {}
    for i in range(4):
        y = family(torch.zeros(2 + i)).sample()
        clients[f"c{i}"] = {"x": torch.zeros(2 + i), "y": y}
    data = bf.Federation.from_arrays(clients)
    posterior = bf.fit(model_of(family), data, bf.SFVI(local_steps=1, draws=1), rounds=1, **QUIET)
    found = posterior.predictive(num_samples=30, seed=3).log_prob(data["y"])
    draws = posterior.log_likelihood(num_samples=30, seed=3)["y"]
    torch.testing.assert_close(found, draws.logsumexp(0) - math.log(30), rtol=1e-9, atol=1e-9)


def test_a_site_with_one_value_per_client():
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                pass
            pyro.sample("survey", dist.Normal(alpha, 0.2), obs=obs["survey"][..., :1])

    data = bf.Federation.from_arrays({"a": {"survey": [0.2, 0.2]}, "b": {"survey": [0.9]}})
    for algorithm in (bf.SFVI(local_steps=1), bf.FedABML()):
        posterior = bf.fit(model, data, algorithm, rounds=1, **QUIET)
        mixture = posterior.predictive(num_samples=20)
        draws = posterior.log_likelihood(num_samples=20)["survey"]
        found = mixture.log_prob(torch.tensor([0.2, 0.9]))
        torch.testing.assert_close(found, draws.logsumexp(0) - math.log(20))


def test_a_mixture_is_of_one_site():
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(alpha, 0.5), obs=obs["y"])
                pyro.sample("z", dist.Normal(alpha, 0.5), obs=obs["y"])

    posterior = bf.fit(model, ragged(3), bf.FedAvg(), rounds=1, **QUIET)
    with pytest.raises(ValueError, match="the model observes y, z: a mixture is of one site"):
        posterior.predictive()
    assert set(posterior.predict(num_samples=2)) == {"y", "z"}


def test_a_distribution_without_classes_has_no_probabilities():
    posterior = bf.fit(conjugate_hierarchy, ragged(3), bf.FedAvg(), rounds=1, **QUIET)
    with pytest.raises(ValueError, match="site 'y' is Normal: no classes"):
        posterior.probabilities()


def test_quantiles_invert_the_distribution_function():
    mixture = MixtureSameFamily(
        Categorical(torch.tensor([[0.3, 0.7], [0.0, 1.0]])),
        Normal(torch.tensor([[-2.0, 1.0], [0.0, 3.0]]), torch.tensor([[0.5, 2.0], [1.0, 0.1]])),
    )
    levels = torch.tensor([0.01, 0.5, 0.975])
    found = quantiles(mixture, levels)
    torch.testing.assert_close(mixture.cdf(found), levels[:, None].expand(3, 2))
    torch.testing.assert_close(found[:, 1], torch.tensor(norm(3.0, 0.1).ppf(levels.numpy())))
