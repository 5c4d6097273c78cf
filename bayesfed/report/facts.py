"""The facts of a fit that a report shows, as plain data: nothing here is rendered, and nothing is computed later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


class EffectTable(Protocol):
    """An effect with its table, such as :class:`bayesfed.effects.Effects`."""

    @property
    def estimand(self) -> str:
        """The quantity, in words."""

    @property
    def level(self) -> str:
        """The level and the rows, in words."""

    def to_frame(self) -> pd.DataFrame:
        """Return labels, mean, sd and interval, a row for each quantity."""


@dataclass(frozen=True)
class Global:
    """One number of a global variable.

    Attributes:
        label: the variable's name, with the index of an entry.
        mean, sd: of the draws.
        interval: its 94 % highest-density interval.
        mcse: Monte Carlo standard error of the mean.
        prior: median and 94 % interval of draws from the prior; None if there are none.
        density: densities of posterior and prior on one grid, ``(2, 60)``, NaN without a prior.
        sensitivity: to power-scaling of the prior and of the likelihood; None if not computed.
    """

    label: str
    mean: float
    sd: float
    interval: tuple[float, float]
    mcse: float
    prior: tuple[float, float, float] | None
    density: np.ndarray
    sensitivity: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False)
class ByClient:
    """A quantity of every client: a local variable, or a statistic of the client's outcomes that is predicted.

    Attributes:
        label: the variable's name with the index of an entry, or the statistic.
        clients: the N clients' names.
        mean: ``(N,)``.
        wide, narrow: 94 % and 50 % highest-density intervals, ``(N, 2)``.
        observed: the statistic of the observed outcomes, ``(N,)``; None of a variable, and of a share of outcomes that
            are predicted right.
        tail: the predictive probability of a value above the observed one, ``(N,)``, ties counting half; None as above.
    """

    label: str
    clients: list[str]
    mean: np.ndarray
    wide: np.ndarray
    narrow: np.ndarray
    observed: np.ndarray | None = None
    tail: np.ndarray | None = None

    @property
    def outside(self) -> np.ndarray:
        """The clients whose observed statistic lies outside the 94 % interval, bool ``(N,)``."""
        assert self.observed is not None
        return (self.observed < self.wide[:, 0]) | (self.observed > self.wide[:, 1])


@dataclass(frozen=True)
class Effect:
    """A table of effects, with the estimand, and the level or something else to note."""

    estimand: str
    note: str
    table: pd.DataFrame


@dataclass(frozen=True)
class Sent:
    """All messages of one kind that left an institution in a run.

    Attributes:
        kind: of the message, see :mod:`bayesfed.deploy.messages`.
        count: of the messages.
        numbers: in the tensors of all of them.
        size: of all of them, in bytes.
        tensors: names and shapes of the tensors of the last one.
    """

    kind: str
    count: int
    numbers: int
    size: int
    tensors: Mapping[str, list[int]]


@dataclass(frozen=True, eq=False)
class Study:
    """The facts of one fit.

    Attributes:
        name: a name of the run.
        model: the model's name or formula.
        program: its source; empty if it is not available.
        algorithm, seed, rounds: how it was fitted.
        settings: all settings, as text.
        clients, rows: their numbers; None for rows at institutions.
        draws: the number of draws that means and intervals are computed from.
        effective: the number of draws that count, as draws by importance sampling are repeated.
        converged: None if the number of rounds was given.
        caveat: a warning, with what to do, or empty.
        khat, khat_limit: Pareto k-hat, None if there is none, and the value up to which it is good.
        corrected: how draws of θ were corrected, in words, or empty.
        rhat, ess: of chains, if θ was drawn by chains.
        epsilon: ε of differential privacy that was spent, or None.
        privacy: the settings of privacy, if they are available.
        globals: the numbers of the global variables, at most :data:`bayesfed.report.collect.MOST_GLOBALS`.
        more_globals: the number of those that are left out.
        params: point estimates of the model's parameters, as text by name.
        locals: local variables by client; those of networks and other large ones are left out.
        more_locals: the number of the numbers of a client that are left out.
        checks: predictive checks by client.
        prior_checks: statistics of all outcomes beside their prior predictive distributions.
        effects: estimated effects.
        left_out: the table of clients that are left out in turn.
        elbo: the ELBO by round.
        seconds: of all rounds.
        deployed: whether the rows were at institutions, and only messages left them.
        sent: by institution, what left it according to its log.
        hashes: of program and data, in hexadecimal.
        software: names and versions.
    """

    name: str
    model: str
    program: str
    settings: str
    algorithm: str
    seed: int
    rounds: int
    clients: int
    rows: int | None
    draws: int
    effective: float
    converged: bool | None
    caveat: str
    khat: float | None
    khat_limit: float
    corrected: str
    rhat: float | None
    ess: float | None
    epsilon: float | None
    globals: list[Global]
    more_globals: int
    params: Mapping[str, str]
    locals: list[ByClient]
    more_locals: int
    checks: list[ByClient]
    prior_checks: list[ByClient]
    elbo: np.ndarray
    seconds: float
    privacy: Mapping[str, object] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    left_out: Effect | None = None
    deployed: bool = False
    sent: Mapping[str, list[Sent]] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Several fits beside each other.

    Attributes:
        table: by name of the run ``elpd``, ``se``, ``diff``, ``dse`` and ``weight`` of leave-one-out; None if there is
            none.
        why: the reason why there is none, or what to heed.
    """

    table: pd.DataFrame | None
    why: str
