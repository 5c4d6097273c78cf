"""The file of a run, written from time to time, from which the same call continues it (invariant 4)."""

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from bayesfed.checks.program_fingerprint import (
    describe_program_change,
    program_fingerprint,
    witnesses,
)
from bayesfed.data.federation import Federation
from bayesfed.data.fingerprint import data_fingerprint, describe_data_change
from bayesfed.elbo.program import Program
from bayesfed.engine.files import read_tensors, sweep, write_tensors
from bayesfed.engine.parts import flat, flatten_state, nested
from bayesfed.engine.plan import first_difference
from bayesfed.engine.states import States
from bayesfed.settings import shown

_METADATA = "bayesfed run"
_FORMAT = 7
_DATA, _PROGRAM = "data", "program"
_SHARE = 0.05
"""The largest share of a run's time that is spent on writing."""


class Written(NamedTuple):
    """The contents of a run's file.

    Attributes:
        done: number of rounds that the run had done.
        compiled: whether its steps were compiled, or which of them.
        tensors: its state, by path.
    """

    done: int
    compiled: bool | list[str]
    tensors: dict[str, Tensor]


@dataclass
class RunFile:
    """The file of a run, which only a run of the same description, program and data continues.

    Attributes:
        path: a safetensors file, of this run alone.
        description: plain data.
        program: the model/guide pair.
        federation: the clients' data.
        name: a random name of the run.
    """

    path: Path
    description: Mapping[str, Any]
    program: Program
    federation: Federation
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    _data: dict[str, Tensor] = field(init=False)
    _program: dict[str, Tensor] = field(init=False)
    _written: float = field(default=0.0, init=False)
    _cost: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        seen = witnesses(len(self.federation))
        self._data = data_fingerprint(self.federation)
        self._program = program_fingerprint(self.program, self.federation, seen)

    def read(self) -> Written | None:
        """Read the file, and take over the run's name; None where there is no file.

        Raises:
            ValueError: the file is of no run, or of one of another description, model or data; the message names the
                difference.
        """
        sweep(self.path)
        if not self.path.exists():
            return None
        found, metadata = read_tensors(self.path, _METADATA)
        if metadata is None:
            raise ValueError(f"{self.path} is a safetensors file, but no run of bayesfed's")
        if metadata.get("format") != _FORMAT:
            raise ValueError(
                f"{self.path} was written by another version of bayesfed: choose another file"
            )
        if (difference := self._difference(metadata, found)) is not None:
            raise ValueError(
                f"{self.path} is a run {difference}: resume it with the same call, or choose another file"
            )
        self.name = metadata["name"]
        return Written(metadata["done"], metadata["compiled"], found)

    def write(
        self, state: Any, done: int, *, compiled: bool | list[str], due: bool, clients: States
    ) -> None:
        """Write the state, atomically; where it is not due, only if writing has taken little of the time so far."""
        start = time.perf_counter()
        if not due and start - self._written < self._cost / _SHARE:
            return
        clients.flush()
        tensors = flatten_state(state) | flat({_DATA: self._data, _PROGRAM: self._program})
        metadata = {
            "format": _FORMAT,
            "name": self.name,
            "description": dict(self.description),
            "clients": self.federation.names,
            "done": done,
            "compiled": compiled,
        }
        write_tensors(self.path, tensors, _METADATA, metadata)
        clients.commit(done)
        self._written = time.perf_counter()
        self._cost = self._written - start

    def _difference(self, metadata: Mapping[str, Any], found: Mapping[str, Tensor]) -> str | None:
        """The difference between the file's run and this one, in words; None where there is none."""
        clients, names = metadata["clients"], list(self.federation.names)
        if clients != names:
            if set(clients) == set(names):
                return "of the same clients in another order"
            other = next(iter({*clients} ^ {*names}))
            return f"{'with' if other in clients else 'without'} client {other!r}"
        now = json.loads(json.dumps(dict(self.description)))
        if (setting := first_difference(now, metadata["description"])) is not None:
            name, here, there = setting
            return f"with {name} {shown(there)}, this one has {shown(here)}"
        saved = nested(found)
        changed = describe_data_change(saved[_DATA], self._data, names)
        if changed is not None:
            return f"with other data ({changed})"
        changed = describe_program_change(self.program, saved[_PROGRAM], self._program)
        return changed and f"of another model ({changed})"


HISTORY = ("elbo", "seconds", "clients", "uphill")
"""The ELBO, the seconds, the number of uploads that count and the number of clients whose steps went uphill."""


def read_history(path: Path) -> dict[str, list[float]]:
    """The history of the rounds that the run of a file had done, by name."""
    found, metadata = read_tensors(path, _METADATA)
    return {n: found[f"['history']['{n}']"][: metadata["done"]].tolist() for n in HISTORY}
