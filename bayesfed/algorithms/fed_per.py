"""FedPer and what differs from it by a line: a body that all clients share, and a head of their own without a prior.

    server    sends the body θ
    client i  θ_i = θ; steps on its head w_i, which it keeps, and on θ_i,  downhill in L_i(w_i, θ_i);
              uploads n_i θ_i and n_i
    server    θ ← Σ n_i θ_i / Σ n_i

L_i(w, θ) = (−log p(D_i | w, θ) − log p(θ) / N) / n_i. In a hierarchical model the head is what the client samples for
itself, and the body is what its likelihood reads beside that. The prior p(w_i | θ) only says where heads start, at its
centre; its own parameters stay as they are. ``personalize`` takes steps on the head alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.algorithms.protocol import Algorithm
from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.build import build
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.factorised import factorised
from bayesfed.settings import Rate, Times
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.optimizer import State
from bayesfed.steps.point_estimates import beginning, everyone, loss_of, owning
from bayesfed.tracing.compiler import traceable


@dataclass(frozen=True)
class FedPer(Algorithm):
    """Federated learning with personal heads (Arivazhagan et al. 2019, Algorithm 1): head and body step together.

    Attributes:
        lr: of all steps.
        local_epochs: passes over a client's rows in a round.
        optimizer: ``"sgd"``, ``"momentum"`` or ``"adam"``; its state is forgotten after the round.
        lr_decay: what is left of the rate in the last round, on half a cosine.
        personal_steps: steps in which a client that took no part makes its head.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.algorithms.fed_per import FedPer
        >>> train, test = datasets.digits(clients=5)
        >>> model = models.Network(models.mlp(64, 32, 10), local=["2."])
        >>> posterior = bf.fit(model, train, FedPer(), rounds=10, batch_size=10)
        >>> accuracy = (posterior.probabilities(test)["y"].argmax(1) == test["y"]).float().mean()
        >>> bool(accuracy > 0.9)
        True
    """

    lr: Rate = 0.1
    local_epochs: int = 5
    optimizer: str = "sgd"
    lr_decay: Rate = 1.0
    personal_steps: Times = 50

    def __post_init__(self) -> None:
        optimizer.check_rules(optimizer=self.optimizer)

    def program(self, model: Model, federation: Federation) -> Program:
        """The model with points for all its variables.

        Raises:
            ValueError: nothing is a client's own; or what clients share does not fit the algorithm.
        """
        program = build(model, factorised(model, federation, local_point=True), federation)
        owning(program, type(self).__name__)
        self.check(program)
        return program

    def check(self, program: Program) -> None:
        """Refuse a model without a body.

        Raises:
            ValueError: the likelihood reads nothing that clients share.
        """
        if not body(program):
            raise ValueError(
                f"{type(self).__name__} needs a body that clients share, but the likelihood reads nothing beside "
                f"{program.locals[0].name!r}, a client's own: use Local, or PFedVEM(point=True), whose clients share a "
                "prior"
            )

    def start_clients(self, program: Program, server: Params, batch: Batch) -> State:
        """Every head at its start."""
        return {"params": beginning(program, copies(server, len(batch)), batch)}

    def passes(self, program: Program) -> Iterator[tuple[list[str], int]]:
        """What is stepped on together in a round, and for how many epochs."""
        yield [*program.local_params, *body(program)], self.local_epochs

    def work(self, job: Job) -> Work:
        """Steps of K clients on their heads and on their copies of the body."""
        program, at = job.program, copies(job.message, len(job))
        kept = job.clients.get("params")
        at |= kept or beginning(program, at, job.rows(0))
        for names, epochs in self.passes(program):
            free = {name: at[name] for name in names}
            at |= self.stepped(job, at, free, job.rows.schedule(epochs), job.rate * self.lr)
        with torch.no_grad():
            term = job.counts * self.term(program, at, job.rows(0))
        found = {name: at[name] for name in body(program)}
        own = {name: at[name] for name in program.local_params}
        return Work(found, term, {"params": own} if kept else {})

    def stepped(self, job: Job, at: Params, free: Params, schedule: Tensor, lr: float) -> Params:
        """What is free of K clients, after its steps."""
        state = optimizer.begin(self.optimizer, free, rows=len(job))
        for step, active in enumerate(optimizer.told(schedule, job.keys.device)):
            state = self.step(job.program, at, state, job.rows(step), active, lr)
        return state["params"]

    @traceable
    def step(
        self,
        program: Program,
        at: Params,
        free: State,
        batch: Batch,
        active: Tensor | None,
        lr: float,
    ) -> State:
        """One step of the clients that are active, on what is free."""
        own = leaves(free["params"])
        grads = gradients(self.loss(program, at | own, batch), own)
        return optimizer.descend(self.optimizer, free, grads, lr, active)

    @traceable
    def term(self, program: Program, params: Params, batch: Batch) -> Tensor:
        """−L_i of K clients, ``(K,)``."""
        return -self.loss(program, params, batch)

    def loss(self, program: Program, params: Params, batch: Batch) -> Tensor:
        """L_i of K clients, ``(K,)``."""
        return loss_of(program, params, batch)

    def personalize(self, job: Job, steps: int | None = None, lr: float | None = None) -> Params:
        """Heads of K clients that took no part: steps from the centre of the prior, the body as it is."""
        theta = copies(job.message, len(job))
        own = beginning(job.program, theta, job.rows(0))
        schedule = everyone(job, self.personal_steps if steps is None else steps)
        return self.stepped(job, theta, own, schedule, self.lr if lr is None else lr)


@dataclass(frozen=True)
class FedRep(FedPer):
    """FedRep (Collins et al. 2021, Algorithm 1): the head first, under the body that was sent; then the body.

    Attributes:
        head_epochs: passes over a client's rows for its head; ``local_epochs`` are those for the body.
    """

    head_epochs: int = 5

    def passes(self, program: Program) -> Iterator[tuple[list[str], int]]:
        """The head, then the body."""
        yield list(program.local_params), self.head_epochs
        yield body(program), self.local_epochs


@dataclass(frozen=True)
class FedBABU(FedPer):
    """FedBABU (Oh et al. 2022, Algorithm 1): the body alone is learnt, under the head with which all clients start.

    Clients keep nothing, so that :func:`bayesfed.fit` ends with ``personalize`` for all of them: their fine-tuning.
    """

    def start_clients(self, program: Program, server: Params, batch: Batch) -> State:
        """Nothing."""
        return {}

    def passes(self, program: Program) -> Iterator[tuple[list[str], int]]:
        """The body."""
        yield body(program), self.local_epochs


@dataclass(frozen=True)
class Local(FedPer):
    """Every client by itself: FedPer without a body. Nothing is sent, so a model must not share anything.

    In :class:`~bayesfed.models.Network` all weights are a client's own unless ``local=`` says otherwise.
    """

    def check(self, program: Program) -> None:
        """Refuse a model whose likelihood reads what clients share.

        Raises:
            ValueError: it does.
        """
        if shared := body(program):
            raise ValueError(
                f"Local has every client by itself, but the likelihood reads {shared[0]!r}, which all clients share: "
                "sample it inside `with federation.clients():`, or use FedPer"
            )


def body(program: Program) -> list[str]:
    """The global parameters that the likelihood reads, given the clients' own variables."""
    return [name for name in program.init if name not in program.unread]
