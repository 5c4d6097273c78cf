"""The options of a fit, in one object: what is fitted to which rows, how, for how long and where."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bayesfed.algorithms import Algorithm
from bayesfed.algorithms.registry import settings_of
from bayesfed.algorithms.table import SFVI
from bayesfed.data.federation import Federation, Model
from bayesfed.engine.execution import Execution
from bayesfed.engine.privacy import Privacy
from bayesfed.settings import Schedule, check, validated


@dataclass(frozen=True, eq=False)
class Plan:
    """The options of a fit; :func:`bayesfed.fit` documents each of them.

    Attributes:
        model: the Pyro program.
        algorithm: how it is fitted.
        rounds: number of rounds; None for a run that stops by itself.
        clients_per_round: cohort size, as a number of clients (int) or a fraction of them (float).
        batch_size: rows of a local step; None for all.
        privacy: clip and noise of the uploads.
        held_out: rows of the same clients that end the run, see :mod:`bayesfed.engine.stopping.held_out`.
        seed: of all streams of noise but those of privacy.
        execution: where and how the clients' work runs.
        precision: the largest Monte Carlo error of the globals' means, in their standard deviations.

    Raises:
        TypeError: the model or the algorithm is something else.
        ValueError: an option is out of range, or two options exclude each other; the message names them.

    Example:
        >>> from bayesfed import models
        >>> from bayesfed.engine.plan import Plan
        >>> Plan(models.eight_schools, batch_size=0)
        Traceback (most recent call last):
        bayesfed.settings.SettingsError: batch_size is 0; it must be at least 1
    """

    model: Model
    algorithm: Algorithm = field(default_factory=SFVI)
    rounds: int | None = None
    clients_per_round: int | float = 1.0
    batch_size: int | None = None
    privacy: Privacy | None = None
    held_out: Federation | None = None
    seed: int = 0
    execution: Execution = field(default_factory=Execution)
    precision: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise TypeError(
                f"model is {self.model!r}: give a Pyro program of the federation, such as models.eight_schools"
            )
        if not isinstance(self.algorithm, Algorithm):
            raise TypeError(
                f"algorithm is {self.algorithm!r}: give an object of the kind that bf.FedAvg() returns"
            )
        validated(Schedule, {name: getattr(self, name) for name in Schedule.model_fields})
        check(self.algorithm)
        if self.held_out is not None:
            self._check_held_out()
        elif self.rounds is None and self.privacy is not None:
            raise ValueError("rounds: ε depends on the number of rounds, so privacy needs one")
        if self.precision is not None:
            self._check_precision()
        if self.noisy and self.algorithm.rule.no_noise:
            raise ValueError(f"{self.algorithm} cannot be private: {self.algorithm.rule.no_noise}")

    def whole(self, clients: int) -> bool:
        """Return whether all of so many clients take part with all rows, without noise, until θ has converged."""
        given = (self.rounds, self.batch_size, self.privacy, self.held_out)
        size = self.clients_per_round
        everyone = size == (clients if isinstance(size, int) else 1.0)
        return everyone and all(option is None for option in given)

    def _check_held_out(self) -> None:
        if self.rounds is not None:
            raise ValueError("held_out: its rows say when the run ends, leave out rounds")
        if self.privacy is not None:
            raise ValueError(
                "held_out: privacy accounts for uploads only, not for what clients send about held-out rows: "
                "give rounds instead"
            )
        if self.execution.group is not None:
            raise ValueError("held_out: a run in several processes needs rounds instead")

    def _check_precision(self) -> None:
        if not self.algorithm.corrected:
            raise ValueError(
                f"precision: {self.algorithm} does not correct draws of θ by importance weights: use SFVI()"
            )
        if self.privacy is not None:
            raise ValueError(
                "precision: importance weights are computed from the clients' rows without noise, leave out precision "
                "or privacy"
            )

    @property
    def noisy(self) -> bool:
        """True if noise is added to the sums of the uploads."""
        return self.privacy is not None and self.privacy.noisy

    @property
    def description(self) -> dict[str, Any]:
        """The plan as plain data: all options but the model, which is code, and the execution."""
        return {
            "algorithm": settings_of(self.algorithm),
            "rounds": self.rounds,
            "clients_per_round": self.clients_per_round,
            "batch_size": self.batch_size,
            "privacy": self.privacy and asdict(self.privacy),
            "held_out": None if self.held_out is None else self.held_out.rows,
            "seed": self.seed,
        } | ({} if self.precision is None else {"precision": self.precision})


def first_difference(one: Any, other: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return the first entry in which two descriptions differ: its path and both values; None if they are equal.

    Example:
        >>> from bayesfed.engine.plan import first_difference
        >>> first_difference({"algorithm": {"lr": 0.1}, "seed": 0}, {"algorithm": {"lr": 0.2}, "seed": 0})
        ('algorithm.lr', 0.1, 0.2)
    """
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return None if one == other else (name, one, other)
    entries = (
        first_difference(
            one.get(key, "absent"), other.get(key, "absent"), f"{name}.{key}".lstrip(".")
        )
        for key in [*one, *other]
    )
    return next((entry for entry in entries if entry is not None), None)
