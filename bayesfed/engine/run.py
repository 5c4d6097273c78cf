"""A run: its state between two rounds, the report of a round, and the error of a run that cannot go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bayesfed.data.federation import Federation
from bayesfed.elbo.program import Params, Program
from bayesfed.engine.plan import Plan
from bayesfed.engine.privacy import NO_PRIVACY, Privacy
from bayesfed.engine.run_file import RunFile
from bayesfed.engine.states import States
from bayesfed.engine.stopping.rule import Stopping
from bayesfed.tracing.compiler import Compiler

PERSONAL = "personal"
"""The part of the states that holds local variables of stateless clients, made from θ when a run is finished."""


@dataclass(frozen=True)
class Round:
    """The report of a round, which callbacks receive.

    Attributes:
        number: rounds done, from 1.
        rounds: number of rounds; an upper bound while the run may stop early.
        elbo: estimate of the ELBO during the round; NaN under noise.
        client_terms: the ELBO terms of the clients whose uploads count, ``(K,)``; NaN under noise.
        cohort: names of these clients.
        refused: names of the clients whose uploads do not count because they are not finite.
        seconds: duration of the round.
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
        run: as it was before the round that failed, but for the states of that round's clients:
            ``bf.finish(error.run)`` is the posterior so far.
        draws: the number of draws a step to try next, four times as many; None if it has not diverged, or its steps
            make no draws.
    """

    def __init__(self, message: str, run: Run, draws: int | None = None) -> None:
        super().__init__(f"round {run.done + 1}: {message}")
        self.run, self.draws = run, draws


@dataclass(eq=False)
class Run:
    """A run between two rounds.

    Attributes:
        plan: the options of the fit.
        program: the model/guide pair.
        federation: the clients' data.
        stopping: when the run ends, and the learning rates until then.
        cohort_size: K, the number of clients in a cohort.
        server: the server's state.
        clients: the clients' states.
        client_terms: the clients' last ELBO terms, ``(N,)``, NaN of a client that has not taken part.
        term_totals: their sum, and the number of clients that have taken part, float64 ``(2,)``.
        refused: number of uploads of each client that did not count, int64 ``(N,)``.
        clip: γ of privacy, ``()``.
        history: a number of each round, by the names of :data:`~bayesfed.engine.run_file.HISTORY`: float64
            ``(rounds,)``.
        done: rounds done.
        compiler: compiles the steps.
        file: the file that the run is saved to.
        confirmed: the posterior at a provisional end and what confirmed it, for :func:`bayesfed.finish`.
        accepted: between machines, round and attempt of each institution's answer that was accepted last, -1 before the
            first, int64 ``(institutions, 2)``. Such a run has made-up rows, and the state of one client.
    """

    plan: Plan
    program: Program
    federation: Federation
    stopping: Stopping
    cohort_size: int
    server: Any
    clients: States
    client_terms: Tensor
    term_totals: Tensor
    refused: Tensor
    clip: Tensor
    history: dict[str, Tensor]
    done: int = 0
    compiler: Compiler = field(default_factory=Compiler)
    file: RunFile | None = None
    confirmed: Any = None
    accepted: Tensor | None = None

    @property
    def state(self) -> dict[str, Any]:
        """All tensors that rounds change, by attribute, but those that are in files of their own."""
        in_memory = {} if self.plan.execution.states is not None else self.clients.tensors
        names = ("server", "client_terms", "term_totals", "refused", "clip", "history")
        state = {name: getattr(self, name) for name in names}
        state |= {"clients": in_memory, "stopping": self.stopping.state}
        return state if self.accepted is None else state | {"accepted": self.accepted}

    @property
    def rounds(self) -> int:
        """Number of rounds: as planned; an upper bound while the run may stop early; the actual number once it has."""
        return self.done if self.stopping.converged else self.stopping.bound

    @property
    def uphill(self) -> int:
        """The number of rounds in which a client's steps went uphill."""
        return int((self.history["uphill"][: self.done] > 0).sum())

    @property
    def rate(self) -> float:
        """The factor on the learning rates in the next round: half as large after each in which steps went uphill."""
        return self.stopping.rate(self.done) / 2**self.uphill

    @property
    def title(self) -> str:
        """The algorithm, its guide and ε, for people."""
        title = f"{self.plan.algorithm} ({self.program.guide_name})"
        return title if self.epsilon is None else f"{title}, ε = {self.epsilon:.3g}"

    @property
    def privacy(self) -> Privacy:
        """Clip and noise of the uploads; :data:`NO_PRIVACY` where the plan has none."""
        return self.plan.privacy or NO_PRIVACY

    @property
    def epsilon(self) -> float | None:
        """The ε that all rounds spend; None without privacy."""
        if self.plan.privacy is None:
            return None
        return self.privacy.spent(self.rounds, *self.sampling)

    @property
    def sampling(self) -> tuple[int, int]:
        """K of N clients, as privacy counts them: K = N for stateful clients.

        And between machines, where cohorts are no secret.
        """
        clients, memory = len(self.federation), self.clients.tensors.keys() - {PERSONAL}
        secret = not memory and self.accepted is None
        return (self.cohort_size if secret else clients), clients

    @property
    def multiplier(self) -> float:
        """Scale of the noise over the sensitivity; 0 without noise."""
        return self.privacy.multiplier(self.rounds, *self.sampling)

    @property
    def description(self) -> dict[str, Any]:
        """The run as plain data: a run's file is continued only by a run of the same description.

        The number of rounds may change, unless ε was spread over them.
        """
        plan, rounds = self.plan, "until convergence" if self.plan.rounds is None else "as given"
        spread = plan.privacy is not None and plan.privacy.epsilon is not None
        return plan.description | {
            "rounds": plan.rounds if spread else rounds,
            "clients_per_round": self.cohort_size,
            "chunk_size": plan.execution.chunk_size,
            "precision": plan.execution.precision,
            "dtype": str(self.federation.dtype),
            "states in files": plan.execution.states is not None,
        }

    @property
    def numbers(self) -> int:
        """About how many numbers a step of the cohort touches."""
        per_client = self.rows_of_step * self.federation.numbers_per_row + self.program.size
        return self.cohort_size * per_client

    @property
    def rows_of_step(self) -> int:
        """The largest number of a client's rows in a local step."""
        longest = int(self.federation.sufficient.lengths.max())
        return min(self.plan.batch_size or longest, longest)
