"""Effects that a program multiplies by their scale, where the data determine the products."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.nn.functional import one_hot

import bayesfed as bf
from bayesfed.output.scaled_coordinates import ScaledCoordinates, find_scaled_coordinates

TIMES, SD, NOISE = 8, 0.5, 0.4


def walk(federation):
    """A random walk over time that all clients share, its steps written as products."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    step = pyro.sample("step", dist.HalfNormal(1.0))
    z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([TIMES]).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, SD))
        with federation.observations() as obs:
            path = (step[..., None] * z).cumsum(-1)
            level = (path * one_hot(obs["t"].long(), TIMES)).sum(-1)
            pyro.sample("y", dist.Normal(a + level, NOISE), obs=obs.get("y"))


def data():
    generator = np.random.default_rng(0)

    def client(i):
        t = generator.integers(0, TIMES, 10)
        y = 1.5 * np.sin(t) + 0.5 * np.cos(i) + NOISE * generator.normal(size=10)
        return {"t": t, "y": y}

    return bf.Federation.from_arrays({f"c{i}": client(i) for i in range(10)})


def moments(federation):
    """Means and standard deviations of step and mu: all but the step is Normal, whose posterior is summed on a grid."""
    t, y = (federation.fields[name].double() for name in ("t", "y"))
    own = one_hot(torch.arange(10).repeat_interleave(10), 10).double()
    path = torch.ones(TIMES, TIMES, dtype=torch.float64).tril()[t.long()]
    ones, steps = torch.ones_like(y), torch.linspace(0.1, 5.0, 1500, dtype=torch.float64)
    fixed = 4 * ones[:, None] * ones + SD**2 * own @ own.T + NOISE**2 * torch.eye(len(y))
    covariance = fixed + steps[:, None, None] ** 2 * (path @ path.T)
    given = dist.MultivariateNormal(torch.zeros_like(y), covariance)
    weights = (given.log_prob(y) - steps**2 / 2).softmax(0)
    solved = torch.linalg.solve(covariance, torch.stack([y, ones], 1))
    given_step = {
        "step": (steps, torch.zeros_like(steps)),
        "mu": (4 * solved[..., 0] @ ones, 4 - 16 * solved[..., 1] @ ones),
    }
    found = {}
    for name, (means, variances) in given_step.items():
        mean = weights @ means
        found[name] = mean, (weights @ (variances + (means - mean) ** 2)).sqrt()
    return found


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_walk_whose_steps_are_products(seed):
    federation = data()
    posterior = bf.fit(walk, federation, seed=seed, progress=False)
    draws = posterior.sample(4000)
    for name, (mean, sd) in moments(federation).items():
        assert abs(draws[name].mean() - mean) < 0.1 * sd
        assert 0.9 < draws[name].std() / sd < 1.1


def test_products_that_draws_are_close_to_normal_in(float64):
    program = bf.fit(walk, data(), rounds=1, progress=False).program
    normal = torch.randn(4000, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    products = ScaledCoordinates(program.guide, {"z": "step"})
    equal = torch.full((4000,), 1 / 4000, dtype=torch.float64)
    bent = products.to_guide(1.0 + 0.3 * normal)
    assert find_scaled_coordinates(program, bent, equal).scales == {"z": "step"}
    assert find_scaled_coordinates(program, normal, equal) is None


def test_the_volume_is_that_of_the_jacobian(float64):
    guide = bf.fit(walk, data(), rounds=1, progress=False).program.guide
    products = ScaledCoordinates(guide, {"z": "step", "mu": "step"})
    z = torch.randn(1, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda z: products.from_guide(z[None])[0][0])(z[0])
    found = products.from_guide(z)[1]
    assert torch.allclose(found, torch.linalg.slogdet(jacobian).logabsdet[None])
