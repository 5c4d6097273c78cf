"""What the server sees of the sites, whatever carries the bytes: Flower, or sockets on one machine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Carrier:
    """The sites' addresses, and bytes there and back.

    Attributes:
        reachable: the addresses that can be asked now.
        exchange: ``exchange(messages, seconds)`` gives each address its message and returns what came back, by
            address, within so many seconds. An address that failed or was too late is missing from the answer, and
            why is in the log; nothing is raised for it.

    Example:
        >>> echo = Carrier(lambda: ["here"], lambda messages, seconds: dict(messages))
        >>> echo.exchange({"here": b"hello"}, 1.0)
        {'here': b'hello'}
    """

    reachable: Callable[[], Sequence[str]]
    exchange: Callable[[Mapping[str, bytes], float], dict[str, bytes]]
