"""Fields that stay on disk: columns of memory-mapped Arrow files, from which a step reads only its rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfed.data.columns import check_columns, client_name
from bayesfed.data.ingest import (
    Missing,
    check_missing,
    check_precision,
    may_change,
    span_of,
    warn_dropped,
)
from bayesfed.data.optional import import_optional

_ROWS = 100_000  # rows checked at once


@dataclass(frozen=True, eq=False)
class Column:
    """A field of a federation that lies in Arrow record batches and is read as tensors.

    Attributes:
        parts: the numbers of each record batch ``(rows, *event)``, views of the mapped file.
        starts: the first row of each record batch, int64.
        order: the position in the file of each row of the federation, int64 ``(rows,)``.
        dtype: floating type of the tensors.
        device: device of the tensors.
    """

    parts: Sequence[Tensor]
    starts: Tensor
    order: Tensor
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> torch.Size:
        """``(rows, *event)``."""
        return torch.Size([len(self.order), *self.parts[0].shape[1:]])

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def place(self) -> str:
        """The addition to the field's name in a description of the data."""
        return " on disk"

    def is_floating_point(self) -> bool:
        """Return True: whole numbers are converted when they are read."""
        return True

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """Read the rows at these positions, as ``Tensor.index_select`` with ``dim=0`` does."""
        at = self.order[rows.to(self.order.device)]
        found = torch.empty(len(at), *self.shape[1:], dtype=self.dtype)
        batch = torch.bucketize(at, self.starts, right=True) - 1
        by_batch = batch.argsort(stable=True)
        numbers, counts = batch[by_batch].unique_consecutive(return_counts=True)
        for number, here in zip(numbers.tolist(), by_batch.split(counts.tolist()), strict=True):
            rows_there = at[here] - self.starts[number]
            found[here] = self.parts[number].index_select(0, rows_there).to(self.dtype)
        return found.to(self.device)

    def __getitem__(self, rows: Tensor) -> Column:
        """Return the column of some rows, without reading it."""
        return replace(self, order=self.order[rows.to(self.order.device)])

    def to(
        self, device: str | torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Column:
        """Return the same column, to be read to another device or as another type."""
        return replace(
            self,
            device=self.device if device is None else torch.device(device),
            dtype=dtype or self.dtype,
        )

    def read(self) -> Tensor:
        """Read all rows."""
        return self.index_select(0, torch.arange(len(self.order)))


def read_table(
    source: Any, client: str, fields: Sequence[str] | None, missing: Missing
) -> tuple[dict[str, Column], np.ndarray, tuple[str, ...]]:
    """Map the fields of an Arrow table, with offsets and clients' names; see :meth:`bayesfed.Federation.from_arrow`."""
    check_missing(missing)
    if missing == "keep":
        raise ValueError(
            "missing='keep' needs data in memory: read the table into a data frame and use from_frame"
        )
    table = _table(source)
    wanted = [c for c in table.column_names if c != client] if fields is None else list(fields)
    check_columns("table", [client, *wanted], table.column_names)
    owners = table[client].combine_chunks().dictionary_encode()
    if owners.null_count:
        row = int(np.flatnonzero(owners.is_null())[0])
        raise ValueError(
            f"row {row} has no client: column {client!r} is missing there. Name its client or drop the row"
        )
    codes = torch.from_numpy(np.array(owners.indices, dtype=np.int64))
    names = tuple(map(client_name, owners.dictionary.to_pylist()))
    chunks = {name: [c for c in table[name].chunks if len(c)] for name in wanted}
    parts = {name: [_numbers(name, c) for c in found] for name, found in chunks.items()}
    keep = torch.ones(len(codes), dtype=torch.bool)
    for name in wanted:
        for row in _missing(name, parts[name], chunks[name]):
            if missing == "fail":
                raise ValueError(
                    f"client {names[codes[row]]!r}, row {row} of the table: field {name!r} is missing. Correct the "
                    "data, or pass missing='drop' to leave such rows out"
                )
            keep[row] = False
    if not keep.all():
        warn_dropped(codes[~keep], names, len(keep))
    order = codes.argsort(stable=True)
    order = order[keep[order]]
    lengths = codes[keep].bincount(minlength=len(names))
    dtype = torch.get_default_dtype()
    made = {}
    for name in wanted:
        sizes = torch.tensor([0, *(len(part) for part in parts[name])])
        starts = sizes.cumsum(0)[:-1]
        made[name] = Column(parts[name], starts, order, dtype, torch.device("cpu"))
    return made, np.concatenate([[0], lengths.numpy().cumsum()]), names


def _table(source: Any) -> Any:
    """Map a file, a folder of files or a Hugging Face dataset as a ``pyarrow.Table``, without reading it."""
    pa = import_optional("pyarrow", "'bayesfed[arrow]'")
    if isinstance(source, str | Path):
        path = Path(source)
        files = sorted(path.glob("*.arrow")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise FileNotFoundError(f"there is no Arrow file {path}")
        return pa.concat_tables([_map_file(file) for file in files])
    if isinstance(source, pa.Table):
        return source
    if getattr(source, "_indices", None) is not None:  # a selection or permutation of rows
        source = source.flatten_indices()
    if not hasattr(source, "data"):
        raise TypeError(
            f"from_arrow takes a path, a pyarrow.Table or a datasets.Dataset, not a {type(source).__name__}"
        )
    return source.data.table


def _map_file(file: Path) -> Any:
    """Map an Arrow file or stream into memory."""
    import pyarrow as pa

    try:
        return pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    except pa.ArrowInvalid:  # datasets.Dataset.save_to_disk writes streams
        try:
            return pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
        except pa.ArrowInvalid as error:
            raise ValueError(f"{file} is not an Arrow file: {error}") from None


def _numbers(field: str, array: Any) -> Tensor:
    """Return a record batch's column as a view of its buffer, ``(rows, *event)``; nulls become arbitrary numbers."""
    import pyarrow as pa

    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _numbers(field, array.storage)
    if pa.types.is_fixed_size_list(kind):
        size, start = kind.list_size, array.offset * kind.list_size
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        sizes = np.diff(array.offsets.to_numpy())
        if (sizes != sizes[0]).any():
            raise TypeError(
                f"field {field!r} has rows of {sizes.min()} to {sizes.max()} entries: all rows of a field need "
                "the same shape"
            )
        size, start = int(sizes[0]), array.offsets[0].as_py()
    else:
        return _flat_numbers(field, array)
    inner = _numbers(field, array.values.slice(start, len(array) * size))
    return inner.unflatten(0, (len(array), size))


def _flat_numbers(field: str, array: Any) -> Tensor:
    """Return a record batch's column of numbers as a view of its buffer, ``(rows,)``."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_boolean(kind):  # stored as bits: the only type that is copied
        return torch.from_numpy(np.array(array.fill_null(False).to_numpy(zero_copy_only=False)))
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise TypeError(
            f"field {field!r} has type {kind}: only numbers can be stored; encode it as numbers first"
        )
    dtype = np.dtype(kind.to_pandas_dtype())
    numbers = np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
    with warnings.catch_warnings():  # the tensor is never written to
        warnings.filterwarnings("ignore", "The given NumPy array is not writ")
        return torch.from_numpy(numbers)


def _missing(field: str, parts: Sequence[Tensor], chunks: Sequence[Any]) -> Iterator[int]:
    """Yield the rows of the table that are null or hold a NaN; refuse infinite and unrepresentable numbers."""
    start = 0
    span = span_of(rows for part in parts if may_change(part) for rows in part.split(_ROWS))
    for part, array in zip(parts, chunks, strict=True):
        if array.null_count:
            yield from (start + np.flatnonzero(array.is_null())).tolist()
        for rows in part.split(_ROWS):
            bad = rows.isnan().reshape(len(rows), -1).any(1)
            yield from (start + bad.nonzero().flatten()).tolist()
            check_precision(field, rows, "the table", span)
            if rows.isinf().any():
                raise ValueError(
                    f"the table: field {field!r} holds an infinite number. Correct the data"
                )
            start += len(rows)
