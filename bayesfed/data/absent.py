"""Fields of clients whose rows are elsewhere: names, shapes and types, and an error where a number is wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor


class RowsAbsent(ValueError):
    """Rows are needed that were not given; the message is one line that names what to give."""

    def __init__(self) -> None:
        super().__init__(
            "this needs the clients' rows, which are not here: bf.Posterior.load(path, model, federation) where they "
            "are, or posterior.personalize(federation) for new clients"
        )


def are_absent(fields: Mapping[str, Any]) -> bool:
    """Return whether the rows of a federation's fields are not here."""
    return any(isinstance(value, AbsentColumn) for value in fields.values())


@dataclass(frozen=True)
class AbsentColumn:
    """A field of a federation whose rows are not here, in the place of a tensor ``(rows, *event)``.

    Attributes:
        rows: the number of rows.
        event: the shape of one row.
        dtype: the type of the numbers.
        device: where results are computed.

    Example:
        >>> import torch
        >>> from bayesfed.data.absent import AbsentColumn
        >>> column = AbsentColumn(5, (2,), torch.float32)
        >>> column.shape, column[torch.arange(3)].shape
        (torch.Size([5, 2]), torch.Size([3, 2]))
        >>> column.index_select(0, torch.arange(3))
        Traceback (most recent call last):
        bayesfed.data.absent.RowsAbsent: this needs the clients' rows, which are not here: ...
    """

    rows: int
    event: Sequence[int]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")  # noqa: RUF009

    @property
    def shape(self) -> torch.Size:
        """``(rows, *event)``."""
        return torch.Size([self.rows, *self.event])

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def place(self) -> str:
        """The addition to the field's name in a description of the data."""
        return " elsewhere"

    def __len__(self) -> NoReturn:
        """Raise :class:`RowsAbsent`: what asks for a length goes on to read."""
        raise RowsAbsent

    def is_floating_point(self) -> bool:
        """Return whether the numbers are floating."""
        return self.dtype.is_floating_point

    def __getitem__(self, rows: Tensor) -> AbsentColumn:
        """Return the column of some rows, by their positions."""
        return replace(self, rows=len(rows))

    def to(
        self, device: str | torch.device | None = None, dtype: torch.dtype | None = None
    ) -> AbsentColumn:
        """Return the same column on another device, or of another type."""
        device = self.device if device is None else torch.device(device)
        return replace(self, device=device, dtype=dtype or self.dtype)

    def index_select(self, dim: int, rows: Tensor) -> NoReturn:
        """Raise :class:`RowsAbsent`."""
        raise RowsAbsent

    def read(self) -> NoReturn:
        """Raise :class:`RowsAbsent`."""
        raise RowsAbsent

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise :class:`RowsAbsent`."""
        raise RowsAbsent

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise :class:`RowsAbsent`."""
        raise RowsAbsent
