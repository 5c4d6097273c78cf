"""When a run is done by what its clients predict of rows that nobody trains on.

Before a round's uploads are forgotten, each client of the cohort evaluates the log predictive density of its held-out
rows under what it would predict with now, and sends that one number. What a client said stands until its next visit;
the mean a row over all clients is what is followed. The run is done when over half of the rounds so far (networks
learn ever more slowly), and since the oldest of the clients' last visits (every one must have been seen), that mean has
risen by less than :data:`GAIN`, beyond its noise: it rises no more, or falls. Where the algorithm's rates fall, they
fall over a third as many rounds again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesfed.data.federation import Federation
from bayesfed.engine.stopping.convergence import BOUND, cooling_rounds, risen
from bayesfed.steps.gradients import annealed

if TYPE_CHECKING:
    from bayesfed.engine.run import Run

GAIN = 0.002
"""Nats a row."""
LEAST = 10
"""Rounds to look at."""


@dataclass
class HeldOut:
    """What clients have said of their held-out rows, and what follows from it.

    Attributes:
        rows: of the run's clients, in its order.
        final: what is left of the algorithm's rates in the end.
        known: each client's last log predictive density, of all its rows, ``(N,)``; NaN until it has said one.
        means: a row, over all clients, after each round, ``(BOUND,)``; NaN until all have said one.
        visits: in which round, counted from 1, each client was last seen, ``(N,)``.
        marks: after how many rounds the rates began to fall, 0 while they do not; whether the run is done. ``(2,)``.
    """

    rows: Federation
    final: float
    known: Tensor = field(init=False)
    means: Tensor = field(init=False)
    visits: Tensor = field(init=False)
    marks: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.known = torch.full((len(self.rows),), torch.nan, dtype=torch.float64)
        self.means = torch.full((BOUND,), torch.nan, dtype=torch.float64)
        self.visits = torch.zeros(len(self.rows), dtype=torch.int64)
        self.marks = torch.zeros(2, dtype=torch.int64)

    @property
    def state(self) -> dict[str, Tensor]:
        """All that rounds change."""
        return {name: getattr(self, name) for name in ("known", "means", "visits", "marks")}

    @property
    def settled(self) -> bool:
        """Whether the run is done."""
        return bool(self.marks[1])

    def rate(self, final: float, done: int) -> float:
        """By what learning rates are multiplied after so many rounds; ``final`` is what is left of them in the end."""
        cooling = int(self.marks[0])
        return annealed(final, (done - cooling) / cooling_rounds(cooling) if cooling else 0.0)

    def record(self, done: int, cohort: Tensor, densities: Tensor) -> None:
        """Add a round, of whose clients these are the log predictive densities ``(K,)``, and see what follows."""
        self.known[cohort] = densities.double().cpu()
        self.visits[cohort] = done
        self.means[done - 1] = self.known.sum() / self.rows.rows
        if cooling := int(self.marks[0]):
            self.marks[1] = int(done == cooling + cooling_rounds(cooling))
        elif self._gains_no_more(done):
            self.marks[:] = torch.tensor([done, int(self.final == 1)])

    def to_go(self, done: int) -> dict[str, float] | None:
        """Nothing that it could tell: points are never said to move."""
        return {} if self.settled else None

    def _gains_no_more(self, done: int) -> bool:
        oldest = int(self.visits.min())
        window = max(LEAST, math.ceil(done / 2), done - oldest + 1)
        last = self.means[max(0, done - window) : done]
        return bool(oldest) and len(last) == window and risen(last) < GAIN


def held_out(run: Run, rows: Federation, rounds: int | None) -> HeldOut:
    """A run's before its first round.

    Raises:
        ValueError: the rows are not of the run's clients, or the run cannot be stopped by them.
    """
    if rounds is not None:
        raise ValueError("held_out: its rows say when the run is done, leave out rounds")
    if run.privacy is not None:
        raise ValueError(
            "held_out: what clients say of its rows is no part of what privacy accounts for, give rounds"
        )
    if run.execution.group is not None:
        raise ValueError("held_out: give rounds to a run in several processes")
    for name, other in zip_longest(run.federation.names, rows.names):
        if name != other:
            raise ValueError(
                f"held_out has client {other!r} where the federation has {name!r}: it must have rows of the same "
                "clients, in the same order, as federation.split gives them"
            )
    return HeldOut(rows, run.algorithm.lr_decay)
