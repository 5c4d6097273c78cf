"""The server's access to the nodes, whatever carries the bytes: Flower, NVIDIA FLARE, sockets, or files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """The time that the server waits for answers.

    Attributes:
        seconds: the longest time.
        enough: the number of answers after which it stops waiting; by default all.
        stale_seconds: for so many seconds more an answer may arrive; a later exchange then returns it.
    """

    seconds: float
    enough: int | None = None
    stale_seconds: float = 0.0


def draw_again(name: str, draw: Callable[[], list[int]]) -> list[int]:
    """Return new numbers: the server of most carriers does not end while it waits for answers."""
    return draw()


@dataclass(frozen=True)
class Carrier:
    """The nodes' addresses, and the exchange of bytes with them.

    Attributes:
        reachable: returns the addresses that can be asked now.
        exchange: ``exchange(messages, wait)`` sends each address its message and returns the answers by address:
            answers to these messages, and stale ones to the last message that an address was sent before. An address
            that failed or was too late is missing from the result, and the log says why; nothing is raised for it.
        remember: ``remember(name, draw)`` returns the numbers ``draw()`` that a request contains and that come from
            the clock or the operating system; where the server ends while it waits (:mod:`bayesfed.deploy.post`),
            those that an earlier process has drawn under this name, so that the request is the same.

    Example:
        >>> echo = Carrier(lambda: ["here"], lambda messages, wait: dict(messages))
        >>> echo.exchange({"here": b"hello"}, Wait(1.0))
        {'here': b'hello'}
    """

    reachable: Callable[[], Sequence[str]]
    exchange: Callable[[Mapping[str, bytes], Wait], dict[str, bytes]]
    remember: Callable[[str, Callable[[], list[int]]], list[int]] = draw_again
