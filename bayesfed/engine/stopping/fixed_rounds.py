"""The stopping rule of a run whose number of rounds is given."""

from dataclasses import dataclass, field

from torch import Tensor

from bayesfed.elbo.program import Params, Program
from bayesfed.engine.stopping.drift import add_round, distances_left, elbo_left, empty_windows
from bayesfed.engine.stopping.rule import Outcome, Remaining, Stopping
from bayesfed.steps.gradients import annealed


@dataclass
class FixedRounds(Stopping):
    """End after a given number of rounds, over which the learning rates fall.

    Attributes:
        program: the model/guide pair.
        rounds: number of rounds.
        final: the factor on the learning rates in the last round.
        windows: means of the guide's global parameters over the last rounds, see
            :mod:`bayesfed.engine.stopping.drift`.
    """

    changing = ("windows",)
    program: Program
    rounds: int
    final: float
    windows: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.windows = empty_windows(self.program)
        self.bound = self.usual = self.rounds

    def rate(self, done: int) -> float:
        """The factor on the learning rates after so many rounds."""
        return annealed(self.final, done / self.rounds)

    def record(self, outcome: Outcome) -> None:
        """Add the round's parameters to their window."""
        number = len(outcome.elbo) - 1
        add_round(self.windows, outcome.params, self.final, number, self.rounds)

    def remaining(self, params: Params, elbo: Tensor) -> Remaining:
        """The distances that are left, by extrapolation of the last windows."""
        done, final, rounds = len(elbo), self.final, self.rounds
        distances = distances_left(self.program, self.windows, params, final, done, rounds)
        return distances, elbo_left(elbo, self.program.rows, final, rounds)
