"""The states of stateful clients: a row for each client, in memory or in memory-mapped files."""

import mmap
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bayesfed.engine.journal import Journal, refuse_others
from bayesfed.steps import optimizer


class States:
    """The states of N clients, from which those of a cohort are taken and put back.

    In a folder they are a NumPy file with a record per client, whose fields are called ``<part>.<name>``:
    ``np.load(file, mmap_mode="r")["params.weights.loc"]``. Only the records in use are in memory, and records of zeros
    take no disk space if the file system supports sparse files. With a journal the states can be put back to those at
    the last call of :meth:`commit`.

    Attributes:
        tensors: by part and name, ``(N, ...)`` each; empty before the first call of :meth:`begin`.

    Raises:
        FileExistsError: there is no journal, and the folder has states already.

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
        """Set the first states of K clients, or a part that they did not have. Zeros only replace other numbers."""
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
        self._release_pages()

    def reopen(self, state: optimizer.State, done: int) -> None:
        """Open the files of states of this form, as they were after a number of rounds.

        Raises:
            ValueError: the files are missing, or of another form.
        """
        assert self._folder is not None and self._journal is not None
        if state:
            self.tensors |= self._file(self._folder, state, "r+")
        for name, file in self._files.items():
            self._journal.undo(name, file, done)
        self.flush()
        self._release_pages()
        self._journal.begin(done)

    def flush(self) -> None:
        """Wait until the files are on the disk."""
        for file in self._files.values():
            file.flush()

    def commit(self, done: int) -> None:
        """Take the present states as those of the run's file, which has been written after a number of rounds."""
        if self._journal is not None:
            self._journal.begin(done)

    def put(self, clients: Tensor, state: optimizer.State) -> None:
        """Replace the states of K clients."""
        if self._folder is None:
            optimizer.put(self.tensors, clients, state)
            return
        at = clients.numpy(force=True)
        for stem, file in self._files.items():
            records = np.empty(len(clients), file.dtype)
            if records.dtype.names[0].split(".", 1)[0] not in state:  # it is made by ``finish``
                continue
            for field in records.dtype.names:
                part, name = field.split(".", 1)
                records[field] = state[part][name].numpy(force=True)
            if self._journal is not None:
                self._journal.note(stem, file, at)
            file[at] = records
        self._release_pages()

    def _file(
        self, folder: Path, state: optimizer.State, mode: Literal["w+", "r+"]
    ) -> optimizer.State:
        """The tensors of a file with the parts and names of a state: a new file of zeros, or an existing one."""
        kinds = [
            (f"{part}.{name}", value.numpy(force=True).dtype, value.shape[1:])
            for part, found in state.items()
            for name, value in found.items()
        ]
        stem, dtype = "-".join(state), np.dtype(kinds, align=True)
        path = folder / f"{stem}.npy"
        if mode == "w+":
            path.unlink(missing_ok=True)  # processes that have mapped an earlier file keep it
        elif not path.exists():
            raise ValueError(f"{path} is gone: start again, with another file and another folder")
        records = np.lib.format.open_memmap(path, mode, dtype, (self._clients,))
        if (records.dtype, records.shape) != (dtype, (self._clients,)):
            raise ValueError(
                f"{path} does not have the states of these clients: it has been changed"
            )
        self._files[stem] = records
        return {
            part: {name: torch.from_numpy(np.asarray(records[f"{part}.{name}"])) for name in found}
            for part, found in state.items()
        }

    def _release_pages(self) -> None:
        """Release the pages of the files from the process's memory."""
        for file in self._files.values():
            if hasattr(file.base, "madvise"):
                file.base.madvise(mmap.MADV_DONTNEED)
