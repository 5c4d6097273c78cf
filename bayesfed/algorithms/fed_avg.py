"""FedAvg: one set of weights for all clients, the mean of what they make of it; and rules that differ by lines.

    server    sends θ
    client i  θ_i = θ; steps on its rows,  θ_i ← θ_i − η ∇L_i(θ_i);  uploads n_i (θ_i − θ) and n_i
    server    θ ← θ + Σ n_i (θ_i − θ) / Σ n_i                           (McMahan et al. 2017, Algorithm 1)

L_i(θ) = (−log p(D_i | w_i = centre of p(w_i | θ), θ) − log p(θ) / N) / n_i: in a hierarchical model every client
stands at the centre of its prior, so that θ is fitted as if clients did not differ. In ``personalize`` a client's own
variables start there and take steps on its likelihood: fine-tuning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.algorithms.protocol import Algorithm, Turn, Upload, mean, moved, moves, weighted
from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.build import build
from bayesfed.elbo.elbo import centred_losses, client_losses
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.factorised import factorised
from bayesfed.settings import Rate, Times
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.optimizer import State
from bayesfed.steps.point_estimates import (
    a_row,
    against,
    at_rest,
    centre,
    inner,
    sharing,
    squared,
    zeros,
)
from bayesfed.tracing.compiler import traceable

STEEPEST = 100.0
"""The steepest slope that is followed, of each number by itself: beyond, a step leaves where the gradient holds."""


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Federated averaging of a point θ, with fine-tuning.

    Attributes:
        lr: η.
        local_epochs: passes over a client's rows in a round.
        local_steps: steps in minibatches, instead.
        optimizer: of θ_i: ``"sgd"``, ``"momentum"`` or ``"adam"``; its state is forgotten after the round.
        proximal: μ of FedProx (Li et al. 2020, eq. 2): adds μ / 2 ‖θ_i − θ‖² to L_i.
        lr_decay: what is left of η in the last round, on half a cosine.
        personal_steps: steps of fine-tuning.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> train, test = datasets.digits(clients=5)
        >>> model = models.Network(models.mlp(64, 10))
        >>> posterior = bf.fit(model, train, bf.FedAvg(), rounds=5, batch_size=10)
        >>> accuracy = (posterior.probabilities(test, centre=True)["y"].argmax(1) == test["y"]).float().mean()
        >>> bool(accuracy > 0.9)
        True
    """

    lr: Rate = 0.1
    local_epochs: int = 5
    local_steps: int | None = None
    optimizer: str = "sgd"
    proximal: float = 0.0
    lr_decay: float = 1.0
    personal_steps: Times = 50

    def __post_init__(self) -> None:
        optimizer.check_rules(optimizer=self.optimizer)

    def program(self, model: Model, federation: Federation) -> Program:
        """The model with points for all its variables.

        Raises:
            ValueError: clients share nothing.
        """
        program = build(model, factorised(model, federation, local_point=True), federation)
        return sharing(program, type(self).__name__)

    def work(self, job: Job) -> Work:
        """Steps of K clients on their θ_i."""
        theta = self.trained(job, job.message, job.message)
        return Work(theta, log_likelihood(job, theta))

    def trained(self, job: Job, theta: Params, beside: Params) -> Params:
        """θ_i of K clients after their steps from θ; ``beside`` is what :meth:`pull` goes by."""
        state = optimizer.begin(self.optimizer, copies(theta, len(job)), rows=len(job))
        schedule = optimizer.told(
            job.rows.schedule(self.local_epochs, self.local_steps), job.keys.device
        )
        for step, active in enumerate(schedule):
            state = self.step(
                job.program, beside, state, job.rows(step), active, job.rate * self.lr
            )
        return state["params"]

    @traceable
    def step(
        self,
        program: Program,
        beside: Params,
        theta: State,
        batch: Batch,
        active: Tensor | None,
        lr: float,
    ) -> State:
        """One step of the clients that are active."""
        own = leaves(theta["params"])
        loss = mean_loss(program, own, batch) + self.pull(own, beside)
        grads = bounded(gradients(loss, own))
        return optimizer.descend(self.optimizer, theta, grads, lr, active)

    def taken(self, job: Job) -> Tensor:
        """How many steps K clients take, ``(K,)``."""
        return job.rows.schedule(self.local_epochs, self.local_steps).sum(0).to(job.counts)

    def pull(self, own: Params, beside: Params) -> Tensor | float:
        """What is added to L_i, ``(K,)``: FedProx's μ / 2 ‖θ_i − θ‖²."""
        return self.near(own, beside)

    def near(self, own: Params, to: Params) -> Tensor | float:
        """μ / 2 ‖own − to‖²."""
        return self.proximal / 2 * squared(own, to) if self.proximal else 0.0

    def personalize(self, job: Job, steps: int | None = None, lr: float | None = None) -> Params:
        """Fine-tuning: steps of K clients on their own variables, from the centre of their prior."""
        program, theta = job.program, copies(job.message, len(job))
        start = centre(program, theta, job.rows(0))
        own = {name: value.detach() for name, value in start.items()}
        lr = self.lr if lr is None else lr
        for step in range(self.personal_steps if steps is None else steps):
            own = self.personal_step(program, theta, start, own, job.rows(step), lr)
        return own

    @traceable
    def personal_step(
        self, program: Program, theta: Params, start: Params, own: Params, batch: Batch, lr: float
    ) -> Params:
        """One step of K clients on their own variables."""
        at = leaves(own)
        losses = client_losses(program, at_rest(program, theta | at, batch), batch, {}, 1)
        loss = losses.nll / losses.rows + self.near(at, start)
        grads = bounded(gradients(loss, at))
        return {name: optimizer.less(own[name], lr, grads[name]) for name in own}


@dataclass(frozen=True)
class FedNova(FedAvg):
    """FedAvg of clients that take different numbers of steps τ_i (Wang et al. 2020, eq. 8).

    What is averaged is a step's mean move, (θ_i − θ) / τ_i; the server makes as many such steps as clients on average.
    """

    no_noise = "it weighs clients by their numbers of rows and of steps: use FedAvg"

    def encode(self, job: Job, work: Work) -> Upload:
        """The mean moves and the numbers of steps, weighted by n_i."""
        taken = self.taken(job)
        move = {n: v / against(taken, v) for n, v in moves(job, work.found).items()}
        return weighted(move | {"steps": taken[:, None]}, job.counts)

    def decode(self, turn: Turn, server: Params, total: Upload) -> tuple[Params, Tensor]:
        """θ + τ̄ Σ π_i (θ_i − θ) / τ_i."""
        move = mean(turn, total)
        steps = move.pop("steps")
        return moved(server, {n: steps * v for n, v in move.items()}), torch.zeros(())


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """SCAFFOLD (Karimireddy et al. 2020, Algorithm 1): a client's steps are corrected by c − c_i, its drift.

    Option II: c_i ← c_i − c + (θ − θ_i) / (steps · η). Clients keep c_i; c is the mean of all.
    """

    remembered = ("control",)
    no_noise = "noise would add up in the control variate: use FedAvg"

    def __post_init__(self) -> None:
        if self.optimizer != "sgd" or self.proximal:
            raise ValueError("SCAFFOLD corrects plain steps: leave out optimizer and proximal")

    def start(self, program: Program) -> Params:
        """θ, and c = 0."""
        theta = super().start(program)
        return theta | controls(zeros(theta))

    def start_clients(self, program: Program, server: Params, batch: Batch) -> State:
        """c_i = 0."""
        return {"control": zeros(copies(self.params(server), len(batch)))}

    def work(self, job: Job) -> Work:
        """Steps of K clients along ∇L_i + c − c_i, and their next c_i."""
        theta, own = self.params(job.message), job.clients["control"]
        drift = {name: job.message[f"control.{name}"] - own[name] for name in theta}
        at, way = self.trained(job, theta, drift), job.rate * self.lr * self.taken(job)
        new = {n: (theta[n] - v) / against(way, v) - drift[n] for n, v in at.items()}
        change = controls({n: new[n] - own[n] for n in new})
        return Work(moves(job, at) | change, log_likelihood(job, at), {"control": new})

    def pull(self, own: Params, beside: Params) -> Tensor | float:
        """⟨c − c_i, θ_i⟩, whose slope is the correction."""
        return inner(beside, own)

    def encode(self, job: Job, work: Work) -> Upload:
        """θ_i − θ and the change of c_i, each client counting alike."""
        return weighted(work.found)

    def decode(self, turn: Turn, server: Params, total: Upload) -> tuple[Params, Tensor]:
        """θ ← mean θ_i;  c ← c + (K / N) mean of the changes."""
        theta = self.params(server)
        move = {n: v if n in theta else v / turn.scale for n, v in mean(turn, total).items()}
        return moved(server, move), torch.zeros(())

    def params(self, server: Params) -> Params:
        """θ."""
        return {name: v for name, v in server.items() if f"control.{name}" in server}


def controls(values: Params) -> Params:
    """As parts of the server's state."""
    return {f"control.{name}": value for name, value in values.items()}


def bounded(grads: Params) -> Params:
    """Gradients of which no number exceeds :data:`STEEPEST`: networks never come near, hierarchies of few rows do."""
    return {name: grad.clamp(-STEEPEST, STEEPEST) for name, grad in grads.items()}


def mean_loss(program: Program, theta: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """L_i of K clients that stand at the centre of their priors, ``(K,)``; θ shared or a copy each."""
    return a_row(program, centred_losses(program, at_rest(program, theta, batch), batch))


def log_likelihood(job: Job, theta: Params) -> Tensor:
    """Of the first minibatch, scaled up to all rows, at the centre of the priors: ``(K,)``."""
    with torch.no_grad():
        return -job.counts * _evaluated(job.program, theta, job.rows(0))


@traceable
def _evaluated(program: Program, theta: Params, batch: Batch) -> Tensor:
    return mean_loss(program, theta, batch)
