"""What users hold, as tensors: numbers only, and no missing ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bayesfed.data.columns import UnknownName, check_columns

Missing = Literal["fail", "drop", "keep"]


Stored = tuple[dict[str, Tensor], np.ndarray, tuple[str, ...]]
"""Field name to ``(rows, *event)``, client by client; where each client's rows start, ``(N + 1,)``; the N names."""


def of_frame(
    frame: pd.DataFrame,
    client: str,
    fields: Sequence[str] | Mapping[str, str | Sequence[str]] | None,
) -> Stored:
    """The rows of a data frame, sorted by client; see :meth:`bayesfed.Federation.from_frame`."""
    if fields is None:
        fields = [c for c in frame.columns if c != client]
    sources = fields if isinstance(fields, Mapping) else {name: name for name in fields}
    wanted = [c for s in sources.values() for c in ([s] if isinstance(s, str) else s)]
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
    tensors = {c: to_tensor(c, frame[c].iloc[order].array, str(names[0])) for c in wanted}
    columns = {
        name: tensors[s] if isinstance(s, str) else torch.stack([tensors[c] for c in s], -1)
        for name, s in sources.items()
    }
    return columns, offsets, tuple(map(str, names))


def of_arrays(clients: Mapping[str, Mapping[str, Any]]) -> Stored:
    """The clients' arrays, one after the other; see :meth:`bayesfed.Federation.from_arrays`."""
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
        for field in set(expected) ^ set(arrays):
            lacking = name if field in expected else names[0]
            raise UnknownName(f"client {lacking!r} has no field {field!r}, other clients have it")
        tensors = {f: to_tensor(f, arrays[f], str(name)) for f in expected}
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
    columns = {field: torch.cat(parts) for field, parts in per_client.items()}
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return columns, offsets, tuple(map(str, names))


def check_missing(missing: str) -> None:
    """Refuse what is no way to treat missing numbers."""
    if missing not in get_args(Missing):
        raise ValueError(f"missing is {missing!r}; choose 'fail', 'drop' or 'keep'")


def to_tensor(field: str, values: Any, client: str) -> Tensor:
    """A field as a tensor; numbers become floating, torch tensors keep their type."""
    if isinstance(values, Tensor):
        return values.detach()
    array = np.asarray(values)
    if array.dtype == object or isinstance(getattr(values, "dtype", None), pd.CategoricalDtype):
        try:
            if isinstance(getattr(values, "dtype", None), pd.CategoricalDtype):
                raise ValueError
            if any(isinstance(value, str) for value in np.ravel(array)):
                raise ValueError  # "02139" is no 2139, unless the user says so
            array = pd.to_numeric(pd.Series(array)).to_numpy(dtype=float, na_value=np.nan)
        except (ValueError, TypeError):
            example = pd.unique(pd.Series(np.ravel(array)))[:3].tolist()
            raise TypeError(
                f"field {field!r} is categorical or text (e.g. {example}; client {client!r}): make numbers of it "
                f"first. Quantities: frame[{field!r}].astype(float). Categories: pandas.get_dummies, or "
                f"frame[{field!r}].astype('category').cat.codes, which makes -1 of what is missing: leave that "
                "out before, frame.dropna()"
            ) from None
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"field {field!r} has type {array.dtype}: only numbers can be stored (client {client!r}); "
            "encode it as numbers first"
        )
    made = torch.from_numpy(np.array(array))
    check_precision(field, made, f"client {client!r}")
    return made.to(torch.get_default_dtype())


def check_precision(field: str, values: Tensor, where: str) -> None:
    """Fail on numbers that are others in torch's default floating type, such as identifiers and seconds since 1970.

    Whole numbers may not change at all; others by no more than a ten-thousandth of their range.

    Raises:
        ValueError: they do; the message names the field and says what to do.
    """
    dtype = torch.get_default_dtype()
    if not len(values) or values.dtype in (torch.bool, dtype):
        return
    whole, exact = not values.is_floating_point(), values.double()
    error = (exact - exact.to(dtype)).abs().nan_to_num(0.0, 0.0)
    finite = exact[exact.isfinite()]
    span = float(finite.max() - finite.min()) if len(finite) else 0.0
    if (whole and error.any()) or (span > 0 and float(error.max()) > 1e-4 * span):
        largest = int(error.flatten().argmax())
        before, after = (float(v.flatten()[largest]) for v in (exact, exact.to(dtype)))
        raise ValueError(
            f"{where}: field {field!r} has numbers that {str(dtype)[6:]} cannot tell from their neighbours, such as "
            f"{before:.17g}, which becomes {after:.17g}. Subtract what they have in common (a first date), leave out "
            "what is a name and no quantity, or call torch.set_default_dtype(torch.float64)"
        )


def without_missing(
    columns: dict[str, Tensor], offsets: np.ndarray, names: tuple[str, ...], missing: Missing
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Fail on a NaN, naming client and row, or drop the rows that hold one and say how many; fail on infinity.

    Args:
        columns: field name to ``(rows, *event)``, client by client.
        offsets: where each client's rows start, ``(N + 1,)``.
        names: the N clients.
        missing: ``"fail"``, ``"drop"``, or ``"keep"``, which leaves them in.

    Returns:
        The columns and offsets that are left.
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
        if infinite.any():
            row = int(infinite.nonzero()[0])
            client = int(owner[row])
            raise ValueError(
                f"client {names[client]!r}, row {row - int(offsets[client])}: field {field!r} is infinite. Mend the "
                "data (the logarithm of 0, a division by 0?) or leave the row out"
            )
        if missing == "fail" and nan.any():
            row = int(nan.nonzero()[0])
            client = int(owner[row])
            raise ValueError(
                f"client {names[client]!r}, row {row - int(offsets[client])}: field {field!r} is "
                "NaN. Mend the data, or pass missing='drop' to leave such rows out, 'keep' where it is an outcome, or "
                "has a prior"
            )
        if missing == "drop":
            bad |= nan
    if bad.any():
        say_dropped(owner[bad], names, len(bad))
        columns = {field: value[~bad] for field, value in columns.items()}
        lengths = np.bincount(owner[~bad].numpy(), minlength=len(names))
        offsets = np.concatenate([[0], lengths.cumsum()])
    return columns, offsets


def say_dropped(owners: Tensor, names: Sequence[str], rows: int) -> None:
    """Warn of rows that are left out: whose they were, of how many in all."""
    clients, counts = owners.unique(return_counts=True)
    most = counts.argsort(descending=True)[:3].tolist()
    worst = ", ".join(f"{names[int(clients[i])]!r} {int(counts[i])}" for i in most)
    warnings.warn(
        f"missing='drop' leaves out {len(owners)} of {rows} rows, of {len(clients)} clients (most of {worst})",
        stacklevel=5,
    )
