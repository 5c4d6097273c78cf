"""What carries bytes between the server and the sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Carrier:
    """The sites as the server sees them.

    Attributes:
        reachable: the addresses that can be reached now.
        exchange: sends messages, by address, and gives what came back within so many seconds.
    """

    reachable: Callable[[], Sequence[str]]
    exchange: Callable[[Mapping[str, bytes], float], dict[str, bytes]]
