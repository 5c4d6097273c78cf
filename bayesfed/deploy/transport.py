"""What the server sees of the sites, whatever carries the bytes: Flower, or sockets on one machine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """How long answers are waited for.

    Attributes:
        seconds: at most.
        enough: only until so many have come; by default until all have.
        late: so many seconds more an answer may come, and is then among those of a later exchange.
    """

    seconds: float
    enough: int | None = None
    late: float = 0.0


@dataclass(frozen=True)
class Carrier:
    """The sites' addresses, and bytes there and back.

    Attributes:
        reachable: the addresses that can be asked now.
        exchange: ``exchange(messages, wait)`` gives each address its message and returns what came back, by address:
            answers to these messages, and late ones to the last message that an address was given before. An address
            that failed or was too late is missing from the answer, and why is in the log; nothing is raised for it.

    Example:
        >>> echo = Carrier(lambda: ["here"], lambda messages, wait: dict(messages))
        >>> echo.exchange({"here": b"hello"}, Wait(1.0))
        {'here': b'hello'}
    """

    reachable: Callable[[], Sequence[str]]
    exchange: Callable[[Mapping[str, bytes], Wait], dict[str, bytes]]
