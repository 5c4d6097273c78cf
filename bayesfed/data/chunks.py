"""Chunks of clients that run at once, so that memory stays bounded."""

from collections.abc import Iterator

import torch
from torch import Tensor

ROUND = 250_000_000
"""Numbers in a chunk of clients in a round: a gigabyte in single precision."""
PASS = 20_000_000
"""Numbers in a chunk of clients in any other pass over all of them, intermediate results included: 80 megabytes."""
EACH_VARIABLE = 32
"""Numbers that a guide computes for one draw of each of a client's variables, about."""
SMALL = 1_000_000
"""Numbers in a chunk below which another chunk would cost more than padding."""
KEPT = 25_000_000
"""Numbers in the minibatches that are kept for the next epoch."""
NOISE = 1_000_000
"""Numbers of noise drawn at once."""
GRADIENTS = 20_000_000
"""Numbers in the gradients of single rows that are computed at once."""


def weight(size: int, per_row: int, copies: int, points: int = 1) -> tuple[int, int]:
    """Estimate the numbers in memory per client, for its variables, and per row, for data and intermediate results.

    Args:
        size: numbers in a client's variables.
        per_row: numbers in a row of data.
        copies: of everything, such as draws.
        points: values of its own latent variable at which each copy of a row is evaluated.

    Example:
        >>> from bayesfed.data.chunks import weight
        >>> weight(size=3, per_row=2, copies=100)
        (300, 404)
    """
    return copies * size, 2 * per_row + 4 * copies * points


def chunks(
    lengths: Tensor, client: int, row: int, most: int = PASS, *, padding: float | None = None
) -> Iterator[Tensor]:
    """Cut consecutive clients into chunks of at most ``most`` numbers each, or of one client.

    The rows of a chunk are padded to its longest client.

    Args:
        lengths: n_i, ``(N,)``.
        client: numbers per client.
        row: numbers per row.
        most: numbers per chunk.
        padding: the largest ratio of padded rows to real rows, in chunks that are not :data:`SMALL`; by default any.

    Yields:
        Positions of the clients of a chunk, int64.

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
