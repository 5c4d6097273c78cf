"""The minibatches of a cohort in a round, and the steps that each of its clients takes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.data.batch import Batch


@dataclass(frozen=True)
class Minibatches:
    """Minibatches of K clients: ``minibatches(step)`` is that of a local step, ``minibatches(None)`` holds all rows.

    Attributes:
        at: makes the batch of a step.
        lengths: n_i, int64 ``(K,)``, on the CPU: the number of steps must be available without waiting for a device.
        width: rows of a minibatch.
        represented: the numbers of rows that these represent, int64 ``(K,)``; None of as many as there are.
    """

    at: Callable[[int | None], Batch]
    lengths: Tensor
    width: int
    represented: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        """The numbers of rows by which clients are weighted, int64 ``(K,)``."""
        return self.lengths if self.represented is None else self.represented

    def __call__(self, step: int | None) -> Batch:
        """Return the minibatch of a step."""
        return self.at(step)

    def select(self, clients: Tensor) -> "Minibatches":
        """Return the minibatches of some of the clients, by position."""
        at = clients.cpu()
        counts = None if self.represented is None else self.represented[at]
        return Minibatches(
            lambda step: self.at(step).select(clients), self.lengths[at], self.width, counts
        )

    def schedule(self, epochs: int, steps: int | None = None) -> Tensor:
        """Return the mask of the clients that take each step: bool ``(steps, K)``, on the CPU.

        Args:
            epochs: passes over a client's rows, in minibatches.
            steps: the number of steps of every client, in place of epochs.

        Example:
            >>> import torch
            >>> from bayesfed.data.minibatches import Minibatches
            >>> Minibatches(lambda step: None, torch.tensor([5, 2]), width=2).schedule(epochs=1).tolist()
            [[True, True], [True, False], [True, False]]
        """
        last = epochs * ((self.lengths + self.width - 1) // self.width)
        if steps is not None:
            last = torch.full_like(last, steps)
        return torch.arange(int(last.max()), device="cpu")[:, None] < last
