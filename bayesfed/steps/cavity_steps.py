"""Local variational inference against a cavity: the local work of PVI.

    q_i = argmax E_q[ELBO term of the client's data given z] − KL(q ‖ cavity),   z = θ in unconstrained coordinates

The local problem is solved by natural-gradient steps (Khan & Lin 2017, eq. 7): against the cavity the optimum
fulfils  Λ_i* = Λ_cavity − E[∇²f],  h_i* = h_cavity + E[∇f] − E[∇²f] m  with f the client's term and m the mean
of q_i; a step moves a fraction β there. With antithetic draws the expectations of a quadratic f are exact,
and so is the posterior of a conjugate Gaussian model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.data.federation import Federation
from bayesfed.elbo import noise
from bayesfed.elbo.elbo import Noise, client_terms
from bayesfed.elbo.program import Program
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.gaussian_factors import Natural, antithetic, factor_of, step_towards
from bayesfed.guides.locals import Locals
from bayesfed.steps.gradients import gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.local_loop import all_clients, local_loop
from bayesfed.steps.local_variational import (
    LocalVariational,
    ascend,
    drop_harmful_corrections,
    follow_origin,
    phi_state,
)
from bayesfed.steps.optimizer import State
from bayesfed.steps.steps import Inputs
from bayesfed.tracing.compiler import traceable

DIMENSIONS = 200
"""The most global dimensions D for which clients take Hessians, D backward passes a step and D × D numbers each."""


@dataclass(frozen=True)
class CavitySteps(LocalVariational):
    """Steps on φ_i, and from the second half on natural-gradient steps on q_i against the cavity.

    Attributes:
        steps: Adam steps on φ_i; those of the second half come with a natural-gradient step on q_i.
        step_size: β, how far a natural-gradient step goes.
        draws: S, draws in a step (even: they come in antithetic pairs).
        local_lr: Adam's rate of the steps on φ_i.
    """

    steps: int = 10
    step_size: float = 0.3
    draws: int = 8
    local_lr: float = 0.03
    gives = frozenset({"gaussian"})
    needs = frozenset({"gaussian"})
    globals = (FullRank,)

    def __post_init__(self) -> None:
        if self.draws % 2:
            raise ValueError(f"draws is {self.draws}; PVI draws pairs, make it even")

    def accept(
        self, program: Program, federation: Federation, locals_: Locals, name: str
    ) -> Program:
        """Refuse a program without random globals, with too many, or with global points."""
        if not program.random:
            raise ValueError(
                f"{name} shares a posterior of global variables, and the model samples none outside the clients plate: "
                "give what clients share a prior with pyro.sample, or use SFVI"
            )
        loc, root = FullRank().normal(program.init)
        if len(loc) > DIMENSIONS:
            raise ValueError(
                f"{name} takes second derivatives in all {len(loc):,} global dimensions of the model at each step, "
                f"which is for up to {DIMENSIONS}: use SFVI"
            )
        if points := [name for name in program.init if name not in FullRank().at(loc, root)]:
            raise ValueError(
                f"{name} shares a posterior of global variables, and the model's global pyro.param {points[0]!r} is a "
                "point: give it a prior with pyro.sample, or use SFVI, which takes both"
            )
        return program

    def run(self, job: Job, locals_: Locals) -> Work:
        """Return the Gaussians q_i that K clients find against the cavity."""
        program, keys = job.program, job.keys
        message, cavity = job.message["gaussian"], Natural(**job.given["cavity"])
        sent = (message[name] for name in Natural._fields)
        q = Natural(*(x.expand_as(c).clone() for x, c in zip(sent, cavity, strict=True)))
        clients = self.caught_up(job, phi_state(job.clients), q)
        terms = []

        def step(
            state: tuple[State, Natural], number: int, active: Tensor | None
        ) -> tuple[State, Natural]:
            local, q = state
            stream = noise.fold(keys, number)
            supplied = program.noise(stream, self.draws, local=True)
            loc, z = antithetic(q, program, stream, self.draws)
            late = number >= self.steps // 2  # φ_i catches up with q first
            given = Inputs(job.rows(number), (job.rate,), constants=job.theta)
            local, factor, term = self.step(program, local, loc, z, given, supplied, late)
            if not late:
                return local, q
            terms.append(term)
            return local, step_towards(q, cavity.plus(factor), self.step_size)

        schedule = all_clients(len(job), self.steps)
        clients, q = local_loop(schedule, keys.device, (clients, q), step)
        return Work({"gaussian": q._asdict()}, torch.stack(terms).mean(0), clients)

    def caught_up(self, job: Job, clients: State, q: Natural) -> State:
        """Return K clients whose φ_i has followed q, without learnt corrections that make their terms worse."""
        program, rows = job.program, job.rows(None)
        if not program.laplace_params:
            return clients
        clients = follow_origin(program, job.theta, clients, rows)
        supplied = program.noise(job.keys, self.draws, local=True)
        _, z = antithetic(q, program, job.keys, self.draws)
        (site,) = program.random
        given = Inputs(rows, constants=job.theta)
        drawn = {site: z.detach()}
        return drop_harmful_corrections(program, drawn, clients, given, supplied, self.draws)

    @traceable
    def step(
        self,
        program: Program,
        clients: State,
        loc: Tensor,
        z: Tensor,
        given: Inputs,
        supplied: Noise,
        late: bool,
    ) -> tuple[State, Natural, Tensor]:
        """Take one step of K clients on φ_i; return where late the factors of their terms at q, and the terms."""
        phi, z = leaves(clients["params"]), z.detach().requires_grad_()
        (site,), at = program.random, given.constants | phi
        f = client_terms(program, at, {site: z}, given.batch, supplied, self.draws)
        if phi:
            grad = gradients(f.mean(0), phi, retain_graph=True)
            with torch.no_grad():
                clients = ascend(program, clients, grad, given.rates[0] * self.local_lr)
        factor = factor_of(f, z, loc) if late else Natural(loc, loc)
        return clients, factor, f.detach().mean(0)
