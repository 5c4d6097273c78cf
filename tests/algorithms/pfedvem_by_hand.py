"""Programs, and steps of pFedVEM, for its tests."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch.distributions import constraints

import bayesfed as bf
from bayesfed.elbo import noise
from bayesfed.engine.batches import batches
from bayesfed.rules import Turn
from bayesfed.steps.job import Job, Work
from tests.scenarios import summed

D = torch.float64


def regression(lengths=(6, 4, 9)):
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for i, n in enumerate(lengths):
        x = torch.randn(n, 2, generator=generator, dtype=D)
        slope = torch.tensor([1.0, -0.5], dtype=D) + 0.3 * i
        noise_ = 0.3 * torch.randn(n, generator=generator, dtype=D)
        arrays[f"client {i}"] = {"x": x, "y": x @ slope + noise_}
    return bf.Federation.from_arrays(arrays)


def means(lengths=(4, 4, 4, 4, 4)):
    """Rows of three numbers, around those of each client."""
    generator = torch.Generator().manual_seed(0)
    m, rho, arrays = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([0.8, 1.0, 1.2]), {}
    for i, n in enumerate(lengths):
        centre = m + rho * torch.randn(3, generator=generator)
        arrays[f"client {i}"] = {"y": centre + 0.5 * torch.randn(n, 3, generator=generator)}
    return bf.Federation.from_arrays(arrays)


def wide(loc, scale, hyper=False):
    """Normal means of three dimensions and noise 0.5, with a centre and a spread of these shapes."""

    def model(federation):
        if hyper:
            a = pyro.sample("a", dist.Normal(1.0, 0.5).expand(loc).to_event(1))
            b = pyro.sample("b", dist.HalfNormal(0.7).expand(scale).to_event(1))
        else:
            over = constraints.positive
            a = pyro.param("a", torch.zeros(loc), event_dim=len(loc))
            b = pyro.param("b", torch.ones(scale), constraint=over, event_dim=len(scale))
        b = b if scale else torch.as_tensor(b)[..., None]
        with federation.clients():
            w = pyro.sample("w", dist.Normal(a * torch.ones(3), b * torch.ones(3)).to_event(1))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(w, 0.5).to_event(1), obs=obs.get("y"))

    return model


def job(program, federation, message, clients=None):
    keys = noise.fold(noise.fold(noise.key(0), 0), federation.stream_ids)
    rows = batches(federation, torch.arange(len(federation)), None, keys)
    return Job(program, message, clients or {}, rows, keys)


def m_step(algorithm, program, federation, theta, phi, found=None):
    """θ after the M-step, of clients that have made these q(w_i)."""
    server = algorithm.start(program) | {"theta": theta}
    task = job(program, federation, server)
    parts = {"theta": {}, "posterior": phi} | (found or {})
    upload, _ = algorithm.rule.encode(task, Work(parts, None))
    turn = Turn(program, noise.key(0), len(federation))
    return algorithm.decode(turn, server, summed(upload))[0]["theta"]
