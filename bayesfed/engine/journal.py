"""A journal, by which clients' states in files can be put back to those that belong to the run's file.

A round changes the states in place, a chunk of clients at a time, and the run's file is written only now and then.
Before a client's record is changed for the first time since, the old record is written to a journal beside the states,
whose name has the number of rounds that the run's file had then:

    old records on the disk → states changed → ... → states on the disk → run's file at round r → journal of round r

A run that is resumed at round r first puts back the records of the journal of round r. A round costs what it changes,
and a journal is never larger than the states. A block that a killed process has not written completely fails its
checksum: the states of its clients were not changed yet.

The file ``run`` names the run that the states belong to; it is called ``starting`` until the run's file exists.
"""

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
        folder: the folder of the states.
        run: the name of their run.

    Raises:
        FileExistsError: the run is new, and the folder has states of another run.
        ValueError: the run is resumed, and the folder does not have its states.
    """

    def __init__(self, folder: Path, run: str, *, new: bool) -> None:
        self.folder, self.run = folder, run
        self._round = 0
        self._noted: dict[str, np.ndarray] = {}
        names = {name: folder / name for name in (_STARTING, _RUN)}
        if new:
            if names[_STARTING].exists():  # it was killed before its file was written
                for file in (*folder.glob("*.npy"), *folder.glob("*.journal")):
                    file.unlink()
            refuse_others(folder)
            folder.mkdir(parents=True, exist_ok=True)
            names[_STARTING].write_text(run, encoding="utf-8")
        elif run not in [
            file.read_text(encoding="utf-8") for file in names.values() if file.exists()
        ]:
            raise ValueError(
                f"{folder} does not have the clients' states of this run: give the folder that it was started with, or "
                "start again, with another file and another folder"
            )

    def begin(self, done: int) -> None:
        """Start the journal of a number of rounds: the run's file and the states are on the disk as they are now."""
        if (starting := self.folder / _STARTING).exists():
            starting.replace(self.folder / _RUN)
        for file in self.folder.glob("*.journal"):
            file.unlink()
        self._round, self._noted = done, {}

    def note(self, name: str, records: np.ndarray, clients: np.ndarray) -> None:
        """Write the old records of clients of a file of states that are about to change."""
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
        """Put back the records that a file of states had after a number of rounds."""
        for block in _blocks(self._path(name, done), _entry(records)):
            records[block["client"]] = block["record"]

    def _path(self, name: str, done: int) -> Path:
        return self.folder / f"{name}.{done}.journal"


def refuse_others(folder: Path) -> None:
    """Fail if a folder has states already."""
    if next(folder.glob("*.npy"), None):
        raise FileExistsError(
            f"{folder} has clients' states of another run: delete them or choose another folder"
        )


def _entry(records: np.ndarray) -> np.dtype[Any]:
    return np.dtype([("client", np.int64), ("record", records.dtype)])


def _blocks(path: Path, entry: np.dtype[Any]) -> Iterator[np.ndarray]:
    """The blocks of a file up to the first incomplete one."""
    if not path.exists():
        return
    with path.open("rb") as file:
        while len(start := file.read(_HEAD.itemsize)) == _HEAD.itemsize:
            head = np.frombuffer(start, _HEAD)[0]
            block = file.read(int(head["count"]) * entry.itemsize)
            if zlib.crc32(block) != head["checksum"] or not block:
                return
            yield np.frombuffer(block, entry)
