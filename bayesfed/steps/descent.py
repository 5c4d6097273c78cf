"""Gradient descent on point estimates of θ, of the clients' own variables w_i, or of both.

    θ_i = θ as sent;  steps  x ← x − η ∇_x (L_i(w_i, θ_i) + μ/2 ‖x − x₀‖² + ⟨c, θ_i⟩)

with L_i of :mod:`bayesfed.steps.losses`, all in units of the priors (:func:`~bayesfed.guides.fisher.prior_units`; a
network's weights have unit 1). x is what the steps move; x₀ is θ as it was sent where they move θ (FedProx,
Li et al. 2020, eq. 2), and the centre of the prior p(w_i | θ) where they move w_i (Ditto, Li et al. 2021, Algorithm
1); c is a correction that the rule may prepare (SCAFFOLD).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.elbo import Noise
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.fisher import prior_units, scaled
from bayesfed.guides.globals import Point
from bayesfed.guides.locals import AtPrior, Kept, Locals, Remade, prior_centre, prior_of_locals
from bayesfed.settings import Rate
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import SINGLE, Job, Parts, Work
from bayesfed.steps.local_loop import all_clients, local_loop
from bayesfed.steps.losses import client_loss, inner_product, squared_distance, uphill
from bayesfed.steps.optimizer import State
from bayesfed.steps.single import few, flat, lowest, step_down
from bayesfed.steps.steps import Inputs, Objective, Steps
from bayesfed.steps.structure import body
from bayesfed.tracing.compiler import traceable

HALVINGS = 30
"""The largest number of rates, each half the one before, at which steps of fine-tuning are tried."""


@dataclass(frozen=True)
class Descent(Steps):
    """Steps of gradient descent, by minibatches.

    Attributes:
        moves: ``"globals"``, θ; ``"body"``, those of θ that the likelihood reads; ``"locals"``, w_i; or ``"all"``, w_i
            and the body together.
        lr: η, the rate of the steps.
        epochs: passes over a client's rows in a round.
        steps: steps in minibatches, in place of ``epochs``.
        optimizer: ``"sgd"``, ``"momentum"`` or ``"adam"``; its state ends with the round.
        proximal: μ, the weight of the squared distance from θ as it was sent, or of w_i from θ.
        at_prior: evaluate the loss with w_i at the centre of its prior, though clients have variables of their own.
        steepest: the largest slope in one number; beyond it a step may leave the region in which the gradient holds. By
            default no limit; FedAvg, its variants and Ditto's common network have 100, which is not in their papers.
        clip: the largest root mean square of a client's gradient, see :func:`~bayesfed.steps.optimizer.clipped`; by
            default no limit.
    """

    moves: Literal["globals", "body", "locals", "all"] = "globals"
    lr: Rate = 0.1
    epochs: int = 5
    steps: int | None = None
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    proximal: float = 0.0
    at_prior: bool = False
    steepest: Rate | None = None
    clip: Rate | None = None
    globals = (Point,)
    kinds = ("point",)

    @property
    def locals(self) -> tuple[type[Locals], ...]:  # type: ignore[override]
        """Families with variables to move, where the steps move the clients' own."""
        return (Kept, Remade) if self.moves in ("locals", "all") else (AtPrior, Kept, Remade)

    @property
    def gives(self) -> frozenset[str]:  # type: ignore[override]
        """Copies of θ, q(w_i) where the steps move it, and the number and rates (``path``) of plain steps on θ."""
        found = {"theta"}
        if self.moves in ("locals", "all"):
            found.add("posterior")
        if self.moves != "locals" and self.optimizer == "sgd":
            found.update({"steps"} if self.proximal else {"steps", "path"})
        return frozenset(found)

    @property
    def moved(self) -> frozenset[str]:  # type: ignore[override]
        """The kind of variables that the steps move."""
        return frozenset({self.moves})

    def run(self, job: Job, locals_: Locals) -> Work:
        """Take the steps of a round."""
        at, taken, terms = self.descend(job, start_of_round(job, locals_), locals_)
        return Work(self.parts(job, at, taken), terms, kept_locals(job, at, locals_))

    def centred(self, locals_: Locals) -> bool:
        """Return whether the loss has w_i at the centre of its prior."""
        return isinstance(locals_, AtPrior) or self.at_prior

    def names(self, program: Program) -> list[str]:
        """Return the parameters that the steps move."""
        if self.moves == "globals":
            return list(program.init)
        return [
            *(program.local_params if self.moves != "body" else ()),
            *(body(program) if self.moves != "locals" else ()),
        ]

    def descend(self, job: Job, at: Params, locals_: Locals) -> tuple[Params, Tensor, Tensor]:
        """Return all parameters after the steps, and each client's number of steps and ELBO term, ``(K,)``.

        A term is −n_i L_i before the steps, on the first minibatch, or −inf where they went uphill. After its steps a
        client's own copy of θ fits its rows better than the common θ, the more so the higher the rates are.
        """
        if SINGLE in job.message:
            return self.single(job, at, locals_)
        on = job.rows if self.moves == "locals" else job
        schedule = on.schedule(self.epochs, self.steps)
        moved, loss, rose = self.loop(job, at, schedule, job.rate * self.lr, self.centred(locals_))
        terms = (-job.counts * loss).masked_fill(rose, -torch.inf)
        return at | moved, schedule.sum(0).to(job.counts), terms

    def gradient_of(self, program: Program) -> list[str] | None:
        """Return what the steps move of θ, where clients have few variables of their own, or those stay."""
        alone = self.moves in ("globals", "body")
        if self.optimizer == "adam" or not (alone or few(program)):
            return None
        return [name for name in self.names(program) if name in program.init]

    def single(self, job: Job, at: Params, locals_: Locals) -> tuple[Params, Tensor, Tensor]:
        """Return the same after a single step, the clients' own variables at their optimum where they are moved."""
        program, rows, centred = job.program, job.rows(0), self.centred(locals_)
        if self.moves in ("locals", "all"):
            at = at | self.optimum(job, at)
        pulls = self.pulls(job, at)
        if self.moves == "locals":
            loss, _ = self.losses(program, at, pulls, {}, rows, centred)
        else:
            moved, loss = self.slope(program, at, pulls, rows, centred)
            at = at | moved
        return at, torch.ones_like(job.counts), -job.counts * loss.detach()

    def has_optimum(self, program: Program) -> bool:
        """Return whether :meth:`optimum` looks for the clients' variables."""
        return few(program)

    def exact(self, program: Program) -> Descent:
        """Return the steps: their objective has no noise."""
        return self

    def points(self, program: Program, keys: Tensor) -> Noise:
        """Return the noise of the objective: none."""
        return {}

    def optimum(self, job: Job, at: Params) -> Params:
        """Return the clients' own variables at the optimum of the objective given θ."""
        own = {name: at[name] for name in job.program.local_params}
        return lowest(job.program, self.loss_of_locals(job, at), own)

    def loss_of_locals(self, job: Job, at: Params) -> Callable[[Params], Tensor]:
        """Return the objective, in nats ``(K,)``, as a function of the clients' own variables."""
        rows, pulls = job.rows(None), _on_locals(self).pulls(job, at)
        return lambda own: job.counts * self._losses(job.program, at, pulls, own, rows, False)[1]

    @traceable
    def slope(
        self, program: Program, at: Params, pulls: Parts, batch: Batch, centred: bool
    ) -> tuple[Params, Tensor]:
        """Return the parameters of θ after a single step, and L_i before it."""
        own = leaves({name: at[name] for name in self.names(program) if name in program.init})
        loss, total = self._losses(program, at, pulls, own, batch, centred)
        return step_down(program, total, own), loss.detach()

    def loop(
        self, job: Job, at: Params, schedule: Tensor, lr: float, centred: bool
    ) -> tuple[Params, Tensor, Tensor]:
        """Return what the steps have moved, L_i before them and whether they went uphill, ``(K,)`` each."""
        pulls = self.pulls(job, at)
        free = {name: at[name] for name in self.names(job.program)}

        def step(state: State, number: int, active: Tensor | None) -> State:
            given = Inputs(job.rows(number), (lr,), active)
            return self.step(job.program, at, pulls, state, given, centred)

        start = optimizer.begin(self.optimizer, free, rows=len(job))
        moved = local_loop(schedule, job.keys.device, start, step)["params"]
        first = job.rows(0)
        with torch.no_grad():
            loss, before = self.losses(job.program, at, pulls, free, first, centred)
            _, after = self.losses(job.program, at, pulls, moved, first, centred)
        return moved, loss, uphill(before, after, job.counts)

    def pulls(self, job: Job, at: Params) -> Parts:
        """Return x₀ (``near``) and c (``correction``), where the steps have them."""
        pulls: Parts = {"near": {}, "correction": {}}
        if self.proximal and self.moves != "locals":
            pulls["near"] |= copies(job.theta, len(job))
        if self.proximal and self.moves in ("locals", "all"):
            pulls["near"] |= prior_of_locals(job.program, at, job.rows(0))
        if self.moves != "locals":
            units = prior_units(job.program)
            pulls["correction"] = {  # SCAFFOLD's are made of steps over rates
                n: v / units[n].square() if n in units else v
                for n, v in job.given.get("correction", {}).items()
            }
        return pulls

    @traceable
    def step(
        self, program: Program, at: Params, pulls: Parts, free: State, given: Inputs, centred: bool
    ) -> State:
        """Take one step with the clients that are active; ``pulls`` are x₀ (``near``) and c (``correction``)."""
        own = leaves(free["params"])
        _, loss = self._losses(program, at, pulls, own, given.batch, centred)
        units = prior_units(program)
        grads = self.bounded(scaled(gradients(loss, own), units))
        return optimizer.descend(self.optimizer, free, grads, given.rates[0], given.active, units)

    @traceable
    def losses(
        self, program: Program, at: Params, pulls: Parts, own: Params, batch: Batch, centred: bool
    ) -> tuple[Tensor, Tensor]:
        """Return L_i, and L_i with the pulls, of K clients at ``own`` values: ``(K,)`` each."""
        return self._losses(program, at, pulls, own, batch, centred)

    def _losses(
        self, program: Program, at: Params, pulls: Parts, own: Params, batch: Batch, centred: bool
    ) -> tuple[Tensor, Tensor]:
        loss = total = client_loss(program, at | own, batch, at_prior=centred)
        if near := pulls["near"]:
            total = total + self.proximal / 2 * squared_distance(own, near, prior_units(program))
        if correction := pulls["correction"]:
            total = total + inner_product(
                {n: v for n, v in own.items() if n in correction}, correction
            )
        return loss, total

    def bounded(self, grads: Params) -> Params:
        """Return the gradients within their bounds."""
        if self.clip is not None:
            return optimizer.clipped(grads, self.clip)
        if self.steepest is None:
            return grads
        return {name: grad.clamp(-self.steepest, self.steepest) for name, grad in grads.items()}

    def parts(self, job: Job, at: Params, taken: Tensor) -> Parts:
        """Return what the steps give to the rule."""
        found: Parts = {"theta": {}}
        if self.moves != "locals":
            moved = job.program.init if self.moves == "globals" else body(job.program)
            found["theta"] = {name: at[name] for name in moved}
        if "posterior" in self.gives:
            found["posterior"] = {name: at[name] for name in job.program.local_params}
        if "steps" in self.gives:
            found["steps"] = {"count": taken[:, None]}
            rate = 1.0 if SINGLE in job.message else job.rate * self.lr
            found["path"] = {"length": rate * taken[:, None]}
        return found

    # -- one step of several in turn ------------------------------------------------------------------

    def objective(self, program: Program, at: Params, batch: Batch, drawn: Noise) -> Tensor:
        """Return L_i + μ/2 ‖w_i − c(θ_i)‖² of K clients, ``(K,)``, c being the centre of the prior."""
        loss = client_loss(program, at, batch)
        if not self.proximal:
            return loss
        centre = prior_centre(program, at, batch)
        own = {name: at[name] for name in centre}
        return loss + self.proximal / 2 * squared_distance(own, centre, prior_units(program))

    def move(
        self, program: Program, at: Params, given: Inputs, drawn: Noise, objective: Objective
    ) -> Params:
        """Return what one plain step down an objective moves."""
        own = leaves({name: at[name] for name in self.names(program)})
        grads, units = (
            gradients(objective(program, at | own, given.batch, drawn), own),
            prior_units(program),
        )
        grads = scaled(self.bounded(scaled(grads, units)), units)
        return {name: optimizer.less(at[name], given.rates[0], grads[name]) for name in own}

    def constants(self, program: Program, batch: Batch) -> Params:
        """Return the constants of a round: none."""
        return {}

    def noise(self, program: Program, keys: Tensor, *path: int) -> Noise:
        """Return the noise of a step: a point estimate needs none."""
        return {}

    def rates(self, rate: float, done: Tensor) -> tuple[Any, ...]:
        """Return the learning rate."""
        return (rate * self.lr,)

    # -- the clients' own variables alone --------------------------------------------------------------

    def adapt(self, job: Job, theta: Params, own: Params, steps: int, lr: float | None) -> Params:
        """Take steps on the clients' own variables alone; clients whose steps go uphill take them at a lower rate.

        Few variables that are held near their prior's centre are brought to their optimum, unless there is a rate.
        """
        if lr is None and steps and self.moves == "locals" and self.proximal and few(job.program):
            return self.optimum(job, theta | own)
        descent, rate = _on_locals(self), self.lr if lr is None else lr
        found, late = dict(own), torch.arange(len(job), device=job.keys.device)
        for halvings in range(HALVINGS):
            some = job if len(late) == len(job) else job.select(late)
            at = {n: v[late] for n, v in (theta | own).items()}
            schedule = all_clients(len(late), steps)
            moved, _, rose = descent.loop(some, at, schedule, rate / 2**halvings, False)
            down = late[~rose]
            found = {n: v.index_copy(0, down, moved[n][~rose]) for n, v in found.items()}
            late = late[rose]
            if not len(late):
                break
        return found


@cache
def _on_locals(steps: Descent) -> Descent:
    """Return the same steps on the clients' own variables; the same object at every call, as tracing needs."""
    if steps.moves == "globals":  # fine-tuning is on the loss alone: FedProx's pull is on θ
        return replace(steps, moves="locals", at_prior=False, optimizer="sgd", proximal=0.0)
    return replace(steps, moves="locals", at_prior=False)


def descent_of_locals(steps: Any, program: Program) -> Descent | None:
    """Return the descent of the clients' own few variables, of those in turn the first; None if there is none."""
    for phase in getattr(steps, "phases", (steps,)):
        if isinstance(phase, Descent) and phase.moves in ("locals", "all") and few(program):
            return phase
    return None


def without_optimum(descent: Descent, job: Job, own: Params) -> Tensor:
    """Return the clients whose own few variables have converged in a direction that has no optimum: bool ``(K,)``."""
    at = copies(job.theta, len(job)) | own
    return flat(job.program, descent.loss_of_locals(job, at), own)


def start_of_round(job: Job, locals_: Locals) -> Params:
    """Return the clients' copies of θ and their own variables before the first step of a round."""
    at = copies(job.theta, len(job))
    if isinstance(locals_, AtPrior):
        return at
    own = job.clients["params"] if locals_.stateful else None
    return at | (own or locals_.begin(job.program, at, job.rows(0)))


def kept_locals(job: Job, at: Params, locals_: Locals) -> State:
    """Return the states of K clients that end a round at these parameters."""
    if not locals_.stateful:
        return {}
    return {"params": {name: at[name] for name in job.program.local_params}}
