"""PVI: partitioned variational inference, one Gaussian factor of q(θ) per client.

    q(z) = t_0(z) Π_i t_i(z),   t_i(z) ∝ exp(h_iᵀ z − ½ zᵀ Λ_i z),   z = θ in unconstrained coordinates

(Ashman et al. 2022, *Partitioned variational inference: a framework for probabilistic federated learning*).

    server    sends q = (Λ, h), the sums of the factors' natural parameters
    client i  divides its own factor out (the cavity), finds the best q_i against the cavity as prior,
                  q_i = argmax E_q[ELBO term of its data given z] − KL(q ‖ cavity),
              and uploads ρ times the change of natural parameters q_i / q, which also updates t_i
    server    adds the changes; t_0, the prior's factor, is updated in the same way (exact if Gaussian)

The local problem is solved by natural-gradient steps (Khan & Lin 2017, eq. 7): against the cavity the optimum
fulfils  Λ_i* = Λ_cavity − E[∇²f],  h_i* = h_cavity + E[∇f] − E[∇²f] m  with f the client's term and m the mean
of q_i; a step moves a fraction β there. With antithetic draws the expectations of a quadratic f are exact,
and so is the posterior of a conjugate Gaussian model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesfed.algorithms.protocol import Turn, Upload
from bayesfed.algorithms.structured import (
    EPS,
    Structured,
    begun,
    dimensions,
    hierarchical,
    moved,
    serving,
)
from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import noise
from bayesfed.elbo.elbo import Noise, client_terms, log_prior, server_pass
from bayesfed.elbo.program import Params, Program
from bayesfed.elbo.sites import sites
from bayesfed.guides.full_rank import FullRank
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.optimizer import State
from bayesfed.tracing.compiler import traceable

DIMENSIONS = 200
"""The most global dimensions D for which clients take Hessians, D backward passes a step and D × D numbers each."""
_FAR = 10.0


class Natural(NamedTuple):
    """Natural parameters of Gaussians: ``precision`` Λ ``(..., D, D)`` and ``shift`` h = Λ m ``(..., D)``."""

    precision: Tensor
    shift: Tensor

    def moments(self) -> tuple[Tensor, Tensor]:
        """The mean ``(..., D)`` and the lower Cholesky factor of the covariance ``(..., D, D)``."""
        factor = torch.linalg.cholesky_ex(self.precision).L
        loc = torch.cholesky_solve(self.shift[..., None], factor).squeeze(-1)
        return loc, torch.linalg.cholesky_ex(torch.cholesky_inverse(factor)).L


class Server(NamedTuple):
    """q and its prior factor t_0."""

    q: Natural
    prior: Natural


@dataclass(frozen=True)
class PVI(Structured):
    """Partitioned variational inference with full-covariance Gaussian factors.

    Attributes:
        conditioned: whether local variables are conditioned on the globals.
        damping: ρ; by default 1 / K, which keeps q proper whatever the factors. 1 is exact in one round
            where the model is conjugate and Gaussian.
        local_steps: Adam steps on φ_i; those of the second half come with a natural-gradient step on q_i.
        step: β, how far a natural-gradient step goes.
        draws: S, draws per step (even: they come in antithetic pairs).
        local_lr: Adam rate of the steps on φ_i.
        lr_decay: the Adam rate falls, as half a cosine, to this fraction of its start.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> bf.fit(models.eight_schools, datasets.eight_schools(), bf.PVI(), rounds=2)
        Posterior: PVI (FullRank globals, conditioned locals), 2 rounds, 8 clients; globals mu, tau; locals theta
        2 rounds are too few to tell whether the fit has converged
    """

    conditioned: bool | None = None
    damping: float | None = None
    local_steps: int = 10
    step: float = 0.3
    draws: int = 8
    local_lr: float = 0.03
    lr_decay: float = 0.01
    remembered = ("factor",)
    no_noise = "clients take out of q what they remember of their uploads, and noise would add up in it: use SFVI"

    def __post_init__(self) -> None:
        if self.draws % 2:
            raise ValueError(f"draws is {self.draws}; PVI draws pairs, make it even")

    def program(self, model: Model, federation: Federation) -> Program:
        """The model with a full-rank Gaussian over its globals."""
        found = sites(model, federation)
        if (size := dimensions(found)) > DIMENSIONS:
            raise ValueError(
                f"PVI takes second derivatives in all {size:,} global dimensions of the model at each step, "
                f"which is for up to {DIMENSIONS}: use SFVI"
            )
        if not size:
            raise ValueError(
                "PVI shares a posterior of global sites, and the model samples none outside the clients plate: "
                "give what clients share a prior with pyro.sample, or use SFVI"
            )
        program = hierarchical(model, federation, FullRank(), self.conditioned)
        of_family = FullRank().at(*FullRank().normal(program.init))
        if points := [name for name in program.init if name not in of_family]:
            raise ValueError(
                f"PVI shares a posterior of global sites, and the model's global pyro.param {points[0]!r} is a "
                "point: give it a prior with pyro.sample, or use SFVI, which takes both"
            )
        return program

    def start(self, program: Program) -> Server:
        """q = t_0 = N(0, I) in the guide's coordinates (close to the prior)."""
        loc, _ = FullRank().normal(program.init)
        unit = torch.eye(len(loc), dtype=loc.dtype, device=loc.device)
        start = Natural(unit, torch.zeros_like(loc))
        return Server(start, start)

    def start_clients(self, program: Program, server: Server, batch: Batch) -> State:
        """φ_i, and t_i = 1."""
        factor = {n: v.new_zeros(len(batch), *v.shape) for n, v in server.q._asdict().items()}
        return begun(program, batch) | {"factor": factor}

    def broadcast(self, turn: Turn, server: Server) -> Params:
        """q's natural parameters and the damping."""
        damping = 1 / turn.cohort if self.damping is None else self.damping
        message = server.q._asdict() | {"damping": server.q.shift.new_tensor(damping)}
        return message | self.params(server)

    def work(self, job: Job) -> Work:
        """K clients find q_i against the cavity; found is ρ times the change of natural parameters."""
        program, message = job.program, job.message
        sent = Natural(message["precision"], message["shift"])
        own = Natural(**job.clients["factor"])
        cavity = Natural(*(q - t for q, t in zip(sent, own, strict=True)))
        params = {name: message[name] for name in program.init}
        local = {part: tensors for part, tensors in job.clients.items() if part != "factor"}
        q = Natural(*(x.expand_as(t).clone() for x, t in zip(sent, own, strict=True)))
        local = self.caught_up(job, params, local, q)
        terms = []
        for step in range(self.local_steps):
            stream = noise.fold(job.keys, step)
            supplied = program.noise(stream, self.draws, local=True)
            loc, z = _antithetic(q, program, stream, self.draws)
            late = step >= self.local_steps // 2  # φ_i catches up with q first
            local, factor, term = self.local_step(
                program, params, local, loc, z, job.rows(step), supplied, late, job.rate
            )
            if not late:
                continue
            q = _towards(
                q, Natural(*(c + t for c, t in zip(cavity, factor, strict=True))), self.step
            )
            terms.append(term)
        change = {
            name: message["damping"] * (new - old)
            for name, new, old in zip(Natural._fields, q, sent, strict=True)
        }
        factor_state = {name: job.clients["factor"][name] + change[name] for name in change}
        return Work(change, torch.stack(terms).mean(0), local | {"factor": factor_state})

    def caught_up(self, job: Job, params: Params, clients: State, q: Natural) -> State:
        """K clients whose φ_i has followed q; what they had learnt is kept where it still serves."""
        program, rows = job.program, job.rows(None)
        if not program.laplace_params:
            return clients
        clients = moved(program, params, clients, rows)
        supplied = program.noise(job.keys, self.draws, local=True)
        _, z = _antithetic(q, program, job.keys, self.draws)
        (site,) = program.random
        return serving(program, params, clients, {site: z.detach()}, rows, supplied, self.draws)

    def encode(self, job: Job, work: Work) -> Upload:
        """The changes."""
        return work.found

    def late(self, server: Any, total: Upload, count: int) -> Upload:
        """The changes of the clients' factors."""
        return total

    @traceable
    def local_step(
        self,
        program: Program,
        params: Params,
        clients: State,
        loc: Tensor,
        z: Tensor,
        batch: Batch,
        supplied: Noise,
        late: bool,
        rate: float,
    ) -> tuple[State, Natural, Tensor]:
        """One step of K clients on φ_i; where late, the Gaussians that stand for their terms at q; the terms."""
        phi, z = leaves(clients["params"]), z.detach().requires_grad_()
        (site,) = program.random
        f = client_terms(program, params | phi, {site: z}, batch, supplied, self.draws)
        if phi:
            grad = gradients(f.mean(0), phi, retain_graph=True)
            with torch.no_grad():
                clients = optimizer.ascend(clients, grad, rate * self.local_lr, EPS)
        factor = _factor(f, z, loc) if late else Natural(loc, loc)
        return clients, factor, f.detach().mean(0)

    def decode(self, turn: Turn, server: Server, total: Upload) -> tuple[Server, Tensor]:
        """q times the clients' changes and the prior factor's own."""
        program, key = turn.program, turn.key
        (site,) = program.random
        rows = Natural(*(x[None] for x in server.q))
        loc, z = _antithetic(rows, program, key[None], max(self.draws, 64))
        f = log_prior(program, self.params(server), {site: z}, len(z))
        fresh = Natural(*(x[0] for x in _factor(f[:, None], z, loc)))
        damping = 1.0 if self.damping is None else self.damping
        prior = Natural(
            *(old + damping * (new - old) for old, new in zip(server.prior, fresh, strict=True))
        )
        q = Natural(
            *(
                old + total[name] + (new_prior - old_prior)
                for name, old, new_prior, old_prior in zip(
                    Natural._fields, server.q, prior, server.prior, strict=True
                )
            )
        )
        if torch.linalg.cholesky_ex(q.precision).info != 0:
            raise FloatingPointError(
                "PVI: the product of the clients' factors is no longer a proper Gaussian; lower damping "
                "(or leave it out: 1 / K keeps q proper)"
            )
        server = Server(q, prior)
        with torch.no_grad():
            supplied = program.noise(key, 64, local=False)
            term = server_pass(program, self.params(server), supplied, 64).term
        return server, term.mean()

    def params(self, server: Server) -> Params:
        """q as the guide's location and Cholesky factor."""
        return FullRank().at(*server.q.moments())

    def pace(self, turn: Turn, server: Server) -> float | None:
        """What the cohort has of all clients' changes, times ρ and how far a client goes."""
        late = self.local_steps - self.local_steps // 2
        damping = 1 / turn.cohort if self.damping is None else self.damping
        return damping * (1 - (1 - self.step) ** late) / turn.scale


def _antithetic(q: Natural, program: Program, keys: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """The means ``(K, D)`` of K Gaussians and draws ``(S, K, 1, D)`` in pairs around them."""
    loc, scale_tril = q.moments()
    (site,) = program.random
    (half,) = program.noise(keys, draws // 2, local=False)[site]
    offset = (scale_tril[:, None] @ half[..., None]).squeeze(-1)
    z = loc[:, None] + torch.cat([offset, -offset])
    return loc, z.detach().requires_grad_()


def _factor(f: Tensor, z: Tensor, loc: Tensor) -> Natural:
    """The Gaussian factor that stands for f at q: Λ = −E[∇²f], h = E[∇f] + Λ m.

    Args:
        f: ``(S, K)``, a function of the draws.
        z: the draws ``(S, K, 1, D)``.
        loc: the mean m of q, ``(K, D)``.
    """
    (grad,) = torch.autograd.grad(f.sum(), z, create_graph=True)
    rows = []
    for d in range(z.shape[-1]):
        slope = grad[..., d].sum()
        (row,) = (
            torch.autograd.grad(slope, z, retain_graph=True, allow_unused=True)
            if slope.requires_grad
            else (None,)
        )
        rows.append(torch.zeros_like(z) if row is None else row)
    hessian = torch.stack(rows, -1).mean(0).squeeze(1)
    precision = -(hessian + hessian.mT) / 2
    shift = grad.detach().mean(0).squeeze(1) + (precision @ loc[..., None]).squeeze(-1)
    return Natural(precision, shift)


def _towards(q: Natural, target: Natural, step: float) -> Natural:
    """A step from q to the target, shorter, row by row, where it would leave the region that q has seen.

    That is where the precision would lose its positive definiteness or the mean would move by more than
    ``_FAR`` standard deviations of q in any direction.
    """
    before, _ = q.moments()
    size = torch.full(q.shift.shape[:1], step, dtype=q.shift.dtype, device=q.shift.device)
    for _ in range(30):
        new = Natural(
            torch.lerp(q.precision, target.precision, size[:, None, None]),
            torch.lerp(q.shift, target.shift, size[:, None]),
        )
        factor, info = torch.linalg.cholesky_ex(new.precision)
        moved = torch.cholesky_solve(new.shift[..., None], factor).squeeze(-1) - before
        distance = (moved * (q.precision @ moved[..., None]).squeeze(-1)).sum(-1).sqrt()
        stays = (info == 0) & (distance <= _FAR)
        if size.device.type == "cpu" and stays.all():  # elsewhere, asking would wait for the device
            break
        size = torch.where(stays, size, size / 2)
    return Natural(
        torch.where(stays[:, None, None], new.precision, q.precision),
        torch.where(stays[:, None], new.shift, q.shift),
    )
