"""The stopping rule of a run that ends when its clients predict held-out rows no better.

After each round every client of the cohort evaluates the log predictive density of its held-out rows, with the
variables that it would predict with now, and sends this one number. It is used until the client's next visit; the rule
follows the mean per row over all clients. The run ends when over half of the rounds so far (networks learn ever more
slowly), and since the oldest of the clients' last visits (every client must have been seen), that mean has risen by
less than :data:`GAIN`, beyond its noise. If the algorithm's learning rates fall, they then fall over a third as many
rounds again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from bayesfed.data.federation import Federation
from bayesfed.elbo.program import Params
from bayesfed.engine.stopping.convergence import cooling_rounds, rise
from bayesfed.engine.stopping.rule import BOUND, Outcome, Remaining, Stopping
from bayesfed.steps.gradients import annealed

GAIN = 0.002
"""The smallest gain that counts, in nats per row."""
LEAST = 10
"""The smallest number of rounds over which the gain is measured."""

Score = Callable[[Params, Tensor], Tensor]
"""From the global parameters and the positions of K clients to the log predictive densities of their held-out rows
``(K,)``, each summed over the client's rows."""

_COOLING, _ENDED = range(2)
"""The positions in ``HeldOut.marks``."""


@dataclass
class HeldOut(Stopping):
    """End when the clients predict held-out rows no better.

    Attributes:
        rows: held-out rows of the run's clients, in its order.
        final: the factor on the learning rates in the last round.
        score: evaluates the held-out rows of some clients.
        densities: each client's last log predictive density, summed over its rows, ``(N,)``; NaN before its first
            visit.
        means: per row, over all clients, after each round, ``(BOUND,)``; NaN until all clients have been seen.
        visits: the round, counted from 1, in which each client was last seen, ``(N,)``.
        marks: after how many rounds the rates began to fall, 0 before that; and whether the run has ended. ``(2,)``.
    """

    changing = ("densities", "means", "visits", "marks")
    rows: Federation
    final: float
    score: Score
    densities: Tensor = field(init=False)
    means: Tensor = field(init=False)
    visits: Tensor = field(init=False)
    marks: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.densities = torch.full((len(self.rows),), torch.nan, dtype=torch.float64)
        self.means = torch.full((BOUND,), torch.nan, dtype=torch.float64)
        self.visits = torch.zeros(len(self.rows), dtype=torch.int64)
        self.marks = torch.zeros(2, dtype=torch.int64)

    @property
    def converged(self) -> bool:
        """True if the run has ended."""
        return bool(self.marks[_ENDED])

    def rate(self, done: int) -> float:
        """The factor on the learning rates after so many rounds."""
        cooling = int(self.marks[_COOLING])
        return annealed(self.final, (done - cooling) / cooling_rounds(cooling) if cooling else 0.0)

    def record(self, outcome: Outcome) -> None:
        """Have the cohort evaluate its held-out rows, and end the run if there is no gain."""
        cohort = outcome.cohort
        if len(cohort):
            self.add_round(len(outcome.elbo), cohort, self.score(outcome.params, cohort))

    def add_round(self, done: int, cohort: Tensor, densities: Tensor) -> None:
        """Add a round whose clients have sent these log predictive densities ``(K,)``."""
        self.densities[cohort] = densities.double().cpu()
        self.visits[cohort] = done
        self.means[done - 1] = self.densities.sum() / self.rows.rows
        if cooling := int(self.marks[_COOLING]):
            self.marks[_ENDED] = int(done == cooling + cooling_rounds(cooling))
        elif self._has_no_gain(done):
            self.marks[:] = torch.tensor([done, int(self.final == 1)])

    def remaining(self, params: Params, elbo: Tensor) -> Remaining:
        """No distances: the rule does not look at q(θ)."""
        return ({} if self.converged else None), 0.0

    def _has_no_gain(self, done: int) -> bool:
        oldest = int(self.visits.min())
        window = max(LEAST, math.ceil(done / 2), done - oldest + 1)
        last = self.means[max(0, done - window) : done]
        return bool(oldest) and len(last) == window and rise(last) < GAIN


def check_clients(federation: Federation, rows: Federation) -> None:
    """Fail unless the held-out rows are of the run's clients, in the same order.

    Raises:
        ValueError: names the first client that differs.
    """
    for name, other in zip_longest(federation.names, rows.names):
        if name != other:
            raise ValueError(
                f"held_out has client {other!r} where the federation has {name!r}: it must have rows of the same "
                "clients, in the same order, as federation.split gives them"
            )
