"""The interface of an aggregation rule: encode → sum → decode.

    client i  upload = encode(what its steps gave)
    server    sees Σ_i upload over the cohort only, and decodes it into its next state

The server needs only the sum, so that the order and the chunking of clients do not matter, and clipping, noise and
secure summation act in one place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.globals import Point
from bayesfed.steps.job import Job, Parts, Work
from bayesfed.steps.losses import per_client
from bayesfed.steps.optimizer import State
from bayesfed.steps.steps import Steps


@dataclass(frozen=True)
class Turn:
    """A round as the server sees it.

    Attributes:
        program: the model/guide pair.
        key: the server's noise stream of this round, int64 ``()``.
        cohort: K, the number of clients that take part; after their work, the number of uploads that count.
        rate: factor on the learning rates in this round.
        noise: the scale of the noise in each number of the sum.
        steps: the steps of the algorithm's clients.
        whole: whether all rows of all clients take part, without noise, so that two rounds are the same function of θ.
    """

    program: Program
    key: Tensor
    cohort: int
    rate: float = 1.0
    noise: float = 0.0
    steps: Any = None
    whole: bool = False

    def of(self, counted: int) -> Self:
        """Return the round in which so many uploads count."""
        return replace(self, cohort=counted, whole=self.whole and counted == self.cohort)

    @property
    def scale(self) -> float:
        """N / K, which makes a sum over the cohort an unbiased estimate of that over all clients."""
        return self.program.clients / self.cohort


@dataclass(frozen=True)
class Progress:
    """The progress of a round, which a rule reports for the convergence criterion.

    Attributes:
        pace: the fraction of the way to the current target of q(θ) that the round has gone.
        noise: how far the noise of a round would move q(θ), in its standard deviations.
        step: how far the whole way was, in standard deviations of q(θ) before the round; infinite if not known.
    """

    pace: float
    noise: float = 0.0
    step: float = math.inf


class Rule:
    """An aggregation rule. Subclasses are frozen dataclasses, whose fields are the settings.

    Attributes:
        needs: the parts that the steps must give.
        sends: the parts of its message, beside ``theta``.
        globals: the families of the globals that it can move.
        by_gradient: its server takes quasi-Newton steps on the clients' mean single step where a run stops by itself; a
            class says so itself, as a subclass may use the sum otherwise.
    """

    by_gradient: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"theta"})
    sends: ClassVar[frozenset[str]] = frozenset()
    globals: ClassVar[tuple[type[Any], ...]] = (Point,)

    @property
    def no_noise(self) -> str:
        """The reason why the rule fails if its sum is noisy, and what to take instead; empty if it does not fail."""
        return ""

    def accept(self, program: Program, steps: Steps, name: str) -> Program:
        """Return the program, or refuse one that lacks a structure that the rule of algorithm ``name`` needs.

        Raises:
            ValueError: names the structure, and what to take instead.
        """
        return program

    def start(self, program: Program) -> Any:
        """Return the server's first state: nested dicts and named tuples of tensors."""
        return {"theta": {name: value.clone() for name, value in program.init.items()}}

    def params(self, server: Any) -> Params:
        """Return the guide's global parameters of a server state."""
        theta: Params = server["theta"]
        return theta

    def start_clients(self, program: Program, server: Any, batch: Batch) -> State:
        """Return what K clients remember of their uploads before their first visit: nothing."""
        return {}

    def broadcast(self, turn: Turn, server: Any) -> Parts:
        """Return the message to every client of the cohort."""
        return {"theta": self.params(server)}

    def prepare(self, job: Job) -> Parts:
        """Return what the rule gives to the steps of K clients beside the message, such as a correction."""
        return {}

    def encode(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return the uploads ``(K, ...)`` of K clients, and what they remember of them."""
        raise NotImplementedError

    def decode(self, turn: Turn, server: Any, total: Parts) -> tuple[Any, Tensor]:
        """Return the server's next state from the sum of the uploads, and its ELBO term ``()``."""
        raise NotImplementedError

    def stale(self, server: Any, total: Parts, count: int) -> Parts:
        """Return the part of K stale uploads that can be added: none."""
        return {}

    def progress(self, turn: Turn, server: Any) -> Progress | None:
        """Return the progress of the last round; None where it is unknown and a number of rounds must be given."""
        return None


@runtime_checkable
class Robust(Protocol):
    """A rule that combines institutions' sums, and so is for fits between machines."""

    def combine(self, totals: Sequence[Parts], clients: Sequence[Tensor]) -> Parts:
        """Return a sum over all clients in place of that of the institutions' sums.

        Args:
            totals: the sum of the uploads of each institution's clients.
            clients: the number of these clients, ``()`` each.
        """


@runtime_checkable
class QuasiNewton(Protocol):
    """A rule whose server can take quasi-Newton steps (:mod:`bayesfed.rules.quasi_newton`)."""

    def newton(self, program: Program, steps: Steps) -> Params:
        """Return the first state of quasi-Newton steps; empty if it takes none here."""


def moves(job: Job, copies: Params) -> Params:
    """Return θ_i − θ of the clients' copies ``(K, 1, ...)``."""
    return {name: value - job.theta[name] for name, value in copies.items()}


def weighted_sum(values: Params, weight: Tensor | None = None) -> Parts:
    """Return the upload of a mean of values ``(K, 1, ...)``: each times its client's weight ``(K,)``, and the weights.

    Without weights clients count alike, and the server counts them.
    """
    if weight is None:
        return {"theta": {name: value.squeeze(1) for name, value in values.items()}}
    upload = {n: v.squeeze(1) * per_client(weight, v.squeeze(1)) for n, v in values.items()}
    return {"theta": upload, "weight": {"rows": weight}}


def mean_of(turn: Turn, total: Parts, part: str = "theta") -> Params:
    """Return the means of a part of a sum of :func:`weighted_sum` uploads."""
    weight = total["weight"]["rows"] if "weight" in total else turn.cohort
    return {name: value / weight for name, value in total.get(part, {}).items()}


def add(values: Params, change: Params) -> Params:
    """Return the values with a change of some of them."""
    return values | {name: values[name] + by for name, by in change.items()}


NO_TERM = torch.zeros(())
"""The ELBO term of a server that has none."""
