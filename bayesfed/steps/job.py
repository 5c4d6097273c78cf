"""The work of K clients in a round: what they are given, and what they return."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from bayesfed.data.minibatches import Minibatches
from bayesfed.elbo.program import Params, Program
from bayesfed.steps import optimizer
from bayesfed.steps.optimizer import State

Parts = dict[str, Params]
"""Tensors by part and name, such as ``{"theta": {"mu.loc": ...}, "weight": {"rows": ...}}``."""
SINGLE = "single"
"""The part of a message that asks for one local step on θ_i."""
INFORMATION = "information"
"""The part of a work that holds estimates of the information on θ, ``(K, D, D)``, beside a single step."""
CURVED = "curved"
"""The part of a message that asks for second derivatives beside gradients."""


@dataclass(frozen=True)
class Job:
    """The work of K clients in a round. All K clients are rows of the same tensors.

    Attributes:
        program: the model/guide pair.
        message: the server's message; its part ``theta`` holds the guide's global parameters.
        clients: the clients' states since their last visit, ``(K, ...)`` each.
        rows: their rows at a step.
        keys: their noise streams of this round, int64 ``(K,)``.
        rate: factor on the learning rates in this round.
        private: the sum of the uploads will be noisy. Then the server does not learn n_i, and no rule may rest on
            clients' memory of their uploads, of which the server has noisy sums only.
        given: tensors that the rule prepares for the steps, such as SCAFFOLD's correction of the gradients.
    """

    program: Program
    message: Parts
    clients: State
    rows: Minibatches
    keys: Tensor
    rate: float = 1.0
    private: bool = False
    given: Parts = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    def select(self, clients: Tensor) -> "Job":
        """Return the work of some of the clients, by position, with nothing that a rule has prepared for all."""
        return Job(
            self.program,
            self.message,
            optimizer.take(self.clients, clients),
            self.rows.select(clients),
            self.keys[clients],
            self.rate,
            self.private,
        )

    @property
    def theta(self) -> Params:
        """The guide's global parameters, as they were sent."""
        return self.message.get("theta", {})

    @property
    def counts(self) -> Tensor:
        """n_i, ``(K,)``."""
        return self.rows.counts.to(self.program.schema.scale)

    def schedule(self, epochs: int, steps: int | None) -> Tensor:
        """Return the clients that take each step on θ_i, bool ``(steps, K)``: one step where the server asks for it."""
        found = self.rows.schedule(epochs, steps)
        return found[:1] if SINGLE in self.message else found


class Work(NamedTuple):
    """The result of K clients' steps.

    Attributes:
        found: the parts that the steps give to the rule, ``(K, 1, ...)`` each; ``theta`` are copies of θ.
        terms: estimates of the clients' ELBO terms, ``(K,)``; −inf of a client whose steps went uphill. Its result does
            not count, and the run goes on at half the learning rates.
        clients: the states that they keep until their next visit, ``(K, ...)`` each.
    """

    found: Parts
    terms: Tensor
    clients: State = {}  # noqa: RUF012  (a constant)
