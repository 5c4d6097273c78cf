"""The sites of a run: who they are, where they are reached, and what is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from bayesfed.deploy.carrier import Carrier
from bayesfed.deploy.messages import (
    Hello,
    MessageError,
    Schema,
    Tensors,
    of_kind,
    packed,
    schema_difference,
    unique,
)
from bayesfed.deploy.plan import Plan
from bayesfed.settings import Strict

M = TypeVar("M", bound=Strict)


@dataclass(frozen=True)
class Patience:
    """What the server waits for.

    Attributes:
        sites: names of the sites that take part; a run begins once all have answered.
        seconds: how long a round waits for answers.
        minimum: how many of the sites that a round asks must answer in time; else it is asked again.
        attempts: how often.
        joining: how long a run waits for all sites at its start, in seconds.
    """

    sites: tuple[str, ...]
    seconds: float = 600.0
    minimum: int = 1
    attempts: int = 10
    joining: float = 600.0


@dataclass(frozen=True)
class Member:
    """A site of the run.

    Attributes:
        schema: what it has.
        first: position of its first client among all.
    """

    schema: Schema
    first: int

    @property
    def name(self) -> str:
        """What it is called."""
        return self.schema.site

    def own(self, cohort: Tensor) -> Tensor:
        """Which of a cohort are its clients: bool ``(K,)``."""
        return (cohort >= self.first) & (cohort < self.first + len(self.schema.clients))


class Sites:
    """The sites of a run, and where they are reached.

    Args:
        carrier: what carries messages.
        plan: what was agreed on.
        patience: what is waited for.
        say: told what happens, a line at a time.
    """

    def __init__(
        self, carrier: Carrier, plan: Plan, patience: Patience, say: Callable[[str], None]
    ) -> None:
        self.carrier, self.plan, self.patience, self.say = carrier, plan, patience, say
        self.addresses: dict[str, str] = {}
        self.keys: dict[str, str] = {}
        self.refused = dict.fromkeys(patience.sites, 0)
        self.absent = dict.fromkeys(patience.sites, 0)

    def members(self) -> list[Member]:
        """The sites, in the order of the plan.

        Raises:
            MessageError: their data do not fit together, or clients are called the same.
            TimeoutError: one has not answered.
        """
        schemas = self.found(self.patience.joining)
        ordered = [schemas[name] for name in self.patience.sites]
        for schema in ordered[1:]:
            differs = schema_difference(ordered[0], schema)
            if differs is not None:
                raise MessageError(differs)
        unique(ordered)
        members, first = [], 0
        for schema in ordered:
            members.append(Member(schema, first))
            first += len(schema.clients)
        return members

    def found(self, seconds: float) -> dict[str, Schema]:
        """Where the sites are now.

        Raises:
            TimeoutError: one has not answered in time.
        """
        end, schemas = time.monotonic() + seconds, dict[str, Schema]()
        while True:
            missing = set(self.patience.sites) - schemas.keys()
            if not missing:
                return schemas
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError(
                    f"site {min(missing)!r} has not answered in {seconds:.0f} s ({len(missing)} of "
                    f"{len(self.patience.sites)} sites have not): is its worker running?"
                )
            unknown = [a for a in self.carrier.reachable() if a not in self._where(schemas)]
            hello = dict.fromkeys(unknown, packed(Hello()))
            for address, payload in self.carrier.exchange(hello, max(1.0, min(left, 60.0))).items():
                try:
                    schema, _ = of_kind(payload, Schema)
                except MessageError as error:
                    self.say(f"{address}: {error}")
                    continue
                if schema.site in self.patience.sites:
                    schemas[schema.site] = schema
                    self.addresses[schema.site] = address
            time.sleep(0.0 if set(self.patience.sites) == schemas.keys() else 0.2)

    def _where(self, schemas: Mapping[str, Schema]) -> set[str]:
        return {self.addresses[name] for name in schemas}

    def told(
        self, requests: Mapping[str, bytes], kind: type[M], run: str
    ) -> dict[str, tuple[M, dict[str, Tensors]]]:
        """What all of these sites answer; who does not is asked again.

        Raises:
            MessageError: a site refuses.
            TimeoutError: one does not answer.
        """
        found: dict[str, tuple[M, dict[str, Tensors]]] = {}
        for _ in range(self.patience.attempts):
            left = {name: payload for name, payload in requests.items() if name not in found}
            if not left:
                break
            for name, payload in self.sent(left).items():
                found[name] = of_kind(payload, kind, run)
            self.await_back(left.keys() - found.keys())
        if missing := requests.keys() - found.keys():
            raise TimeoutError(f"site {min(missing)!r} does not answer")
        return found

    def sent(self, requests: Mapping[str, bytes]) -> dict[str, bytes]:
        """What these sites answer in time, by site; those that do not are looked for at other addresses."""
        at = {self.addresses[name]: payload for name, payload in requests.items()}
        replies = self.carrier.exchange(at, self.patience.seconds)
        found = {n: replies[self.addresses[n]] for n in requests if self.addresses[n] in replies}
        if len(found) < len(requests):
            self._look_again(requests.keys() - found.keys())
        return found

    def await_back(self, names: Set[str]) -> None:
        """Wait until these sites can be asked again, for as long as a round waits for answers."""
        end, missing = time.monotonic() + self.patience.seconds, set(names)
        while missing and time.monotonic() < end:
            missing -= self._look_again(missing)
            time.sleep(0.5 if missing else 0.0)

    def _look_again(self, names: Set[str]) -> set[str]:
        """Those of these sites that answer, wherever they are now."""
        known = {self.addresses[n] for n in self.addresses if n not in names}
        hello = {a: packed(Hello()) for a in self.carrier.reachable() if a not in known}
        seconds, found = min(10.0, self.patience.seconds), set()
        for address, payload in self.carrier.exchange(hello, seconds).items():
            try:
                schema, _ = of_kind(payload, Schema)
            except MessageError:
                continue
            if schema.site in names:
                self.addresses[schema.site] = address
                found.add(schema.site)
        return found
