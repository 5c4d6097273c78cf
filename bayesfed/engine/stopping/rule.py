"""The interface of a stopping rule: when a run ends, and what the learning rates are until then."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from bayesfed.elbo.program import Params
from bayesfed.rules.rule import Turn
from bayesfed.tracing.compiler import Compiler

BOUND, USUAL = 500, 60
"""Of a run that stops by itself: the largest number of rounds, and the number that is expected."""

Remaining = tuple[Mapping[str, float] | None, float | None]
"""Distances by global sample site, and nats of the ELBO, see :meth:`Stopping.remaining`."""


@dataclass(frozen=True)
class Outcome:
    """The result of a round, as a stopping rule uses it.

    Attributes:
        turn: the round as the server saw it.
        server: the server's state after it.
        params: the guide's global parameters after it.
        elbo: estimates of all rounds so far, ``(rounds,)``.
        cohort: positions of the clients whose uploads counted, int64.
        compiler: runs the run's traceable functions.
    """

    turn: Turn
    server: Any
    params: Params
    elbo: Tensor
    cohort: Tensor
    compiler: Compiler


class Stopping(ABC):
    """A stopping rule.

    Attributes:
        changing: names of the attributes that rounds change: tensors.
        bound: the largest number of rounds.
        usual: the number of rounds that is expected, within which compilation must pay.
    """

    changing: ClassVar[tuple[str, ...]]
    bound: int = BOUND
    usual: int = USUAL

    @property
    def state(self) -> dict[str, Tensor]:
        """All tensors that rounds change, by attribute."""
        return {name: getattr(self, name) for name in self.changing}

    @property
    def converged(self) -> bool | None:
        """True if the rule has ended the run; None of a rule that ends it after its rounds, converged or not."""
        return None

    @property
    def provisional(self) -> bool:
        """True if importance weights of draws of θ have yet to confirm the end."""
        return False

    @property
    def early(self) -> bool:
        """True if the end is provisional and q(θ) may be far from its target, so that the weights must be good."""
        return False

    def is_worth_correcting(
        self, distant: bool, noisy: bool, large: bool = True, mixture: bool = False
    ) -> bool:
        """Return whether an early end of large data is worth a correction, see :class:`Convergence`."""
        raise NotImplementedError

    def withdraw(self) -> None:
        """Withdraw a provisional end: the run goes on."""
        raise NotImplementedError

    @abstractmethod
    def rate(self, done: int) -> float:
        """The factor on the learning rates after so many rounds."""

    @abstractmethod
    def record(self, outcome: Outcome) -> None:
        """Record a round, and end the run if the rule is met."""

    @abstractmethod
    def remaining(self, params: Params, elbo: Tensor) -> Remaining:
        """Return the distances from convergence: of q(θ), by global site, in standard deviations; of the ELBO, in nats.

        Small distances are left out, or 0; None means that the rounds do not tell.

        Args:
            params: the guide's global parameters.
            elbo: estimates of all rounds so far, ``(rounds,)``.
        """
