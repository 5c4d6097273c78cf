"""A client's part of variational expectation maximisation (pFedVEM).

    p(w_i | θ) = N(m, ρ_i² I),   q(w_i) = N(μ_i, diag s_i²) = N(μ_i, Σ_i)                 (Zhu et al. 2023, eq. 5)

    E-step  steps on (μ_i, s_i), downhill in −E_q[log p(D_i | w_i, θ)] + λ KL(q(w_i) ‖ p(w_i | θ))
    M-step  ρ_i² = (tr Σ_i + ‖μ_i − m‖²) / D, where ρ_i is the client's own (Algorithm 1; the authors' code does this
            before the E-step, and uploads that ρ_i with the new μ_i)
    M-step  steps on its copy of the body, downhill in the same, with log p(θ) / N added

The body is all of θ that has no closed form in the server's M-step (:mod:`bayesfed.rules.m_step`). Its gradients are
divided by their root mean square over the clients of the rounds before, one number for each parameter, which the
server keeps: steps fit any unit, as Adam's do, but as it is the same number for all clients they pull by the
size of their gradients, so that the fixed point is the maximum.

As in the paper q(w_i) has no correlations, and where rows make them (an intercept with a slope) its variances, and ρ
with them, come out too small: in ``varying_slope`` on Grunfeld's firms a slope's ρ is 0.033 after 200 rounds and
0.013 in the end, where the exact marginal likelihood under the same priors has its maximum at 0.18. A fit warns of
that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo import noise
from bayesfed.elbo.elbo import Noise, client_losses
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.closed_forms import closed_forms, own_spreads
from bayesfed.guides.fisher import prior_units, scaled
from bayesfed.guides.globals import Point
from bayesfed.guides.locals import Kept, Locals
from bayesfed.settings import Rate, Times
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import SINGLE, Job, Work
from bayesfed.steps.local_loop import all_clients, local_loop
from bayesfed.steps.losses import per_client, zeros_like
from bayesfed.steps.natural_descent import RATE, NaturalDescent, cubature, natural
from bayesfed.steps.optimizer import State
from bayesfed.steps.single import few, lowest, step_down
from bayesfed.steps.steps import Inputs, Steps
from bayesfed.tracing.compiler import traceable

NATURAL_STEPS = 20
"""The number of natural E-steps in a round."""
LONGEST = 3.0
"""The longest step on the body, in units of its rate."""


@dataclass(frozen=True)
class VariationalEM(Steps):
    """The E-step on q(w_i), with the optimiser's state kept by the client, and gradient steps of the M-step.

    Attributes:
        lr: rate for q(w_i), in the mean over rows of the negative ELBO term.
        epochs: passes over the rows for the E-step.
        steps: steps of the E-step in minibatches, in place of ``epochs``.
        body_lr: rate for the body: how far a parameter moves in a step whose gradient is as large as those of all
            clients are on average.
        body_epochs: passes for the client's copy of the body, with w_i drawn from q.
        body_steps: steps on the body, in place of ``body_epochs``.
        optimizer: of q(w_i): ``"adam"``, ``"momentum"`` or ``"sgd"``; or ``"natural"``: 20 steps of
            :class:`~bayesfed.steps.NaturalDescent` at 0.7 of Newton's rate, with the points of a cubature rule for
            draws, whatever ``lr``, ``epochs`` and ``draws``. None: natural where a client has at most 8 variables and
            no ρ_i; else Adam.
        kl_weight: λ, the weight of the KL divergence from the prior.
        draws: draws of w_i in a step.
    """

    lr: Rate = 0.01
    epochs: Times = 5
    steps: int | None = None
    body_lr: Rate = 0.02
    body_epochs: Times = 5
    body_steps: int | None = None
    optimizer: Literal["natural", "sgd", "momentum", "adam"] | None = None
    kl_weight: float = 1.0
    draws: int = 5
    gives = frozenset({"theta", "posterior", "squares"})
    needs = frozenset({"squares"})
    globals = (Point,)
    locals = (Kept,)

    def start_clients(
        self, program: Program, theta: Params, batch: Batch, locals_: Locals
    ) -> State:
        """Return q(w_i) at the centre of its prior and its ρ_i, with the optimiser's first state."""
        theta = copies(theta, len(batch))
        own = locals_.begin(program, theta, batch)
        state = optimizer.begin(self.rule(program), own, rows=len(batch))
        return self.with_own_spreads(program, theta, state, batch)

    def run(self, job: Job, locals_: Locals) -> Work:
        """Take the E-step, the M-step for ρ_i, and the M-step for the body."""
        if SINGLE in job.message:
            return self.single(job)
        program, keys, first = job.program, job.keys, job.rows(0)
        theta = copies(job.theta, len(job))
        state = job.clients

        def e_step(state: State, number: int, active: Tensor | None) -> State:
            given = Inputs(job.rows(number), (job.rate * self.lr,), active)
            return self.e_step(program, theta, state, given, self.noise(program, keys, number))

        if exact := self.natural_steps(program):
            whole = len(job.rows.schedule(1)) == 1
            rate = RATE * (1.0 if whole else job.rate)
            moved = exact.approach(job, theta | state["params"], NATURAL_STEPS, rate)
            state = state | {"params": moved}
        elif program.locals:
            schedule = job.rows.schedule(self.epochs, self.steps)
            state = local_loop(schedule, keys.device, state, e_step)
            state = self.with_own_spreads(program, theta, state, first)
        body = {name: theta[name] for name in closed_forms(program).others(theta)}
        squares: Params = {}
        if body:
            body, squares = self.m_steps(job, theta, body, state["params"])
        with torch.no_grad():
            supplied = program.noise(keys, 1, local=True)
            term = self.term(program, theta | body | state["params"], first, supplied)
        found = {"theta": body, "posterior": state["params"], "squares": squares}
        return Work(found, term, state)

    def rule(self, program: Program) -> str:
        """Return the optimiser of q(w_i)."""
        exact = NaturalDescent().has_optimum(program) and not closed_forms(program).own
        return self.optimizer or ("natural" if exact else "adam")

    def natural_steps(self, program: Program) -> NaturalDescent | None:
        """Return the natural steps on q(w_i), if the E-step takes those."""
        takes = program.locals and self.rule(program) == "natural"
        return natural(self.kl_weight, program) if takes else None

    def gradient_of(self, program: Program) -> list[str] | None:
        """Return all of θ, but the spreads of priors of point estimates; None where a client has its own ρ_i."""
        known, point = closed_forms(program), _point(program)
        if known.own or not (few(program) if point else self.natural_steps(program)):
            return None
        return [name for name in program.init if not (point and name in known.spreads)]

    def single(self, job: Job) -> Work:
        """Take a single step on θ, with q(w_i) at its optimum."""
        program, rows, params = job.program, job.rows(0), job.clients["params"]
        theta, drawn = copies(job.theta, len(job)), self.noise(program, job.keys, 0)

        def loss(own: Params) -> Tensor:
            return job.counts * self.loss(program, theta | own, rows, drawn)

        exact = None if _point(program) else self.natural_steps(program)
        own = exact.optimum(job, theta | params) if exact else lowest(program, loss, params)
        moved, value = self.slope(program, theta | own, rows, drawn)
        found = {"theta": moved, "posterior": own, "squares": {}}
        return Work(found, -job.counts * value, job.clients | {"params": own})

    @traceable
    def slope(
        self, program: Program, at: Params, batch: Batch, drawn: Noise
    ) -> tuple[Params, Tensor]:
        """Return θ after a single step, and the negative ELBO per row before it."""
        theta = leaves({name: at[name] for name in self.gradient_of(program) or ()})
        loss = self.loss(program, at | theta, batch, drawn, hyper=1 / program.clients)
        return step_down(program, loss, theta), loss.detach()

    def m_steps(self, job: Job, theta: Params, body: Params, phi: Params) -> tuple[Params, Params]:
        """Return the clients' copies of the body after their steps, and its gradients' mean squares ``(K, 1)``."""
        program, at, before = job.program, theta | phi, job.message["squares"]
        schedule = job.rows.schedule(self.body_epochs, self.body_steps)
        total = schedule.sum(0).to(job.counts)

        def step(
            state: tuple[State, Params], number: int, active: Tensor | None
        ) -> tuple[State, Params]:
            moving, squares = state
            given = Inputs(job.rows(number), (job.rate * self.body_lr,), active, before)
            drawn = self.noise(program, job.keys, -1 - number)
            moving, found = self.m_step(program, at, moving, given, drawn)
            part = 1 / total if active is None else active / total
            return moving, {n: v + part * found[n] for n, v in squares.items()}

        start = optimizer.begin("sgd", body), {n: torch.zeros_like(job.counts) for n in body}
        moving, squares = local_loop(schedule, job.keys.device, start, step)
        return moving["params"], {name: value[:, None] for name, value in squares.items()}

    def with_own_spreads(
        self, program: Program, theta: Params, state: State, batch: Batch
    ) -> State:
        """Return the clients' states with their ρ_i in closed form; a point estimate has none."""
        own = closed_forms(program).own
        if not own or _point(program):
            return state
        with torch.no_grad():
            new = own_spreads(program, own, theta, state["params"], batch)
        return state | {"params": state["params"] | new}

    @traceable
    def e_step(
        self, program: Program, theta: Params, state: State, given: Inputs, supplied: Noise
    ) -> State:
        """Take one step on each client's q(w_i), and on variables of its own that have no closed form."""
        params = state["params"]
        own = leaves({n: v for n, v in params.items() if n not in closed_forms(program).own})
        loss = self.loss(program, theta | params | own, given.batch, supplied)
        units = prior_units(program)
        grads = zeros_like(params) | scaled(gradients(loss, own), units)
        rule = self.rule(program)
        return optimizer.descend(rule, state, grads, given.rates[0], given.active, units)

    @traceable
    def m_step(
        self, program: Program, at: Params, body: State, given: Inputs, supplied: Noise
    ) -> tuple[State, Params]:
        """Take one step on each client's copy of the body; return also its gradients' mean squares ``(K,)``."""
        own, before = leaves(body["params"]), given.constants
        loss = self.loss(program, at | own, given.batch, supplied, hyper=1 / program.clients)
        grads = gradients(loss, own)
        squares = {n: g.square().flatten(1).mean(1) for n, g in grads.items()}
        for name, grad in grads.items():
            square = torch.where(before[name] > 0, before[name], squares[name])
            unit = square.clamp(min=1e-30).sqrt()
            grads[name] = (grad / per_client(unit, grad)).clamp(-LONGEST, LONGEST)
        units = prior_units(program)
        return optimizer.descend("sgd", body, grads, given.rates[0], given.active, units), squares

    def loss(
        self, program: Program, params: Params, batch: Batch, supplied: Noise, hyper: float = 0.0
    ) -> Tensor:
        """Return each client's negative ELBO term per row, its KL times λ, with a share of −log p(θ): ``(K,)``."""
        draws = next((len(part) for parts in supplied.values() for part in parts), 1)
        losses = client_losses(program, params, batch, supplied, draws)
        total = losses.nll + self.kl_weight * losses.divergence
        return (total + hyper * losses.hyper if hyper else total) / losses.rows

    @traceable
    def term(self, program: Program, params: Params, batch: Batch, supplied: Noise) -> Tensor:
        """Return K clients' ELBO terms, with one draw: ``(K,)``."""
        losses = client_losses(program, params, batch, supplied, 1)
        return -(losses.nll + losses.divergence)

    def noise(self, program: Program, keys: Tensor, step: int) -> Noise:
        """Return the noise of the draws of one step; a point estimate has none."""
        if self.natural_steps(program):
            return cubature(program, keys)
        return program.noise(noise.fold(keys, step), self.draws, local=True)

    def adapt(self, job: Job, theta: Params, own: Params, steps: int, lr: float | None) -> Params:
        """Take the E-step alone, with ρ_i in closed form before each step."""
        program, first, rate = job.program, job.rows(0), self.lr if lr is None else lr
        if exact := self.natural_steps(program):
            return exact.approach(job, theta | own, steps, min(RATE, rate / self.lr))

        def step(state: State, number: int, active: Tensor | None) -> State:
            state = self.with_own_spreads(program, theta, state, first)
            given = Inputs(job.rows(number), (rate,), active)
            return self.e_step(program, theta, state, given, self.noise(program, job.keys, number))

        start = optimizer.begin(self.rule(program), own, rows=len(job))
        return local_loop(all_clients(len(job), steps), job.keys.device, start, step)["params"]


def _point(program: Program) -> bool:
    """Return whether q(w_i) is a point estimate."""
    return bool(program.guide.local_point)
