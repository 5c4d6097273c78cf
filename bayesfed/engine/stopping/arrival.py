"""The stopping rule of a run whose server's steps on a point estimate of θ say when they have converged."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bayesfed.elbo.program import Params
from bayesfed.engine.stopping.convergence import LEAST, rise
from bayesfed.engine.stopping.rule import Outcome, Remaining, Stopping
from bayesfed.rules.quasi_newton import converged


@dataclass
class Arrival(Stopping):
    """End when the server's steps are short, and the clients' terms neither rise nor fall, beyond their noise.

    Attributes:
        nats: the rise of the clients' terms that counts as none.
        ended: whether the run has ended, ``()``.
    """

    changing = ("ended",)
    nats: float
    ended: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))

    @property
    def converged(self) -> bool:
        """True if the run has ended."""
        return bool(self.ended)

    def rate(self, done: int) -> float:
        """Return 1: rates do not fall."""
        return 1.0

    def record(self, outcome: Outcome) -> None:
        """End the run if the server's steps are short."""
        past = outcome.elbo[-LEAST:]
        moved = max(rise(past), rise(-past))
        if converged(outcome.server["newton"]) and moved < self.nats:
            self.ended = torch.ones_like(self.ended)

    def remaining(self, params: Params, elbo: Tensor) -> Remaining:
        """Return that nothing is left, or that it is unknown."""
        return ({}, 0.0) if self.converged else (None, None)
