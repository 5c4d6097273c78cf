"""FedBE against steps, a mean and a variance worked by hand, and predictions against quadrature."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed.guides.globals import LaplaceGaussian

EAGER = bf.Execution(compile=False)
LR, EPOCHS, ROUNDS = 0.1, 3, 4


def line(federation):
    """A common intercept with a prior, and a common slope that is a parameter."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    slope = pyro.param("slope", torch.tensor(1.0))
    with federation.clients(), federation.observations() as obs:
        pyro.sample("y", dist.Normal(mu + slope * obs["x"], 0.8), obs=obs.get("y"))


def data():
    generator = np.random.default_rng(0)
    found = {}
    for i in range(5):
        x = generator.normal(size=2 + i)
        found[f"client {i}"] = {"x": x, "y": generator.normal() - 0.5 * x}
    return bf.Federation.from_arrays(found)


def by_hand(federation, start=(0.0, 1.0), rounds=ROUNDS):
    """Return μ_S and the diagonal of Σ_S after the rounds; the priors are N(0, 2²) and, of the slope, N(1, 1)."""
    n = len(federation.owner)
    unit, theta, centre = np.array([2.0, 1.0]), np.array(start), np.array([0.0, 1.0])
    precision = unit**-2 / n
    for _ in range(rounds):
        ends, weights = [], []
        for name in federation.names:
            own = federation.select([name])
            x = np.stack([np.ones(len(own["x"])), own["x"].double().numpy()], 1)
            at = theta
            for _ in range(EPOCHS):
                slope = -x.T @ (own["y"].double().numpy() - x @ at) / 0.64 / len(x)
                at = at - (slope + precision * (at - centre)) / (1 / (LR * unit**2) + precision)
            ends.append(at)
            weights.append(len(x) / n)
        theta = np.average(ends, axis=0, weights=weights)
        variance = np.average((np.array(ends) - theta) ** 2, axis=0, weights=weights)
    return theta, variance


def test_q_has_the_mean_and_the_variance_of_the_uploads(float64):
    federation = data()
    algorithm = bf.FedBE(lr=LR, local_epochs=EPOCHS, gamma=1.0)
    posterior = bf.fit(line, federation, algorithm, rounds=ROUNDS, execution=EAGER)
    loc, variance = by_hand(federation)
    scale = posterior.params["global.log_scale"].exp()
    np.testing.assert_allclose(posterior.params["global.loc"], loc, rtol=1e-8)
    np.testing.assert_allclose(scale.square(), variance, rtol=1e-8)


def test_without_a_number_of_rounds_the_centre_is_the_mode_and_the_spread_that_of_steps_from_there(
    float64,
):
    """Of a linear model the mode is the solution of normal equations."""
    federation = data()
    posterior = bf.fit(line, federation, bf.FedBE(lr=LR, local_epochs=EPOCHS), execution=EAGER)
    assert posterior.converged
    x = np.stack([np.ones(len(federation["x"])), federation["x"].numpy()], 1)
    pull = np.diag([1 / 4, 1.0])
    left, right = x.T @ x / 0.64 + pull, x.T @ federation["y"].numpy() / 0.64 + pull @ [0.0, 1.0]
    mode = np.linalg.solve(left, right)
    np.testing.assert_allclose(posterior.params["global.loc"], mode, atol=1e-4)
    _, variance = by_hand(federation, mode, rounds=1)
    scale = posterior.params["global.log_scale"].exp()
    np.testing.assert_allclose(scale.square(), variance, rtol=1e-3)


def test_predictions_are_means_over_the_ensemble():
    """The chance of a 1 is E sigmoid(b) under q(b), which is not sigmoid(E b): by Gauss-Hermite quadrature."""

    def coins(federation):
        b = pyro.sample("b", dist.Normal(0.0, 5.0))
        with federation.clients(), federation.observations() as obs:
            logits = b + 0.0 * obs["x"]
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=obs.get("y"))

    rows = {"all": [1.0] * 6, "none": [0.0] * 2}
    federation = bf.Federation.from_arrays(
        {name: {"x": [0.0] * len(y), "y": y} for name, y in rows.items()}
    )
    algorithm = bf.FedBE(lr=1.0, local_epochs=40)
    posterior = bf.fit(coins, federation, algorithm, rounds=1, execution=EAGER)
    loc, sd = (float(posterior.params[f"global.{n}"]) for n in ("loc", "log_scale"))
    sd = np.exp(sd)
    x, weight = np.polynomial.hermite_e.hermegauss(40)
    chance = (weight / weight.sum() / (1 + np.exp(-loc - sd * x))).sum()
    assert abs(chance - 1 / (1 + np.exp(-loc))) > 0.1
    found = posterior.probabilities(federation, 4000)["y"]
    assert float(found.reshape(-1, found.shape[-1])[0, -1]) == pytest.approx(chance, abs=0.03)


def test_a_full_covariance_and_noise_are_refused():
    algorithm = bf.FedBE().replace(globals=LaplaceGaussian("full"), name="FedBE")
    with pytest.raises(ValueError, match=r"take LaplaceGaussian\('diagonal'\)"):
        bf.fit(line, data(), algorithm, rounds=1)
    with pytest.raises(ValueError, match="a difference of sums.*use FedAvg"):
        bf.fit(line, data(), bf.FedBE(), rounds=1, privacy=bf.Privacy(epsilon=1.0))
