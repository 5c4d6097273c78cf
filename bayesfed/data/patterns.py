"""One row for all equal rows of a client: counts by pattern, as of a table of categorical predictors and outcomes.

Rows of a client that are equal in all fields have the same likelihood under a model in which rows are independent given
the variables. One of them with their number as its weight takes their place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayesfed.data.federation import Federation

TOGETHER = 2**22
"""About how many numbers of the fields are compared at once."""


def rows_of_patterns(federation: Federation, worth: float) -> Federation | None:
    """Return the distinct rows of each client, each weighted by how often the client has it.

    Args:
        federation: clients whose fields have no gaps.
        worth: the largest share of the rows that may be left; where the first clients have more, no others are read.

    Returns:
        A federation with the same clients and fields, in memory, with ``weights``; None if too many rows differ.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed.data.patterns import rows_of_patterns
        >>> ward = {"treated": [0.0, 1.0, 0.0, 0.0, 1.0], "died": [0.0, 1.0, 0.0, 1.0, 1.0]}
        >>> few = rows_of_patterns(bf.Federation.from_arrays({"north": ward}), worth=0.7)
        >>> few["treated"].tolist(), few["died"].tolist(), few.weights.tolist(), few.counts.tolist()
        ([0.0, 1.0, 0.0], [0.0, 1.0, 1.0], [2.0, 2.0, 1.0], [5])
        >>> rows_of_patterns(bf.Federation.from_arrays({"north": ward}), worth=0.5)
    """
    generator = torch.Generator("cpu").manual_seed(0)
    size = federation.numbers_per_row + 1
    code = torch.rand(size, generator=generator, dtype=torch.float64, device="cpu")
    code = code.to(federation.device)
    found: list[Tensor] = []
    weights: list[Tensor] = []
    seen = kept = 0
    for rows in torch.arange(federation.rows, device=federation.device).split(TOGETHER // size + 1):
        first, times = _distinct(_numbers(federation, rows), code)
        found.append(rows[first])
        weights.append(times)
        seen, kept = seen + len(rows), kept + len(first)
        if kept > worth * seen:
            return None
    chosen = torch.cat(found)
    lengths = federation.owner[chosen].bincount(minlength=len(federation)).cpu()
    return Federation(
        {name: value.index_select(0, chosen) for name, value in federation.fields.items()},
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        federation.names,
        federation.client_dim,
        counts=federation.lengths,
        weights=torch.cat(weights).to(federation.dtype),
    )


def _numbers(federation: Federation, rows: Tensor) -> Tensor:
    """Return the owner and the numbers of some rows, ``(B, 1 + D)``, in double precision."""
    values = [federation.owner, *federation.fields.values()]
    parts = [value.index_select(0, rows) for value in values]
    return torch.cat([part.double().reshape(len(rows), -1) for part in parts], 1)


def _distinct(numbers: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first of each kind of equal rows of ``(B, D)``, in order, and how many there are of it.

    Rows are compared by one random combination of their numbers, which no two different rows share but by accident;
    after such an accident all rows are returned.
    """
    _, kind, times = (numbers * code).sum(1).unique(return_inverse=True, return_counts=True)
    place = torch.arange(len(numbers), device=numbers.device)
    first = torch.full_like(times, len(numbers)).scatter_reduce(0, kind, place, "amin")
    if not torch.equal(numbers, numbers[first[kind]]):
        return place, torch.ones_like(place)
    order = first.argsort()
    return first[order], times[order]
