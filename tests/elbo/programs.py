"""Programs, and parts of them, of several tests."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample

import bayesfed as bf

ROWS = (5, 3, 1)


def federation(gap=False):
    """Three clients with covariates, a category, a count, a grade and a vector, and on request a missing covariate."""
    rng, clients = np.random.default_rng(0), {}
    for i, n in enumerate(ROWS):
        rows = {"x": rng.normal(size=(n, 2)), "y": rng.normal(size=n), "v": rng.normal(size=(n, 3))}
        rows |= {"kind": rng.integers(0, 3, n), "grade": rng.integers(2, 4, n)}
        clients[f"c{i}"] = rows
    if gap:
        clients["c0"]["x"][0, 0] = np.nan
    return bf.Federation.from_arrays(clients, missing="keep")


def hierarchy(
    local=lambda mu: dist.Normal(mu, 0.7), prior=lambda: dist.Normal(0.0, 1.0), **reparam
):
    def model(federation):
        mu = pyro.sample("mu", prior())
        mu = mu.sum(-1) if prior().event_dim else mu
        with federation.clients():
            own = pyro.sample("own", local(mu))
            own = own.sum(-1) if local(mu).event_dim else own
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(own, 1.0), obs=obs.get("y"))

    return poutine.reparam(model, config=reparam) if reparam else model


def stable(mu):
    return dist.Stable(1.5, 0.0, 1.0, mu)


def four(mu):
    return dist.Normal(torch.stack([mu, mu + 1, mu - 1, 0 * mu], -1), 1.0).to_event(1)


class Layers(PyroModule):
    """A Bayesian network of one hidden layer."""

    def __init__(self):
        super().__init__()
        self.hidden = PyroModule[torch.nn.Linear](2, 3)
        self.out = PyroModule[torch.nn.Linear](3, 1)
        for layer in (self.hidden, self.out):
            for name, value in list(layer.named_parameters()):
                prior = dist.Normal(0.0, 1.0).expand(value.shape).to_event(value.ndim)
                setattr(layer, name, PyroSample(prior))

    def weights(self):
        return [layer.weight + 0 * layer.bias[..., None] for layer in (self.hidden, self.out)]

    def outcome(self, obs):
        mean = self.out(self.hidden(obs["x"]).tanh()).squeeze(-1)
        pyro.sample("y", dist.Normal(mean, 1.0), obs=obs.get("y"))
