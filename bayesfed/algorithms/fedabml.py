"""FedABML: Bayesian meta-learning with an amortised posterior for every client.

    server    sends θ
    client i  φ = θ_i = θ: q(w | φ) is the prior p(w | θ); then R times (Algorithm 1), each with fresh noise
                  k times  φ ← φ − η ∇_φ L_i(φ, θ_i)
                  θ_i ← θ_i − η' ∇_θ L_i(φ, θ_i)
              and uploads θ_i; nothing is kept: the posterior is made anew from θ by gradient steps (eq. 3.8)
    server    θ ← mean of the θ_i

    L_i(φ, θ) = (−E_q[log p(D_i | w, θ)] + λ KL(q(w | φ) ‖ p(w | θ)) − log p(θ) / N) / n_i          (eq. 3.5)

In the paper p(w | θ) and q(w | φ) are Normal with diagonal covariances, and θ is p's mean and standard deviations. Here
the model is any hierarchical one, θ all that its clients share, and q Normal in unconstrained coordinates; it starts
with the location and scale of p(w | θ) there. Where the likelihood reads w alone, θ_i's step runs the prior only.

The steps are natural gradients (``natural=False`` makes them the plain ones of the paper): the Fisher information of a
Normal is 1 / σ² for its location and 2 for its log σ, so that, KL being λ / n_i of L_i,

    location of q          −η  σ_q² (n_i / λ) ∇L_i      its log scale      −η  ½ (n_i / λ) ∇L_i
    location of a prior    −η' σ_θ² (n_i / λ) ∇L_i      its log scale      −η' ½ (n_i / λ) ∇L_i

A rate of 1 would be Newton's step, whatever the scales, n_i and λ: η' = 1 puts θ_i's location on φ's. Locations move by
at most one rate in units of σ (root mean square), log scales by at most 0.1 in a step; σ counts for no more than it was
before the first round, since where θ lags behind the clients a growing σ would make steps grow without end. η falls to
a thirtieth while φ is made, on half a cosine, for weights that act together overshoot at rates that suit one by itself.
All other θ (slopes, noise, shared layers) takes gradient steps on L_i where the likelihood reads it, on n_i L_i / λ
where priors alone do, bounded by :func:`~bayesfed.steps.optimizer.clipped`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.algorithms.protocol import Algorithm, Upload, moves, weighted
from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import noise
from bayesfed.elbo.build import build
from bayesfed.elbo.elbo import Noise, client_losses, local_priors
from bayesfed.elbo.moments import Moments
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.factorised import Factorised, factorised
from bayesfed.settings import Rate, Times
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.optimizer import clipped, kept, told
from bayesfed.steps.point_estimates import against, beginning, owning, sharing
from bayesfed.tracing.compiler import traceable

MOST = 0.1
"""How far a natural step may move a log scale: an outlying weight would throw it off at rates that suit locations."""
LEFT = 0.03
"""What is left of η at the end of a round."""
Fisher = dict[str, tuple[Tensor, bool]]
"""By parameter: one over the root of its Fisher information, ``(K, 1, ...)``, and whether it is a log scale."""


@dataclass(frozen=True)
class FedABML(Algorithm):
    """Federated amortised Bayesian meta-learning.

    Attributes:
        local_epochs: R, passes over a client's rows in a round.
        local_steps: R in minibatches, instead.
        inner_steps: k, steps on φ before each one on θ_i.
        lr: η.
        prior_lr: η', of what Normal local priors stand on: their locations and log scales.
        shared_lr: η' of all other θ.
        lr_decay: what is left of η' in the last round, on half a cosine: while it is high θ_i runs ahead to suit
            its own client, as it falls θ comes to where all agree. η stays: every round makes φ anew.
        kl_weight: λ.
        draws: s, draws of w in a step.
        natural: natural-gradient steps, as above; otherwise plain ones.
        weighted: the server's mean is weighted by n_i.
        personal_steps: steps on φ in which a client makes its posterior in the end.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> train, test = datasets.digits(clients=5)
        >>> model = models.Network(models.mlp(64, 10), spread="learnt")
        >>> posterior = bf.fit(model, train, bf.FedABML(), rounds=5, batch_size=10)
        >>> accuracy = (posterior.probabilities(test)["y"].argmax(1) == test["y"]).float().mean()
        >>> bool(accuracy > 0.9)
        True
    """

    local_epochs: int = 5
    local_steps: int | None = None
    inner_steps: int = 5
    lr: Rate = 0.3
    prior_lr: Rate = 0.3
    shared_lr: Rate = 0.1
    lr_decay: float = 0.03
    kl_weight: Rate = 1.0
    draws: int = 5
    natural: bool = True
    weighted: bool = False
    personal_steps: Times = 50

    def __post_init__(self) -> None:
        for name in ("lr", "prior_lr"):
            if self.natural and getattr(self, name) >= 2:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: natural steps diverge from 2 on, 1 being Newton's. "
                    "For plain ones say natural=False"
                )

    def program(self, model: Model, federation: Federation) -> Program:
        """The model with a point for θ and Normals for its local sites.

        Raises:
            ValueError: clients share nothing, or have nothing of their own.
        """
        program = build(model, factorised(model, federation), federation)
        return owning(sharing(program, type(self).__name__), type(self).__name__)

    def work(self, job: Job) -> Work:
        """Algorithm 1 for K clients."""
        program, theta = job.program, copies(job.message, len(job))
        phi, widest = beginning(program, theta, job.rows(0)), widths(program, job.rows(0))
        schedule = job.rows.schedule(self.local_epochs, self.local_steps)
        steps = schedule.sum(0).to(job.counts)
        prior_lr, shared_lr = (
            torch.full_like(steps, job.rate * lr) for lr in (self.prior_lr, self.shared_lr)
        )
        for r, active in enumerate(told(schedule, job.keys.device)):
            lr = self.falling(self.lr, r / steps)
            drawn = [self.noise(program, job.keys, r, i) for i in range(self.inner_steps + 1)]
            rates = lr, prior_lr, shared_lr
            theta, phi = self.step(program, theta, phi, widest, job.rows(r), drawn, active, *rates)
        with torch.no_grad():
            sent, last = copies(job.message, len(job)), self.noise(program, job.keys)
            loss = self.loss(program, sent | phi, job.rows(0), last)
        return Work(theta, -job.counts * loss)

    def encode(self, job: Job, work: Work) -> Upload:
        """θ_i − θ, each client counting alike, or by its n_i."""
        return weighted(moves(job, work.found), job.weight if self.weighted else None)

    def personalize(self, job: Job, steps: int | None = None, lr: float | None = None) -> Params:
        """φ of K clients: steps from the prior at θ (eq. 3.8)."""
        program, theta = job.program, copies(job.message, len(job))
        phi, widest = beginning(program, theta, job.rows(0)), widths(program, job.rows(0))
        lr, steps = self.lr if lr is None else lr, self.personal_steps if steps is None else steps
        for step in range(steps):
            drawn, done = self.noise(program, job.keys, 1 + step), torch.full_like(job.counts, step)
            rate = self.falling(lr, done / steps)
            phi = self.inner_step(program, theta, phi, widest, job.rows(step), drawn, rate)
        return phi

    @traceable
    def step(
        self,
        program: Program,
        theta: Params,
        phi: Params,
        widest: Params,
        batch: Batch,
        drawn: list[Noise],
        active: Tensor | None,
        lr: Tensor,
        prior_lr: Tensor,
        shared_lr: Tensor,
    ) -> tuple[Params, Params]:
        """k steps on φ and one on θ_i, of the clients that are active."""
        new = phi
        for supplied in drawn[1:]:
            new = self.inner_step(program, theta, new, widest, batch, supplied, lr)
        own = leaves(theta)
        if program.unread >= own.keys():
            loss = self.prior_loss(program, own | new, batch, drawn[0])
        else:
            loss = self.loss(program, own | new, batch, drawn[0])
        known = fisher_of_prior(program, theta | new, theta, widest, batch)
        move = self.moves(program, gradients(loss, own), known, batch, prior_lr, shared_lr)
        after = {"θ": {name: theta[name] - move[name] for name in theta}, "φ": new}
        after = kept({"θ": theta, "φ": phi}, after, active)
        return after["θ"], after["φ"]

    @traceable
    def inner_step(
        self,
        program: Program,
        theta: Params,
        phi: Params,
        widest: Params,
        batch: Batch,
        supplied: Noise,
        lr: Tensor,
    ) -> Params:
        """One step on φ."""
        own = leaves(phi)
        loss = self.loss(program, theta | own, batch, supplied)
        known = fisher_of_posterior(program, phi, widest)
        if own.keys() - known.keys():  # parameters of the model that are a client's own
            known |= fisher_of_prior(program, theta | phi, phi, widest, batch)
        move = self.moves(program, gradients(loss, own), known, batch, lr, lr)
        return {name: phi[name] - move[name] for name in phi}

    # -- the objective ------------------------------------------------------------------------------

    @traceable
    def loss(
        self, program: Program, params: Mapping[str, Tensor], batch: Batch, drawn: Noise
    ) -> Tensor:
        """L_i of K clients, ``(K,)``."""
        losses = client_losses(program, params, batch, drawn, self.draws)
        of_prior = self.kl_weight * losses.divergence + losses.hyper / program.clients
        return (losses.nll + of_prior) / losses.rows

    def prior_loss(
        self, program: Program, params: Mapping[str, Tensor], batch: Batch, drawn: Noise
    ) -> Tensor:
        """L_i without the likelihood, ``(K,)``, from one row."""
        losses = client_losses(program, params, batch.head(), drawn, self.draws)
        return (self.kl_weight * losses.divergence + losses.hyper / program.clients) / batch.rows

    def noise(self, program: Program, keys: Tensor, *path: int) -> Noise:
        """What the draws of one loss need."""
        for data in path:
            keys = noise.fold(keys, data)
        return program.noise(keys, self.draws, local=True)

    # -- its steps ----------------------------------------------------------------------------------

    def moves(
        self,
        program: Program,
        grads: Params,
        known: Fisher,
        batch: Batch,
        lr: Tensor,
        shared_lr: Tensor,
    ) -> Params:
        """What a step takes off the parameters: at rate ``lr`` those whose Fisher information is known."""
        rest = {name: grad for name, grad in grads.items() if name not in known}
        if not self.natural:
            plain = {name: against(lr, grads[name]) * grads[name] for name in known}
            return plain | {name: against(shared_lr, grad) * grad for name, grad in rest.items()}
        nats = batch.rows / self.kl_weight
        found = {}
        if rest:
            rest = {n: against(nats, g) * g if n in program.unread else g for n, g in rest.items()}
            found = {n: against(shared_lr, g) * g for n, g in clipped(rest).items()}
        for name, (unit, is_log_scale) in known.items():
            step = {name: unit * against(nats, unit) * grads[name]}
            move = unit * against(lr, unit) * (step if is_log_scale else clipped(step))[name]
            found[name] = move.clamp(-MOST, MOST) if is_log_scale else move
        return found

    def falling(self, lr: float, done: Tensor) -> Tensor:
        """η of K clients when a part of the steps is over, ``(K,)``."""
        left = LEFT if self.natural else 1.0
        return lr * (left + (1 - left) * (1 + (math.pi * done.clamp(max=1.0)).cos()) / 2)


def widths(program: Program, batch: Batch) -> Params:
    """The standard deviation of the local sites' priors before the first round, ``(K, 1, ...)``."""
    params = copies(program.init, len(batch)) | program.init_locals(batch)
    return {
        n: at.scale.detach().contiguous() for n, at in local_priors(program, params, batch).items()
    }


def fisher_of_posterior(program: Program, phi: Params, widest: Params) -> Fisher:
    """Of q(w | φ) in its locations and log scales."""
    guide: Factorised = program.guide
    scales = {n: torch.minimum(at.scale, widest[n]) for n, at in guide.moments(phi).items()}
    by_name = guide.at({name: Moments(scale, scale, True) for name, scale in scales.items()})
    return {
        name: (torch.full_like(value, 0.5**0.5), True)
        if name in guide.log_scales
        else (value, False)
        for name, value in by_name.items()
    }


def fisher_of_prior(
    program: Program, params: Params, of: Params, widest: Params, batch: Batch
) -> Fisher:
    """Of p(w | θ) in those of the parameters ``of`` that are locations or log scales of Normal local priors only."""
    read = frozenset().union(*(program.reads[site.name] for site in program.likelihood))
    precision: dict[str, Tensor] = {}
    log_scales = set()
    priors = local_priors(program, params, batch)
    for site, anchor in program.anchors.items():
        scale = torch.minimum(priors[site].scale.detach(), widest[site])
        for name, found in (
            (anchor.loc, scale**-2),
            (anchor.log_scale, torch.full_like(scale, 2.0)),
        ):
            if name is not None and name in of and name not in read:
                precision[name] = precision.get(name, 0) + _summed(found, of[name])
        if anchor.log_scale is not None:
            log_scales.add(anchor.log_scale)
    return {name: (value**-0.5, name in log_scales) for name, value in precision.items()}


def _summed(value: Tensor, like: Tensor) -> Tensor:
    """``(K, 1, *shape)`` summed to the shape of a parameter ``(K, 1, ...)`` that is expanded to it."""
    missing = [1] * (value.ndim - like.ndim)
    return value.sum_to_size(*like.shape[:2], *missing, *like.shape[2:]).reshape(like.shape)
