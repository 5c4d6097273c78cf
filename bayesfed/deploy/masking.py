"""A node's part in secure sums: its key of a run, and a record of what was masked last."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from bayesfed.deploy import secure
from bayesfed.deploy.messages import RoundId, Tensors
from bayesfed.engine.files import atomically

_RECORDS, _RUN_KEY = ("record.json", "record_after.json"), "run.key"


@dataclass(frozen=True)
class Masking:
    """The masks of a run's secure sums.

    Attributes:
        folder: holds the key of the run and the record.
    """

    folder: Path

    @property
    def run_key(self) -> bytes:
        """The private key of this run."""
        return load_or_make_key(self.folder / _RUN_KEY)

    def delete_key(self) -> None:
        """Delete the private key of this run."""
        (self.folder / _RUN_KEY).unlink(missing_ok=True)

    def mask(
        self, upload: Tensors, keys: secure.Keys, sum_id: secure.SumId, *, after: bool
    ) -> Tensors:
        """Return the masked upload of a secure sum, once a record of it is stored.

        Rounds may go on after sums that come after them (``after``), so these have a record of their own.
        """
        words, name = secure.mask(upload, keys, sum_id), _RECORDS[after]
        self._write(name, secure.record_masking(self._record(name), sum_id, words))
        return {name: torch.from_numpy(value.view(np.int64)) for name, value in words.items()}

    def seal(self, keys: secure.Keys, sum_id: secure.SumId) -> str:
        """Return the seal of a last masked upload, in hexadecimal, once a record of it is stored."""
        records = {name: self._record(name) for name in _RECORDS}
        digest = sum_id.digest().hex()
        of = [name for name, record in records.items() if record and record.digest == digest]
        name = of[0] if of else _RECORDS[0]
        self._write(name, secure.record_opening(records[name], sum_id))
        return secure.seal(keys, sum_id).hex()

    def _record(self, name: str) -> secure.Record | None:
        path = self.folder / name
        if not path.exists():
            return None
        return secure.Record(**json.loads(path.read_text(encoding="utf-8")))

    def _write(self, name: str, record: secure.Record) -> None:
        with atomically(self.folder / name) as file:
            file.write_text(json.dumps(asdict(record)), encoding="utf-8")


def load_or_make_key(path: Path, new: Callable[[], bytes] = secure.new_key) -> bytes:
    """Return the private key in a file, which only its owner can read; make one if there is none."""
    if not path.exists():
        with atomically(path) as file:
            file.touch(mode=0o600)
            file.write_bytes(new())
    return path.read_bytes()


def sum_id(
    run: str, round_id: RoundId, broadcast: bytes, roster: Mapping[str, str] | None
) -> secure.SumId:
    """Return the identity of a secure sum from the contents of messages."""
    keys = {name: bytes.fromhex(key) for name, key in (roster or {}).items()}
    return secure.SumId(run, round_id.number, round_id.attempt, broadcast, keys)
