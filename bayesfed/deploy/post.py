"""A carrier of files: the server's requests are letters, and institutions' answers come whenever somebody brings them.

The server is the ordinary one. A command starts it, and it goes on from the run's file, which it writes after each
round. Requests since then are the same as in the process before, and those that were answered have their answers here;
at the first one without, the server ends with :class:`Unanswered` and the requests are the next letter. So nothing is
lost if a process is killed at any point: a command repeats at most the server's part of one round.

    coordinator.key               the private key that signs letters, which only its owner can read
    study.json                    the study's name, 64 random hexadecimal digits, and the experiment file
    letters/0003.ask              a letter, as it was sent
    answers/0003-<name>.answer    an institution's answer, as it was taken
    replies/<digest>.message      the reply to a request, which the digest names; empty where the run goes on without
    drawn.json                    numbers in requests that are from the clock or the operating system

A letter has the messages of a bundle (:mod:`bayesfed.deploy.bundles`), one by one, which have no reply yet. Messages
after which nothing is asked (End, Close, Deliver) are the last letter of a study, which needs no answer.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bayesfed.data.plural import plural
from bayesfed.deploy.bundles import join, split
from bayesfed.deploy.coding_messages import Code, RunMessage
from bayesfed.deploy.letters import (
    Letter,
    LetterAnswer,
    SignedFile,
    new_signing_key,
    public_signing_key,
    read_letter,
    sign_letter,
)
from bayesfed.deploy.masking import load_or_make_key
from bayesfed.deploy.messages import (
    Close,
    Done,
    End,
    Finish,
    MessageError,
    Refusal,
    Schema,
    pack,
    unpack,
)
from bayesfed.deploy.moments_messages import Deliver
from bayesfed.deploy.transport import Carrier, Wait
from bayesfed.engine.files import atomically

_LATER = Finish, End, Close, Deliver


class Unanswered(Exception):
    """The server has requests to which there is no reply yet.

    Attributes:
        requests: by institution, its messages in their order.
    """

    def __init__(self, requests: Mapping[str, Sequence[bytes]]) -> None:
        super().__init__(f"there is no answer yet of {', '.join(requests)}")
        self.requests = requests


@dataclass
class Post:
    """The coordinator's letters of one study, and the answers to them.

    Attributes:
        folder: where they are stored.
        institutions: the names of all.
        keys: by institution, the public key that it signs with, 64 hexadecimal digits.

    Raises:
        ValueError: an institution without a key, or two with the same.
    """

    folder: Path
    institutions: tuple[str, ...]
    keys: Mapping[str, str]
    _later: dict[str, list[bytes]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        owners: dict[str, str] = {}
        for name in self.institutions:
            if name not in self.keys:
                raise ValueError(
                    f"deployment.keys has no key of institution {name!r}: `bayesfed key` with its node file prints it"
                )
            if owners.setdefault(self.keys[name], name) != name:
                raise ValueError(
                    f"deployment.keys: {owners[self.keys[name]]!r} and {name!r} have the same key"
                )
        for name in ("letters", "answers", "replies"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    @property
    def key(self) -> bytes:
        """The coordinator's private key."""
        return coordinator_key(self.folder)

    @property
    def study(self) -> str:
        """The study's name in all letters."""
        return str(self._read("study.json")["study"])

    def begin(self, experiment: Path) -> None:
        """Name the study, unless an earlier process has."""
        if not (self.folder / "study.json").exists():
            about = {"study": secrets.token_hex(32), "experiment": str(experiment.resolve())}
            self._write("study.json", about)

    # -- letters ----------------------------------------------------------------------------------

    @property
    def letter(self) -> SignedFile | None:
        """The last letter, if there is one."""
        path = self.letter_path
        return None if path is None else read_letter(path.read_bytes())

    @property
    def letter_path(self) -> Path | None:
        """Where the last letter is stored."""
        return max((self.folder / "letters").glob("*.ask"), default=None)

    def write(self, requests: Mapping[str, Sequence[bytes]], *, final: bool = False) -> None:
        """Write the next letter, unless the last one has the same requests."""
        last, number = self.letter, 1
        if last is not None:
            if all(last.requests_to(name) == list(own) for name, own in requests.items()):
                return
            number = last.head.number + 1
        messages = list(dict.fromkeys(one for own in requests.values() for one in own))
        where = {message: i for i, message in enumerate(messages)}
        positions = {
            name: [where[one] for one in requests[name]]
            for name in self.institutions
            if name in requests
        }
        head = Letter(study=self.study, number=number, requests=positions, final=final)
        with atomically(self.folder / "letters" / f"{number:04}.ask") as file:
            file.write_bytes(sign_letter(head, messages, self.key))

    def write_last(self) -> None:
        """Write the last letter of the study, of the messages that no other letter has."""
        if self._later:
            self.write(self._later, final=True)

    @property
    def missing(self) -> list[str]:
        """The institutions whose answers to the last letter are not here."""
        letter = self.letter
        if letter is None or letter.head.kind != "letter" or letter.head.final:
            return []
        return [
            name
            for name in letter.head.requests
            if any(self._reply(name, one) is None for one in letter.requests_to(name))
        ]

    def go_on_without(self, names: Iterable[str]) -> None:
        """Let a round go on without the answers of some institutions to the last letter.

        Raises:
            ValueError: an institution was not asked, or has answered; or the letter is not of a round.
        """
        letter = self.letter
        for name in names:
            if letter is None or name not in self.missing:
                raise ValueError(f"--without {name}: the last letter does not wait for its answer")
            requests = letter.requests_to(name)
            if any(unpack(one)[0].kind != "ask" for one in requests):
                raise ValueError(
                    f"--without {name}: letter {letter.head.number} needs the answers of all institutions; only a "
                    "round can do without some"
                )
            for one in requests:
                self._store(name, one, b"")

    def reopen(self) -> None:
        """Put away the answers to the last letter, which the run could not use, so that others may come."""
        letter = self.letter
        if letter is None:
            return
        for name in letter.head.requests if isinstance(letter.head, Letter) else ():
            self._answer_path(letter.head.number, name).unlink(missing_ok=True)
            for one in letter.requests_to(name):
                self._reply_path(name, one).unlink(missing_ok=True)

    # -- answers ----------------------------------------------------------------------------------

    def take(self, data: bytes) -> str:
        """Check an institution's answer to the last letter, and store it; return the institution's name.

        The same file may come twice.

        Raises:
            MessageError: gives the reason why the file is refused; nothing of it is stored.
        """
        file, letter = read_letter(data), self.letter
        head = file.head
        if not isinstance(head, LetterAnswer):
            raise MessageError("it is a letter to the institutions, not an answer of one")
        name = head.institution
        who = f"institution {name!r}"
        if head.study != self.study:
            raise MessageError(f"it is an answer of {who} in another study")
        if name not in self.institutions:
            raise MessageError(f"it is an answer of {who}, which has no part in this study")
        file.check(self.keys[name], who)
        if letter is None or head.number > letter.head.number:
            raise MessageError(f"it answers letter {head.number}, which was not sent yet")
        if head.number < letter.head.number:
            raise MessageError(
                f"it is an old answer of {who}, to letter {head.number}; the last is letter {letter.head.number}"
            )
        if head.letter != letter.digest:
            raise MessageError(f"{who} answers another letter {head.number} than the one here")
        requests, path = letter.requests_to(name), self._answer_path(head.number, name)
        if path.exists():
            if path.read_bytes() == data:
                return name
            raise MessageError(f"it is a second, different answer of {who} to letter {head.number}")
        if any(self._reply(name, one) == b"" for one in requests):
            raise MessageError(f"letter {head.number} went on without {who}")
        self._check_replies(name, requests, file.messages)
        for one, reply in zip(requests, file.messages, strict=True):
            self._store(name, one, reply)
        with atomically(path) as temporary:
            temporary.write_bytes(data)
        return name

    def _check_replies(
        self, name: str, requests: Sequence[bytes], replies: Sequence[bytes]
    ) -> None:
        """Fail on replies that are no messages, or not those to the requests, or refusals."""
        if len(requests) != len(replies):
            raise MessageError(
                f"institution {name!r} answers {plural(len(replies), 'message')} of {len(requests)}"
            )
        for one, payload in zip(requests, replies, strict=True):
            request, reply = unpack(one)[0], unpack(payload)[0]
            if isinstance(reply, Refusal):
                raise MessageError(reply.why)
            if isinstance(reply, Schema) and reply.institution != name:
                raise MessageError(
                    f"institution {name!r} claims to be institution {reply.institution!r}"
                )
            described = isinstance(request, Code) and isinstance(reply, Schema)
            if (
                isinstance(request, RunMessage)
                and not described
                and getattr(reply, "run", None) != request.run
            ):
                raise MessageError(f"institution {name!r} answers in another run")

    # -- the carrier ------------------------------------------------------------------------------

    def carrier(self) -> Carrier:
        """Return a carrier whose addresses are the institutions' names.

        Its exchange raises :class:`Unanswered` where there are no replies yet.
        """
        self._later = {}
        return Carrier(lambda: list(self.institutions), self._exchange, self._remember)

    def _exchange(self, messages: Mapping[str, bytes], wait: Wait) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        pending: dict[str, list[bytes]] = {}
        for name, payload in messages.items():
            requests = split(payload)
            replies = {one: self._reply(name, one) for one in requests}
            missing = {one: unpack(one)[0] for one in requests if replies[one] is None}
            if any(not isinstance(message, _LATER) for message in missing.values()):
                pending[name] = list(missing)
                continue
            for one, message in missing.items():
                if isinstance(message, _LATER):
                    self._later.setdefault(name, []).append(one)
                    replies[one] = pack(Done(run=message.run))
            whole = [replies[one] or b"" for one in requests]
            found |= {name: join(whole)} if all(whole) else {}
        if not pending:
            return found
        if wait.enough is None or len(found) < wait.enough:
            raise Unanswered(pending)
        for name, own in pending.items():
            self._store(name, own[-1], b"")
        return found

    def _remember(self, name: str, draw: Callable[[], list[int]]) -> list[int]:
        drawn = self._read("drawn.json") if (self.folder / "drawn.json").exists() else {}
        if name not in drawn:
            drawn[name] = draw()
            self._write("drawn.json", drawn)
        return list(drawn[name])

    # -- files ------------------------------------------------------------------------------------

    def _reply(self, name: str, request: bytes) -> bytes | None:
        """Return the reply to a request, empty if the run goes on without, or None if there is none yet."""
        path = self._reply_path(name, request)
        return path.read_bytes() if path.exists() else None

    def _store(self, name: str, request: bytes, reply: bytes) -> None:
        with atomically(self._reply_path(name, request)) as file:
            file.write_bytes(reply)

    def _reply_path(self, name: str, request: bytes) -> Path:
        of = hashlib.sha256(json.dumps(name).encode() + hashlib.sha256(request).digest())
        return self.folder / "replies" / f"{of.hexdigest()}.message"

    def _answer_path(self, number: int, name: str) -> Path:
        position = (
            self.institutions.index(name) + 1
        )  # names may differ in what a file's cannot have
        return self.folder / "answers" / f"{number:04}-{position:03}-{file_name(name)}.answer"

    def _read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_text("utf-8"))
        return found

    def _write(self, name: str, data: Mapping[str, object]) -> None:
        with atomically(self.folder / name) as file:
            file.write_text(json.dumps(data), encoding="utf-8")


def coordinator_key(folder: Path) -> bytes:
    """Return the private key of the coordinator of a study; make one if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    return load_or_make_key(folder / "coordinator.key", new_signing_key)


def coordinator_public_key(folder: Path) -> str:
    """Return the public half, 64 hexadecimal digits, to be compared by telephone."""
    return public_signing_key(coordinator_key(folder))


def file_name(institution: str) -> str:
    """Return an institution's name as a part of a file's name.

    Example:
        >>> file_name("St. Mary's / ward 3")
        'St.-Mary-s-ward-3'
    """
    return re.sub(r"[^\w.]+", "-", institution).strip("-.") or "institution"
