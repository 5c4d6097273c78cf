"""Clients' states in files as they were when their run was last written, whatever a killed process has left in them.

A round changes the files in place, some clients at a time, and is written in the run's file now and then. Before a
client's record is changed for the first time since, the old one is put down beside the states, in a file that is named
after the rounds that the run had then:

    old records on the disk → states changed → ... → states on the disk → run's file at round r → journal of round r

A run that goes on from round r first puts back what the journal of round r holds. A round costs what it changes, and a
journal is never larger than the states. A block that a killed process has not written to its end fails its checksum:
the states of its clients were not changed yet.

Whose the states are says a file ``run``, which is called ``starting`` until the run's file is there for the first time.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_STARTING, _RUN = "starting", "run"
_HEAD = np.dtype([("count", "<i8"), ("checksum", "<u4")])


class Journal:
    """The old records of the states in a folder.

    Attributes:
        folder: where the states lie.
        run: which run they are of.

    Raises:
        FileExistsError: the run is new, and the folder holds states of another.
        ValueError: the run goes on, and the folder does not hold its states.
    """

    def __init__(self, folder: Path, run: str, *, new: bool) -> None:
        self.folder, self.run = folder, run
        self._round = 0
        self._noted: dict[str, np.ndarray] = {}
        whose = {name: folder / name for name in (_STARTING, _RUN)}
        if new:
            if whose[_STARTING].exists():  # killed before anything of it was kept
                for file in (*folder.glob("*.npy"), *folder.glob("*.journal")):
                    file.unlink()
            refuse_others(folder)
            folder.mkdir(parents=True, exist_ok=True)
            whose[_STARTING].write_text(run)
        elif run not in [file.read_text() for file in whose.values() if file.exists()]:
            raise ValueError(
                f"{folder} does not hold the clients' states of this run: give the folder that it began with, or "
                "begin anew, with another file and another folder"
            )

    def begin(self, done: int) -> None:
        """The run's file is there, and the states are on the disk, as they are after so many rounds."""
        if (starting := self.folder / _STARTING).exists():
            starting.replace(self.folder / _RUN)
        for file in self.folder.glob("*.journal"):
            file.unlink()
        self._round, self._noted = done, {}

    def note(self, name: str, records: np.ndarray, clients: np.ndarray) -> None:
        """Put down the old records of clients that are about to change, of a file of states."""
        noted = self._noted.setdefault(name, np.zeros(len(records), dtype=bool))
        first = clients[~noted[clients]]
        if not len(first):
            return
        block = np.empty(len(first), _entry(records))
        block["client"], block["record"] = first, records[first]
        head = np.array((len(first), zlib.crc32(block.tobytes())), _HEAD)
        with self._path(name, self._round).open("ab") as file:
            file.write(head.tobytes() + block.tobytes())
            file.flush()
            os.fsync(file.fileno())
        noted[first] = True

    def undo(self, name: str, records: Any, done: int) -> None:
        """Put back the records that a file of states had after so many rounds."""
        for block in _blocks(self._path(name, done), _entry(records)):
            records[block["client"]] = block["record"]

    def _path(self, name: str, done: int) -> Path:
        return self.folder / f"{name}.{done}.journal"


def refuse_others(folder: Path) -> None:
    """Fail where a folder holds states already."""
    if next(folder.glob("*.npy"), None):
        raise FileExistsError(
            f"{folder} holds clients' states of another run: delete them or choose another folder"
        )


def _entry(records: np.ndarray) -> np.dtype[Any]:
    return np.dtype([("client", np.int64), ("record", records.dtype)])


def _blocks(path: Path, entry: np.dtype[Any]) -> Iterator[np.ndarray]:
    """The blocks of a file up to the first that is not whole."""
    if not path.exists():
        return
    with path.open("rb") as file:
        while len(start := file.read(_HEAD.itemsize)) == _HEAD.itemsize:
            head = np.frombuffer(start, _HEAD)[0]
            block = file.read(int(head["count"]) * entry.itemsize)
            if zlib.crc32(block) != head["checksum"] or not block:
                return
            yield np.frombuffer(block, entry)
