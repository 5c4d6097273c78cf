"""Atomic writing of files, which are complete or absent: safetensors and others."""

import errno
import glob
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

WINDOWS = os.name == "nt"
"""Open and mapped files can then not be replaced."""
WAITS = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Seconds between attempts to replace a file that another program, such as a virus scanner, has open."""


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
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            if WINDOWS:  # they are a map of the file, which could not be written again
                found = {key: value.clone() for key, value in found.items()}
            return found, metadata
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Give a temporary path in the folder of ``path``, which replaces ``path`` at the end if nothing is raised.

    A process that is killed leaves the temporary file behind, and ``path`` as it was: see :func:`sweep`.

    Raises:
        PermissionError: on Windows, if another program has the file open.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        _replace(temporary, path)
        _keep_name(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def lock(path: Path, what: str) -> Iterator[None]:
    """Lock a resource against other processes until the block or this process ends.

    By ``flock``, on Windows by a lock of the file's first byte.

    Args:
        path: an empty file, which stays; its name starts with a dot.
        what: the resource, for the message.

    Raises:
        BlockingIOError: another process holds it.
    """
    with path.open("ab") as file:
        try:
            _try_lock(file.fileno())
        except BlockingIOError:
            why = f"another process has {what}: end it, or wait for it"
            raise BlockingIOError(errno.EAGAIN, why) from None
        try:
            yield
        finally:
            _unlock(file.fileno())


def sweep(path: Path) -> None:
    """Remove temporary files of ``path`` that killed processes have left; no other process may be writing it."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 8}"):
        temporary.unlink(missing_ok=True)


def _try_lock(descriptor: int) -> None:
    """Lock a file until it is closed.

    Raises:
        BlockingIOError: another process has locked it.
    """
    try:
        import fcntl
    except ImportError:
        import msvcrt

        os.lseek(descriptor, 0, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError as error:
            raise BlockingIOError(*error.args) from None
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlock(descriptor: int) -> None:
    """Unlock a file that :func:`_try_lock` has locked; Windows would do so some time after it is closed."""
    with suppress(ImportError):
        import msvcrt

        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined]


def _replace(temporary: Path, path: Path) -> None:
    """Move a file to the place of another, on Windows in several attempts."""
    for wait in WAITS if WINDOWS else ():
        try:
            os.replace(temporary, path)
        except PermissionError:
            time.sleep(wait)
        else:
            return
    try:
        os.replace(temporary, path)
    except PermissionError as error:
        raise PermissionError(
            error.errno,
            f"cannot be written: close the program that has it open ({error.strerror})",
            str(path),
        ) from None


def _keep_name(folder: Path) -> None:
    """Write a folder's entries to the disk, if the system allows it."""
    with suppress(PermissionError):  # Windows cannot open folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
