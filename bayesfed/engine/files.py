"""Atomic writing of files, which are complete or absent: safetensors and others."""

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
from safetensors.torch import save as serialise
from torch import Tensor


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], name: str, metadata: Mapping[str, Any]
) -> None:
    """Write a safetensors file, atomically, with JSON under a name in its metadata."""
    with atomically(path) as temporary:
        temporary.write_bytes(to_bytes(tensors, name, json.dumps(metadata)))


def to_bytes(tensors: Mapping[str, Tensor], name: str, text: str) -> bytes:
    """Return a safetensors file as bytes, with a text under a name in its metadata."""
    plain = {
        key: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for key, value in tensors.items()
    }
    return serialise(plain, {name: text})


def metadata_text(payload: bytes, name: str) -> str | None:
    """Return the text under a name in the metadata of a safetensors file, or None."""
    size = int.from_bytes(payload[:8], "little")
    found: str | None = json.loads(payload[8 : 8 + size]).get("__metadata__", {}).get(name)
    return found


def read_tensors(path: Path, name: str) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a safetensors file, and the JSON under a name in its metadata, None if there is none.

    Raises:
        ValueError: it is not a complete safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get(name, "null"))
            return {key: file.get_tensor(key) for key in file.keys()}, metadata  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Give a temporary path in the folder of ``path``, which replaces ``path`` at the end if nothing is raised.

    A process that is killed leaves the temporary file behind, and ``path`` as it was: see :func:`sweep`.
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
def lock(path: Path, what: str) -> Iterator[None]:
    """Lock a resource against other processes until the block or this process ends, if the system has file locks.

    Args:
        path: an empty file, which stays; its name starts with a dot.
        what: the resource, for the message.

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
    """Remove temporary files of ``path`` that killed processes have left; no other process may be writing it."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 8}"):
        temporary.unlink(missing_ok=True)


def _keep_name(folder: Path) -> None:
    """Write a folder's entries to the disk, if the system allows it."""
    with suppress(PermissionError):  # Windows cannot open folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
