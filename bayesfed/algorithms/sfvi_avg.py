"""SFVI-Avg: several local steps on each client's own copy of q(θ), then the barycentre of the copies.

    server    sends λ
    client i  with its copy λ_i = λ: steps uphill on λ_i and φ_i of
                  E_q[log p(θ) − log q(θ)] + N · E_q[log p(w_i, D_i | θ) − log q(w_i | θ)]
              that is, as if all N clients were like it; uploads its copy as an optimal transport map
    server    q(θ) ← the Wasserstein barycentre of the copies (Hassan, Salomone & Mengersen 2023)

The copies are Gaussian, q_i = N(m_i, L_i L_iᵀ). The map that carries the server's q = N(m, Σ) onto q_i is
affine with slope A_i = Σ^{-½} (Σ^{½} Σ_i Σ^{½})^{½} Σ^{-½}, and the barycentre's fixed point (Álvarez-Esteban et
al. 2016, eq. 6) is Σ ← Ā Σ Ā with Ā the mean of the A_i: a sum over clients is all that it needs. For
mean-field copies that is the mean of the standard deviations; for a model's global ``pyro.param``, which are points,
the mean.

The copies step by plain gradients divided by a root mean square that the server keeps, equal for all: Adam
in each client would normalise each client's gradient by itself, and the mean of the normalised gradients is
zero in the wrong place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.algorithms.protocol import Turn, Upload, mean, weighted
from bayesfed.algorithms.structured import (
    EPS,
    Structured,
    family_of,
    hierarchical,
    moved,
    noise_of_steps,
)
from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.elbo import Noise, elbo_terms, server_pass
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.mean_field import MeanField
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.optimizer import State
from bayesfed.tracing.compiler import traceable

MOST = 3.0
"""The largest gradient of a step, in root mean squares of the rounds before: where a step goes too far for the
curvature the next gradient is larger still, and only the next round knows."""


class Server(NamedTuple):
    """λ, the running mean of its squared gradients, and the rounds done ``()``."""

    params: Params
    square: Params
    rounds: Tensor


@dataclass(frozen=True)
class SFVIAvg(Structured):
    """SFVI with averaging: fewer rounds, for Gaussian global guides.

    Attributes:
        global_guide: MeanField or FullRank.
        conditioned: whether local variables are conditioned on the globals.
        local_steps: steps on (λ_i, φ_i) per round.
        draws: S, ELBO draws per step.
        lr: rate of the steps on λ_i.
        local_lr: Adam rate of the steps on φ_i.
        lr_decay: both rates fall, as half a cosine, to this fraction of their start.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> bf.fit(models.eight_schools, datasets.eight_schools(), bf.SFVIAvg(bf.MeanField()), rounds=2)
        Posterior: SFVIAvg (MeanField globals, conditioned locals), 2 rounds, 8 clients; globals mu, tau; locals theta
        2 rounds are too few to tell whether the fit still moves
    """

    global_guide: MeanField | FullRank | None = None
    conditioned: bool | None = None
    local_steps: int = 10
    draws: int = 8
    lr: float = 0.05
    local_lr: float = 0.03
    lr_decay: float = 0.01
    no_noise = "it averages maps and squares of gradients, which noise makes improper: use SFVI"

    def program(self, model: Model, federation: Federation) -> Program:
        """The model with the guide that these settings choose."""
        if self.global_guide is not None and not self.global_guide.gaussian:
            raise ValueError(
                f"SFVIAvg averages Gaussians: global_guide is {type(self.global_guide).__name__}, use "
                "MeanField or FullRank, or SFVI for any guide"
            )
        return hierarchical(model, federation, self.global_guide, self.conditioned)

    def start(self, program: Program) -> Server:
        """λ at its start."""
        params = {name: value.clone() for name, value in program.init.items()}
        square = {name: torch.zeros_like(value) for name, value in params.items()}
        rounds = torch.zeros((), dtype=torch.int64, device=program.schema.device)
        return Server(params, square, rounds)

    def broadcast(self, turn: Turn, server: Server) -> Params:
        """λ, and what one step divides a gradient by (0 in the first round, which only measures)."""
        size = {
            f"size.{name}": (value / (1 - 0.9 ** server.rounds.clamp(min=1))).sqrt()
            for name, value in server.square.items()
        }
        return server.params | size

    def work(self, job: Job) -> Work:
        """Steps of K clients on λ_i and φ_i; found are the copies λ_i, and the squares of their gradients."""
        program, start = job.program, {name: job.message[name] for name in job.program.init}
        size = {name: job.message[f"size.{name}"] for name in start}
        clients = moved(program, start, job.clients, job.rows(None))
        own = copies(start, len(job))
        square = {name: torch.zeros_like(value) for name, value in own.items()}
        terms = []
        streams = noise_of_steps(program, job.keys, self.local_steps, self.draws, theta=True)
        for step, supplied in enumerate(streams):
            clients, own, square, term = self.step(
                program, clients, own, square, size, job.rows(step), supplied, job.rate
            )
            terms.append(term)
        found = own | {f"square.{name}": value for name, value in square.items()}
        return Work(found, terms[0], clients)  # the terms at λ itself, before the copies part

    @traceable
    def step(
        self,
        program: Program,
        clients: State,
        own: Params,
        square: Params,
        size: Params,
        batch: Batch,
        supplied: Noise,
        rate: float,
    ) -> tuple[State, Params, Params, Tensor]:
        """One step of K clients on φ_i and λ_i; the mean of λ_i's squared gradients so far; the terms ``(K,)``."""
        lam, phi = leaves(own), leaves(clients["params"])
        server, client = elbo_terms(program, {**lam, **phi}, batch, supplied, self.draws)
        term = client.mean(0)
        # φ_i climbs the client's own term; λ_i the ELBO of N clients like this one
        objective = server.mean(0).sum() + program.clients * term.sum()
        grad = gradients(objective, {**lam, **phi})
        with torch.no_grad():
            of_term = {name: grad[name] / program.clients for name in phi}
            clients = optimizer.ascend(clients, of_term, rate * self.local_lr, EPS)
            new, squared = {}, {}
            for name, value in own.items():
                squared[name] = square[name] + grad[name].square() / self.local_steps
                sizes = (grad[name] / (size[name] + 1e-12)).clamp(-MOST, MOST)
                new[name] = value + rate * self.lr * torch.where(size[name] > 0, sizes, 0.0)
        return clients, new, squared, term.detach()

    def encode(self, job: Job, work: Work) -> Upload:
        """The copies of q(θ) as optimal transport maps, less the map that leaves it where it is; the rest as moves."""
        start = {name: job.message[name] for name in job.program.init}
        found, still = (
            maps(job.program, start, work.found),
            maps(job.program, start, copies(start, 1)),
        )
        return weighted({n: v - still[n] if n in still else v for n, v in found.items()})

    def decode(self, turn: Turn, server: Server, total: Upload) -> tuple[Server, Tensor]:
        """The barycentre."""
        still = maps(turn.program, server.params, copies(server.params, 1))
        found = mean(turn, total)
        found |= {name: value[0, 0] + found[name] for name, value in still.items()}
        square = {
            name: 0.9 * value + 0.1 * found[f"square.{name}"]
            for name, value in server.square.items()
        }
        params = {name: found[name] for name in server.params if name in found}
        if turn.program.random:
            params = family_of(turn.program).apply_map(server.params, found)
        supplied = turn.program.noise(turn.key, 64, local=False)
        with torch.no_grad():
            term = server_pass(turn.program, params, supplied, 64).term
        return Server(params, square, server.rounds + 1), term.mean()

    def params(self, server: Server) -> Params:
        """λ."""
        return server.params

    def pace(self, turn: Turn, server: Server) -> float | None:
        """The length of all its steps where gradients agree."""
        return turn.rate * self.lr * self.local_steps


def maps(program: Program, start: Params, found: Params) -> Params:
    """Copies of λ ``(K, 1, ...)`` as optimal transport maps from its start; the model's own parameters as they are."""
    return family_of(program).transport_maps(start, found) if program.random else dict(found)
