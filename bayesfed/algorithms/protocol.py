"""What an algorithm is: the page that the runner, and whoever writes a new one, goes by.

    server    state = start(program);                            each round: message = broadcast(turn, state)
    client i  work(job): steps on what it was sent and on what it keeps
              encode(job, work): its upload, of which the server sees the sum over the cohort only
    server    state, term = decode(turn, state, total)

What most algorithms leave alone has a default: θ is the guide's global parameters at a point, clients keep nothing and
upload by how much their own copy of θ has moved, the server moves by the mean. :mod:`bayesfed.algorithms.fed_avg` is
that case. All K clients of a job are rows of the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.program import Params, Program
from bayesfed.steps.job import Job, Work
from bayesfed.steps.optimizer import State

Upload = dict[str, Tensor]
WEIGHT = "by what it counts"
"""Beside the parts of an upload, one of which may be a parameter called "weight"."""


@dataclass(frozen=True)
class Turn:
    """A round as the server sees it.

    Attributes:
        program: the model/guide pair.
        key: the server's noise stream of this round, int64 ``()``.
        cohort: K, how many clients take part; once they have worked, how many uploads count.
        rate: by what the learning rates are multiplied this round.
        noise: the scale of the noise in each number of the sum.
    """

    program: Program
    key: Tensor
    cohort: int
    rate: float = 1.0
    noise: float = 0.0

    @property
    def scale(self) -> float:
        """N / K, which makes a sum over the cohort an unbiased estimate of that over all clients."""
        return self.program.clients / self.cohort


class Algorithm:
    """Globals and locals (:meth:`program`), schedule (:meth:`work`) and rule (:meth:`encode`, :meth:`decode`).

    Subclasses are frozen dataclasses, whose fields are the settings.
    """

    lr_decay: float = 1.0
    """What is left of the learning rates in the last round, on half a cosine."""
    draws: int = 1
    """Number of Monte Carlo draws in a step."""
    personal_steps: int = 50
    """Steps in which a client makes its own variables from θ."""
    corrected: bool = False
    """Whether draws of θ are weighed by all clients in the end, see :mod:`bayesfed.output.correction`."""
    remembered: tuple[str, ...] = ()
    """The parts of a client's state whose change it uploads: they change by what the server took of it."""

    @property
    def no_noise(self) -> str:
        """Why the rule fails where its sum is noisy, and what to take instead; empty where it does not."""
        return ""

    def program(self, model: Model, federation: Federation) -> Program:
        """The model with the guide that the settings choose; refuses a model that lacks a structure it needs."""
        raise NotImplementedError

    def start(self, program: Program) -> Any:
        """The server's first state: nested dicts and named tuples of tensors."""
        return {name: value.clone() for name, value in program.init.items()}

    def start_clients(self, program: Program, server: Any, batch: Batch) -> State:
        """What K clients have before their first visit: nothing."""
        return {}

    def broadcast(self, turn: Turn, server: Any) -> dict[str, Tensor]:
        """What the server sends to every client of the cohort: its state."""
        return server

    def work(self, job: Job) -> Work:
        """The local work of K clients."""
        raise NotImplementedError

    def encode(self, job: Job, work: Work) -> Upload:
        """What K clients upload, ``(K, ...)`` each: θ_i − θ, weighted by n_i."""
        return weighted(moves(job, work.found), job.weight)

    def decode(self, turn: Turn, server: Any, total: Upload) -> tuple[Any, Tensor]:
        """The server's next state from the sum of the uploads, and its ELBO term ``()``: θ and the mean, and 0."""
        return moved(server, mean(turn, total)), torch.zeros(())

    def late(self, server: Any, total: Upload, count: int) -> Upload:
        """What of K uploads of an earlier round still counts: changes of what the server keeps of clients. Nothing."""
        return {}

    def params(self, server: Any) -> Params:
        """The guide's global parameters that the server's state stands for."""
        return server

    def pace(self, turn: Turn, server: Any) -> float | None:
        """What part of the way to where q(θ) is drawn the last round has gone; None where that is not known.

        A run without a number of rounds stops by it.
        """
        return None

    def shaken(self, server: Any) -> float:
        """How far the noise of a round would move q(θ), in its standard deviations, where that is known."""
        return 0.0

    def levels(self, program: Program) -> tuple[float, ...]:
        """At what rates q(θ) is to settle, one after the other, in a run without a number of rounds."""
        return (1.0,)

    def temperature(self, clients: int, rows: float) -> float:
        """How much the clients' likelihoods, of so many rows on average, count against the prior of θ: in full."""
        return 1.0

    def personalize(self, job: Job, steps: int | None = None, lr: float | None = None) -> Params:
        """The local parameters ``(K, 1, ...)`` of K clients, made from θ (``job.message``) and their own rows.

        Args:
            job: the clients; they need not have taken part.
            steps: by default :attr:`personal_steps`.
            lr: the rate of the steps; by default that of the algorithm.
        """
        return {}


def moves(job: Job, copies: Mapping[str, Tensor]) -> Params:
    """By how much the clients' copies ``(K, 1, ...)`` of what was sent have moved."""
    return {name: value - job.message[name] for name, value in copies.items()}


def weighted(values: Mapping[str, Tensor], weight: Tensor | None = None) -> Upload:
    """Upload of a mean of values ``(K, 1, ...)``: each client's times its weight ``(K,)``, and the weights.

    Without weights clients count alike, and the server knows how many there are.
    """
    if weight is None:
        return {name: value.squeeze(1) for name, value in values.items()}
    upload = {
        name: value.squeeze(1) * weight.reshape(-1, *[1] * (value.ndim - 2))
        for name, value in values.items()
    }
    return upload | {WEIGHT: weight}


def mean(turn: Turn, total: Mapping[str, Tensor]) -> Params:
    """The means that a sum of :func:`weighted` uploads stands for."""
    weight = total.get(WEIGHT, turn.cohort)
    return {name: value / weight for name, value in total.items() if name != WEIGHT}


def moved(server: Params, by: Mapping[str, Tensor]) -> Params:
    """The server's parameters, some of them moved."""
    return server | {name: server[name] + move for name, move in by.items()}
