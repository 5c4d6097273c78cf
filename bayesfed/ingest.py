"""What users hold, as tensors: numbers only, and no missing ones."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

Missing = Literal["fail", "drop"]


def to_tensor(field: str, values: Any, client: str) -> Tensor:
    """A field as a tensor; numbers become floating, torch tensors keep their type."""
    if isinstance(values, Tensor):
        return values.detach()
    array = np.asarray(values)
    if array.dtype == object or isinstance(getattr(values, "dtype", None), pd.CategoricalDtype):
        try:
            if isinstance(getattr(values, "dtype", None), pd.CategoricalDtype):
                raise ValueError
            array = pd.to_numeric(pd.Series(array)).to_numpy(dtype=float, na_value=np.nan)
        except (ValueError, TypeError):
            example = pd.unique(pd.Series(np.ravel(array)))[:3].tolist()
            raise TypeError(
                f"field {field!r} is categorical or text (e.g. {example}; client {client!r}): encode it "
                f"as numbers first, e.g. frame[{field!r}].astype('category').cat.codes, or as dummies"
            ) from None
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"field {field!r} has type {array.dtype}: only numbers can be stored (client {client!r}); "
            "encode it as numbers first"
        )
    return torch.as_tensor(np.array(array), dtype=torch.get_default_dtype())


def without_missing(
    columns: dict[str, Tensor], offsets: np.ndarray, names: tuple[str, ...], missing: Missing
) -> tuple[dict[str, Tensor], np.ndarray]:
    """Fail on a NaN, naming client and row, or drop the rows that hold one.

    Args:
        columns: field name to ``(rows, *event)``, client by client.
        offsets: where each client's rows start, ``(N + 1,)``.
        names: the N clients.
        missing: ``"fail"`` or ``"drop"``.

    Returns:
        The columns and offsets that are left.
    """
    if missing not in ("fail", "drop"):
        raise ValueError(f"missing is {missing!r}; choose 'fail' or 'drop'")
    if not columns:
        raise ValueError("no fields were given: a federation needs at least one")
    lengths = np.diff(offsets)
    owner = torch.from_numpy(np.repeat(np.arange(len(names)), lengths))
    bad = torch.zeros(int(offsets[-1]), dtype=torch.bool)
    for field, value in columns.items():
        if not value.is_floating_point() or len(value) != len(bad):
            continue
        nan = value.isnan().reshape(len(value), -1).any(-1)
        if missing == "fail" and nan.any():
            row = int(nan.nonzero()[0])
            client = int(owner[row])
            raise ValueError(
                f"client {names[client]!r}, row {row - int(offsets[client])}: field {field!r} is "
                "NaN. Mend the data, or pass missing='drop' to leave such rows out"
            )
        bad |= nan
    if bad.any():
        columns = {field: value[~bad] for field, value in columns.items()}
        lengths = np.bincount(owner[~bad].numpy(), minlength=len(names))
        offsets = np.concatenate([[0], lengths.cumsum()])
    return columns, offsets
