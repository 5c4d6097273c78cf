"""Interrupts that wait for the end of a round, so that a run can be saved as it is between two rounds."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def delayed_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises the KeyboardInterrupt that has been sent in the meantime; a second acts at once.

    Signals are handled in the main thread only; elsewhere, and where the program has a handler of its own, nothing
    changes.

    Example:
        >>> import signal
        >>> from bayesfed.engine.interrupts import delayed_interrupts
        >>> with delayed_interrupts() as check:
        ...     signal.raise_signal(signal.SIGINT)
        ...     done = "the round"
        ...     try:
        ...         check()
        ...     except KeyboardInterrupt:
        ...         print("after", done)
        after the round
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or (
        before is not signal.default_int_handler
    ):
        yield lambda: None
        return
    sent: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if sent:
            raise KeyboardInterrupt
        sent.append(number)

    def check() -> None:
        if sent:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
