"""The product of one Gaussian factor per client and of the prior's (PVI).

    q(z) = t_0(z) Π_i t_i(z),   t_i(z) ∝ exp(h_iᵀ z − ½ zᵀ Λ_i z),   z = θ in unconstrained coordinates

(Ashman et al. 2022, *Partitioned variational inference: a framework for probabilistic federated learning*).

    server    sends q = (Λ, h), the sums of the factors' natural parameters within a trust region
    client i  divides its own factor out (the cavity), finds the best q_i against the cavity as prior
              (:mod:`bayesfed.steps.cavity_steps`), and uploads ρ times the change of natural parameters q_i / q, which
              also updates t_i
    server    adds the changes to the product of all factors; t_0, the prior's factor, is made anew (exact if Gaussian);
              q goes towards the product, as far as it stays proper and its mean moves by a few standard deviations

What is missing to the product is one more factor of q, the server's, which is 1 in the end: the fixed points are those
of the paper. In its place the paper damps (ρ), as 1 / K to be safe, which takes K rounds and more.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.elbo import log_prior, server_pass
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.gaussian_factors import Natural, antithetic, factor_of, step_towards
from bayesfed.rules.rule import Progress, Rule, Turn
from bayesfed.steps.job import Job, Parts, Work
from bayesfed.steps.optimizer import State
from bayesfed.tracing.compiler import traceable


class Server(NamedTuple):
    """q, its prior factor t_0, and the product of t_0 and all t_i, which q follows within a trust region.

    ``improper`` is the number of passes over all clients for which the product has been no proper Gaussian, ``()``.
    """

    q: Natural
    prior: Natural
    product: Natural
    improper: Tensor


IMPROPER, LONGEST = 0.5, 10.0
"""How far the product may be from proper: by minus its precision in any direction, over that of q, for each row; and
for how many passes over all clients. Where clients' terms are not concave at the start it is improper for a few."""


@dataclass(frozen=True)
class ProductOfFactors(Rule):
    """The product of the clients' factors.

    Attributes:
        damping: ρ. 1 is exact in one round where the model is conjugate and Gaussian.
    """

    damping: float = 1.0
    needs = frozenset({"gaussian"})
    sends = frozenset({"gaussian"})
    globals = (FullRank,)
    no_noise = "clients take out of q what they remember of their uploads, and noise would add up in it: use SFVI"

    def start(self, program: Program) -> Server:
        """Return q = t_0 at the guide's start; t_0 becomes the prior's factor by its updates."""
        loc, scale_tril = FullRank().normal(program.init)
        precision = torch.cholesky_inverse(scale_tril)
        start = Natural(precision, precision @ loc)
        return Server(start, start, start, loc.new_zeros(()))

    def params(self, server: Server) -> Params:
        """Return q as the guide's location and Cholesky factor."""
        return FullRank().at(*server.q.moments())

    def start_clients(self, program: Program, server: Server, batch: Batch) -> State:
        """Return t_i = 1."""
        factor = {n: v.new_zeros(len(batch), *v.shape) for n, v in server.q._asdict().items()}
        return {"factor": factor}

    def broadcast(self, turn: Turn, server: Server) -> Parts:
        """Return q's natural parameters, the damping, and q's moments."""
        message = server.q._asdict() | {"damping": server.q.shift.new_tensor(self.damping)}
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
        """Return q as far towards the new product of the factors as its trust region reaches."""
        program, key, changes = turn.program, turn.key, Natural(**total["gaussian"])
        rows = Natural(*(x[None] for x in server.q))
        loc, z = antithetic(rows, program, key[None], max(turn.steps.draws, 64))
        fresh = Natural(*(x[0] for x in prior_factor(program, self.params(server), z, loc)))
        step = Natural(*(f - p for f, p in zip(fresh, server.prior, strict=True)))
        prior, product = server.prior.plus(step), server.product.plus(changes).plus(step)
        proper = torch.linalg.cholesky_ex(product.precision).info == 0
        improper = torch.where(proper, 0.0, server.improper + 1 / turn.scale)
        bound = product.precision + IMPROPER * program.rows * server.q.precision
        if improper > LONGEST or torch.linalg.cholesky_ex(bound).info > 0:
            raise FloatingPointError(
                "PVI: the product of the clients' factors is far from a proper Gaussian; lower damping"
            )
        target = Natural(*(x[None] for x in product))
        q = Natural(*(x[0] for x in step_towards(rows, target, 1.0)))
        server = Server(q, prior, product, improper)
        with torch.no_grad():
            supplied = program.noise(key, 64, local=False)
            term = server_pass(program, self.params(server), supplied, 64).term
        return server, term.mean()

    def progress(self, turn: Turn, server: Server) -> Progress:
        """Return the cohort's share of all clients' changes, times ρ and how far a client goes."""
        late = turn.steps.steps - turn.steps.steps // 2
        gone = 1 - (1 - turn.steps.step_size) ** late
        return Progress(self.damping * gone / turn.scale)


@traceable
def prior_factor(program: Program, params: Params, z: Tensor, loc: Tensor) -> Natural:
    """Return the factor of log p(θ), a batch of one, from draws ``(S, 1, 1, D)`` around its location ``(1, D)``."""
    (site,) = program.random
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        return factor_of(log_prior(program, params, {site: z}, len(z))[:, None], z, loc)
