"""Natural-gradient steps on a Normal q(w_i | φ) and on Normal local priors p(w_i | θ) (FedABML).

    L_i(φ, θ) = (−E_q[log p(D_i | w, θ)] + λ KL(q(w | φ) ‖ p(w | θ)) − log p(θ) / N) / n_i          (eq. 3.5)

Algorithm 1 of the paper has a single step on φ for each step on θ; eq. 3.8 has k of them, from the prior on. The
package's FedABML makes k = 5 for each step on θ, from where φ is; ``FedABML(inner_steps=1)`` is Algorithm 1.

In the paper p(w | θ) and q(w | φ) are Normal with diagonal covariances, and θ is p's mean and standard deviations. Here
the model is any hierarchical one, θ all that its clients share, and q Normal in unconstrained coordinates. Where the
likelihood reads w alone, the step on θ_i evaluates the prior only.

The Fisher information of a Normal is 1 / σ² for its location and 2 for its log σ, so that, KL being λ / n_i of L_i,

    location of q          −η  σ_q² (n_i / λ) ∇L_i      its log scale      −η  ½ (n_i / λ) ∇L_i
    location of a prior    −η' σ_θ² (n_i / λ) ∇L_i      its log scale      −η' ½ (n_i / λ) ∇L_i

A rate of 1 would be Newton's step, whatever the scales, n_i and λ: η' = 1 puts θ_i's location on φ's. Locations move by
at most one rate in units of σ (root mean square), log scales by at most 0.1 in a step; σ counts for at most what it was
before the first round, since where θ lags behind the clients a growing σ would make steps grow without end. η falls to
a thirtieth while φ is made, on half a cosine, for weights that act together overshoot at rates that suit one by itself.
All other θ (slopes, noise, shared layers) takes gradient steps on L_i where the likelihood reads it, on n_i L_i / λ
where priors alone do, bounded by :func:`~bayesfed.steps.optimizer.clipped`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo import noise
from bayesfed.elbo.elbo import Noise, client_losses
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.factorised import loc_of
from bayesfed.guides.fisher import Units, first_prior_scales, units_of_posterior, units_of_prior
from bayesfed.guides.newton import jacobian, magnitude
from bayesfed.settings import Rate
from bayesfed.steps.bfgs import minima
from bayesfed.steps.gradients import gradients, leaves
from bayesfed.steps.job import Job
from bayesfed.steps.local_loop import all_clients, local_loop
from bayesfed.steps.losses import per_client
from bayesfed.steps.optimizer import clipped
from bayesfed.steps.single import WEAKEST, dimensions
from bayesfed.steps.steps import Inputs, Objective
from bayesfed.tracing.compiler import traceable

MOST = 0.1
"""The largest natural step in a log scale: an outlying weight would throw it off at rates that suit locations."""
FEW, RATE = 8, 0.7
"""The largest number of a client's variables whose optimum is looked for; the rate of steps without noise."""
LEFT = 0.03
"""The fraction of η that is left at the end of a round."""


@dataclass(frozen=True)
class NaturalDescent:
    """Natural-gradient steps, a phase of :class:`~bayesfed.steps.Alternate`.

    Attributes:
        moves: ``"locals"``, q(w_i | φ), or ``"globals"``, θ_i.
        lr: η of q, or η' of the locations and log scales of Normal local priors.
        shared_lr: η' of all other θ.
        kl_weight: λ, the weight of the KL divergence from the prior.
        draws: s, draws of w in a step.
        natural: natural gradients; otherwise plain ones, as in the paper.
        epochs: R, passes over a client's rows in a round.
        steps: R in minibatches, in place of ``epochs``.
    """

    moves: Literal["locals", "globals"] = "locals"
    lr: Rate = 0.3
    shared_lr: Rate = 0.1
    kl_weight: Rate = 1.0
    draws: int = 5
    natural: bool = True
    epochs: int = 5
    steps: int | None = None
    kinds: ClassVar[tuple[str, ...]] = ("point", "normal")

    def __post_init__(self) -> None:
        if self.natural and self.lr >= 2:
            raise ValueError(
                f"lr is {self.lr}: natural steps diverge from 2 on, 1 being Newton's. For plain ones say natural=False"
            )

    def constants(self, program: Program, batch: Batch) -> Params:
        """Return the standard deviation of each local prior before the first round."""
        return first_prior_scales(program, batch)

    def noise(self, program: Program, keys: Tensor, *path: int) -> Noise:
        """Return the noise of the draws of w in one step."""
        for number in path:
            keys = noise.fold(keys, number)
        return program.noise(keys, self.draws, local=True)

    def rates(self, rate: float, done: Tensor) -> tuple[Any, ...]:
        """Return η and the rate of all other parameters, ``(K,)``, when a part of the steps of a round is over."""
        if self.moves == "globals":
            return tuple(torch.full_like(done, rate * lr) for lr in (self.lr, self.shared_lr))
        left = LEFT if self.natural else 1.0
        lr = self.lr * (left + (1 - left) * (1 + (math.pi * done.clamp(max=1.0)).cos()) / 2)
        return lr, lr

    def objective(self, program: Program, at: Params, batch: Batch, drawn: Noise) -> Tensor:
        """Return L_i of K clients, ``(K,)``."""
        losses = client_losses(program, at, batch, drawn, self.draws)
        prior = self.kl_weight * losses.divergence + losses.hyper / program.clients
        return (losses.nll + prior) / losses.rows

    def prior_objective(self, program: Program, at: Params, batch: Batch, drawn: Noise) -> Tensor:
        """Return L_i without the likelihood, ``(K,)``, from one row."""
        losses = client_losses(program, at, batch.head(), drawn, self.draws)
        return (self.kl_weight * losses.divergence + losses.hyper / program.clients) / batch.rows

    def move(
        self, program: Program, at: Params, given: Inputs, drawn: Noise, objective: Objective
    ) -> Params:
        """Return what one step down the objective moves."""
        batch, constants = given.batch, given.constants
        names = program.init if self.moves == "globals" else program.local_params
        here = {name: at[name] for name in names}
        own = leaves(here)
        prior_only = self.moves == "globals" and program.unread >= own.keys()
        loss = (self.prior_objective if prior_only else objective)(program, at | own, batch, drawn)
        units = {} if self.moves == "globals" else units_of_posterior(program, here, constants)
        if here.keys() - units.keys():  # θ, or parameters of the model that are a client's own
            units = units | units_of_prior(program, at, here, constants, batch)
        steps = self.natural_steps(program, gradients(loss, own), units, given)
        return {name: here[name] - steps[name] for name in here}

    def natural_steps(self, program: Program, grads: Params, units: Units, given: Inputs) -> Params:
        """Return a step, at the first of the rates in the parameters whose Fisher information is known."""
        (lr, shared_lr), nats = given.rates, given.batch.rows / self.kl_weight
        rest = {name: grad for name, grad in grads.items() if name not in units}
        if self.natural and rest:
            alone = rest.keys() & program.unread
            rest = clipped(rest | {n: per_client(nats, rest[n]) * rest[n] for n in alone})
        found = {name: per_client(shared_lr, grad) * grad for name, grad in rest.items()}
        for name, (unit, is_log_scale) in units.items():
            if not self.natural:
                found[name] = per_client(lr, unit) * grads[name]
                continue
            step = {name: unit * per_client(nats, unit) * grads[name]}
            move = unit * per_client(lr, unit) * (step if is_log_scale else clipped(step))[name]
            found[name] = move.clamp(-MOST, MOST) if is_log_scale else move
        return found

    def has_optimum(self, program: Program) -> bool:
        """Return whether :meth:`optimum` looks for q: that of few variables with a Normal each, and nothing else."""
        normal = len(program.local_params) == 2 * len(program.guide.locals)
        return normal and not program.guide.local_point and 0 < dimensions(program) <= FEW

    def exact(self, program: Program) -> NaturalDescent:
        """Return natural steps with the points of a cubature rule for draws."""
        return natural(self.kl_weight, program)

    def points(self, program: Program, keys: Tensor) -> Noise:
        """Return these points."""
        return cubature(program, keys)

    def optimum(self, job: Job, at: Params) -> Params:
        """Return q(w_i | φ) at its optimum given θ, by BFGS from where it is or from Laplace's approximation there.

        Natural-gradient steps are diagonal: where rows make variables correlated, as slopes on fields that go together,
        hundreds of steps end far from the optimum. BFGS starts with the curvature of the loss at the location of q.
        Locations are in units of the first priors, losses in nats over λ.
        """
        program, exact, rows = job.program, self.exact(job.program), job.rows(None)
        drawn, prior = cubature(program, job.keys), exact.constants(program, rows)
        nats = (job.counts / self.kl_weight)[:, None]
        own = {name: at[name] for name in ordered(program)}
        scale = joined({name: prior[name] for name in program.guide.locals})
        unit = torch.cat([scale, torch.ones_like(scale)], -1)

        def slope(u: Tensor) -> tuple[Tensor, Tensor]:
            value, grads = exact.slope(program, at, parted(u * unit, own), rows, drawn)
            return nats[:, 0] * value, nats * unit * joined(grads)

        hessian = exact.curvature_at_loc(program, at, rows, drawn)
        hessian = nats[..., None] * hessian * scale[..., None] * scale[:, None]
        hessian = magnitude(hessian, torch.full_like(scale, WEAKEST))
        loc = (joined(own) / unit)[:, : scale.shape[1]]
        log_scale = joined({name: at[name] for name in program.guide.log_scales})
        laplace = scale.log() - hessian.diagonal(dim1=-2, dim2=-1).log() / 2
        inverse = torch.diag_embed(torch.full_like(unit, 0.5))  # of log scales
        inverse[:, : scale.shape[1], : scale.shape[1]] = torch.linalg.inv(hessian)
        starts = [torch.cat([loc, each], -1) for each in (log_scale, laplace)]
        return parted(minima(slope, starts, inverse) * unit, own)

    @traceable
    def slope(
        self, program: Program, at: Params, phi: Params, batch: Batch, drawn: Noise
    ) -> tuple[Tensor, Params]:
        """Return L_i of K clients, ``(K,)``, and its gradients in q."""
        own = leaves(phi)
        loss = self.objective(program, {**at, **own}, batch, drawn)
        return loss.detach(), gradients(loss, own)

    @traceable
    def curvature_at_loc(self, program: Program, at: Params, batch: Batch, drawn: Noise) -> Tensor:
        """Return the Hessians of L_i in the locations of q, where w_i is there: ``(K, P, P)``."""
        locs = {name: at[name] for name in map(loc_of, program.guide.locals)}
        one = _with_draws(self.kl_weight, 1)
        centre = {name: [0 * part[:1] for part in parts] for name, parts in drawn.items()}
        with torch.enable_grad():
            u = joined(locs).requires_grad_()
            loss = one.objective(program, {**at, **parted(u, locs)}, batch, centre)
            (grad,) = torch.autograd.grad(loss.sum(), u, create_graph=True)
            return jacobian(grad, u).detach()

    def approach(self, job: Job, at: Params, steps: int, rate: float) -> Params:
        """Return q(w_i | φ) after natural-gradient steps from where it is, θ as it is."""
        program, exact = job.program, self.exact(job.program)
        constants, drawn = exact.constants(program, job.rows(0)), cubature(program, job.keys)
        rates = (torch.full_like(job.counts, rate),) * 2

        def step(phi: Params, number: int, active: Tensor | None) -> Params:
            given = Inputs(job.rows(number), rates, constants=constants)
            return exact.own_step(program, at | phi, given, drawn)

        own = {name: at[name] for name in program.local_params}
        return local_loop(all_clients(len(job), steps), job.keys.device, own, step)

    @traceable
    def own_step(self, program: Program, at: Params, given: Inputs, drawn: Noise) -> Params:
        """Return what one step down L_i moves."""
        return self.move(program, at, given, drawn, self.objective)

    def adapt(self, job: Job, theta: Params, own: Params, steps: int, lr: float | None) -> Params:
        """Take steps on q alone, from where it is (eq. 3.8).

        Few variables have steps without noise, unless there is a rate.
        """
        if lr is None and self.natural and self.has_optimum(job.program):
            return self.optimum(job, theta | own) if steps else own
        program, constants = job.program, self.constants(job.program, job.rows(0))
        factor = 1.0 if lr is None else lr / self.lr

        def step(phi: Params, number: int, active: Tensor | None) -> Params:
            drawn = self.noise(program, job.keys, 1 + number)
            rate = self.rates(1.0, torch.full_like(job.counts, number) / steps)[0] * factor
            given = Inputs(job.rows(number), (rate, rate), constants=constants)
            return self.own_step(program, theta | phi, given, drawn)

        return local_loop(all_clients(len(job), steps), job.keys.device, own, step)


def natural(kl_weight: float, program: Program) -> NaturalDescent:
    """Return natural steps on q(w_i) with the points of a cubature rule for draws."""
    return _with_draws(kl_weight, 2 * dimensions(program))


@cache
def _with_draws(kl_weight: float, draws: int) -> NaturalDescent:
    """Return natural steps; the same object at every call, as tracing needs."""
    return NaturalDescent("locals", kl_weight=kl_weight, draws=draws)


def ordered(program: Program) -> list[str]:
    """Return the parameters of q(w_i): the locations, then the log scales."""
    return [*map(loc_of, program.guide.locals), *program.guide.log_scales]


def joined(values: Params) -> Tensor:
    """Return values ``(K, 1, ...)`` as vectors ``(K, P)``."""
    return torch.cat([value.flatten(1) for value in values.values()], -1)


def parted(vectors: Tensor, like: Params) -> Params:
    """Return vectors ``(K, P)`` as values of these shapes; the inverse of :func:`joined`."""
    parts = vectors.split([value[0].numel() for value in like.values()], -1)
    return {n: part.reshape(v.shape) for (n, v), part in zip(like.items(), parts, strict=True)}


def cubature(program: Program, keys: Tensor) -> Noise:
    """Return the 2 P points ±√P e_j of a cubature rule in place of standard normal draws (Arasaratnam & Haykin 2009).

    Expectations of polynomials of third degree are exact.
    """
    sizes = {name: site.start.numel() for name, site in program.guide.locals.items()}
    total, first, found = sum(sizes.values()), 0, {}
    eye = total**0.5 * torch.eye(total, dtype=program.schema.scale.dtype, device=keys.device)
    points = torch.cat([eye, -eye])
    for name, like in program.noise(keys, 1, local=True).items():
        part = points[:, first : first + sizes[name]]
        shape = (2 * total, 1, 1, *like[0].shape[3:])
        found[name] = [part.reshape(shape).expand(-1, len(keys), -1, *like[0].shape[3:])]
        first += sizes[name]
    return found
