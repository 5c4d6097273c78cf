"""Per-FedAvg and pFedMe: one θ for all clients, from which each comes to a point of its own in a few steps.

    Per-FedAvg (Fallah et al. 2020, Algorithm 1), or MAML between clients
    server    sends θ
    client i  θ_i = θ; for every two minibatches D, D':
                  φ = centre of p(w_i | θ_i);  k times  φ ← φ − α ∇_φ f(φ, θ_i; D)
                  θ_i ← θ_i − β ∇_{θ_i} f(φ(θ_i), θ_i; D')      through the k steps
    server    θ ← mean of the θ_i

    pFedMe (Dinh et al. 2020, Algorithm 1, β = 1)
    server    sends θ
    client i  θ_i = w_i = θ; for every minibatch D:
                  k times  w_i ← w_i − α ∇_w h(w_i, θ_i; D),   h = f(w, θ; D) + λ/2 ‖w − θ‖²
                  θ_i ← θ_i − η ∇_{θ_i} h(w_i, θ_i; D) = θ_i − η λ (θ_i − w_i)
    server    θ ← mean of the θ_i

f(w, θ; D) = −log p(D | w, θ) / n. In a hierarchical model w_i is all that is local, and where it says θ beside w above
it means the centre of p(w_i | θ), all in unconstrained coordinates. What else the likelihood reads of θ is in its
gradient too, and so is −log p(θ) / (N n_i). Gradients are bounded, see :func:`~bayesfed.steps.optimizer.clipped`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.algorithms.protocol import Algorithm, Upload, moves, weighted
from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.build import build
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.factorised import factorised
from bayesfed.settings import Rate, Times
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import adapted, copies, gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.optimizer import State, clipped
from bayesfed.steps.point_estimates import centre, loss_of, owning, sharing, squared
from bayesfed.tracing.compiler import traceable


class Personal(Algorithm):
    """What both share: points for all variables, and a client's own made from θ by steps on its loss."""

    lr: float
    personal_steps: int

    def program(self, model: Model, federation: Federation) -> Program:
        """The model with points for all its variables.

        Raises:
            ValueError: clients share nothing, or have nothing of their own.
        """
        program = build(model, factorised(model, federation, local_point=True), federation)
        return owning(sharing(program, type(self).__name__), type(self).__name__)

    def encode(self, job: Job, work: Work) -> Upload:
        """θ_i − θ, each client counting alike."""
        return weighted(moves(job, work.found))

    def personalize(self, job: Job, steps: int | None = None, lr: float | None = None) -> Params:
        """The points of K clients: steps from the centre."""
        theta, lr = copies(job.message, len(job)), self.lr if lr is None else lr
        start = centre(job.program, theta, job.rows(0))
        own = {name: value.detach() for name, value in start.items()}
        for step in range(self.personal_steps if steps is None else steps):
            own = self.personal_step(job.program, theta, own, job.rows(step), lr)
        return own

    @traceable
    def personal_step(
        self, program: Program, theta: Params, own: Params, batch: Batch, lr: float
    ) -> Params:
        """One step of K clients on their own variables."""
        return adapted(lambda w, _: self.loss(program, theta, dict(w), batch), own, 1, lr, most=1.0)

    def loss(self, program: Program, theta: Params, own: Params, batch: Batch) -> Tensor:
        """What their steps descend: f, and −log p(θ) / (N n_i), ``(K,)``."""
        return loss_of(program, theta | own, batch)


@dataclass(frozen=True)
class PerFedAvg(Personal):
    """Personalised FedAvg: a θ that is good after a few steps of a client's own.

    Attributes:
        lr: α.
        prior_lr: β.
        inner_steps: k.
        second_order: θ's gradient goes through the k steps; otherwise their gradients count as constants.
        local_epochs: passes over a client's rows in a round, in steps on θ_i.
        local_steps: steps on θ_i, instead.
        prior_optimizer: of θ_i: ``"sgd"``, ``"momentum"`` or ``"adam"``; its state is forgotten after the round.
        lr_decay: what is left of β in the last round, on half a cosine.
        personal_steps: steps in which a client makes its own point in the end.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.algorithms.per_fed_avg import PerFedAvg
        >>> train, test = datasets.digits(clients=5)
        >>> model = models.Network(models.mlp(64, 10))
        >>> posterior = bf.fit(model, train, PerFedAvg(), rounds=5, batch_size=10)
        >>> accuracy = (posterior.probabilities(test)["y"].argmax(1) == test["y"]).float().mean()
        >>> bool(accuracy > 0.9)
        True
    """

    lr: Rate = 0.1
    prior_lr: Rate = 0.1
    inner_steps: int = 1
    second_order: bool = True
    local_epochs: int = 5
    local_steps: int | None = None
    prior_optimizer: str = "sgd"
    lr_decay: float = 1.0
    personal_steps: Times = 50

    def __post_init__(self) -> None:
        optimizer.check_rules(prior_optimizer=self.prior_optimizer)

    def work(self, job: Job) -> Work:
        """Steps of K clients on their θ_i, k + 1 minibatches each."""
        theta = optimizer.begin(self.prior_optimizer, copies(job.message, len(job)), rows=len(job))
        schedule = optimizer.told(
            job.rows.schedule(self.local_epochs, self.local_steps), job.keys.device
        )
        lr, prior_lr = self.lr, job.rate * self.prior_lr
        for step, active in enumerate(schedule):
            first = (self.inner_steps + 1) * step
            rows = [job.rows(first + i) for i in range(self.inner_steps + 1)]
            theta = self.step(job.program, theta, rows, active, lr, prior_lr)
        rows = [job.rows(0)] * (self.inner_steps + 1)
        with torch.enable_grad():
            loss = self.adapted_loss(job.program, theta["params"], rows, lr)
        return Work(theta["params"], -job.counts * loss)

    @traceable
    def step(
        self,
        program: Program,
        theta: State,
        rows: list[Batch],
        active: Tensor | None,
        lr: float,
        prior_lr: float,
    ) -> State:
        """One step on θ_i of the clients that are active."""
        own = leaves(theta["params"])
        order = "second" if self.second_order else "first"
        phi = self.adapted(program, own, rows[:-1], lr, order)
        grads = clipped(gradients(loss_of(program, own | phi, rows[-1]), own))
        return optimizer.descend(self.prior_optimizer, theta, grads, prior_lr, active)

    def adapted(
        self, program: Program, theta: Params, rows: list[Batch], lr: float, order: str
    ) -> Params:
        """φ after a step on each of the minibatches."""

        def loss(phi: Mapping[str, Tensor], step: int) -> Tensor:
            return loss_of(program, {**theta, **phi}, rows[step])

        return adapted(loss, centre(program, theta, rows[0]), len(rows), lr, order=order, most=1.0)

    @traceable
    def adapted_loss(self, program: Program, theta: Params, rows: list[Batch], lr: float) -> Tensor:
        """f after the steps on all but the last minibatch, on the last one, ``(K,)``."""
        phi = self.adapted(program, theta, rows[:-1], lr, "detached")
        return loss_of(program, theta | phi, rows[-1]).detach()


@dataclass(frozen=True)
class PFedMe(Personal):
    """pFedMe: personal points near θ, and θ drawn towards them (a Moreau envelope of the clients' losses).

    Attributes:
        lam: λ.
        lr: α.
        prior_lr: η; θ_i goes a fraction η λ of the way to w_i in a step.
        inner_steps: k.
        local_epochs: passes over a client's rows in a round, in steps on θ_i.
        local_steps: steps on θ_i, instead.
        lr_decay: what is left of η in the last round, on half a cosine.
        personal_steps: steps on w_i in which a client makes its own point in the end.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.algorithms.per_fed_avg import PFedMe
        >>> train, test = datasets.digits(clients=5)
        >>> model = models.Network(models.mlp(64, 10))
        >>> posterior = bf.fit(model, train, PFedMe(), rounds=5, batch_size=10)
        >>> accuracy = (posterior.probabilities(test)["y"].argmax(1) == test["y"]).float().mean()
        >>> bool(accuracy > 0.8)
        True
    """

    lam: Rate = 2.0
    lr: Rate = 0.1
    prior_lr: Rate = 0.3
    inner_steps: int = 5
    local_epochs: int = 5
    local_steps: int | None = None
    lr_decay: float = 1.0
    personal_steps: Times = 50

    def work(self, job: Job) -> Work:
        """Steps of K clients on their w_i and θ_i."""
        theta = copies(job.message, len(job))
        start = centre(job.program, theta, job.rows(0))
        own = {name: value.detach() for name, value in start.items()}
        schedule = optimizer.told(
            job.rows.schedule(self.local_epochs, self.local_steps), job.keys.device
        )
        lr, prior_lr = self.lr, job.rate * self.prior_lr
        for step, active in enumerate(schedule):
            theta, own = self.step(job.program, theta, own, job.rows(step), active, lr, prior_lr)
        with torch.no_grad():
            loss = self.loss(job.program, theta, own, job.rows(0))
        return Work(theta, -job.counts * loss)

    @traceable
    def step(
        self,
        program: Program,
        theta: Params,
        own: Params,
        batch: Batch,
        active: Tensor | None,
        lr: float,
        prior_lr: float,
    ) -> tuple[Params, Params]:
        """k steps on w_i and one on θ_i, of the clients that are active."""
        w = own
        for _ in range(self.inner_steps):
            w = self.personal_step(program, theta, w, batch, lr)
        t = leaves(theta)
        grads = clipped(gradients(self.loss(program, t, w, batch), t))
        new = optimizer.descend("sgd", {"params": theta}, grads, prior_lr, active)
        return new["params"], optimizer.kept({"own": own}, {"own": w}, active)["own"]

    @traceable
    def loss(self, program: Program, theta: Params, own: Params, batch: Batch) -> Tensor:
        """h, and −log p(θ) / (N n_i), ``(K,)``."""
        near = squared(own, centre(program, theta, batch))
        return loss_of(program, theta | own, batch) + self.lam / 2 * near
