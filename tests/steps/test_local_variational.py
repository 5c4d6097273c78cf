"""Steps that clients take at the end of a run, where their posteriors given θ are known."""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed.engine.batches import batches
from bayesfed.steps.job import Job
from bayesfed.steps.local_variational import (
    LocalVariational,
    follow_origin,
    lacks_steps,
    noise_of_steps,
    phi_state,
)
from bayesfed.steps.noise_of_weights import EXACT, PERSONAL_DRAWS, noise_of_weights


def levels(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        w = pyro.sample("w", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(w, 2.0), obs=obs["y"])


def log_odds(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        w = pyro.sample("w", dist.Normal(mu, 3.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Bernoulli(logits=w), obs=obs["y"])


ROWS = bf.Federation.from_arrays(
    {"a": {"y": [1.0, 0.0, 1.0]}, "b": {"y": [1.0]}, "c": {"y": [0.0, 0.0]}}
)


@pytest.mark.parametrize(("model", "taken"), [(levels, False), (log_odds, True)])
def test_clients_take_steps_where_their_q_is_not_exact(model, taken, monkeypatch):
    """The posterior of a Normal level given θ is the closed form of q(w_i | θ); that of log-odds is skewed."""
    steps = []
    whole = LocalVariational._personal_steps

    def counted(self, job, clients, *rest):
        steps.append(len(job))
        return whole(self, job, clients, *rest)

    monkeypatch.setattr(LocalVariational, "_personal_steps", counted)
    posterior = bf.fit(model, ROWS, bf.SFVI(corrected=False), rounds=1)
    assert bool(steps) is taken
    if not taken:
        n, total = ROWS.lengths, torch.stack([ROWS.select([k])["y"].sum() for k in ROWS.names])
        mu = posterior.sample(40_000)["mu"]
        w = posterior.sample(40_000)["w"]
        precision = 1 + n / 4
        away = w - (mu[:, None] + total / 4) / precision
        torch.testing.assert_close(away.mean(0), torch.zeros(3), atol=0.02, rtol=0)
        torch.testing.assert_close(away.std(0), precision**-0.5, atol=0, rtol=0.02)


def counts(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        w = pyro.sample("w", dist.Normal(0.0, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Poisson((mu + w).exp()), obs=obs["y"])


def test_the_closed_form_of_clients_with_many_rows_is_their_posterior():
    """Given θ the posterior of a client with 40,000 events is 60 times as narrow as that of the mean of all clients."""
    g = torch.Generator().manual_seed(0)
    rates = (0.5 + 0.6 * torch.randn(12, generator=g)).exp()
    rows = bf.Federation.from_arrays(
        {f"{i}": {"y": torch.poisson(rates[i].expand(20_000), generator=g)} for i in range(12)}
    )
    run = bf.start(counts, rows, bf.SFVI(corrected=False), rounds=8)
    for _ in range(8):
        bf.step(run)
    program, batch = run.program, rows.batch(torch.arange(12))
    params = {name: value.detach() for name, value in run.plan.algorithm.params(run.server).items()}
    clients = follow_origin(program, params, phi_state(run.clients.tensors), batch)
    found = [
        noise_of_weights(program, clients["params"] | clients["origin"], params, batch, one)
        for one in noise_of_steps(program, rows.stream_ids, 20, PERSONAL_DRAWS, theta=True)
    ]
    assert bool((torch.stack(found).mean(0) < 5e-4).all())


def test_a_client_returns_to_its_closed_form_where_what_it_has_learnt_is_worse():
    run = bf.start(log_odds, ROWS, bf.SFVI(corrected=False), rounds=8)
    for _ in range(8):
        bf.step(run)
    states = run.clients.tensors
    params = {name: value.detach() for name, value in run.plan.algorithm.params(run.server).items()}
    assert not bool(lacks_steps(states).any())
    worse = states["params"]["local.loc"].clone()
    worse[1] += 3.0
    worse = states | {"params": states["params"] | {"local.loc": worse}}
    keys = ROWS.stream_ids
    rows = batches(ROWS, torch.arange(3), None, keys)
    job = Job(run.program, {"theta": params}, worse, rows, keys)
    found = run.plan.algorithm.steps.complete(job)
    for name, value in found.items():
        torch.testing.assert_close(value[1], worse["origin"][name][1])
        torch.testing.assert_close(value[[0, 2]], states["params"][name][[0, 2]])


def test_the_noise_of_weights_is_that_of_a_q_that_is_off():
    """log p − log q of a q that is d standard deviations off is linear in a standard Normal, with slope d."""
    posterior = bf.fit(levels, ROWS, bf.SFVI(corrected=False), rounds=1)
    own = posterior.local_params
    moved = own | {name: v + 0.5 if name.endswith("loc") else v for name, v in own.items()}
    right, off = (replace(posterior, local_params=x).sample(4000)["w"] for x in (own, moved))
    d = (off - right).mean(0) * (1 + ROWS.lengths / 4) ** 0.5
    assert bool((d > 0.05).all())
    program, batch = posterior.program, ROWS.batch(torch.arange(3))
    noises = [*noise_of_steps(program, ROWS.stream_ids, 400, PERSONAL_DRAWS, theta=True)]
    found = [noise_of_weights(program, moved, posterior.params, batch, one) for one in noises]
    torch.testing.assert_close(torch.stack(found).mean(0), d.square(), rtol=0.1, atol=0)
    exact = noise_of_weights(program, own, posterior.params, batch, noises[0])
    assert bool((exact < EXACT).all())
