"""The plan that the server and the institutions have agreed on before anything is sent: each reads the same file."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayesfed.engine.plan import Plan


@dataclass(frozen=True, eq=False)
class DeploymentPlan(Plan):
    """The options of a fit between machines; those of :class:`~bayesfed.engine.plan.Plan` and two more.

    The model is never sent. ``execution`` is that of the server.

    Attributes:
        secure: the server sees only sums of the institutions' uploads, see :mod:`bayesfed.deploy.secure`.
        honest: with ``secure`` and privacy, the number of institutions whose shares of noise are enough, see
            :mod:`bayesfed.engine.discrete_noise`.

    Raises:
        ValueError: noise under secure sums without ``honest``, or ``honest`` without them; a robust rule with
            secure sums or noise; held-out rows.
    """

    secure: bool = False
    honest: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.held_out is not None:
            raise ValueError("held_out: between machines give rounds")
        if (self.secure and self.noisy) != (self.honest is not None):
            raise ValueError(
                "honest is the number of institutions whose shares of noise are enough: secure sums with privacy need "
                "it, nothing else does"
            )
        if self.honest is not None:
            if self.honest < 1:
                raise ValueError(f"honest is {self.honest}: noise needs at least one institution")
            if self.privacy is not None and self.privacy.seed is not None:
                raise ValueError(
                    "Privacy(seed=) is for tests in one process: whoever has the seed can subtract a share of noise"
                )
        if self.algorithm.rule.robust and (self.secure or self.noisy):
            raise ValueError(
                f"rule: {type(self.algorithm.rule).__name__} combines single institutions' sums, which are not "
                "seen in a secure or noisy sum: use Mean"
            )

    @property
    def description(self) -> dict[str, Any]:
        """The plan as plain data: an institution takes part only in a run of the very same description."""
        own = {"secure": self.secure, "honest": self.honest}
        plain: dict[str, Any] = json.loads(json.dumps(super().description | own))
        return plain | {"own code": code_digests(plain["algorithm"])}


def code_digests(settings: Any) -> dict[str, str]:
    """Return a digest of every file that holds parts of the user's own, by module: all machines must have the same.

    Args:
        settings: plain data of an algorithm, in which such parts are called ``module:name``.
    """
    if isinstance(settings, list):
        return {k: v for item in settings for k, v in code_digests(item).items()}
    if not isinstance(settings, dict):
        return {}
    found = code_digests(list(settings.values()))
    module, colon, _ = str(settings.get("name")).partition(":")
    file = getattr(sys.modules.get(module), "__file__", None)
    if colon and file is not None and module != "__main__":  # each machine has a script of its own
        text = Path(file).read_text(encoding="utf-8")
        found[module] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any], where: str = "") -> str | None:
    """The first difference between two descriptions, in words; None where there is none.

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
