"""The plan that the server and the institutions have agreed on before anything is sent: each reads the same file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bayesfed.algorithms.registry import own_files
from bayesfed.engine.plan import Plan, first_difference
from bayesfed.formulas.formula import Formula
from bayesfed.formulas.settings import FormulaSettings
from bayesfed.rules.rule import Robust
from bayesfed.settings import EffectSettings, LeaveOneOutSettings


@dataclass(frozen=True, eq=False)
class DeploymentPlan(Plan):
    """The options of a fit between machines; those of :class:`~bayesfed.engine.plan.Plan` and six more.

    The model is never sent. ``execution`` is that of the server.

    Attributes:
        secure: the server sees only sums of the institutions' uploads, see :mod:`bayesfed.deploy.secure`.
        effects: the effects that the institutions compute sums for after the fit, see :mod:`bayesfed.effects.agreed`.
        leave_one_out: predictive densities that the institutions compute sums of after the fit, and the earlier fits
            that it is compared with, see :mod:`bayesfed.deploy.node_elpds`.
        chains: θ is drawn by chains after the rounds, see :mod:`bayesfed.deploy.server_chains`.
        reveal: ``"moments"`` for a fit to the moments of each client, which the server gets in one upload, see
            :mod:`bayesfed.deploy.revealed`.
        honest: with ``secure`` and privacy, the number of institutions whose shares of noise are enough, see
            :mod:`bayesfed.engine.discrete_noise`.

    Raises:
        ValueError: a formula, effects or leave-one-out with noise; chains with privacy, or an algorithm that corrects
            nothing; effects on the scale of a link, or for a new
            client; noise under secure sums without ``honest``, or ``honest`` without them; a robust rule with secure
            sums or noise; held-out rows; ``reveal`` with secure sums, privacy, a robust rule, minibatches, or what is
            asked of institutions after a fit.
    """

    secure: bool = False
    honest: int | None = None
    effects: tuple[EffectSettings, ...] = ()
    leave_one_out: LeaveOneOutSettings | None = None
    chains: bool = False
    reveal: Literal["moments"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.held_out is not None:
            raise ValueError("held_out: between machines give rounds")
        if (self.secure and self.noisy) != (self.honest is not None):
            raise ValueError(
                "honest is the number of institutions whose shares of noise are enough: secure sums with privacy need "
                "it, nothing else does"
            )
        if self.formula is not None and self.noisy:
            raise ValueError(
                "model.formula: levels, means and scales are agreed from reports and sums without noise, for which ε "
                "does not account: leave out the noise, or give model.name, a program whose constants are public"
            )
        if self.effects and self.noisy:
            raise ValueError("effects: their sums have no noise, leave out effects or privacy")
        if self.leave_one_out is not None and self.noisy:
            raise ValueError(
                "leave_one_out: its sums have no noise, leave out leave_one_out or privacy"
            )
        if self.chains and self.privacy is not None:
            raise ValueError(
                "deployment.chains: the sums of chains are of the clients' rows, without clip and noise, for which ε "
                "does not account: leave out deployment.chains or privacy"
            )
        if self.chains and not self.algorithm.corrected:
            raise ValueError(
                f"deployment.chains: {self.algorithm} does not correct draws of θ: use SFVI(), or leave it out"
            )
        for one in self.effects:
            if one.level == "new" or one.scale == "link":
                raise ValueError(
                    'effects: between machines level is "clients" or "average", and scale is "response"'
                )
        if self.honest is not None:
            if self.honest < 1:
                raise ValueError(f"honest is {self.honest}: noise needs at least one institution")
            if self.privacy is not None and self.privacy.seed is not None:
                raise ValueError(
                    "Privacy(seed=) is for tests in one process: whoever has the seed can subtract a share of noise"
                )
        if isinstance(self.algorithm.rule, Robust) and (self.secure or self.noisy):
            raise ValueError(
                f"rule: {type(self.algorithm.rule).__name__} combines single institutions' sums, which are not "
                "seen in a secure or noisy sum: use Mean"
            )

        if self.reveal is not None:
            self._check_reveal()

    def _check_reveal(self) -> None:
        """Fail on options that exclude an upload of moments.

        Raises:
            ValueError: names the option.
        """
        if self.reveal != "moments":
            raise ValueError(f'deployment.reveal is {self.reveal!r}; it can be "moments"')
        shown = "moments show the server the counts, means and covariances of each client"
        reasons = {
            "deployment.secure": (self.secure, f"{shown}, and secure sums show it none"),
            "privacy": (self.privacy is not None, f"{shown}, without clip and noise"),
            "effects": (
                bool(self.effects),
                "they are means over rows, which the server does not have",
            ),
            "leave_one_out": (
                self.leave_one_out is not None,
                "it is of rows, which the server does not have: bf.leave_one_client_out is of clients",
            ),
            "deployment.chains": (self.chains, "they follow by themselves where they are needed"),
            "schedule.batch_size": (
                self.batch_size is not None,
                "there are no rows to choose from",
            ),
            "algorithm.rule": (
                isinstance(self.algorithm.rule, Robust),
                "it combines institutions' uploads of a round, and there are no rounds with them",
            ),
        }
        for name, (given, why) in reasons.items():
            if given:
                raise ValueError(
                    f"{name} and deployment.reveal exclude each other: {why}: leave one out"
                )

    @property
    def asks_after_fit(self) -> bool:
        """Return whether the institutions are asked for sums after the fit."""
        return bool(self.effects) or self.leave_one_out is not None

    @property
    def formula(self) -> FormulaSettings | None:
        """The formula, before its coding is agreed and after; None of other models."""
        model = self.model
        if isinstance(model, Formula):
            return model.settings
        return model if isinstance(model, FormulaSettings) else None

    @property
    def description(self) -> dict[str, Any]:
        """The plan as plain data: an institution takes part only in a run of the same description."""
        own: dict[str, Any] = {"secure": self.secure, "honest": self.honest}
        if self.formula is not None:
            own["formula"] = self.formula.description
        if self.effects:
            own["effects"] = [one.model_dump() for one in self.effects]
        if self.leave_one_out is not None:
            own["leave_one_out"] = self.leave_one_out.model_dump()
        if self.chains:
            own["chains"] = True
        if self.reveal is not None:
            own["reveal"] = self.reveal
        plain: dict[str, Any] = json.loads(json.dumps(super().description | own))
        return plain | {"own code": code_digests(plain["algorithm"])}


def code_digests(settings: Any) -> dict[str, str]:
    """Return a digest of every file that holds parts of the user's own, by module: all machines must have the same.

    Args:
        settings: plain data of an algorithm, in which such parts are called ``module:name``.
    """
    files = {name.partition(":")[0]: file for name, file in own_files(settings).items()}
    return {
        module: hashlib.sha256(file.read_text(encoding="utf-8").encode()).hexdigest()[:16]
        for module, file in files.items()
        if module != "__main__"  # each machine has a script of its own
    }


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first difference between two descriptions, in words; None where there is none.

    Example:
        >>> from bayesfed.deploy.plan import difference
        >>> difference({"algorithm": {"lr": 0.1}, "seed": 0}, {"algorithm": {"lr": 0.2}, "seed": 0})
        'algorithm.lr is 0.1 here and 0.2 there'
    """
    if (found := first_difference(mine, theirs)) is None:
        return None
    name, here, there = found
    return f"{name} is {json.dumps(here)} here and {json.dumps(there)} there"
