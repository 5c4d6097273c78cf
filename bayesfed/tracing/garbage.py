"""Garbage collection while many objects are made. It needs no torch, so that imports of torch can use it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection while thousands of needed objects are made.

    It would double the time of a trace, and after torch's import a pass takes a tenth of a second.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
