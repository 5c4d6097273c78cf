"""Regressions, and FOLA's rounds on them, one by one."""

import torch
from torch import nn

import bayesfed as bf
from bayesfed.elbo import noise
from bayesfed.engine.batches import batches
from bayesfed.models.network import Network
from bayesfed.rules import Turn
from bayesfed.steps.job import Job
from tests.scenarios import summed

ROWS = (6, 9, 12)
N = sum(ROWS)
EAGER = bf.Execution(compile=False)
PAPER = {"covariance": "diagonal", "fisher": "per-sample", "cavity": False, "lr": 0.1}


def network(weights, *, noise=1.0):
    """y = x w + N(0, noise²), w common to all and starting there."""
    line = nn.Linear(len(weights), 1, bias=False)
    with torch.no_grad():
        line.weight.copy_(torch.as_tensor(weights)[None])
    return Network(line, local=(), likelihood="normal", noise=noise)


def separate(noise=0.5, weights=3):
    """Clients of unequal sizes whose rows have one input each, so that XᵀX is diagonal; coefficients differ."""
    rng = torch.Generator().manual_seed(0)
    clients = {}
    for i, rows in enumerate(ROWS):
        x = torch.eye(weights)[torch.arange(rows) % weights]
        x = x * (1 + torch.rand(rows, 1, generator=rng))
        y = x @ torch.randn(weights, generator=rng) + noise * torch.randn(rows, generator=rng)
        clients[f"client {i}"] = {"x": x, "y": y}
    return bf.Federation.from_arrays(clients)


def correlated(noise=0.5, weights=3):
    """The same with inputs that are correlated."""
    rng = torch.Generator().manual_seed(1)
    clients = {}
    for i, rows in enumerate(ROWS):
        x = torch.randn(rows, weights, generator=rng) + 0.7 * torch.randn(rows, 1, generator=rng)
        y = x @ torch.randn(weights, generator=rng) + noise * torch.randn(rows, generator=rng)
        clients[f"client {i}"] = {"x": x, "y": y}
    return bf.Federation.from_arrays(clients)


def one_round(algorithm, program, federation, server, clients, batch_size=None):
    """The next server, the next states of the clients and their uploads."""
    key = noise.fold(noise.key(0), server.rounds)
    turn = Turn(program, key, len(federation))
    keys = noise.fold(key, federation.stream_ids)
    rows = batches(federation, torch.arange(len(federation)), batch_size, keys)
    job = Job(program, algorithm.broadcast(turn, server), clients, rows, keys)
    answer = algorithm.work(job)
    server, _ = algorithm.decode(turn, server, summed(answer.upload))
    return server, answer.clients | answer.memory, answer.upload["gaussian"]


def run(algorithm, model, federation, rounds, **how):
    program = algorithm.program(model, federation)
    server = algorithm.start(program)
    clients = algorithm.start_clients(program, server, federation.batch())
    for _ in range(rounds):
        server, clients, upload = one_round(algorithm, program, federation, server, clients, **how)
    return server, clients, upload


def pooled(federation, noise, gamma=0.0, start=0.0):
    """The mode of the mean loss of all rows plus ½ γ / n (w − start)², and its curvature."""
    x, y = federation.fields["x"], federation.fields["y"]
    n = len(y)
    precision = x.mT @ x / (n * noise**2) + gamma / n * torch.eye(x.shape[1])
    return torch.linalg.solve(precision, x.mT @ y / (n * noise**2) + gamma / n * start), precision
