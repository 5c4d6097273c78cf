"""The Wasserstein barycentre of the clients' copies of q(θ) (SFVI-Avg).

    client i  uploads its copy q_i as an optimal transport map, and the change of its control variate c_i
              (:mod:`bayesfed.steps.own_copy`)
    server    q(θ) ← the barycentre of the copies (Hassan, Salomone & Mengersen 2023); keeps Σ_i c_i, and sends it

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

from bayesfed.data.batch import Batch
from bayesfed.elbo.elbo import server_pass
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.globals import Gaussian
from bayesfed.guides.mean_field import MeanField
from bayesfed.guides.natural_gradient import QuadraticTerm
from bayesfed.rules.rule import Progress, Rule, Turn, add, mean_of, weighted_sum
from bayesfed.steps.gradients import copies
from bayesfed.steps.job import Job, Parts, Work
from bayesfed.steps.losses import per_client, zeros_like
from bayesfed.steps.optimizer import State
from bayesfed.steps.own_copy import plain_params, takes_natural_steps


class Server(NamedTuple):
    """λ, the running means of the squared plain gradients, Σ_i c_i, and the numbers of rounds and of clients seen."""

    params: Params
    square: Params
    control: Params
    counts: Params


@dataclass(frozen=True)
class Barycentre(Rule):
    """The barycentre of the clients' Gaussians; every client counts alike. Clients remember c_i."""

    needs = frozenset({"copy", "squares", "control"})
    sends = frozenset({"size", "seen"})
    globals = (Gaussian, FullRank, MeanField)
    no_noise = "noise would add up in the control variates of its clients' steps: use SFVI"

    def start(self, program: Program) -> Server:
        """Return λ at its start, and c_i = 0."""
        params = super().start(program)["theta"]
        squares = zeros_like({name: params[name] for name in plain_params(program)})
        control = dict(squares)
        if takes_natural_steps(program):
            control |= program.guide.family.zero_term(params)._asdict()
        none = program.schema.scale.new_zeros(())
        return Server(params, squares, control, {"rounds": none, "seen": none})

    def params(self, server: Server) -> Params:
        """Return λ."""
        return server.params

    def start_clients(self, program: Program, server: Server, batch: Batch) -> State:
        """Return c_i = 0."""
        control = {n: v.new_zeros(len(batch), *v.shape) for n, v in server.control.items()}
        return {"control": control, "visits": {"seen": server.counts["seen"].new_zeros(len(batch))}}

    def broadcast(self, turn: Turn, server: Server) -> Parts:
        """Return λ, the divisors of plain gradients, the mean of the c_i, and the number of clients that it is of."""
        rounds, seen = server.counts["rounds"], server.counts["seen"]
        share = 1 - 0.9 ** rounds.clamp(min=1)
        return {
            "theta": server.params,
            "size": {name: (value / share).sqrt() for name, value in server.square.items()},
            "control": {n: v / seen.clamp(min=1) for n, v in server.control.items()},
            "seen": {"clients": seen},
        }

    def prepare(self, job: Job) -> Parts:
        """Return c_i, and which clients have none yet."""
        own, seen = job.clients.get("control", {}), job.clients["visits"]["seen"]
        own = {n: v if n in QuadraticTerm._fields else v[:, None] for n, v in own.items()}
        return {"own": own, "new": {"client": seen == 0}}

    def encode(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return the maps of the copies, less the identity map of q(θ), and the changes of c_i.

        They are NaN for a copy that is not finite.
        """
        copy = work.found["copy"]
        finite = [v.isfinite().flatten(1).all(1) for v in copy.values()]
        sound = torch.stack([torch.ones_like(job.keys, dtype=torch.bool), *finite]).all(0)
        # an eigenvalue problem that is not finite would fail for all clients of the batch
        copy = {n: torch.where(per_client(sound, v), v, job.theta[n]) for n, v in copy.items()}
        found = maps(job.program, job.theta, copy)
        found = {n: torch.where(per_client(sound, v), v, torch.nan) for n, v in found.items()}
        identity = maps(job.program, job.theta, copies(job.theta, 1))
        upload = weighted_sum({name: value - identity[name] for name, value in found.items()})
        own, new = job.clients.get("control", {}), job.given["new"]["client"]
        control = {n: v.reshape(own[n].shape) for n, v in work.found["control"].items()}
        upload["control"] = {
            n: torch.where(per_client(sound, v), v - own[n], torch.nan) for n, v in control.items()
        }
        upload["visits"] = {"seen": new.to(job.counts)}
        memory = {"control": control, "visits": {"seen": torch.ones_like(job.counts)}}
        return upload | {"squares": weighted_sum(work.found["squares"])["theta"]}, memory

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
        control = add(server.control, total.get("control", {}))
        seen = server.counts["seen"] + total["visits"]["seen"]
        counts = {"rounds": server.counts["rounds"] + 1, "seen": seen}
        return Server(params, square, control, counts), term.mean()

    def progress(self, turn: Turn, server: Server) -> Progress:
        """Return how far a client goes."""
        return Progress(1 - (1 - turn.rate * turn.steps.lr) ** turn.steps.steps)


def maps(program: Program, start: Params, found: Params) -> Params:
    """Return copies of λ ``(K, 1, ...)`` as optimal transport maps from λ; the model's own parameters as they are."""
    return program.guide.family.transport_maps(start, found) if program.random else dict(found)
