"""Files that are whole or not there: safetensors, and whatever else is written to a temporary path first."""

from __future__ import annotations

import errno
import glob
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialised
from torch import Tensor


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], name: str, metadata: Mapping[str, Any]
) -> None:
    """Write one safetensors file, atomically, with JSON under a name in its metadata."""
    plain = {
        key: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for key, value in tensors.items()
    }
    with atomically(path) as temporary:
        temporary.write_bytes(serialised(plain, {name: json.dumps(metadata)}))


def read_tensors(path: Path, name: str) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a safetensors file, and the JSON under a name in its metadata: None where there is none.

    Raises:
        ValueError: it is no such file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get(name, "null"))
            return {key: file.get_tensor(key) for key in file.keys()}, metadata  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """A temporary path in the folder of ``path`` that takes its place if nothing is raised.

    A process that is killed leaves the temporary file, and at ``path`` what was there before: see :func:`sweep`.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _keep_name(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Keep other processes from what a file stands for, until this one has done or is dead; where the system can.

    Args:
        path: an empty file, which stays; its name begins with a dot.
        what: is held, for the message.

    Raises:
        BlockingIOError: another process holds it.
    """
    if fcntl is None:
        yield
        return
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = f"another process has {what}: end it, or wait for it"
            raise BlockingIOError(errno.EAGAIN, why) from None
        yield


def sweep(path: Path) -> None:
    """Remove what processes that were killed have left of ``path``, of which nobody else may be a writer."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 8}"):
        temporary.unlink(missing_ok=True)


def _keep_name(folder: Path) -> None:
    """Put a folder's names on the disk, where the system can."""
    with suppress(PermissionError):  # Windows opens no folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
