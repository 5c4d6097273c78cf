"""Few rows with the moments of many: sufficient statistics of a log likelihood that is quadratic in a row's fields.

A client's n rows of d numbers x_r, with mean μ and covariance C, are replaced by d + 1 rows of weight n / (d + 1) each,

    x_k = μ + √(d + 1) C^{½} s_k,     Σ_k s_k = 0,  Σ_k s_k s_kᵀ = I,

the vertices of a regular simplex in the coordinates of C (Julier 2003, *The spherical simplex unscented
transformation*). All sums of quadratic functions over the rows are unchanged: for a Gaussian outcome whose mean is
linear in the fields, and whose variance does not depend on them, so is the log likelihood at every value of the
variables.
"""

import torch
from torch import Tensor

from bayesfed.data.absent import AbsentColumn
from bayesfed.data.arrow import Column
from bayesfed.data.batch import Batch
from bayesfed.data.chunks import PASS, chunks
from bayesfed.data.federation import Federation


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


def _simplex(batch: Batch) -> dict[str, Tensor]:
    """Return d + 1 rows of K clients with the moments of their rows, by field ``(K, d + 1, *event)``."""
    flat = [value.double().reshape(*value.shape[:2], -1) for value in batch.fields.values()]
    x = torch.cat(flat, -1)
    mask, size = batch.mask[..., None], x.shape[-1]
    count = batch.mask.sum(1).to(x)[:, None]
    mean = torch.where(mask, x, 0.0).sum(1) / count
    centred = torch.where(mask, x - mean[:, None], 0.0)
    values, vectors = torch.linalg.eigh(centred.mT @ centred / count[..., None])
    ones = torch.ones(size + 1, 1, dtype=x.dtype, device=x.device)
    basis = torch.cat([ones, torch.eye(size + 1, size, dtype=x.dtype, device=x.device)], 1)
    vertices = torch.linalg.qr(basis).Q[:, 1:].mT
    spread = vectors * (values.clamp(min=0.0) * (size + 1)).sqrt()[:, None]
    varies = ((x != x[:, :1]) & mask).any(1, keepdim=True)
    points = torch.where(varies, mean[:, None] + (spread @ vertices).mT, x[:, :1])
    sizes = [value.shape[2:].numel() for value in batch.fields.values()]
    parts = zip(batch.fields.items(), points.split(sizes, -1), strict=True)
    return {name: part.reshape(*part.shape[:2], *v.shape[2:]).to(v) for (name, v), part in parts}
