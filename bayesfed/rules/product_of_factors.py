"""The product of one Gaussian factor per client and of the prior's (PVI).

    q(z) = t_0(z) Π_i t_i(z),   t_i(z) ∝ exp(h_iᵀ z − ½ zᵀ Λ_i z),   z = θ in unconstrained coordinates

(Ashman et al. 2022, *Partitioned variational inference: a framework for probabilistic federated learning*).

    server    sends q = (Λ, h), the sums of the factors' natural parameters
    client i  divides its own factor out (the cavity), finds the best q_i against the cavity as prior
              (:mod:`bayesfed.steps.cavity_steps`), and uploads ρ times the change of natural parameters q_i / q, which
              also updates t_i
    server    adds the changes; t_0, the prior's factor, is updated in the same way (exact if Gaussian)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.elbo import log_prior, server_pass
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.gaussian_factors import Natural, antithetic, factor_of
from bayesfed.rules.rule import Progress, Rule, Turn
from bayesfed.steps.job import Job, Parts, Work
from bayesfed.steps.optimizer import State


class Server(NamedTuple):
    """q and its prior factor t_0."""

    q: Natural
    prior: Natural


@dataclass(frozen=True)
class ProductOfFactors(Rule):
    """The product of the clients' factors.

    Attributes:
        damping: ρ; by default 1 / K, which keeps q proper whatever the factors. 1 is exact in one round
            where the model is conjugate and Gaussian.
    """

    damping: float | None = None
    needs = frozenset({"gaussian"})
    sends = frozenset({"gaussian"})
    globals = (FullRank,)
    no_noise = "clients take out of q what they remember of their uploads, and noise would add up in it: use SFVI"

    def start(self, program: Program) -> Server:
        """Return q = t_0 = N(0, I) in the guide's coordinates (close to the prior)."""
        loc, _ = FullRank().normal(program.init)
        unit = torch.eye(len(loc), dtype=loc.dtype, device=loc.device)
        start = Natural(unit, torch.zeros_like(loc))
        return Server(start, start)

    def params(self, server: Server) -> Params:
        """Return q as the guide's location and Cholesky factor."""
        return FullRank().at(*server.q.moments())

    def start_clients(self, program: Program, server: Server, batch: Batch) -> State:
        """Return t_i = 1."""
        factor = {n: v.new_zeros(len(batch), *v.shape) for n, v in server.q._asdict().items()}
        return {"factor": factor}

    def broadcast(self, turn: Turn, server: Server) -> Parts:
        """Return q's natural parameters, the damping, and q's moments."""
        damping = self._damping(turn.cohort)
        message = server.q._asdict() | {"damping": server.q.shift.new_tensor(damping)}
        return {"gaussian": message, "theta": self.params(server)}

    def prepare(self, job: Job) -> Parts:
        """Return the cavity, q without the client's own factor."""
        sent, own = job.message["gaussian"], job.clients["factor"]
        return {"cavity": {name: sent[name] - own[name] for name in Natural._fields}}

    def encode(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return ρ times the changes of natural parameters, and the factors with these changes."""
        sent, own, q = job.message["gaussian"], job.clients["factor"], work.found["gaussian"]
        change = {name: sent["damping"] * (q[name] - sent[name]) for name in Natural._fields}
        return {"gaussian": change}, {"factor": {n: own[n] + change[n] for n in change}}

    def stale(self, server: Server, total: Parts, count: int) -> Parts:
        """Return the changes of the clients' factors."""
        return total

    def decode(self, turn: Turn, server: Server, total: Parts) -> tuple[Server, Tensor]:
        """Return q times the clients' changes and the prior factor's own."""
        program, key, changes = turn.program, turn.key, Natural(**total["gaussian"])
        (site,) = program.random
        rows = Natural(*(x[None] for x in server.q))
        loc, z = antithetic(rows, program, key[None], max(turn.steps.draws, 64))
        f = log_prior(program, self.params(server), {site: z}, len(z))
        fresh = Natural(*(x[0] for x in factor_of(f[:, None], z, loc)))
        damping = 1.0 if self.damping is None else self.damping
        # the mean of the clients' q is proper, but the change of the prior's factor may undo that: it is shortened
        for shorter in (1.0, 0.5, 0.25, 0.125, 0.0):
            part = shorter * damping
            step = Natural(*(part * (f - p) for f, p in zip(fresh, server.prior, strict=True)))
            prior, q = server.prior.plus(step), server.q.plus(changes).plus(step)
            if torch.linalg.cholesky_ex(q.precision).info == 0:
                break
        else:
            raise FloatingPointError(
                "PVI: the product of the clients' factors is no longer a proper Gaussian; lower damping "
                "(or leave it out: 1 / K keeps q proper)"
            )
        server = Server(q, prior)
        with torch.no_grad():
            supplied = program.noise(key, 64, local=False)
            term = server_pass(program, self.params(server), supplied, 64).term
        return server, term.mean()

    def progress(self, turn: Turn, server: Server) -> Progress:
        """Return the cohort's share of all clients' changes, times ρ and how far a client goes."""
        late = turn.steps.steps - turn.steps.steps // 2
        gone = 1 - (1 - turn.steps.step_size) ** late
        return Progress(self._damping(turn.cohort) * gone / turn.scale)

    def _damping(self, cohort: int) -> float:
        return 1 / cohort if self.damping is None else self.damping
