"""Conversion of the user's data to tensors: numbers only, checked for missing and infinite values."""

import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from bayesfed.data.columns import UnknownName, check_columns, client_name
from bayesfed.data.frames import to_pandas
from bayesfed.data.plural import plural

Missing = Literal["fail", "drop", "keep"]
"""Treatment of missing numbers."""
Empty = Literal["fail", "drop"]
"""Treatment of partitions without rows."""
Stored = tuple[dict[str, Tensor], np.ndarray, tuple[str, ...]]
"""Field name to ``(rows, *event)``, client by client; the offsets of the clients' rows, ``(N + 1,)``; the N names."""


def read_frame(
    frame: Any,
    client: Hashable,
    fields: Sequence[Any] | Mapping[str, Any] | None,
) -> Stored:
    """Read the rows of a data frame, sorted by client; see :meth:`bayesfed.Federation.from_frame`."""
    import pandas as pd

    frame = to_pandas(frame)
    if client in frame.index.names and client not in frame.columns:
        frame = frame.reset_index(client)
    if fields is None:
        fields = [c for c in frame.columns if c != client]
    sources = fields if isinstance(fields, Mapping) else {name: name for name in fields}
    wanted = [c for s in sources.values() for c in (s if isinstance(s, list | tuple) else [s])]
    check_columns("frame", [client, *wanted], frame.columns)
    nameless = frame[client].isna().to_numpy()
    if nameless.any():
        raise ValueError(
            f"row {frame.index[nameless.argmax()]!r} has no client: column {client!r} is missing "
            "there. Name its client or drop the row"
        )
    codes, names = pd.factorize(frame[client])
    order = np.argsort(codes, kind="stable")
    offsets = np.concatenate([[0], np.bincount(codes, minlength=len(names)).cumsum()])
    tensors = {}
    for c in wanted:
        numbers = to_numbers(c, frame[c].iloc[order].array, str(names[0]))
        tensors[c] = to_floating(c, numbers, "the frame", span_of([numbers]))
    columns = {
        str(name): torch.stack([tensors[c] for c in s], -1)
        if isinstance(s, list | tuple)
        else tensors[s]
        for name, s in sources.items()
    }
    return columns, offsets, tuple(map(client_name, names))


def read_arrays(clients: Mapping[str, Mapping[str, Any]]) -> Stored:
    """Read the clients' arrays, one after the other; see :meth:`bayesfed.Federation.from_arrays`."""
    import pandas as pd

    if not isinstance(clients, Mapping):
        raise TypeError(
            "from_arrays takes one mapping per named client: {'hospital A': {'x': ..., 'y': ...}}, "
            f"not a {type(clients).__name__}; clients need names"
        )
    if not clients:
        raise ValueError("a federation needs at least one client; none was given")
    names = list(clients)
    expected = list(clients[names[0]])
    per_client: dict[str, list[Tensor]] = {field: [] for field in expected}
    lengths = []
    for name, arrays in clients.items():
        if not isinstance(arrays, Mapping | pd.DataFrame):
            arrays = to_pandas(arrays)
        for field in set(expected) ^ set(arrays):
            lacking = name if field in expected else names[0]
            raise UnknownName(f"client {lacking!r} has no field {field!r}, other clients have it")
        tensors = {f: to_numbers(f, arrays[f], str(name)) for f in expected}
        sizes = {f: t.shape[0] if t.ndim else 0 for f, t in tensors.items()}
        odd = [f for f in sizes if sizes[f] != sizes[expected[0]]]
        if odd:
            raise ValueError(
                f"client {name!r}: field {odd[0]!r} has length {sizes[odd[0]]}, "
                f"field {expected[0]!r} has length {sizes[expected[0]]}"
            )
        lengths.append(sizes[expected[0]] if expected else 0)
        for field, tensor in tensors.items():
            per_client[field].append(tensor)
    for field, parts in per_client.items():
        for name, part in zip(names, parts, strict=True):
            if part.shape[1:] != parts[0].shape[1:]:
                raise ValueError(
                    f"client {name!r}: field {field!r} has rows of shape {tuple(part.shape[1:])}, "
                    f"those of client {names[0]!r} have {tuple(parts[0].shape[1:])}"
                )
    columns = {}
    for field, parts in per_client.items():
        span = span_of([torch.cat(parts)])
        kept = [isinstance(arrays[field], Tensor) for arrays in clients.values()]
        columns[str(field)] = torch.cat(
            [
                part if own_type else to_floating(field, part, f"client {name!r}", span)
                for name, part, own_type in zip(names, parts, kept, strict=True)
            ]
        )
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return columns, offsets, tuple(map(client_name, names))


def read_partitions(
    dataset: Any, partitioner: Any, fields: Sequence[str] | None, drop_empty: bool
) -> tuple[dict[str, dict[str, Any]], str]:
    """Read each partition's arrays by name, and the partitioning column; see :meth:`Federation.from_partitioner`."""
    partitioner.dataset = dataset
    ids: Mapping[int, Any] = {}
    clients, empty = {}, []
    for number in range(partitioner.num_partitions):
        rows = partitioner.load_partition(number).with_format("numpy")
        wanted = rows.column_names if fields is None else fields
        check_columns("dataset", wanted, rows.column_names)
        # the first load creates the mapping
        ids = getattr(partitioner, "partition_id_to_natural_id", None) or {}
        name = client_name(ids.get(number, number))
        if drop_empty and not len(rows):
            empty.append(name)
            continue
        clients[name] = {field: rows[field][:] for field in wanted}
    if empty:
        warnings.warn(
            f"{len(empty)} of {partitioner.num_partitions} partitions have no rows and are left out: "
            f"{', '.join(map(repr, empty[:5]))}{', ...' if len(empty) > 5 else ''}",
            stacklevel=3,
        )
    column = getattr(partitioner, "_partition_by", None) if ids else None
    return clients, column or "client"


def check_clients(fields: Mapping[str, Any], offsets: Tensor, names: Sequence[str]) -> None:
    """Raise ValueError unless each client has a name of its own and rows, and each field as many rows as they have."""
    if not names:
        raise ValueError("a federation needs at least one client; none was given")
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise ValueError(f"client {twice!r} appears twice; clients' names must be unique")
    empty = (offsets.diff() <= 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"client {names[empty[0]]!r} is empty (no rows): leave it out of the federation, a partition "
            "with empty='drop'"
        )
    rows = int(offsets[-1])
    for name, value in fields.items():
        if value.shape[:1] != (rows,):
            raise ValueError(
                f"field {name!r} has {plural(value.shape[0], 'row')}, the clients have {rows} together"
            )


def check_missing(missing: str) -> None:
    """Raise ValueError for an unknown treatment of missing numbers."""
    if missing not in get_args(Missing):
        raise ValueError(f"missing is {missing!r}; choose 'fail', 'drop' or 'keep'")


def to_numbers(field: str, values: Any, client: str) -> Tensor:
    """Convert a field to a tensor of the type that its numbers have.

    Raises:
        TypeError: they are text or categories, or lists of different lengths.
    """
    import pandas as pd

    if isinstance(values, Tensor):
        return values.detach()
    array = np.asarray(values)
    if array.dtype == object and array.size and all(np.ndim(value) for value in array):
        array = _stacked_rows(field, array, client)
    dtype = getattr(values, "dtype", None)
    categorical = isinstance(dtype, pd.CategoricalDtype)
    if array.dtype == object or categorical:
        try:
            # text is never converted: "02139" is not the number 2139
            if categorical or any(isinstance(value, str) for value in np.ravel(array)):
                raise ValueError
            array = pd.to_numeric(pd.Series(array)).to_numpy(dtype=float, na_value=np.nan)
        except (ValueError, TypeError):
            example = pd.unique(pd.Series(np.ravel(array)))[:3].tolist()
            raise TypeError(
                f"field {field!r} is categorical or text (e.g. {example}; client {client!r}): convert it to numbers "
                f"first. Quantities: frame[{field!r}].astype(float). Categories: pandas.get_dummies, or "
                f"frame[{field!r}].astype('category').cat.codes, which codes missing values as -1: drop "
                "them before, frame.dropna()"
            ) from None
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"field {field!r} has type {array.dtype}: only numbers can be stored (client {client!r}); "
            "encode it as numbers first"
        )
    return torch.from_numpy(np.array(array))


def to_floating(field: str, numbers: Tensor, where: str, span: float) -> Tensor:
    """Convert numbers to torch's default floating type; arguments as of :func:`check_precision`."""
    check_precision(field, numbers, where, span)
    return numbers.to(torch.get_default_dtype())


def _stacked_rows(field: str, rows: np.ndarray, client: str) -> np.ndarray:
    """Stack the lists of numbers in the cells of a column."""
    shapes = {np.shape(row) for row in rows}
    if len(shapes) > 1:
        raise TypeError(
            f"field {field!r} holds lists of different lengths (client {client!r}): all rows of a field have one shape"
        )
    return np.stack([np.asarray(row) for row in rows])


def may_change(values: Tensor) -> bool:
    """Return whether torch's default floating type may change numbers of a tensor."""
    return values.dtype not in (torch.bool, torch.get_default_dtype())


def check_precision(field: str, values: Tensor, where: str, span: float) -> None:
    """Raise an error if torch's default floating type changes numbers too much: identifiers or seconds since 1970.

    Whole numbers may not change at all; others by at most a ten-thousandth of their range over all rows.

    Args:
        field: its name.
        values: some of its numbers, ``(rows, *event)``.
        where: the client or table that they are of.
        span: the range over all rows of the field; a few of them may be close to one another.

    Raises:
        ValueError: they do; the message names the field and says what to do.
    """
    dtype = torch.get_default_dtype()
    if not len(values) or not may_change(values):
        return
    whole, exact = not values.is_floating_point(), values.double()
    error = (exact - exact.to(dtype)).abs().nan_to_num(0.0, 0.0)
    if (whole and error.any()) or (span > 0 and float(error.max()) > 1e-4 * span):
        largest = int(error.flatten().argmax())
        before, after = (float(v.flatten()[largest]) for v in (exact, exact.to(dtype)))
        raise ValueError(
            f"{where}: field {field!r} has numbers that {str(dtype)[6:]} cannot "
            f"represent, such as {before:.17g}, which becomes {after:.17g}. Subtract a common offset (a first "
            "date), leave out a column that is an identifier and not a quantity, or call "
            "torch.set_default_dtype(torch.float64)"
        )


def span_of(parts: Iterable[Tensor]) -> float:
    """Return the range of the finite numbers of a field that comes in parts; 0 if there are none."""
    ends: list[float] = []
    for part in parts:
        if len(finite := part[part.isfinite()]):
            ends += float(finite.min()), float(finite.max())
    return max(ends) - min(ends) if ends else 0.0


def treat_missing(
    columns: dict[str, Tensor], offsets: np.ndarray, names: tuple[str, ...], missing: Missing
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Raise an error for a NaN, or drop the rows that hold one with a warning, or keep them; refuse infinite numbers.

    Args:
        columns: field name to ``(rows, *event)``, client by client.
        offsets: the offsets of the clients' rows, ``(N + 1,)``.
        names: the N clients.
        missing: ``"fail"``, ``"drop"`` or ``"keep"``.

    Returns:
        The remaining columns and their offsets.

    Raises:
        ValueError: a number is infinite, or NaN under ``"fail"``; the message names client and row.
    """
    check_missing(missing)
    if not columns:
        raise ValueError("no fields were given: a federation needs at least one")
    lengths = np.diff(offsets)
    owner = torch.from_numpy(np.repeat(np.arange(len(names)), lengths))
    bad = torch.zeros(int(offsets[-1]), dtype=torch.bool)
    for field, value in columns.items():
        if not value.is_floating_point() or len(value) != len(bad):
            continue
        nan, infinite = (x.reshape(len(value), -1).any(-1) for x in (value.isnan(), value.isinf()))
        refused = {
            "infinite. Correct the data (the logarithm of 0?) or leave the row out": infinite
        }
        if missing == "fail":
            refused[
                "NaN. Correct the data, pass missing='drop' to leave such rows out, or missing='keep' if the field is "
                "an outcome or has a prior"
            ] = nan
        for reason, wrong in refused.items():
            if wrong.any():
                row = int(wrong.nonzero()[0])
                client = int(owner[row])
                place = f"client {names[client]!r}, row {row - int(offsets[client])}"
                raise ValueError(f"{place}: field {field!r} is {reason}")
        if missing == "drop":
            bad |= nan
    if bad.any():
        warn_dropped(owner[bad], names, len(bad))
        columns = {field: value[~bad] for field, value in columns.items()}
        lengths = np.bincount(owner[~bad].numpy(), minlength=len(names))
        offsets = np.concatenate([[0], lengths.cumsum()])
    return columns, offsets


def warn_dropped(owners: Tensor, names: Sequence[str], rows: int) -> None:
    """Warn of rows that are left out, with the clients that have most of them.

    Args:
        owners: the client of each row that is left out, int64.
        names: all clients.
        rows: the number of all rows.
    """
    clients, counts = owners.unique(return_counts=True)
    most = counts.argsort(descending=True)[:3].tolist()
    worst = ", ".join(f"{names[int(clients[i])]!r} {int(counts[i])}" for i in most)
    warnings.warn(
        f"missing='drop' leaves out {len(owners)} of {plural(rows, 'row')}, of {plural(len(clients), 'client')} "
        f"(most of {worst})",
        stacklevel=5,
    )
