"""What clients keep from round to round: a row for each of them, in memory or in files that are mapped into it."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from bayesfed import optimizer


class States:
    """The states of N clients, of which a cohort is taken and put back.

    In a folder every tensor is a NumPy file ``<part>.<name>.npy`` with a row per client. Of it only the rows at work
    are in memory, and zeros that were never written take no disk where the file system knows holes.

    Attributes:
        tensors: by part and name, ``(N, ...)`` each; none before the first state is there.

    Raises:
        FileExistsError: the folder holds states already.

    Example:
        >>> import tempfile, torch
        >>> from bayesfed.states import States
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
    ) -> None:
        self.tensors: optimizer.State = {}
        self._clients, self._device = clients, torch.device(device)
        self._folder = None if folder is None else Path(folder)
        self._maps: list[Any] = []
        if self._folder is not None:
            if next(self._folder.glob("*.npy"), None):
                raise FileExistsError(
                    f"{self._folder} holds clients' states of another run: delete them or choose another folder"
                )
            self._folder.mkdir(parents=True, exist_ok=True)

    def take(self, clients: Tensor) -> optimizer.State:
        """The states of K clients, on the device."""
        here = clients.cpu() if self._folder else clients
        state = optimizer.take(self.tensors, here)
        return {p: {n: v.to(self._device) for n, v in found.items()} for p, found in state.items()}

    def begin(self, clients: Tensor, state: optimizer.State) -> None:
        """Keep the first states of K clients. Zeros need not be written."""
        for part, found in state.items():
            if part not in self.tensors:
                self.tensors[part] = {n: self._zeros(f"{part}.{n}", v) for n, v in found.items()}
        self.put(
            clients, {p: {n: v for n, v in found.items() if v.any()} for p, found in state.items()}
        )

    def put(self, clients: Tensor, state: optimizer.State) -> None:
        """Keep the states of K clients."""
        if not self._folder:
            optimizer.put(self.tensors, clients, state)
            return
        written = {p: {n: v.cpu() for n, v in found.items()} for p, found in state.items()}
        optimizer.put(self.tensors, clients.cpu(), written)
        for file in self._maps:  # the pages stay in the file; the process lets them go
            if hasattr(file, "madvise"):
                file.madvise(mmap.MADV_DONTNEED)

    def _zeros(self, name: str, like: Tensor) -> Tensor:
        shape = (self._clients, *like.shape[1:])
        if self._folder is None:
            return like.new_zeros(shape)
        array = np.lib.format.open_memmap(
            self._folder / f"{quote(name, safe='')}.npy",
            mode="w+",
            dtype=like.detach().cpu().numpy().dtype,
            shape=shape,
        )
        self._maps.append(array.base)
        return torch.from_numpy(array)
