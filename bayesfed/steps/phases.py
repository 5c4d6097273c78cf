"""Rounds of several phases: one after the other, or in alternation on every minibatch."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.elbo import Noise
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.globals import Point
from bayesfed.guides.locals import Kept, Locals, Remade
from bayesfed.steps import optimizer
from bayesfed.steps.descent import Descent, kept_locals, start_of_round
from bayesfed.steps.gradients import copies, leaves
from bayesfed.steps.job import SINGLE, Job, Parts, Work
from bayesfed.steps.local_loop import local_loop
from bayesfed.steps.natural_descent import NaturalDescent
from bayesfed.steps.single import few, step_down
from bayesfed.steps.steps import Inputs, Steps, gradient_of
from bayesfed.tracing.compiler import traceable


@dataclass(frozen=True)
class InTurn(Steps):
    """Phases one after the other, such as FedRep's head and body, or Ditto's personal and common network.

    Attributes:
        phases: the phases, in order.
    """

    phases: tuple[Descent, ...]
    globals = (Point,)
    locals = (Kept, Remade)
    kinds = ("point",)

    @property
    def gives(self) -> frozenset[str]:  # type: ignore[override]
        """All that the phases give."""
        return frozenset().union(*(phase.gives for phase in self.phases))

    @property
    def moved(self) -> frozenset[str]:  # type: ignore[override]
        """All that the phases move."""
        return frozenset(phase.moves for phase in self.phases)

    def run(self, job: Job, locals_: Locals) -> Work:
        """Take the steps of all phases."""
        at, found = start_of_round(job, locals_), Parts()
        terms: list[Tensor] = []
        for phase in self.phases:
            at, taken, own_terms = phase.descend(job, at, locals_)
            terms.append(own_terms)
            for part, values in phase.parts(job, at, taken).items():
                found[part] = found.get(part, {}) | values
        uphill = torch.stack(terms).isneginf().any(0)
        last = terms[-1].masked_fill(uphill, -torch.inf)
        return Work(found, last, kept_locals(job, at, locals_))

    def gradient_of(self, program: Program) -> list[str] | None:
        """Return what the phases move of θ, where clients have few variables of their own."""
        found: list[str] = []
        for phase in self.phases:
            moved = gradient_of(phase, program) if few(program) else None
            if moved is None:
                return None
            found += moved
        return found

    def adapt(self, job: Job, theta: Params, own: Params, steps: int, lr: float | None) -> Params:
        """Take steps of the first phase that moves the clients' own variables."""
        moving = [phase for phase in self.phases if phase.moves in ("locals", "all")]
        return (moving or self.phases)[0].adapt(job, theta, own, steps, lr)


@dataclass(frozen=True)
class Alternate(Steps):
    """On every minibatch, some steps on the clients' own variables, then one on θ_i, down the same objective.

        times ×  w_i ← w_i − step of ``inner``       (its learning rate does not fall from round to round)
                 θ_i ← θ_i − step of ``outer``

    Attributes:
        inner: the steps on the clients' own variables, whose objective is that of both.
        times: k, the number of inner steps.
        outer: the step on θ_i; its epochs or steps are those of the round.
    """

    inner: Descent | NaturalDescent = field(default_factory=lambda: NaturalDescent("locals"))
    times: int = 5
    outer: Descent | NaturalDescent = field(default_factory=lambda: NaturalDescent("globals"))
    gives = frozenset({"theta", "posterior"})
    globals = (Point,)
    locals = (Kept, Remade)
    moved = frozenset({"globals", "locals"})

    def __post_init__(self) -> None:
        if isinstance(self.inner, Descent) and not self.inner.proximal:
            raise ValueError(
                "inner=Descent(proximal=0.0): θ_i moves by the penalty, which ties w_i to it; give a proximal above 0, "
                "or take NaturalDescent"
            )

    @property
    def kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """Point estimates or Normals: what the inner steps can move."""
        return self.inner.kinds

    @property
    def draws(self) -> int:
        """Draws of w_i in an inner step."""
        return getattr(self.inner, "draws", 1)

    def gradient_of(self, program: Program) -> list[str] | None:
        """Return all of θ, where clients have few variables."""
        return [*program.init] if self.inner.has_optimum(program) else None

    def single(self, job: Job, locals_: Locals) -> Work:
        """Take a single step on θ, the clients' variables at the optimum of the objective of both."""
        program, rows, inner = job.program, job.rows(0), self.inner.exact(job.program)
        at = start_of_round(job, locals_)
        own = inner.optimum(job, at)
        moved, loss = self.slope(program, at | own, inner, rows, inner.points(program, job.keys))
        found = {"theta": moved, "posterior": own}
        return Work(found, -job.counts * loss, kept_locals(job, at | own, locals_))

    @traceable
    def slope(
        self, program: Program, at: Params, inner: Any, batch: Batch, drawn: Noise
    ) -> tuple[Params, Tensor]:
        """Return θ after a single step, and the objective before it."""
        theta = leaves({name: at[name] for name in program.init})
        loss = inner.objective(program, at | theta, batch, drawn)
        return step_down(program, loss, theta), loss.detach()

    def run(self, job: Job, locals_: Locals) -> Work:
        """Take the steps of a round."""
        if SINGLE in job.message:
            return self.single(job, locals_)
        program, keys = job.program, job.keys
        schedule = job.schedule(self.outer.epochs, self.outer.steps)
        steps = schedule.sum(0).to(job.counts)
        constants = self.inner.constants(program, job.rows(0))

        def step(at: Params, number: int, active: Tensor | None) -> Params:
            done = number / steps
            inner = Inputs(job.rows(number), self.inner.rates(1.0, done), active, constants)
            drawn = [self.inner.noise(program, keys, number, i) for i in range(self.times + 1)]
            return self.step(program, at, inner, self.outer.rates(job.rate, done), drawn)

        at = local_loop(schedule, keys.device, start_of_round(job, locals_), step)
        own = {name: at[name] for name in program.local_params}
        with torch.no_grad():
            sent, last = copies(job.theta, len(job)), self.inner.noise(program, keys)
            loss = self.loss(program, sent | own, job.rows(0), last)
        found = {"theta": {name: at[name] for name in program.init}, "posterior": own}
        return Work(found, -job.counts * loss, kept_locals(job, at, locals_))

    @traceable
    def step(
        self,
        program: Program,
        at: Params,
        inner: Inputs,
        outer_rates: tuple[Any, ...],
        drawn: list[Noise],
    ) -> Params:
        """Take the inner steps and one outer step with the clients that are active."""
        objective, new = self.inner.objective, at
        for noise in drawn[1:]:
            new = new | self.inner.move(program, new, inner, noise, objective)
        outer = inner._replace(rates=outer_rates)
        new = new | self.outer.move(program, new, outer, drawn[0], objective)
        return optimizer.where_active(at, new, inner.active)

    @traceable
    def loss(self, program: Program, at: Params, batch: Batch, drawn: Noise) -> Tensor:
        """Return the objective, ``(K,)``."""
        return self.inner.objective(program, at, batch, drawn)

    def adapt(self, job: Job, theta: Params, own: Params, steps: int, lr: float | None) -> Params:
        """Take inner steps alone."""
        return self.inner.adapt(job, theta, own, steps, lr)
