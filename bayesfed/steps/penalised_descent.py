"""Descent under a quadratic penalty that the other clients set: FedCurv.

    θ_i = θ; steps on  L_i(θ_i) + λ Σ_{j≠i} (θ_i − θ_j)ᵀ F_j (θ_i − θ_j)              (Shoham et al. 2019, section 3)
    F_i ← diagonal of the Fisher information of L_i at θ_i, the mean over rows of (∇ log p(y | x, θ_i))²

L_i is a mean over the client's rows, and so is F_i; the penalties of clients of all sizes count alike, as the authors
write them. A step goes along ∇L_i and then makes the proximal step of the penalty, which is stable for every λ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.elbo import client_losses
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.fisher import prior_units
from bayesfed.guides.globals import Point
from bayesfed.guides.locals import AtPrior, Locals, prior_centre, with_model_locals
from bayesfed.settings import Rate
from bayesfed.steps.curvature import Loss, layered, slopes
from bayesfed.steps.descent import Descent
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import SINGLE, Job, Parts, Work
from bayesfed.steps.local_loop import local_loop
from bayesfed.steps.losses import client_loss, uphill
from bayesfed.steps.optimizer import where_active
from bayesfed.steps.single import step_down
from bayesfed.steps.steps import Inputs, Steps
from bayesfed.tracing.compiler import traceable


@dataclass(frozen=True)
class PenalisedDescent(Steps):
    """Steps on θ_i under the penalty that the rule prepares, with clients at the centres of their priors.

    Attributes:
        lam: λ, the weight of the penalty.
        lr: η, the rate of the steps.
        epochs: passes over a client's rows in a round.
        steps: steps in minibatches, in place of ``epochs``.
    """

    lam: float = 1.0
    lr: Rate = 0.1
    epochs: int = 5
    steps: int | None = None
    gives = frozenset({"theta", "fisher"})
    needs = frozenset({"fisher", "pull"})
    globals = (Point,)
    locals = (AtPrior,)
    moved = frozenset({"globals"})

    def gradient_of(self, program: Program) -> list[str] | None:
        """Return all of θ: there is no penalty where all θ_j are θ."""
        return [*program.init]

    def reads_single_rows(self, program: Program) -> bool:
        """Return True: F_i is the mean of the rows' squared gradients."""
        return True

    def run(self, job: Job, locals_: Locals) -> Work:
        """Take the steps of a round, and return θ_i with F_i at it; at θ where there is a single step."""
        if SINGLE in job.message:
            own = leaves(copies(job.theta, len(job)))
            loss = client_loss(job.program, own, job.rows(0), at_prior=True)
            found = {"theta": step_down(job.program, loss, own), "fisher": self.fisher(job, own)}
            return Work(found, -job.counts * loss.detach())

        def step(theta: Params, number: int, active: Tensor | None) -> Params:
            given = Inputs(job.rows(number), (job.rate * self.lr,), active)
            return self.step(job.program, theta, job.given, given)

        schedule = job.schedule(self.epochs, self.steps)
        sent = copies(job.theta, len(job))
        theta = local_loop(schedule, job.keys.device, sent, step)
        with torch.no_grad():
            before = self.losses(job.program, sent, job.given, job.rows(0))[1]
            loss, after = self.losses(job.program, theta, job.given, job.rows(0))
        rose = uphill(before, after, job.counts)
        terms = (-job.counts * loss).masked_fill(rose, -torch.inf)
        return Work({"theta": theta, "fisher": self.fisher(job, theta)}, terms)

    @traceable
    def step(self, program: Program, theta: Params, penalty: Parts, given: Inputs) -> Params:
        """Take one step with the clients that are active, under Σ_j F_j and Σ_j F_j θ_j of the other clients."""
        own, (lr,) = leaves(theta), given.rates
        grads = gradients(client_loss(program, own, given.batch, at_prior=True), own)
        units, found = prior_units(program), {}
        for name, value in theta.items():
            rate = lr * units[name].square() if name in units else lr
            weight = 2 * self.lam * rate
            pulled = value - rate * grads[name] + weight * penalty["pull"][name]
            found[name] = pulled / (1 + weight * penalty["fisher"][name])
        return where_active(theta, found, given.active)

    @traceable
    def losses(
        self, program: Program, theta: Params, penalty: Parts, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Return L_i, and L_i with the penalty up to a constant, of K clients: ``(K,)`` each."""
        loss = total = client_loss(program, theta, batch, at_prior=True)
        for name, value in theta.items():
            fisher, pull = penalty["fisher"][name], penalty["pull"][name]
            total = total + self.lam * ((fisher * value - 2 * pull) * value).flatten(1).sum(1)
        return loss, total

    def fisher(self, job: Job, theta: Params) -> Params:
        """Return F_i of K clients at their θ_i."""
        flat = torch.cat([value.flatten(1) for value in theta.values()], 1)
        loss = _stacked(job.program, theta)
        kind = "layers" if layered(loss, flat, job.rows(0)) else "per-sample"
        return _unstack(slopes(loss, flat, job.rows(None), kind)[1], theta)

    def adapt(self, job: Job, theta: Params, own: Params, steps: int, lr: float | None) -> Params:
        """Fine-tune the clients' own variables, as :class:`~bayesfed.steps.Descent` does."""
        return Descent(lr=self.lr, steepest=100.0).adapt(job, theta, own, steps, lr)


def _stacked(program: Program, like: Mapping[str, Tensor]) -> Loss:
    """Return −log p(D_i | θ) / n_i, clients at the centres of their priors, as a function of stacked θ_i ``(K, D)``."""

    def loss(flat: Tensor, batch: Batch) -> Tensor:
        theta = _unstack(flat, like)
        centre = prior_centre(program, theta, batch)
        at = with_model_locals(program, theta | centre, batch)
        losses = client_losses(program, at, batch, {}, 1)
        return losses.nll / losses.rows

    return loss


def _unstack(flat: Tensor, like: Mapping[str, Tensor]) -> Params:
    """Return stacked numbers ``(K, D)`` as parameters ``(K, 1, ...)``."""
    parts = flat.split([value[0].numel() for value in like.values()], 1)
    return {
        name: part.reshape(-1, *value.shape[1:])
        for (name, value), part in zip(like.items(), parts, strict=True)
    }
