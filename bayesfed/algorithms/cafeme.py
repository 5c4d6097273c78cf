"""CAFeMe: meta-learning of a model together with an encoder that reads the client's labelled rows.

    ω = (ψ, μ): the weights of the base network f and of the modulator g. In a hierarchical model: θ, and what a client
    has of its own; f is the likelihood, g the encoder of the local site ζ (see :mod:`bayesfed.steps.encoders`)

    server    sends ω
    client i  splits D_i into D_pers and D_eval, at random; then on its copy ω_i = ω (Algorithm 1)
                  (ψ', ζ) = personalise(ω_i, D_pers)
                  ω_i ← ω_i − β ∇_ω L_{D_eval}(f_ψ' | ζ)        through the steps of personalise
              and uploads ω_i; nothing is kept
    server    ω ← the mean of the ω_i

    personalise (Algorithm 2)
              S times   ζ = g_μ'(D'),   (ψ', μ') ← (ψ', μ') − α ∇ L_{D'}(f_ψ' | ζ),   D' ⊆ D_pers
              then      ζ = g_μ'(D_pers)

(ψ', μ') starts at ω. In a hierarchical model these are the client's variables other than ζ, which start at the centre
of their prior given θ; in :class:`~bayesfed.models.Modulated` that is ω itself. L is the mean loss of a row; where θ is
random, −log p(θ) / N belongs to the loss of D_eval, so that ω is a maximum a posteriori.

The last ζ reads all of D_pers, where the paper draws one more D': the context is a mean over rows, so this is the same
mean with less noise.

The authors' code differs from their paper. It is first order (``second_order=False``), and it predicts with the
mean over the *test* batch as context, so that a prediction depends on the rows predicted with it and on their
labels. Here the context is that of the client's labelled training rows, fixed when the client personalises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bayesfed.algorithms.protocol import Algorithm, Upload, moves, weighted
from bayesfed.data.batch import Batch, Fields
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import noise
from bayesfed.elbo.build import build
from bayesfed.elbo.elbo import client_losses, local_priors
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.factorised import factorised
from bayesfed.settings import Times
from bayesfed.steps import optimizer
from bayesfed.steps.encoders import Encoded, contexts
from bayesfed.steps.gradients import adapted, copies, gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.optimizer import State
from bayesfed.tracing.compiler import traceable

_SPLIT = noise.word("split")


@dataclass(frozen=True)
class CAFeMe(Algorithm):
    """Context-aware federated meta-learning of a model with a local site that an encoder makes from the client's rows.

    :class:`~bayesfed.models.Modulated` is such a model. A client needs two rows, one of each kind. The runner's
    ``batch_size`` has no part in this: ``support_rows`` says how many rows an inner step reads.

    Attributes:
        inner_lr: α, of the steps by which a client personalises.
        lr: β, of the client's steps on its copy of ω.
        optimizer: of these steps: ``"sgd"``, ``"momentum"`` or ``"adam"``; its state is forgotten after the round.
        inner_steps: S.
        second_order: take ∇_ω through the inner steps; False takes their gradients as constants.
        personal_fraction: share of a client's rows in D_pers, between 0 and 1; the split is drawn once a round.
        support_rows: rows of D', drawn anew for every inner step; by default all of D_pers.
        outer_steps: steps on ω_i per round; the paper's is 1.
        weighted: the server's mean is weighted by n_i.
        lr_decay: what is left of β in the last round, on half a cosine.
        personal_steps: inner steps in which a client makes its own variables from ω at the end.

    Raises:
        ValueError: ``personal_fraction`` is not between 0 and 1.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> train, test = datasets.digits(clients=4)
        >>> model = models.Modulated(models.mlp(64, 8, 10), models.mlp(64, 4), context=4)
        >>> posterior = bf.fit(model, train, bf.CAFeMe(personal_steps=2), rounds=2)
        >>> posterior.log_likelihood(test, num_samples=1)["y"].shape
        torch.Size([1, 80])
    """

    inner_lr: float = 0.3
    lr: float = 0.5
    optimizer: str = "sgd"
    inner_steps: int = 5
    second_order: bool = True
    personal_fraction: float = 0.5
    support_rows: int | None = None
    outer_steps: int = 1
    weighted: bool = False
    lr_decay: float = 1.0
    personal_steps: Times = 50

    def __post_init__(self) -> None:
        optimizer.check_rules(optimizer=self.optimizer)
        if not 0 < self.personal_fraction < 1:
            raise ValueError(
                f"personal_fraction is {self.personal_fraction}; it must lie between 0 and 1, so that "
                "both sets have rows"
            )

    def program(self, model: Model, federation: Federation) -> Program:
        """The model with points for all its variables.

        Raises:
            ValueError: no local site has an encoder; a client has a single row.
        """
        program = build(model, factorised(model, federation, local_point=True), federation)
        if not program.contexts:
            sites = ", ".join(repr(site.name) for site in program.locals) or "there are none"
            raise ValueError(
                f"CAFeMe needs a local site that is made from the client's rows, and no local site ({sites}) has an "
                "encoder: pyro.sample(name, ..., infer={'context': encode}), as in models.Modulated. FedABML and "
                "PerFedAvg adapt the local sites of any model"
            )
        if int(federation.lengths.min()) < 2:
            name = federation.names[int(federation.lengths.argmin())]
            raise ValueError(
                f"client {name!r} has a single row; CAFeMe needs one to personalise with and one to "
                "evaluate on: leave the client out and personalise it afterwards"
            )
        params = program.init | program.init_locals(program.schema)
        contexts(program, params, program.schema)  # refuses encoders that give other shapes
        return program

    def work(self, job: Job) -> Work:
        """A round of K clients (Algorithm 1).

        A term is the log-likelihood of D_eval under the personalised network in the last step, scaled up to the
        client's n_i rows.
        """
        rows, keys = job.rows(None), job.keys
        personal, held_out = split(rows, job.rows.lengths, self.personal_fraction, keys)
        omega = optimizer.begin(self.optimizer, copies(job.message, len(job)), rows=len(job))
        for step in range(self.outer_steps):
            own = noise.fold(keys, step)
            support = [self.support(personal, own, inner) for inner in range(self.inner_steps)]
            omega, terms = self.step(
                job.program, omega, personal, support, held_out, job.rate * self.lr
            )
        return Work(omega["params"], terms)

    @traceable
    def step(
        self,
        program: Program,
        omega: State,
        personal: Batch,
        support: list[Batch],
        held_out: Batch,
        lr: float,
    ) -> tuple[State, Tensor]:
        """ω_i ← ω_i − β ∇_ω L_{D_eval}(f_ψ' | ζ) of K clients; and their terms ``(K,)`` before it."""
        theta = leaves(omega["params"])
        own = self.adapted(
            program, theta, personal, support.__getitem__, self.inner_steps, self.inner_lr
        )
        losses = client_losses(program, theta | own, held_out, {}, 1)
        loss = (losses.nll + losses.hyper / program.clients) / losses.rows
        active = torch.ones_like(held_out.index, dtype=torch.bool)
        omega = optimizer.descend(self.optimizer, omega, gradients(loss, theta), lr, active)
        return omega, -losses.nll.detach()

    def encode(self, job: Job, work: Work) -> Upload:
        """ω_i − ω, each client counting alike, or by its n_i."""
        return weighted(moves(job, work.found), job.weight if self.weighted else None)

    def personalize(self, job: Job, steps: int | None = None, lr: float | None = None) -> Params:
        """Personalise (Algorithm 2), with all of a client's rows as D_pers.

        The context is kept beside the client's other variables, so that predictions do not depend on the test
        batch; the authors' code takes the test batch as context.
        """
        theta, rows = copies(job.message, len(job)), job.rows(None)
        steps = self.personal_steps if steps is None else steps
        lr = self.inner_lr if lr is None else lr
        return self.adapted(
            job.program, theta, rows, lambda step: self.support(rows, job.keys, step), steps, lr
        )

    def support(self, batch: Batch, keys: Tensor, step: int) -> Batch:
        """D', the rows of D_pers that a step uses."""
        if self.support_rows is None:
            return batch
        rows = chosen(noise.fold(keys, step), batch.mask, self.support_rows)
        return with_rows(batch, rows, min(self.support_rows, rows.shape[1]))

    def adapted(
        self,
        program: Program,
        theta: Params,
        batch: Batch,
        support: Callable[[int], Batch],
        steps: int,
        lr: float,
    ) -> Params:
        """Personalise (Algorithm 2): the local parameters of K clients, differentiable in what ω is.

        Args:
            program: the model/guide pair.
            theta: ω per client, ``(K, 1, ...)`` each.
            batch: D_pers.
            support: the rows of D_pers that a step uses.
            steps: S.
            lr: α.
        """

        def with_context(own: Mapping[str, Tensor], rows: Batch) -> Params:
            """ζ = g_μ'(D')."""
            made = contexts(program, {**theta, **start, **own}, rows)
            return {**own, **program.guide.at(made)}

        def loss(own: Mapping[str, Tensor], step: int) -> Tensor:
            """L_{D'}(f_ψ' | ζ)."""
            rows = support(step)
            losses = client_losses(program, theta | with_context(own, rows), rows, {}, 1)
            return losses.nll / losses.rows

        start = program.init_locals(batch)  # ζ' own parameters, until it is made
        own = beginning(program, theta, batch)
        if own:
            order = "second" if self.second_order else "first"
            own = adapted(loss, own, steps, lr, order=order)
        return with_context(own, batch)


def beginning(program: Program, theta: Params, batch: Batch) -> Params:
    """(ψ', μ') before the first step: the clients' variables but ζ, at the centre of their priors given θ."""
    start = program.init_locals(batch)
    with Encoded(batch):  # a prior may depend on ζ
        priors = local_priors(program, theta | start, batch)
    made = {site.name: priors.pop(site.name) for site in program.contexts}
    guide = program.guide
    own = start | guide.at(priors)
    return {name: own[name] for name in own if name not in guide.at(made)}


def split(batch: Batch, lengths: Tensor, share: float, keys: Tensor) -> tuple[Batch, Batch]:
    """D_pers, with ``share`` of each client's rows drawn at random (at least one), and D_eval, with the others.

    The batch holds all rows; ``lengths`` are their numbers ``(K,)``, on the CPU.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed.elbo import noise
        >>> from bayesfed.algorithms.cafeme import split
        >>> data = bf.Federation.from_arrays({"a": {"y": [1.0, 2.0, 3.0]}, "b": {"y": [4.0, 5.0]}})
        >>> personal, held_out = split(data.batch(), data.lengths, 0.5, noise.fold(noise.key(0), data.stream_ids))
        >>> personal.mask.sum(1).tolist(), held_out.mask.sum(1).tolist()
        ([2, 1], [1, 1])
    """
    count = (share * lengths).round().long().clamp(min=1).minimum(lengths - 1)
    mask = chosen(noise.fold(keys, _SPLIT), batch.mask, count[:, None].to(keys.device))
    personal = with_rows(batch, mask, int(count.max()))
    return personal, with_rows(batch, batch.mask & ~mask, int((lengths - count).max()))


def chosen(keys: Tensor, mask: Tensor, count: Tensor | int) -> Tensor:
    """``count`` of each client's rows, drawn without replacement: bool like ``mask`` ``(K, B)``; all if fewer."""
    order = noise.uniform(keys, mask.shape[1:]).masked_fill(~mask, torch.inf)
    return mask & (order.argsort(-1).argsort(-1) < count)


def with_rows(batch: Batch, mask: Tensor, most: int) -> Batch:
    """The batch with some of its rows only, at most so many of a client, which stand for all n_i."""
    scale = batch.rows[:, None] / mask.sum(-1, keepdim=True)
    first = (~mask).byte().argsort(dim=-1, stable=True)[:, :most]
    client = torch.arange(len(batch), device=mask.device)[:, None]
    fields = Fields({name: value[client, first] for name, value in batch.fields.items()})
    return replace(batch, fields=fields, mask=mask[client, first], scale=scale)
