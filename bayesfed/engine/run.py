"""A run: what it is between two rounds, what is told of a round, and what is left of a run that cannot go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bayesfed.algorithms.algorithm import Algorithm
from bayesfed.algorithms.registry import settings_of
from bayesfed.data.federation import Federation
from bayesfed.elbo.program import Params, Program
from bayesfed.engine.execution import Execution
from bayesfed.engine.privacy import Privacy
from bayesfed.engine.resume import Checkpoint
from bayesfed.engine.states import States
from bayesfed.engine.stopping.convergence import Settling
from bayesfed.engine.stopping.held_out import HeldOut
from bayesfed.steps.gradients import annealed
from bayesfed.tracing.compiler import Compiler

if TYPE_CHECKING:
    from bayesfed.output.posterior import Posterior

MADE = "personal"
"""What clients that keep nothing make of θ in the end."""


@dataclass(frozen=True)
class Round:
    """What a callback sees after a round.

    Attributes:
        number: rounds done, from 1.
        rounds: rounds to do; at most, where the run stops by itself.
        elbo: estimate of the ELBO during the round; NaN where privacy keeps it.
        client_terms: the ELBO terms of the clients whose uploads count, ``(K,)``; NaN likewise.
        cohort: names of these clients.
        refused: names of those whose uploads do not count, as they are not finite.
        seconds: time that the round took.
        params: the guide's global parameters after the round, unconstrained.
    """

    number: int
    rounds: int
    elbo: float
    client_terms: Tensor
    cohort: Sequence[str]
    refused: Sequence[str]
    seconds: float
    params: Params


class Stopped(FloatingPointError):
    """A run that cannot go on.

    Attributes:
        run: as it was before the round that failed, but for what clients of that round keep: ``bf.finish(error.run)``
            is the posterior that it has come to.
    """

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(f"round {run.done + 1}: {message}")
        self.run = run


@dataclass
class Run:
    """A run between two rounds.

    Attributes:
        program: the model/guide pair.
        federation: the clients' data.
        algorithm: the algorithm.
        rounds: how many rounds there are to be; where it stops by itself, at most, and once it has, those that it took.
        size: K, clients in a cohort.
        batch_size: rows of a local step, None for all.
        privacy: what happens to uploads, if anything.
        seed: of every stream of noise.
        execution: how it runs.
        server: the server's state.
        clients: what the clients keep.
        known: the clients' last ELBO terms, ``(N,)``, NaN where a client has not taken part.
        said: their sum, and how many clients have taken part, float64 ``(2,)``.
        refused: how many uploads of each client did not count, int64 ``(N,)``.
        clip: γ of ``privacy``, ``()``.
        history: ELBO, seconds and number of uploads that count of each round, ``(3, rounds)``.
        path: where q(θ) has been, see :mod:`bayesfed.engine.stopping.drift`.
        settling: by what it stops by itself, see :mod:`bayesfed.engine.stopping`;
            None where rounds were given.
        done: rounds done.
        compiler: what compiles the steps.
        file: where the run is kept after its rounds, if anywhere.
        posterior: of a run that is done, where draws around q(θ) have been weighed to see whether it is.
        accepted: of a run between machines: round and attempt of each site's answer that was taken last, -1 where none
            was, int64 ``(sites, 2)``. Such a run has made-up rows, and what one client would keep.
    """

    program: Program
    federation: Federation
    algorithm: Algorithm
    rounds: int
    size: int
    batch_size: int | None
    privacy: Privacy | None
    seed: int
    execution: Execution
    server: Any
    clients: States
    known: Tensor
    said: Tensor
    refused: Tensor
    clip: Tensor
    history: Tensor
    path: Tensor
    settling: Settling | HeldOut | None = None
    done: int = 0
    compiler: Compiler = field(default_factory=Compiler)
    file: Checkpoint | None = None
    posterior: Posterior | None = None
    accepted: Tensor | None = None

    @property
    def state(self) -> dict[str, Any]:
        """All tensors that rounds change, by attribute, but those that are in files of their own."""
        kept = {} if self.execution.states is not None else self.clients.tensors
        names = ("server", "known", "said", "refused", "clip", "history", "path")
        state = {name: getattr(self, name) for name in names} | {"clients": kept}
        if self.accepted is not None:
            state["accepted"] = self.accepted
        return state if self.settling is None else state | {"settling": self.settling.state}

    @property
    def near(self) -> bool:
        """Whether it is done if draws around q(θ) say so."""
        return isinstance(self.settling, Settling) and self.settling.near

    def go_on(self) -> None:
        """The draws did not."""
        assert isinstance(self.settling, Settling)
        self.settling.go_on()
        self.rounds = self.history.shape[1]

    @property
    def rate(self) -> float:
        """By what the learning rates of the next round are multiplied."""
        final = self.algorithm.lr_decay
        if self.settling is None:
            return annealed(final, self.done / self.rounds)
        return self.settling.rate(final, self.done)

    @property
    def title(self) -> str:
        """The run in words."""
        title = f"{self.algorithm} ({self.program.guide_name})"
        return title if self.epsilon is None else f"{title}, ε = {self.epsilon:.3g}"

    @property
    def epsilon(self) -> float | None:
        """ε that all rounds spend."""
        if self.privacy is None:
            return None
        return self.privacy.spent(self.rounds, *self.sampling)

    @property
    def sampling(self) -> tuple[int, int]:
        """K of N clients, as privacy counts them: K = N where clients keep something from round to round.

        And between machines, where cohorts are no secret.
        """
        clients, memory = len(self.federation), self.clients.tensors.keys() - {MADE}
        return (clients if memory or self.accepted is not None else self.size), clients

    @property
    def multiplier(self) -> float:
        """Scale of the noise over the sensitivity; 0 without."""
        return 0.0 if self.privacy is None else self.privacy.multiplier(self.rounds, *self.sampling)

    @property
    def settings(self) -> dict[str, Any]:
        """What a run that goes on from this one must have in common with it, beside model and data."""
        spread = self.privacy is not None and self.privacy.epsilon is not None
        return {
            "algorithm": settings_of(self.algorithm),
            "cohort": self.size,
            "batch_size": self.batch_size,
            "chunk_size": self.execution.chunk_size,
            "privacy": self.privacy and asdict(self.privacy),
            # of the rounds that are over: told with noise for as many as there were to be
            "rounds for its epsilon": self.rounds if spread else None,
            "precision": self.execution.precision,
            "type": str(self.federation.dtype),
            "states in files": self.execution.states is not None,
            "rounds": "as given" if self.settling is None else "until it has settled",
            "held out": self.settling.rows.rows if isinstance(self.settling, HeldOut) else None,
            "seed": self.seed,
        }

    @property
    def numbers(self) -> int:
        """About how many numbers a step of the cohort touches."""
        rows = min(self.batch_size or self.federation.rows, int(self.federation.lengths.max()))
        return self.size * (rows * self.federation.numbers_per_row + self.program.size)
