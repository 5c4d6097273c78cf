"""Rows in a federation's flat storage: those of some clients, a random split, and padded positions."""

from collections.abc import Sequence

import torch
from torch import Tensor


def rows_of_clients(offsets: Tensor, clients: Sequence[int]) -> Tensor:
    """Return the rows of some clients, client by client: int64.

    Example:
        >>> import torch
        >>> from bayesfed.data.rows import rows_of_clients
        >>> rows_of_clients(torch.tensor([0, 2, 3, 6]), [2, 0]).tolist()
        [3, 4, 5, 0, 1]
    """
    rows = torch.arange(int(offsets[-1])).split(offsets.diff().tolist())
    return torch.cat([rows[client] for client in clients] or [torch.empty(0, dtype=torch.int64)])


def split_rows(
    offsets: Tensor, names: Sequence[str], test: float, seed: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Split the rows within each client at random; see :meth:`bayesfed.Federation.split`.

    Returns:
        Rows and numbers of rows per client, of the training part and of the test part.
    """
    if not 0 < test < 1:
        raise ValueError(f"test is {test}; it is the fraction of rows to hold out, in (0, 1)")
    generator = torch.Generator().manual_seed(seed)
    lengths = offsets.diff()
    n_test = []
    train, held = [], []
    for name, start, n in zip(names, offsets.tolist(), lengths.tolist(), strict=False):
        if n < 2:
            raise ValueError(f"client {name!r} has a single row: it cannot be split")
        rows = torch.randperm(n, generator=generator, device="cpu") + start
        n_test.append(min(max(round(test * n), 1), n - 1))
        held.append(rows[: n_test[-1]].sort().values)
        train.append(rows[n_test[-1] :].sort().values)
    sizes = lengths.new_tensor(n_test)
    return (torch.cat(train), lengths - sizes), (torch.cat(held), sizes)


def padded_positions(lengths: Tensor) -> Tensor:
    """Return the positions 0 … n_i − 1 of each client's rows, padded with -1: int64 ``(K, B)``.

    Example:
        >>> import torch
        >>> from bayesfed.data.rows import padded_positions
        >>> padded_positions(torch.tensor([2, 1])).tolist()
        [[0, 1], [0, -1]]
    """
    positions = torch.arange(int(lengths.max()), device="cpu")
    return torch.where(positions < lengths[:, None], positions, -1)
