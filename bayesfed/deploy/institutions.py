"""The institutions of a run: their names and data, their nodes' addresses, and how long the server waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from bayesfed.data.plural import plural
from bayesfed.deploy.bundles import join, split_replies
from bayesfed.deploy.messages import (
    Done,
    Hello,
    MessageError,
    RoundId,
    Schema,
    Tensors,
    pack,
    unpack_as,
)
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.schemas import check_unique, schema_difference
from bayesfed.deploy.transport import Carrier, Wait
from bayesfed.engine.run import Run
from bayesfed.rules import Rule
from bayesfed.settings import Strict

M = TypeVar("M", bound=Strict)


@dataclass(frozen=True)
class Expected:
    """The numbers of clients and rows of an institution that may join a run later."""

    clients: int
    rows: int


@dataclass(frozen=True)
class Patience:
    """The institutions for which the server waits, and for how long.

    Attributes:
        institutions: names of the institutions that take part; a run begins once all have answered.
        seconds: how long a round waits for answers.
        minimum: the number of institutions that must answer a round in time; else it is asked again.
        attempts: how often a round is asked.
        joining: how long a run waits for all institutions at its start, in seconds.
        enough: a round goes on once so many of the institutions that it asks have answered; by default all.
        max_staleness: in how many later rounds an answer counts; until then its institution is not asked again.
        expected: institutions that are not waited for at the start, and their data when they join.

    Raises:
        ValueError: ``enough`` is below the minimum; no institution takes part from the start.
    """

    institutions: tuple[str, ...]
    seconds: float = 600.0
    minimum: int = 1
    attempts: int = 10
    joining: float = 600.0
    enough: int | None = None
    max_staleness: int = 0
    expected: Mapping[str, Expected] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.enough is not None and self.enough < self.minimum:
            raise ValueError(
                f"enough: {plural(self.enough, 'institution is', 'institutions are')} fewer than the minimum, "
                f"{self.minimum}"
            )
        if not set(self.institutions) - self.expected.keys():
            raise ValueError(
                "expected: a run begins with an institution that is there at the start"
            )

    def check(self, plan: DeploymentPlan) -> None:
        """Fail if the plan does not allow answers of some of the institutions, or stale ones.

        Raises:
            ValueError: gives the reason.
        """
        if plan.secure and (self.enough is not None or self.max_staleness):
            raise ValueError(
                "enough, max_staleness: a secure sum is of all whom its round asks: leave them out"
            )
        if self.max_staleness and plan.privacy is not None:
            raise ValueError(
                "max_staleness: clip and noise are of a round's own uploads: leave it out, or privacy"
            )
        if self.max_staleness and type(plan.algorithm.rule).stale is Rule.stale:
            raise ValueError(
                f"max_staleness: {plan.algorithm} uploads what is of use in its own round only; SFVI "
                "and PVI upload changes of what the server remembers"
            )

    @property
    def wait(self) -> Wait:
        """The wait for the answers to a round."""
        return Wait(self.seconds, self.enough, self.max_staleness * self.seconds)


@dataclass(frozen=True)
class Institution:
    """An institution of the run.

    Attributes:
        schema: a description of its data.
        first: the position of its first client among all.
    """

    schema: Schema
    first: int

    @property
    def name(self) -> str:
        """The institution's name."""
        return self.schema.institution

    def owns(self, cohort: Tensor) -> Tensor:
        """Return which clients of a cohort are its own: bool ``(K,)``."""
        return (cohort >= self.first) & (cohort < self.first + len(self.schema.clients))


@dataclass(frozen=True)
class Overdue:
    """An answer that has not come in its round: the round, and the number of clients that it is of."""

    round: RoundId
    clients: int


SILENCE = 3.0
"""After so many seconds the server says for which institutions it waits at the start of a run."""


class Institutions:
    """The institutions of a run, and the addresses of their nodes.

    Args:
        carrier: the transport of messages.
        plan: the fit.
        patience: how long the server waits, and for whom.
        report: called with a line of text for each event.

    Attributes:
        addresses: by institution, where its node was reached last.
        keys: for secure sums, the public keys of the run, in hexadecimal.
        refused, absent: by institution, the number of its answers that were refused, or did not come in time.
        overdue: by institution, the answer that has not come.
        present: the institutions that take part already.
        exchanges: the number of times that institutions were asked and waited for, their greeting included.
        chain_exchanges: the number of exchanges that chains have taken.
    """

    def __init__(
        self,
        carrier: Carrier,
        plan: DeploymentPlan,
        patience: Patience,
        report: Callable[[str], None],
    ) -> None:
        self.carrier, self.plan, self.patience, self.report = carrier, plan, patience, report
        self.addresses: dict[str, str] = {}
        self.keys: dict[str, str] = {}
        self.refused = dict.fromkeys(patience.institutions, 0)
        self.absent = dict.fromkeys(patience.institutions, 0)
        self.overdue: dict[str, Overdue] = {}
        self.present = set(patience.institutions) - patience.expected.keys()
        self.exchanges = 0
        self.chain_exchanges = 0
        self._queued: dict[str, list[bytes]] = {}
        self._further: dict[str, list[bytes]] = {}
        self._found: dict[tuple[str, bytes], bytes] = {}
        self._stale: dict[str, bytes] = {}
        patience.check(plan)

    def gather(self) -> list[Institution]:
        """Wait for the institutions, and return them in the order of the plan; some may be expected to join later.

        Raises:
            MessageError: their data do not fit together, or clients have the same name.
            TimeoutError: an institution has not answered.
        """
        schemas = self._find_all(self.patience.joining)
        self.exchanges += 1
        known = [schemas[name] for name in self.patience.institutions if name in schemas]
        for schema in known[1:]:
            differs = schema_difference(known[0], schema)
            if differs is not None:
                raise MessageError(differs)
        check_unique(known)
        members, first = [], 0
        for name in self.patience.institutions:
            schema = schemas[name] if name in schemas else self._expected_schema(name, known[0])
            members.append(Institution(schema, first))
            first += len(schema.clients)
        return members

    def _expected_schema(self, name: str, like: Schema) -> Schema:
        expected = self.patience.expected[name]
        clients = [f"{name} {i + 1}" for i in range(expected.clients)]
        update = {"institution": name, "clients": clients, "rows": expected.rows}
        return like.model_copy(update=update)

    def _find_all(self, seconds: float) -> dict[str, Schema]:
        """Wait for all institutions that are there from the start, and return their schemas."""
        end, schemas = time.monotonic() + seconds, dict[str, Schema]()
        quiet = time.monotonic() + SILENCE
        while missing := self.present - schemas.keys():
            if time.monotonic() > quiet:
                self.report(f"waiting for {', '.join(sorted(missing))}: at most {seconds:.0f} s")
                quiet = float("inf")
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError(
                    f"institution {min(missing)!r} has not answered in {seconds:.0f} s ({len(missing)} of "
                    f"{plural(len(self.present), 'institution has', 'institutions have')} not): is its node running?"
                )
            known = {self.addresses[name] for name in schemas}
            schemas |= self._greet(missing, known, max(1.0, min(left, 60.0)))
            time.sleep(0.2 if self.present - schemas.keys() else 0.0)
        return schemas

    def _greet(self, names: Set[str], known: Set[str], seconds: float) -> dict[str, Schema]:
        """Look for institutions at all but the known addresses; note the addresses, and return the schemas."""
        hello = {a: pack(Hello()) for a in self.carrier.reachable() if a not in known}
        owner = {address: name for name, address in self.addresses.items()}
        found: dict[str, list[tuple[str, Schema]]] = {}
        for address, payload in self._exchange(hello, Wait(seconds)).items():
            try:
                schema, _ = unpack_as(payload, Schema)
            except MessageError as error:
                self.report(f"{address}: {error}")
                continue
            name = schema.institution
            if owner.get(address, name) != name:
                self.report(f"{address} was institution {owner[address]!r}, it is not {name!r} now")
            elif name in names:
                found.setdefault(name, []).append((address, schema))
        for name in [name for name, who in found.items() if len(who) > 1]:
            where = " and ".join(sorted(address for address, _ in found.pop(name)))
            self.report(f"{where} both claim to be institution {name!r}: neither is accepted")
        self.addresses |= {name: who[0][0] for name, who in found.items()}
        return {name: who[0][1] for name, who in found.items()}

    def _greet_again(self, names: Set[str], *, elsewhere: bool = False) -> dict[str, Schema]:
        """Return the schemas of those institutions that answer now, wherever they are.

        Args:
            names: of the institutions.
            elsewhere: look at new addresses only, since nodes at the known ones may be busy.
        """
        known = {self.addresses[n] for n in self.addresses if elsewhere or n not in names}
        return self._greet(names, known, min(10.0, self.patience.seconds))

    def newcomers(self) -> dict[str, Schema]:
        """Return the schemas of institutions that were to join later and have appeared."""
        missing = self.patience.expected.keys() - self.present
        return self._greet_again(missing, elsewhere=True) if missing else {}

    def await_return(self, names: Set[str]) -> None:
        """Wait until these institutions can be asked again, for as long as a round waits for answers."""
        end, missing = time.monotonic() + self.patience.seconds, set(names)
        while missing and time.monotonic() < end:
            missing -= self._greet_again(missing).keys()
            time.sleep(0.5 if missing else 0.0)

    def queue(self, requests: Mapping[str, bytes]) -> None:
        """Let a message that needs no answer but :class:`Done` travel ahead of the next request to each institution."""
        for name, payload in requests.items():
            self._queued.setdefault(name, []).append(payload)

    def drop_queued(self) -> None:
        """Forget messages that no request has taken along."""
        self._queued = {}

    def prefetch(self, payloads: Sequence[bytes]) -> None:
        """Let requests that will follow travel behind the next one to all institutions, whose answer they do not need.

        An institution that refuses one is asked for those behind it when they follow.
        """
        self._further = {name: [*payloads] for name in self.present}

    def send_queued(self, run: str) -> None:
        """Send messages that no request has taken along.

        Raises:
            MessageError: an institution refuses.
            TimeoutError: an institution does not answer.
        """
        last = {name: own.pop() for name, own in self._queued.items()}
        if last:
            self.request_all(last, Done, run)

    def request_all(
        self, requests: Mapping[str, bytes], kind: type[M], run: str
    ) -> dict[str, tuple[M, dict[str, Tensors]]]:
        """Return the answers of all of these institutions; those that do not answer are asked again.

        Raises:
            MessageError: an institution refuses.
            TimeoutError: an institution does not answer.
        """
        found = {
            name: read_reply(name, self._found.pop((name, one)), kind, run)
            for name, one in requests.items()
            if (name, one) in self._found
        }
        whole = {
            name: [
                *self._queued.get(name, ()),
                one,
                *(other for other in self._further.get(name, ()) if other != one),
            ]
            for name, one in requests.items()
        }
        for _ in range(self.patience.attempts):
            left = {name: own for name, own in whole.items() if name not in found}
            if not left:
                break
            for name, replies in self.send_bundles(left, Wait(self.patience.seconds)).items():
                ahead = len(self._queued.get(name, ()))
                for reply in replies[:ahead]:
                    read_reply(name, reply, Done, run)
                self._queued.pop(name, None)
                found[name] = read_reply(name, replies[min(ahead, len(replies) - 1)], kind, run)
                further = zip(whole[name][ahead + 1 :], replies[ahead + 1 :], strict=False)
                self._found |= {(name, request): reply for request, reply in further}
                self._further.pop(name, None)
            self.await_return(left.keys() - found.keys())
        if missing := requests.keys() - found.keys():
            raise TimeoutError(f"institution {min(missing)!r} does not answer")
        return found

    def send_bundles(
        self, requests: Mapping[str, Sequence[bytes]], wait: Wait
    ) -> dict[str, list[bytes]]:
        """Send each institution some messages in one exchange; return the replies that come in time.

        They are fewer than the messages of an institution if it refuses one.
        """
        found = self.send({name: join(own) for name, own in requests.items()}, wait)
        return {name: split_replies(reply, len(requests[name])) for name, reply in found.items()}

    def send(self, requests: Mapping[str, bytes], wait: Wait) -> dict[str, bytes]:
        """Return the answers that come in time, by institution; look for the others at other addresses."""
        self.exchanges += 1
        replies = self._exchange({self.addresses[n]: p for n, p in requests.items()}, wait)
        found = {n: replies[self.addresses[n]] for n in requests if self.addresses[n] in replies}
        if missing := requests.keys() - found.keys():
            busy = wait.enough is not None or wait.stale_seconds > 0
            self._greet_again(missing, elsewhere=busy)
        return found

    def available(
        self, members: Mapping[str, Institution], done: int, fewest: int
    ) -> Mapping[str, Institution]:
        """Return the institutions without an answer that may yet come; all, if these are too few."""
        limit = self.patience.max_staleness
        self.overdue = {n: o for n, o in self.overdue.items() if done - o.round.number <= limit}
        free = {name: member for name, member in members.items() if name not in self.overdue}
        return free if len(free) >= fewest else members

    def new_number(self, name: str) -> int:
        """Return a number larger than those of earlier requests; a request of this name has it in all processes."""
        return self.carrier.remember(name, lambda: [time.time_ns()])[0]

    def take_stale(self) -> dict[str, bytes]:
        """Return the answers to earlier rounds that have come since the last call, by institution."""
        found, self._stale = self._stale, {}
        return {n: found[address] for n, address in self.addresses.items() if address in found}

    def _exchange(self, messages: Mapping[str, bytes], wait: Wait) -> dict[str, bytes]:
        found = self.carrier.exchange(messages, wait)
        self._stale |= {at: payload for at, payload in found.items() if at not in messages}
        return {at: payload for at, payload in found.items() if at in messages}


def read_reply(name: str, payload: bytes, kind: type[M], run: str) -> tuple[M, dict[str, Tensors]]:
    """Return an institution's reply, which must be of this kind and of this run.

    Raises:
        MessageError: it is not; names the institution.
    """
    try:
        return unpack_as(payload, kind, run)
    except MessageError as error:
        who = f"institution {name!r}"
        text = f"{error}" if who in str(error) else f"from {who}: {error}"
        raise MessageError(text) from None


def run_name(run: Run) -> str:
    """Return the identifier of a run in messages."""
    assert run.file is not None
    return run.file.name
