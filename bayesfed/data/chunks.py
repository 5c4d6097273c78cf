"""How many clients run at once: what may be held in memory, and the one function that cuts clients by it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ROUND = 250_000_000
"""Numbers of a chunk of clients in a round: a gigabyte in single precision."""
PASS = 4_000_000
"""Numbers of a chunk of clients wherever else all are gone through, with what is worked out on the way: a cacheful."""
SMALL = 1_000_000
"""So few numbers that another chunk would cost more than padding."""
KEPT = 25_000_000
"""Numbers of minibatches that are kept for the next epoch."""
NOISE = 1_000_000
"""Numbers of noise that are drawn at once."""
GRADIENTS = 20_000_000
"""Numbers of the gradients of single rows."""


def weight(size: int, per_row: int, copies: int, points: int = 1) -> tuple[int, int]:
    """About how many numbers a client takes, and each of its rows: its variables, and what is worked out of a row.

    Args:
        size: numbers of the variables.
        per_row: numbers of a row of data.
        copies: of everything, such as draws.
        points: at how many values of a variable of its own each copy of a row is worked out.

    Example:
        >>> from bayesfed.data.chunks import weight
        >>> weight(size=3, per_row=2, copies=100)
        (300, 404)
    """
    return copies * size, 2 * per_row + 4 * copies * points


def chunks(
    lengths: Tensor, client: int, row: int, most: int = PASS, *, padding: float | None = None
) -> Iterator[Tensor]:
    """Positions of consecutive clients, in chunks that hold at most so many numbers, or one client.

    The rows of a chunk are padded to its longest client.

    Args:
        lengths: n_i, ``(N,)``.
        client: numbers of a client.
        row: numbers of a row.
        most: numbers of a chunk.
        padding: how many rows with padding there may be for a row without, in chunks that are not :data:`SMALL`;
            by default any number.

    Example:
        >>> import torch
        >>> from bayesfed.data.chunks import chunks
        >>> lengths = torch.tensor([10, 10, 11, 500, 510])
        >>> [part.tolist() for part in chunks(lengths, 0, 1, most=1000)]
        [[0, 1, 2], [3], [4]]
        >>> [part.tolist() for part in chunks(lengths, 1_000_000, 1, most=10**9, padding=1.25)]
        [[0, 1, 2], [3, 4]]
    """
    start, longest, rows = 0, 0, 0
    for i, n in enumerate(lengths.tolist()):
        count, longest = i + 1 - start, max(longest, n)
        numbers = count * (client + longest * row)
        idle = padding is not None and count * longest > padding * (rows + n) and numbers > SMALL
        if i > start and (numbers > most or idle):
            yield torch.arange(start, i)
            start, longest, rows = i, n, 0
        rows += n
    yield torch.arange(start, len(lengths))
