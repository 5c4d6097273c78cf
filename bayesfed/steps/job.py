"""What K clients work on in a round, and what they have done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from bayesfed.data.minibatches import Minibatches
from bayesfed.elbo.program import Params, Program
from bayesfed.steps.optimizer import State


@dataclass(frozen=True)
class Job:
    """What K clients work on in a round.

    Attributes:
        program: the model/guide pair.
        message: what the server sent.
        clients: what the clients kept of their last visit, ``(K, ...)`` each.
        rows: their rows at a step.
        keys: their noise streams of this round, int64 ``(K,)``.
        rate: by what the learning rates are multiplied this round.
        private: the sum of the uploads will be noisy. Then the server does not learn n_i, and nothing is to rest on
            what clients remember of their uploads, of which the server has noisy sums only.
    """

    program: Program
    message: dict[str, Tensor]
    clients: State
    rows: Minibatches
    keys: Tensor
    rate: float = 1.0
    private: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def counts(self) -> Tensor:
        """n_i, ``(K,)``."""
        return self.rows.lengths.to(self.program.schema.scale)

    @property
    def weight(self) -> Tensor | None:
        """By what a client counts in a mean over rows: n_i, where the server may know it."""
        return None if self.private else self.counts


class Work(NamedTuple):
    """What K clients have done.

    Attributes:
        found: what :meth:`Algorithm.encode` makes the upload of, by name; for the default their copies of θ
            ``(K, 1, ...)``.
        terms: estimates of the clients' ELBO terms, ``(K,)``.
        clients: what they keep until their next visit, ``(K, ...)`` each.
    """

    found: Params
    terms: Tensor
    clients: State = {}  # noqa: RUF012  (a constant)
