"""A site's part in a run, and the files that keep it whatever is killed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bayesfed.deploy import secure
from bayesfed.deploy.messages import Begin, MessageError, Round, Tensors, check_like
from bayesfed.engine.files import atomically, read_tensors, write_tensors
from bayesfed.engine.run import Run
from bayesfed.output.posterior import Posterior

BEGIN, FINISH = "begin.message", "finish.message"
_ACCEPTED, _ANSWERED = "accepted.safetensors", "answered.safetensors"
_RECORD = "record.json"
_METADATA = "bayesfed site"


class Answered(NamedTuple):
    """The last answer.

    Attributes:
        round: what it answers.
        asked: hash of the question.
        reply: the answer's bytes.
    """

    round: Round
    asked: str
    reply: bytes


@dataclass
class Part:
    """A site's part in a run.

    Attributes:
        begin: what the server began it with.
        run: the run of the site's own clients.
        form: the server's first state.
        folder: where it is kept.
        accepted: the last answer that was taken, and what the clients kept after it.
        answered: the last answer, which may not have been taken yet: the run's clients are after it.
        posterior: once the rounds are over.
    """

    begin: Begin
    run: Run
    form: Any
    folder: Path
    accepted: tuple[Round | None, Tensors]
    answered: Answered | None = None
    posterior: Posterior | None = None

    def answer(self, answered: Answered) -> bytes:
        """Keep an answer beside what was accepted, and give its bytes."""
        self.answered = answered
        reply = torch.frombuffer(bytearray(answered.reply), dtype=torch.uint8)
        metadata = {"round": answered.round.model_dump(), "asked": answered.asked}
        saved = kept(self.run) | {"reply": reply}
        write_tensors(self.folder / _ANSWERED, saved, _METADATA, metadata)
        return answered.reply

    def settle(self, accepted: Round | None) -> None:
        """Keep what goes with the answer that the server took last, and no other.

        Raises:
            MessageError: it took one that this site does not know.
        """
        before, clients = self.accepted
        if self.answered is not None and accepted == self.answered.round:
            (self.folder / _ANSWERED).replace(self.folder / _ACCEPTED)
            self.accepted = (accepted, kept(self.run))
        elif accepted == before:
            _restore(self.run, clients)
            (self.folder / _ANSWERED).unlink(missing_ok=True)
        else:
            raise MessageError(
                f"the server took {in_words(accepted)} last, and this site's clients are where they were after "
                f"{in_words(before)}: they have been put back. Begin another run"
            )
        self.answered = None

    def reopen(self) -> None:
        """The rounds go on after all; the posterior's file stays until the next one takes its place."""
        self.posterior = None
        (self.folder / FINISH).unlink()

    def read(self) -> None:
        """What an earlier process has written of the clients."""
        for name in (_ACCEPTED, _ANSWERED):
            path = self.folder / name
            if not path.exists():
                continue
            found, metadata = read_tensors(path, _METADATA)
            reply = found.pop("reply").numpy().tobytes()
            check_like(f"{path}: ", found, kept(self.run))
            number = Round(**metadata["round"])
            if name == _ACCEPTED:
                self.accepted = (number, found)
            else:
                self.answered = Answered(number, metadata["asked"], reply)
            _restore(self.run, found)

    @property
    def run_key(self) -> bytes:
        """Of secure sums, the private key of this run."""
        return private_key(self.folder / "run.key")

    def masked(self, upload: Tensors, site: secure.Site, of: secure.Sum) -> Tensors:
        """What a site sends to a secure sum; that it does is written before."""
        words = secure.mask(upload, site, of)
        self._write(secure.sending(self._record(), of, words))
        return {name: torch.from_numpy(value.view(np.int64)) for name, value in words.items()}

    def seal(self, site: secure.Site, of: secure.Sum) -> str:
        """The seal of what was masked last, in hexadecimal; that it is told is written before."""
        self._write(secure.opening(self._record(), of))
        return secure.seal(site, of).hex()

    def _record(self) -> secure.Record | None:
        path = self.folder / _RECORD
        if not path.exists():
            return None
        return secure.Record(**json.loads(path.read_text(encoding="utf-8")))

    def _write(self, record: secure.Record) -> None:
        with atomically(self.folder / _RECORD) as file:
            file.write_text(json.dumps(asdict(record)), encoding="utf-8")


def kept(run: Run) -> Tensors:
    """Copies of what the clients keep."""
    clients = run.clients.tensors.items()
    found = {f"clients/{part}/{n}": v for part, own in clients for n, v in own.items()}
    return {name: value.clone() for name, value in (found | {"known": run.client_terms}).items()}


def _restore(run: Run, before: Tensors) -> None:
    run.client_terms.copy_(before["known"])
    for part, own in run.clients.tensors.items():
        for name, value in own.items():
            value.copy_(before[f"clients/{part}/{name}"])


def private_key(path: Path) -> bytes:
    """The private key of a file, made where there is none."""
    if not path.exists():
        with atomically(path) as file:
            file.touch(mode=0o600)
            file.write_bytes(secure.new_key())
    return path.read_bytes()


def sum_of(run: str, number: Round, broadcast: bytes, roster: Mapping[str, str]) -> secure.Sum:
    """One sum, as messages have it."""
    keys = {name: bytes.fromhex(key) for name, key in roster.items()}
    return secure.Sum(run, number.number, number.attempt, broadcast, keys)


def in_words(number: Round | None) -> str:
    """A round in words."""
    return "no round" if number is None else f"round {number.number} (attempt {number.attempt})"
