"""What clients keep from round to round: a row for each of them, in memory or in files that are mapped into it."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bayesfed.engine.journal import Journal, refuse_others
from bayesfed.steps import optimizer


class States:
    """The states of N clients, of which a cohort's is taken and put back.

    In a folder they are a NumPy file with a record per client, whose fields are called ``<part>.<name>``:
    ``np.load(file, mmap_mode="r")["params.weights.loc"]``. Of it only the records at work are in memory, and what was
    never written but with zeros takes no disk where the file system knows holes. With a journal they can be put back to
    what they were when :meth:`written` was last called.

    Attributes:
        tensors: by part and name, ``(N, ...)`` each; none before the first state is there.

    Raises:
        FileExistsError: there is no journal, and the folder holds states already.

    Example:
        >>> import tempfile, torch
        >>> from bayesfed.engine.states import States
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     states = States(1000, folder)
        ...     states.begin(torch.arange(1000), {"params": {"w": torch.zeros(1000, 5)}})
        ...     states.put(torch.tensor([3, 7]), {"params": {"w": torch.ones(2, 5)}})
        ...     states.take(torch.tensor([2, 3]))["params"]["w"].sum(1).tolist()
        [0.0, 5.0]
    """

    def __init__(
        self,
        clients: int,
        folder: str | Path | None = None,
        device: str | torch.device = "cpu",
        journal: Journal | None = None,
    ) -> None:
        self.tensors: optimizer.State = {}
        self._clients, self._device = clients, torch.device(device)
        self._folder = None if folder is None else Path(folder)
        self._journal = journal
        self._files: dict[str, Any] = {}
        if self._folder is not None and journal is None:
            refuse_others(self._folder)
            self._folder.mkdir(parents=True, exist_ok=True)

    def take(self, clients: Tensor) -> optimizer.State:
        """The states of K clients, on the device."""
        if self._folder is None:
            return optimizer.take(self.tensors, clients)
        found: optimizer.State = {part: {} for part in self.tensors}
        for file in self._files.values():
            records = file[clients.numpy(force=True)]
            for field in records.dtype.names:
                part, name = field.split(".", 1)
                value = torch.from_numpy(records[field]).contiguous()
                found.setdefault(part, {})[name] = value.to(self._device)
        return found

    def begin(self, clients: Tensor, state: optimizer.State) -> None:
        """Keep the first states of K clients, or a part that they did not have. Zeros go over other numbers only."""
        new = {part: found for part, found in state.items() if part not in self.tensors}
        if new and self._folder is None:
            self.tensors |= {
                part: {n: v.new_zeros(self._clients, *v.shape[1:]) for n, v in found.items()}
                for part, found in new.items()
            }
        elif new and self._folder is not None:
            self.tensors |= self._file(self._folder, new, "w+")
        if self._folder is not None:
            clients = clients.cpu()
            state = {p: {n: v.cpu() for n, v in found.items()} for p, found in state.items()}
        filled = {
            part: {
                n: v for n, v in found.items() if v.any() or self.tensors[part][n][clients].any()
            }
            for part, found in state.items()
        }
        optimizer.put(self.tensors, clients, filled)
        self._let_go()

    def reopen(self, state: optimizer.State, done: int) -> None:
        """Take the files of states of this form as they were after so many rounds.

        Raises:
            ValueError: there are no such files.
        """
        assert self._folder is not None and self._journal is not None
        if state:
            self.tensors |= self._file(self._folder, state, "r+")
        for name, file in self._files.items():
            self._journal.undo(name, file, done)
        self.flush()
        self._let_go()
        self._journal.begin(done)

    def flush(self) -> None:
        """Wait until the files are on the disk."""
        for file in self._files.values():
            file.flush()

    def written(self, done: int) -> None:
        """The run is kept as it is after so many rounds: from now on it is these states that it may come back to."""
        if self._journal is not None:
            self._journal.begin(done)

    def put(self, clients: Tensor, state: optimizer.State) -> None:
        """Keep the states of K clients."""
        if self._folder is None:
            optimizer.put(self.tensors, clients, state)
            return
        at = clients.numpy(force=True)
        for stem, file in self._files.items():
            records = np.empty(len(clients), file.dtype)
            if records.dtype.names[0].split(".", 1)[0] not in state:  # made by ``finish``
                continue
            for field in records.dtype.names:
                part, name = field.split(".", 1)
                records[field] = state[part][name].numpy(force=True)
            if self._journal is not None:
                self._journal.note(stem, file, at)
            file[at] = records
        self._let_go()

    def _file(
        self, folder: Path, state: optimizer.State, mode: Literal["w+", "r+"]
    ) -> optimizer.State:
        """The tensors of a file with the parts and names of a state: a new one of zeros, or one that is there."""
        kinds = [
            (f"{part}.{name}", value.numpy(force=True).dtype, value.shape[1:])
            for part, found in state.items()
            for name, value in found.items()
        ]
        stem, dtype = "-".join(state), np.dtype(kinds, align=True)
        path = folder / f"{stem}.npy"
        if mode == "w+":
            path.unlink(missing_ok=True)  # who has mapped an earlier one keeps it
        elif not path.exists():
            raise ValueError(f"{path} is gone: begin anew, with another file and another folder")
        records = np.lib.format.open_memmap(path, mode, dtype, (self._clients,))
        if (records.dtype, records.shape) != (dtype, (self._clients,)):
            raise ValueError(f"{path} does not hold what these clients keep: it has been changed")
        self._files[stem] = records
        return {
            part: {name: torch.from_numpy(np.asarray(records[f"{part}.{name}"])) for name in found}
            for part, found in state.items()
        }

    def _let_go(self) -> None:
        """The pages stay in the files, the process lets them go."""
        for file in self._files.values():
            if hasattr(file.base, "madvise"):
                file.base.madvise(mmap.MADV_DONTNEED)
