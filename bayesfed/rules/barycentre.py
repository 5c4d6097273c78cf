"""The Wasserstein barycentre of the clients' copies of q(θ) (SFVI-Avg).

    client i  uploads its copy q_i as an optimal transport map
    server    q(θ) ← the barycentre of the copies (Hassan, Salomone & Mengersen 2023)

The copies are Gaussian, q_i = N(m_i, L_i L_iᵀ). The map that carries the server's q = N(m, Σ) onto q_i is
affine with slope A_i = Σ^{-½} (Σ^{½} Σ_i Σ^{½})^{½} Σ^{-½}, and the barycentre's fixed point (Álvarez-Esteban et
al. 2016, eq. 6) is Σ ← Ā Σ Ā with Ā the mean of the A_i: a sum over clients is all that it needs. For
mean-field copies that is the mean of the standard deviations; for a model's global ``pyro.param``, which are points,
the mean.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.elbo.elbo import server_pass
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.globals import Gaussian
from bayesfed.guides.mean_field import MeanField
from bayesfed.rules.rule import Progress, Rule, Turn, mean_of, weighted_sum
from bayesfed.steps.gradients import copies
from bayesfed.steps.job import Job, Parts, Work
from bayesfed.steps.losses import per_client, zeros_like
from bayesfed.steps.optimizer import State


class Server(NamedTuple):
    """λ, the running mean of its squared gradients, and the rounds done ``()``."""

    params: Params
    square: Params
    rounds: Tensor


@dataclass(frozen=True)
class Barycentre(Rule):
    """The barycentre of the clients' Gaussians; every client counts alike."""

    needs = frozenset({"copy", "squares"})
    sends = frozenset({"size"})
    globals = (Gaussian, FullRank, MeanField)
    no_noise = "it averages maps and squares of gradients, which noise makes improper: use SFVI"

    def start(self, program: Program) -> Server:
        """Return λ at its start."""
        params = super().start(program)["theta"]
        rounds = torch.zeros((), dtype=torch.int64, device=program.schema.device)
        return Server(params, zeros_like(params), rounds)

    def params(self, server: Server) -> Params:
        """Return λ."""
        return server.params

    def broadcast(self, turn: Turn, server: Server) -> Parts:
        """Return λ, and the divisors of a step's gradients (0 in the first round, which only measures)."""
        share = 1 - 0.9 ** server.rounds.clamp(min=1)
        size = {name: (value / share).sqrt() for name, value in server.square.items()}
        return {"theta": server.params, "size": size}

    def encode(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return the maps of the copies, less the identity map of q(θ); NaN for a copy that is not finite."""
        copy = work.found["copy"]
        finite = [v.isfinite().flatten(1).all(1) for v in copy.values()]
        sound = torch.stack([torch.ones_like(job.keys, dtype=torch.bool), *finite]).all(0)
        # an eigenvalue problem that is not finite would fail for all clients of the batch
        copy = {n: torch.where(per_client(sound, v), v, job.theta[n]) for n, v in copy.items()}
        found = maps(job.program, job.theta, copy)
        found = {n: torch.where(per_client(sound, v), v, torch.nan) for n, v in found.items()}
        identity = maps(job.program, job.theta, copies(job.theta, 1))
        upload = weighted_sum({name: value - identity[name] for name, value in found.items()})
        return upload | {"squares": weighted_sum(work.found["squares"])["theta"]}, {}

    def decode(self, turn: Turn, server: Server, total: Parts) -> tuple[Server, Tensor]:
        """Return the barycentre."""
        identity = maps(turn.program, server.params, copies(server.params, 1))
        mean, squares = mean_of(turn, total), mean_of(turn, total, "squares")
        found = {name: value[0, 0] + mean[name] for name, value in identity.items()}
        square = {n: 0.9 * value + 0.1 * squares[n] for n, value in server.square.items()}
        params = {name: found[name] for name in server.params if name in found}
        if turn.program.random:
            params = turn.program.guide.family.apply_map(server.params, found)
        supplied = turn.program.noise(turn.key, 64, local=False)
        with torch.no_grad():
            term = server_pass(turn.program, params, supplied, 64).term
        return Server(params, square, server.rounds + 1), term.mean()

    def progress(self, turn: Turn, server: Server) -> Progress:
        """Return the length of all steps of a client where gradients agree."""
        return Progress(turn.rate * turn.steps.lr * turn.steps.steps)


def maps(program: Program, start: Params, found: Params) -> Params:
    """Return copies of λ ``(K, 1, ...)`` as optimal transport maps from λ; the model's own parameters as they are."""
    return program.guide.family.transport_maps(start, found) if program.random else dict(found)
