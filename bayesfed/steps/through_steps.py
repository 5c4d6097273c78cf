"""Steps on θ_i through the steps by which a client adapts its own variables: Per-FedAvg (MAML) and CAFeMe.

    φ = w_i before its first step, given θ_i
    S times   φ ← φ − α ∇_φ L(φ, θ_i; D)
    θ_i ← θ_i − β ∇_{θ_i} L(φ(θ_i), θ_i; D')            through the S steps

L is the client's mean loss, in the last line with −log p(θ) / (N n_i). Per-FedAvg (Fallah et al. 2020, Algorithm 1)
takes a new minibatch for every D and for D'. CAFeMe (Algorithm 1) splits a client's rows once a round into D_pers,
from which every D is drawn, and D' = D_eval; a variable ζ that the model's encoder makes from D is made anew before
each step (Algorithm 2), and in the end from all of D_pers, where the paper draws one more D: the context is a mean
over rows, so this is the same mean with less noise.

The authors' code of CAFeMe differs from their paper. It is first order (``second_order=False``), and it predicts with
the mean over the *test* batch as context, so that a prediction depends on the rows predicted with it and on their
labels. Here the context is that of the client's labelled training rows, fixed when the client personalises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from bayesfed.data.batch import Batch, Fields
from bayesfed.elbo import noise
from bayesfed.elbo.elbo import client_losses
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.encoders import contexts
from bayesfed.guides.fisher import prior_units, scaled
from bayesfed.guides.globals import Point
from bayesfed.guides.locals import Encoded, Locals, Remade, prior_centre
from bayesfed.settings import Rate
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import adapted, copies, gradients, leaves
from bayesfed.steps.job import SINGLE, Job, Work
from bayesfed.steps.local_loop import all_clients, local_loop
from bayesfed.steps.losses import client_loss
from bayesfed.steps.optimizer import State, clipped
from bayesfed.steps.single import step_down
from bayesfed.steps.steps import Steps
from bayesfed.tracing.compiler import traceable

_SPLIT = noise.word("split")


@dataclass(frozen=True)
class ThroughSteps(Steps):
    """Gradient steps on θ_i through steps on point estimates of w_i; each reads a minibatch of its own (Per-FedAvg).

    Attributes:
        inner_lr: α, the rate of a client's own steps.
        inner_steps: S, their number.
        lr: β, the rate of the steps on θ_i.
        second_order: the gradient in θ_i goes through the S steps; otherwise their gradients count as constants.
        epochs: passes over a client's rows in a round, in steps on θ_i.
        steps: steps on θ_i, in place of ``epochs``.
        optimizer: of θ_i: ``"sgd"``, ``"momentum"`` or ``"adam"``; its state ends with the round.
    """

    inner_lr: Rate = 0.1
    inner_steps: int = 1
    lr: Rate = 0.1
    second_order: bool = True
    epochs: int = 5
    steps: int | None = None
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    globals = (Point,)
    locals = (Remade,)
    kinds = ("point",)
    moved = frozenset({"globals", "locals"})

    def gradient_of(self, program: Program) -> list[str] | None:
        """Return all of θ, where the gradient goes through the steps."""
        return [*program.init] if self.second_order else None

    def run(self, job: Job, locals_: Locals) -> Work:
        """Take steps on θ_i, S + 1 minibatches each."""
        if SINGLE in job.message:
            found, loss = self.slope(job.program, copies(job.theta, len(job)), job.rows(0))
            return Work({"theta": found}, -job.counts * loss)
        theta, each = copies(job.theta, len(job)), self.inner_steps + 1

        def step(state: State, number: int, active: Tensor | None) -> State:
            rows = [job.rows(each * number + i) for i in range(each)]
            return self.step(job.program, state, rows, active, job.rate * self.lr)

        schedule = job.schedule(self.epochs, self.steps)
        start = optimizer.begin(self.optimizer, theta, rows=len(job))
        theta = local_loop(schedule, job.keys.device, start, step)["params"]
        with torch.enable_grad():
            loss = self.loss(job.program, theta, [job.rows(0)] * each)
        return Work({"theta": theta}, -job.counts * loss)

    @traceable
    def step(
        self, program: Program, theta: State, rows: list[Batch], active: Tensor | None, lr: float
    ) -> State:
        """Take one step on θ_i with the clients that are active."""
        own = leaves(theta["params"])
        phi = self.inner(program, own, rows[:-1], "second" if self.second_order else "first")
        units = prior_units(program)
        grads = gradients(client_loss(program, own | phi, rows[-1]), own)
        grads = clipped(scaled(grads, units))
        return optimizer.descend(self.optimizer, theta, grads, lr, active, units)

    @traceable
    def slope(self, program: Program, theta: Params, rows: Batch) -> tuple[Params, Tensor]:
        """Return θ after a single step, all on the same rows, and the loss before it."""
        own = leaves(theta)
        phi = self.inner(program, own, [rows] * self.inner_steps, "second")
        loss = client_loss(program, own | phi, rows)
        return step_down(program, loss, own), loss.detach()

    def inner(self, program: Program, theta: Params, rows: list[Batch], order: str) -> Params:
        """Return φ after a step on each of the minibatches."""

        def loss(phi: Mapping[str, Tensor], step: int) -> Tensor:
            return client_loss(program, {**theta, **phi}, rows[step])

        units, start = prior_units(program), prior_centre(program, theta, rows[0])
        return adapted(loss, start, len(rows), self.inner_lr, units, order=order, most=1.0)

    @traceable
    def loss(self, program: Program, theta: Params, rows: list[Batch]) -> Tensor:
        """Return the loss on the last minibatch after the steps on all others, ``(K,)``."""
        phi = self.inner(program, theta, rows[:-1], "detached")
        return client_loss(program, theta | phi, rows[-1]).detach()

    def adapt(self, job: Job, theta: Params, own: Params, steps: int, lr: float | None) -> Params:
        """Take inner steps alone."""
        lr = self.inner_lr if lr is None else lr

        def step(phi: Params, number: int, active: Tensor | None) -> Params:
            return self.inner_step(job.program, theta, phi, job.rows(number), lr)

        return local_loop(all_clients(len(job), steps), job.keys.device, own, step)

    @traceable
    def inner_step(
        self, program: Program, theta: Params, own: Params, batch: Batch, lr: float
    ) -> Params:
        """Take one step on w_i."""
        return adapted(
            lambda phi, _: client_loss(program, theta | dict(phi), batch),
            own,
            1,
            lr,
            prior_units(program),
            most=1.0,
        )


@dataclass(frozen=True)
class ThroughContext(Steps):
    """The same with a variable that an encoder makes from the client's rows, and rows to evaluate on (CAFeMe).

    ``batch_size`` of :func:`bayesfed.fit` has no effect here: ``support_rows`` says how many rows an inner step reads.

    Attributes:
        inner_lr: α, the rate of a client's own steps.
        inner_steps: S, their number.
        lr: β, the rate of the steps on θ_i.
        optimizer: of the steps on θ_i: ``"sgd"``, ``"momentum"`` or ``"adam"``; its state ends with the round.
        second_order: as for :class:`ThroughSteps`.
        personal_fraction: share of a client's rows in D_pers, between 0 and 1; the split is drawn once a round.
        support_rows: rows of D, drawn anew for every inner step; by default all of D_pers.
        steps: steps on θ_i in a round; the paper's number is 1.
    """

    inner_lr: float = 0.3
    inner_steps: int = 5
    lr: float = 0.5
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    second_order: bool = True
    personal_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    support_rows: int | None = None
    steps: int = 1
    globals = (Point,)
    locals = (Encoded,)

    def reads_single_rows(self, program: Program) -> bool:
        """Return True: a client's rows are divided into two parts."""
        return True

    def run(self, job: Job, locals_: Locals) -> Work:
        """Take the steps of a round; a term is the log likelihood of D_eval, scaled up to n_i rows."""
        rows, keys = job.rows(None), job.keys
        personal, held_out = split(rows, job.rows.lengths, self.personal_fraction, keys)
        theta = optimizer.begin(self.optimizer, copies(job.theta, len(job)), rows=len(job))
        start = theta, torch.zeros_like(job.counts)

        def step(
            state: tuple[State, Tensor], number: int, active: Tensor | None
        ) -> tuple[State, Tensor]:
            own = noise.fold(keys, number)
            support = [self.support(personal, own, inner) for inner in range(self.inner_steps)]
            rows = personal, support, held_out
            return self.step(job.program, state[0], rows, job.rate * self.lr)

        theta, terms = local_loop(all_clients(len(job), self.steps), keys.device, start, step)
        return Work({"theta": theta["params"]}, terms)

    @traceable
    def step(
        self, program: Program, theta: State, rows: tuple[Batch, list[Batch], Batch], lr: float
    ) -> tuple[State, Tensor]:
        """Take one step on θ_i; return also the terms ``(K,)`` before it. ``rows``: D_pers, each D, and D_eval."""
        at, (personal, support, held_out) = leaves(theta["params"]), rows
        own = self.inner(program, at, personal, support, self.inner_lr)
        losses = client_losses(program, at | own, held_out, {}, 1)
        loss = (losses.nll + losses.hyper / program.clients) / losses.rows
        theta = optimizer.descend(self.optimizer, theta, gradients(loss, at), lr)
        return theta, -losses.nll.detach()

    def inner(
        self, program: Program, theta: Params, batch: Batch, support: list[Batch], lr: float
    ) -> Params:
        """Personalise (Algorithm 2): return the local parameters of K clients, differentiable in θ.

        Args:
            program: the model/guide pair.
            theta: θ of each client, ``(K, 1, ...)`` each.
            batch: D_pers.
            support: the rows of D_pers that each step uses.
            lr: α.
        """
        start = program.init_locals(batch)  # parameters of the encoded variable until it is made

        def with_context(own: Mapping[str, Tensor], rows: Batch) -> Params:
            encoded = contexts(program, {**theta, **start, **own}, rows)
            return {**own, **program.guide.at(encoded)}

        def loss(own: Mapping[str, Tensor], step: int) -> Tensor:
            rows = support[step]
            losses = client_losses(program, theta | with_context(own, rows), rows, {}, 1)
            return losses.nll / losses.rows

        own = Encoded().begin(program, theta, batch)
        if own:
            order = "second" if self.second_order else "first"
            own = adapted(loss, own, len(support), lr, order=order)
        return with_context(own, batch)

    def support(self, batch: Batch, keys: Tensor, step: int) -> Batch:
        """Return D, the rows of D_pers that a step uses."""
        if self.support_rows is None:
            return batch
        rows = draw_rows(noise.fold(keys, step), batch.mask, self.support_rows)
        return select_rows(batch, rows, min(self.support_rows, rows.shape[1]))

    def adapt(self, job: Job, theta: Params, own: Params, steps: int, lr: float | None) -> Params:
        """Personalise (Algorithm 2), with all of a client's rows as D_pers."""
        rows = job.rows(None)
        support = [self.support(rows, job.keys, step) for step in range(steps)]
        lr = self.inner_lr if lr is None else lr
        return self.inner(job.program, theta, rows, support, lr)


def split(batch: Batch, lengths: Tensor, share: float, keys: Tensor) -> tuple[Batch, Batch]:
    """Split each client's rows at random into D_pers, with ``share`` of them (at least one), and D_eval, the others.

    The batch holds all rows; ``lengths`` are their numbers ``(K,)``, on the CPU.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed.elbo import noise
        >>> from bayesfed.steps.through_steps import split
        >>> data = bf.Federation.from_arrays({"a": {"y": [1.0, 2.0, 3.0]}, "b": {"y": [4.0, 5.0]}})
        >>> personal, held_out = split(data.batch(), data.lengths, 0.5, noise.fold(noise.key(0), data.stream_ids))
        >>> personal.mask.sum(1).tolist(), held_out.mask.sum(1).tolist()
        ([2, 1], [1, 1])
    """
    count = (share * lengths).round().long().clamp(min=1).minimum(lengths - 1)
    mask = draw_rows(noise.fold(keys, _SPLIT), batch.mask, count[:, None].to(keys.device))
    personal = select_rows(batch, mask, int(count.max()))
    return personal, select_rows(batch, batch.mask & ~mask, int((lengths - count).max()))


def draw_rows(keys: Tensor, mask: Tensor, count: Tensor | int) -> Tensor:
    """Draw ``count`` of each client's rows without replacement: bool like ``mask`` ``(K, B)``; all if fewer."""
    order = noise.uniform(keys, mask.shape[1:]).masked_fill(~mask, torch.inf)
    return mask & (order.argsort(-1).argsort(-1) < count)


def select_rows(batch: Batch, mask: Tensor, most: int) -> Batch:
    """Return the batch with some of its rows, at most ``most`` of a client, which represent all n_i."""
    scale = batch.rows[:, None] / mask.sum(-1, keepdim=True)
    first = (~mask).byte().argsort(dim=-1, stable=True)[:, :most]
    client = torch.arange(len(batch), device=mask.device)[:, None]
    fields = Fields({name: value[client, first] for name, value in batch.fields.items()})
    return replace(batch, fields=fields, mask=mask[client, first], scale=scale)
