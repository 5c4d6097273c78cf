"""Few rows with the moments of many: sufficient statistics of a log likelihood that is quadratic in a row's fields.

A client's n rows of d numbers x_r, with mean μ and covariance C, are replaced by d + 1 rows of weight n / (d + 1) each,

    x_k = μ + √(d + 1) C^{½} s_k,     Σ_k s_k = 0,  Σ_k s_k s_kᵀ = I,

the vertices of a regular simplex in the coordinates of C (Julier 2003, *The spherical simplex unscented
transformation*). All sums of quadratic functions over the rows are unchanged: for a Gaussian outcome whose mean is
linear in the fields, and whose variance does not depend on them, so is the log likelihood at every value of the
variables.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayesfed.data.absent import AbsentColumn, are_absent
from bayesfed.data.arrow import Column
from bayesfed.data.batch import Batch
from bayesfed.data.chunks import PASS, chunks
from bayesfed.data.federation import Federation

NEGLIGIBLE = 1e-12
"""The part of the largest eigenvalue of a correlation matrix below which one is round-off."""


def rows_of_moments(federation: Federation) -> Federation:
    """Return d + 1 rows of each client with the moments of its own, d the count of numbers in the fields of a row.

    A client of no more rows than that keeps its own.

    Args:
        federation: clients whose fields are floating numbers without gaps.

    Returns:
        A federation with the same clients and fields, in memory, whose rows count as often as ``counts`` says.

    Example:
        >>> import bayesfed as bf, torch
        >>> from bayesfed.data.moments import rows_of_moments
        >>> x = torch.arange(100.0)
        >>> few = rows_of_moments(bf.Federation.from_arrays({"a": {"x": x, "y": x.cos()}}))
        >>> few, few.counts.tolist()
        (Federation: 1 client, 3 rows (3 to 3 a client), fields x, y, [100])
        >>> f = lambda rows: (rows["y"] - 0.5 * rows["x"]).square().mean()
        >>> bool((f(few) - (x.cos() - 0.5 * x).square().mean()).abs() < 1e-3)
        True
    """
    most = federation.numbers_per_row + 1
    lengths = federation.lengths.clamp(max=most)
    parts: dict[str, list[Tensor]] = {name: [] for name in federation.fields}
    for some in chunks(federation.lengths, 0, 4 * most, PASS):
        batch = federation.batch(some)
        points = _simplex(batch) if batch.mask.shape[1] > most else dict(batch.fields)
        own = torch.arange(most, device=batch.device) < lengths[some, None].to(batch.device)
        short = (federation.lengths[some] <= most).to(batch.device)
        for name, value in points.items():
            rows = batch.fields[name][:, :most]
            kept = short.reshape(-1, *[1] * (value.ndim - 1))
            parts[name].append(
                torch.where(kept, rows, value[:, : rows.shape[1]])[own[:, : rows.shape[1]]]
            )
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    fields: dict[str, Tensor | Column | AbsentColumn] = {
        name: torch.cat(values) for name, values in parts.items()
    }
    return Federation(
        fields, offsets, federation.names, federation.client_dim, counts=federation.lengths
    )


class Statistics(NamedTuple):
    """Statistics of K clients' rows of d numbers, in double precision.

    Attributes:
        counts: n_i, ``(K,)``.
        mean: ``(K, d)``.
        covariance: divided by n_i, ``(K, d, d)``; exactly zero for a number that is the same in all rows of a client.
    """

    counts: Tensor
    mean: Tensor
    covariance: Tensor


def statistics(batch: Batch) -> Statistics:
    """Return count, mean and covariance of K clients' rows; the numbers of a row are in the order of the fields.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed.data.moments import statistics
        >>> found = statistics(bf.Federation.from_arrays({"a": {"x": [1.0, 3.0], "y": [2.0, 2.0]}}).batch())
        >>> found.counts.tolist(), found.mean.tolist(), found.covariance.tolist()
        ([2.0], [[2.0, 2.0]], [[[1.0, 0.0], [0.0, 0.0]]])
    """
    x, mask = flat_rows(batch), batch.mask[..., None]
    count = batch.mask.sum(1).to(x)
    mean = torch.where(mask, x, 0.0).sum(1) / count[:, None]
    varies = ((x != x[:, :1]) & mask).any(1)
    mean = torch.where(varies, mean, x[:, 0])
    centred = torch.where(mask, x - mean[:, None], 0.0)
    product = centred.mT @ centred  # symmetric but for round-off on some processors
    return Statistics(count, mean, (product + product.mT) / (2 * count[:, None, None]))


def flat_rows(batch: Batch) -> Tensor:
    """Return the numbers of each row in double precision, ``(K, B, d)``."""
    flat = [value.double().reshape(*value.shape[:2], -1) for value in batch.fields.values()]
    return torch.cat(flat, -1)


def simplex(found: Statistics) -> Tensor:
    """Return d + 1 rows of K clients with their means and covariances, ``(K, d + 1, d)``."""
    size, like = found.mean.shape[-1], found.mean
    values, vectors = torch.linalg.eigh(found.covariance)
    vertices = _vertices(size, like)
    spread = vectors * (values.clamp(min=0.0) * (size + 1)).sqrt()[:, None]
    varies = (found.covariance.diagonal(dim1=1, dim2=2) > 0)[:, None]
    mean = found.mean[:, None]
    return torch.where(varies, mean + (spread @ vertices).mT, mean)


def _simplex(batch: Batch) -> dict[str, Tensor]:
    """Return d + 1 rows of K clients with the moments of their rows, by field ``(K, d + 1, *event)``."""
    kinds = {name: (value.shape[2:], value.dtype) for name, value in batch.fields.items()}
    return fields_of(simplex(statistics(batch)), kinds)


def fields_of(
    rows: Tensor, kinds: Mapping[str, tuple[Sequence[int], torch.dtype]]
) -> dict[str, Tensor]:
    """Divide rows of numbers ``(..., d)`` into fields ``(..., *event)`` of these shapes and types."""
    sizes = [torch.Size(shape).numel() for shape, _ in kinds.values()]
    parts = zip(kinds.items(), rows.split(sizes, -1), strict=True)
    return {
        name: part.reshape(*rows.shape[:-1], *shape).to(dtype)
        for (name, (shape, dtype)), part in parts
    }


def clients_of_moments(
    names: Sequence[str],
    client_dim: str,
    kinds: Mapping[str, tuple[Sequence[int], torch.dtype]],
    found: Statistics,
) -> Federation:
    """Return clients whose rows are elsewhere, of which these statistics are here.

    Args:
        names: of the N clients.
        client_dim: the name of a client in the data.
        kinds: field name to the shape of one row, and the type of its numbers.
        found: of all clients.

    Returns:
        A federation of absent rows, whose :attr:`~bayesfed.Federation.sufficient` rows have the statistics.
    """
    counts, ends = found.counts.to(torch.int64), torch.arange(len(names) + 1)
    few = {name: rows.flatten(0, 1) for name, rows in fields_of(simplex(found), kinds).items()}
    offsets = (found.mean.shape[-1] + 1) * ends
    own = Federation(few, offsets, tuple(names), client_dim, counts=counts)
    rows = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    absent = {
        name: AbsentColumn(int(rows[-1]), tuple(shape), dtype)
        for name, (shape, dtype) in kinds.items()
    }
    return Federation(absent, rows, tuple(names), client_dim, moments=own)


def is_of_moments(federation: Federation) -> bool:
    """Return whether clients are here by their moments alone, as :func:`clients_of_moments` returns them."""
    return federation.moments is not None and are_absent(federation.fields)


def rows_at_hand(federation: Federation) -> Federation:
    """Return the clients with the rows that can be read: their own, or, where only moments are here, rows of these."""
    return federation.sufficient if is_of_moments(federation) else federation


def other_rows(few: Federation) -> Federation:
    """Return 2 d + 3 rows of each client with the moments of its d + 1 rows, and other third and fourth moments."""
    batch = few.batch()
    x = flat_rows(batch)
    size, many = x.shape[-1], 2 * x.shape[-1] + 3
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        turned = torch.linalg.qr(torch.cat([torch.ones(many, 1), torch.randn(many, size)], 1)).Q
    turn = (many / (size + 1)) ** 0.5 * turned[:, 1:].to(x) @ _vertices(size, x)
    mean = torch.where((x != x[:, :1]).any(1), x.mean(1), x[:, 0])[:, None]
    rows = mean + turn @ (x - mean)
    kinds = {name: (value.shape[2:], value.dtype) for name, value in batch.fields.items()}
    fields = {name: value.flatten(0, 1) for name, value in fields_of(rows, kinds).items()}
    offsets = many * torch.arange(len(few) + 1)
    return Federation(fields, offsets, few.names, few.client_dim, counts=few.counts)


def _vertices(size: int, like: Tensor) -> Tensor:
    """Return the vertices s_k of a simplex as columns, ``(d, d + 1)``: Σ_k s_k = 0, Σ_k s_k s_kᵀ = I."""
    ones = torch.ones(size + 1, 1, dtype=like.dtype, device=like.device)
    basis = torch.cat([ones, torch.eye(size + 1, size, dtype=like.dtype, device=like.device)], 1)
    return torch.linalg.qr(basis).Q[:, 1:].mT


def largest_leverage(federation: Federation) -> Tensor:
    """Return the largest leverage of a row of each client, of its numbers and a constant: double ``(N,)``.

    If m rows are all that have a one in some linear combination of the numbers and a constant, and the others a zero,
    then the moments have the means of all numbers over these m rows, and each of them has a leverage of 1 / m or more.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed.data.moments import largest_leverage
        >>> rows = {"old": [0.0] * 6 + [1.0] * 2, "y": [0.0, 1.0] * 4}
        >>> [round(found, 2) for found in largest_leverage(bf.Federation.from_arrays({"a": rows})).tolist()]
        [0.62]
    """
    parts = []
    for some in chunks(federation.lengths, 0, 4 * federation.numbers_per_row, PASS):
        batch = federation.batch(some)
        found, mask = statistics(batch), batch.mask[..., None]
        sd = found.covariance.diagonal(dim1=1, dim2=2).sqrt()[:, None]
        x = torch.where(mask & (sd > 0), (flat_rows(batch) - found.mean[:, None]) / sd, 0.0)
        values, vectors = torch.linalg.eigh(x.mT @ x)
        inverse = torch.where(values > NEGLIGIBLE * values.amax(1, keepdim=True), 1 / values, 0.0)
        squares = (x @ vectors).square() * inverse[:, None]
        parts.append(squares.sum(-1).amax(1) + 1 / found.counts)
    return torch.cat(parts)
