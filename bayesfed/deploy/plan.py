"""What the server and the sites have agreed on before anything is sent: the same experiment file, read by each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bayesfed.algorithms.algorithm import Algorithm
from bayesfed.algorithms.registry import settings_of
from bayesfed.data.federation import Model
from bayesfed.engine.privacy import Privacy
from bayesfed.rules import Mean


@dataclass(frozen=True)
class Plan:
    """A fit, but for the clients.

    Attributes:
        model: the Pyro program; it is never sent.
        algorithm: how it is fitted.
        rounds: how many, None until it has settled.
        clients_per_round: cohort size, see :func:`bayesfed.fit`.
        batch_size: rows of a local step.
        privacy: what is clipped, and the noise.
        seed: of every stream of noise but that of privacy.
        secure: the server sees sums of the sites' uploads only, see :mod:`bayesfed.deploy.secure`.
        honest: with ``secure`` and privacy, the shares of noise of how many sites are noise enough, see
            :mod:`bayesfed.deploy.noise_shares`.
        median: what counts is the median of the sites' mean moves, number by number, in place of the mean of all
            clients': a few sites that lie then move little, whatever they send; and sites that differ from most
            count less. For rules that average moves.

    Raises:
        ValueError: noise under secure sums without ``honest``, or ``honest`` without them; ``median`` of what is no
            average, or with secure sums or noise.
    """

    model: Model
    algorithm: Algorithm
    rounds: int | None = None
    clients_per_round: int | float = 1.0
    batch_size: int | None = None
    privacy: Privacy | None = None
    seed: int = 0
    secure: bool = False
    honest: int | None = None
    median: bool = False

    def __post_init__(self) -> None:
        if (self.secure and self.noisy) != (self.honest is not None):
            raise ValueError(
                "honest says of how many sites the shares of noise must be enough: with secure sums and privacy it is "
                "needed, else not"
            )
        if self.median and (self.secure or self.noisy):
            raise ValueError(
                "median: single sites are not seen in a secure or noisy sum: leave it out"
            )
        if self.median and not isinstance(self.algorithm.rule, Mean):
            raise ValueError(
                f"median: {self.algorithm} does more with its clients' uploads than average them, so "
                "that no site can stand for another; FedAvg, FedABML and others whose server moves by the mean can"
            )

    @property
    def noisy(self) -> bool:
        """Whether the sums of the uploads are."""
        return self.privacy is not None and bool(self.privacy.epsilon or self.privacy.noise)

    @property
    def terms(self) -> dict[str, Any]:
        """The settings as plain data: a site takes part in a run with the very same only."""
        found = {
            "algorithm": settings_of(self.algorithm),
            "rounds": self.rounds,
            "clients_per_round": self.clients_per_round,
            "batch_size": self.batch_size,
            "privacy": self.privacy and asdict(self.privacy),
            "seed": self.seed,
            "secure": self.secure,
            "honest": self.honest,
            "median": self.median,
        }
        plain: dict[str, Any] = json.loads(json.dumps(found))
        return plain


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any], where: str = "") -> str | None:
    """In what two sites' terms differ, in words; None where in nothing.

    Example:
        >>> from bayesfed.deploy.plan import difference
        >>> difference({"algorithm": {"lr": 0.1}, "seed": 0}, {"algorithm": {"lr": 0.2}, "seed": 0})
        'algorithm.lr is 0.1 here and 0.2 there'
    """
    for name in [*mine, *theirs]:
        one, other = mine.get(name), theirs.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            found = difference(one, other, f"{where}{name}.")
            if found is not None:
                return found
        elif one != other or (name in mine) != (name in theirs):
            return f"{where}{name} is {json.dumps(one)} here and {json.dumps(other)} there"
    return None
