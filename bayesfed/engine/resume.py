"""A run in a file, written from time to time, from which the same call goes on as if it had never stopped (law 4)."""

from __future__ import annotations

import json
import time
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from bayesfed.checks.program_fingerprint import (
    describe_program_change,
    program_fingerprint,
    witnesses,
)
from bayesfed.data.federation import Federation
from bayesfed.data.fingerprint import data_fingerprint, describe_data_change
from bayesfed.elbo.program import Program
from bayesfed.engine.files import read_tensors, sweep, write_tensors
from bayesfed.engine.journal import Journal
from bayesfed.engine.states import States
from bayesfed.tracing.compiler import Compiler

if TYPE_CHECKING:
    from bayesfed.engine.run import Run

_METADATA = "bayesfed run"
_FORMAT = 4
_DATA, _PROGRAM = "data/", "program/"
_SHARE = 0.05
"""The part of a run's time that writing may take."""


class Written(NamedTuple):
    """What a run was in when it was last written.

    Attributes:
        done: rounds that it had done.
        compiled: whether its steps were compiled, or which.
        tensors: its state, by place.
    """

    done: int
    compiled: bool | list[str]
    tensors: dict[str, Tensor]

    def state(self, form: Any) -> Any:
        """The state in the form of another, on the devices of its tensors."""
        leaves, tree = tree_flatten_with_path(form)
        return tree_unflatten(
            [self.tensors[keystr(at)].to(leaf.device) for at, leaf in leaves], tree
        )


@dataclass
class Checkpoint:
    """The file of a run.

    Attributes:
        path: a safetensors file, of this run alone.
        settings: plain data; a run goes on only with the same,
        program: with the same model and guide,
        federation: and with the same data.
        name: what the run calls itself.
    """

    path: Path
    settings: Mapping[str, Any]
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
        """What was written; None where no file is. Takes the run's name from it.

        Raises:
            ValueError: the file is no run, or one with other settings, another model or other data; the message names
                what has changed.
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
        if (changed := self._changed(metadata, found)) is not None:
            raise ValueError(
                f"{self.path} is a run {changed}: go on with the same call, or choose another file"
            )
        self.name = metadata["name"]
        return Written(metadata["done"], metadata["compiled"], found)

    def write(
        self, state: Any, done: int, *, compiled: bool | list[str], due: bool, kept: States
    ) -> None:
        """Write the state, atomically, unless that would take more than a twentieth of the time."""
        begin = time.perf_counter()
        if not due and begin - self._written < self._cost / _SHARE:
            return
        kept.flush()
        leaves, _ = tree_flatten_with_path(state)
        tensors = {keystr(at): leaf for at, leaf in leaves}
        tensors |= {_DATA + name: value for name, value in self._data.items()}
        tensors |= {_PROGRAM + name: value for name, value in self._program.items()}
        metadata = {
            "format": _FORMAT,
            "name": self.name,
            "settings": dict(self.settings),
            "clients": self.federation.names,
            "done": done,
            "compiled": compiled,
        }
        write_tensors(self.path, tensors, _METADATA, metadata)
        kept.written(done)
        self._written = time.perf_counter()
        self._cost = self._written - begin

    def _changed(self, metadata: Mapping[str, Any], found: Mapping[str, Tensor]) -> str | None:
        """What is not as it was, in words."""
        clients, names = metadata["clients"], list(self.federation.names)
        if clients != names:
            if set(clients) == set(names):
                return "of the same clients in another order"
            other = next(iter({*clients} ^ {*names}))
            return f"{'with' if other in clients else 'without'} client {other!r}"
        settings, before = json.loads(json.dumps(dict(self.settings))), metadata["settings"]
        for name in [*settings, *before]:
            if before.get(name) != settings.get(name):
                was, now = _short(before.get(name)), _short(settings.get(name))
                return f"with {name} {was}, this one has {now}"
        changed = describe_data_change(under(_DATA, found), self._data, names)
        if changed is not None:
            return f"with other data ({changed})"
        changed = describe_program_change(self.program, under(_PROGRAM, found), self._program)
        return changed and f"of another model ({changed})"


def begin(run: Run) -> None:
    """Give the clients their first states, or the run all that its file has."""
    file, folder, kept, journal = run.file, run.execution.states, run.clients, None
    before = None if file is None else file.read()
    if file is not None and before is not None and before.done > run.rounds:
        raise ValueError(
            f"{file.path} is a run of {before.done} rounds already: ask for at least as many, or choose another file"
        )
    if folder is not None:
        if file is not None:
            journal = Journal(Path(folder), file.name, new=before is None)
        kept = run.clients = States(len(run.federation), folder, run.federation.device, journal)
    alone = (
        run.federation if run.accepted is None else run.federation.select(run.federation.names[:1])
    )
    for batch in run.program.starts(alone):
        first = run.algorithm.start_clients(run.program, run.server, batch)
        if before is not None and journal is not None:
            kept.reopen(first, before.done)
            break
        kept.begin(batch.index, first)
    if before is not None:
        state, run.done = before.state(run.state), before.done
        run.history[:, : run.done] = state.pop("history")[:, : run.done]
        if clients := state.pop("clients"):
            kept.tensors = clients
        for name, value in state.pop("settling", {}).items():
            setattr(run.settling, name, value)
        for name, value in state.items():
            setattr(run, name, value)
        if run.settling is not None and run.settling.settled:
            run.rounds = run.done
        if run.done:
            how = before.compiled
            run.compiler = Compiler(how) if isinstance(how, bool) else Compiler(chosen=set(how))
        if run.done < run.rounds and run.multiplier and run.privacy and run.privacy.seed is None:
            warnings.warn(
                f"the run goes on after round {run.done} with noise and cohorts drawn anew: those of a private run "
                "are kept nowhere, so it ends elsewhere than one that never stopped. Its ε is the same",
                stacklevel=5,
            )
    elif file is not None and (journal is not None or run.accepted is not None):
        keep(run, file)


def keep(run: Run, file: Checkpoint) -> None:
    """Keep a run after a round; always where it is over, where noise is spent, and where sites go on from it."""
    due = run.done in (0, run.rounds) or run.multiplier > 0 or run.accepted is not None
    how = run.compiler
    compiled = sorted(how.chosen) if how.mode == "auto" else how.mode
    file.write(run.state, run.done, compiled=compiled, due=due, kept=run.clients)


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, without that."""
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}


def history(path: Path) -> list[list[float]]:
    """ELBO, seconds and cohort size of each round that the run of a file had done."""
    found, metadata = read_tensors(path, _METADATA)
    done: list[list[float]] = found["['history']"][:, : metadata["done"]].T.tolist()
    return done


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
