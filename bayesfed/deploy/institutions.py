"""The sites of a run: who they are, where they are reached, and what is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from bayesfed.deploy.messages import (
    Hello,
    MessageError,
    Round,
    Schema,
    Tensors,
    of_kind,
    packed,
    schema_difference,
    unique,
)
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.transport import Carrier, Wait
from bayesfed.rules import Rule
from bayesfed.settings import Strict

M = TypeVar("M", bound=Strict)


@dataclass(frozen=True)
class Expected:
    """What a site brings that may join a run later."""

    clients: int
    rows: int


@dataclass(frozen=True)
class Patience:
    """What the server waits for.

    Attributes:
        sites: names of the sites that take part; a run begins once all have answered.
        seconds: how long a round waits for answers.
        minimum: how many of the sites that a round asks must answer in time; else it is asked again.
        attempts: how often.
        joining: how long a run waits for all sites at its start, in seconds.
        enough: a round goes on once so many of the sites that it asks have answered; by default all.
        late: in how many later rounds an answer still counts; until then its site is not asked again.
        expected: sites that are not waited for at the start, and what they bring when they join.

    Raises:
        ValueError: ``enough`` is fewer than the minimum; none of the sites is there at the start.
    """

    sites: tuple[str, ...]
    seconds: float = 600.0
    minimum: int = 1
    attempts: int = 10
    joining: float = 600.0
    enough: int | None = None
    late: int = 0
    expected: Mapping[str, Expected] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.enough is not None and self.enough < self.minimum:
            raise ValueError(
                f"enough: {self.enough} sites are fewer than the minimum, {self.minimum}"
            )
        if not set(self.sites) - self.expected.keys():
            raise ValueError("expected: a run begins with a site that is there at the start")

    def check(self, plan: DeploymentPlan) -> None:
        """Fail where answers of a part of the sites, or late ones, cannot count.

        Raises:
            ValueError: says why.
        """
        if plan.secure and (self.enough is not None or self.late):
            raise ValueError(
                "enough, late: a secure sum is of all whom its round asks: leave them out"
            )
        if self.late and plan.privacy is not None:
            raise ValueError(
                "late: clip and noise are of a round's own uploads: leave it out, or privacy"
            )
        if self.late and type(plan.algorithm.rule).stale is Rule.stale:
            raise ValueError(
                f"late: {plan.algorithm} uploads what is of use in its own round only; SFVI and PVI "
                "upload changes of what the server remembers"
            )

    @property
    def wait(self) -> Wait:
        """Of a round."""
        return Wait(self.seconds, self.enough, self.late * self.seconds)


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


@dataclass(frozen=True)
class Due:
    """An answer that has not come in its round: of which round, and of how many clients."""

    round: Round
    clients: int


class Sites:
    """The sites of a run, and where they are reached.

    Args:
        carrier: what carries messages.
        plan: what was agreed on.
        patience: what is waited for.
        say: told what happens, a line at a time.
    """

    def __init__(
        self, carrier: Carrier, plan: DeploymentPlan, patience: Patience, say: Callable[[str], None]
    ) -> None:
        self.carrier, self.plan, self.patience, self.say = carrier, plan, patience, say
        self.addresses: dict[str, str] = {}
        self.keys: dict[str, str] = {}
        self.refused = dict.fromkeys(patience.sites, 0)
        self.absent = dict.fromkeys(patience.sites, 0)
        self.due: dict[str, Due] = {}
        self._later: dict[str, bytes] = {}
        self.there = {name for name in patience.sites if name not in patience.expected}
        patience.check(plan)

    def members(self) -> list[Member]:
        """The sites, in the order of the plan; of those who may join later what is expected of them.

        Raises:
            MessageError: their data do not fit together, or clients are called the same.
            TimeoutError: one has not answered.
        """
        schemas = self.found(self.patience.joining)
        known = [schemas[name] for name in self.patience.sites if name in schemas]
        for schema in known[1:]:
            differs = schema_difference(known[0], schema)
            if differs is not None:
                raise MessageError(differs)
        unique(known)
        members, first = [], 0
        for name in self.patience.sites:
            schema = schemas[name] if name in schemas else self._expected(name, known[0])
            members.append(Member(schema, first))
            first += len(schema.clients)
        return members

    def _expected(self, name: str, like: Schema) -> Schema:
        brings = self.patience.expected[name]
        clients = [f"{name} {i + 1}" for i in range(brings.clients)]
        return like.model_copy(update={"site": name, "clients": clients, "rows": brings.rows})

    def found(self, seconds: float) -> dict[str, Schema]:
        """Where the sites are now that are there from the start.

        Raises:
            TimeoutError: one has not answered in time.
        """
        end, schemas = time.monotonic() + seconds, dict[str, Schema]()
        while missing := self.there - schemas.keys():
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError(
                    f"site {min(missing)!r} has not answered in {seconds:.0f} s ({len(missing)} of "
                    f"{len(self.there)} sites have not): is its worker running?"
                )
            known = {self.addresses[name] for name in schemas}
            schemas |= self._greeted(missing, known, max(1.0, min(left, 60.0)))
            time.sleep(0.2 if self.there - schemas.keys() else 0.0)
        return schemas

    def _greeted(self, names: Set[str], known: Set[str], seconds: float) -> dict[str, Schema]:
        """Those of these sites that answer at other addresses than the known ones, where they are from now on."""
        hello = {a: packed(Hello()) for a in self.carrier.reachable() if a not in known}
        owner = {address: name for name, address in self.addresses.items()}
        found: dict[str, list[tuple[str, Schema]]] = {}
        for address, payload in self._exchange(hello, Wait(seconds)).items():
            try:
                schema, _ = of_kind(payload, Schema)
            except MessageError as error:
                self.say(f"{address}: {error}")
                continue
            if owner.get(address, schema.site) != schema.site:
                self.say(f"{address} was site {owner[address]!r}, it is not {schema.site!r} now")
            elif schema.site in names:
                found.setdefault(schema.site, []).append((address, schema))
        for name in [name for name, who in found.items() if len(who) > 1]:
            where = " and ".join(sorted(address for address, _ in found.pop(name)))
            self.say(f"{where} say both that they are site {name!r}: neither is taken for it")
        self.addresses |= {name: who[0][0] for name, who in found.items()}
        return {name: who[0][1] for name, who in found.items()}

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
            for name, payload in self.sent(left, Wait(self.patience.seconds)).items():
                try:
                    found[name] = of_kind(payload, kind, run)
                except MessageError as error:
                    who = "" if f"site {name!r}" in str(error) else f"from site {name!r}: "
                    raise MessageError(f"{who}{error}") from None
            self.await_back(left.keys() - found.keys())
        if missing := requests.keys() - found.keys():
            raise TimeoutError(f"site {min(missing)!r} does not answer")
        return found

    def sent(self, requests: Mapping[str, bytes], wait: Wait) -> dict[str, bytes]:
        """What these sites answer in time, by site; those that do not are looked for at other addresses."""
        replies = self._exchange({self.addresses[n]: p for n, p in requests.items()}, wait)
        found = {n: replies[self.addresses[n]] for n in requests if self.addresses[n] in replies}
        if missing := requests.keys() - found.keys():
            busy = wait.enough is not None or wait.late > 0
            self._look_again(missing, elsewhere=busy)
        return found

    def idle(self, own: Mapping[str, Member], done: int, fewest: int) -> Mapping[str, Member]:
        """Those of these sites whose answers to earlier rounds are not waited for; all, where these are too few."""
        late = self.patience.late
        self.due = {n: due for n, due in self.due.items() if done - due.round.number <= late}
        free = {name: member for name, member in own.items() if name not in self.due}
        return free if len(free) >= fewest else own

    def belated(self) -> dict[str, bytes]:
        """What sites have answered since to an earlier round, by site; each is told once."""
        found, self._later = self._later, {}
        return {n: found[address] for n, address in self.addresses.items() if address in found}

    def _exchange(self, messages: Mapping[str, bytes], wait: Wait) -> dict[str, bytes]:
        found = self.carrier.exchange(messages, wait)
        self._later |= {at: payload for at, payload in found.items() if at not in messages}
        return {at: payload for at, payload in found.items() if at in messages}

    def await_back(self, names: Set[str]) -> None:
        """Wait until these sites can be asked again, for as long as a round waits for answers."""
        end, missing = time.monotonic() + self.patience.seconds, set(names)
        while missing and time.monotonic() < end:
            missing -= self._look_again(missing).keys()
            time.sleep(0.5 if missing else 0.0)

    def arrived(self) -> dict[str, Schema]:
        """Of the sites that may join later those that are there now."""
        missing = self.patience.expected.keys() - self.there
        return self._look_again(missing, elsewhere=True) if missing else {}

    def _look_again(self, names: Set[str], *, elsewhere: bool = False) -> dict[str, Schema]:
        """Those of these sites that answer, wherever they are now; who is busy where it was only at another address."""
        known = {self.addresses[n] for n in self.addresses if elsewhere or n not in names}
        return self._greeted(names, known, min(10.0, self.patience.seconds))
