"""The clients' data, stored once: all rows of a field in one flat tensor, with the clients' offsets, unpadded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesfed.data.absent import AbsentColumn, are_absent
from bayesfed.data.arrow import Column, read_table
from bayesfed.data.batch import Batch, Fields
from bayesfed.data.columns import UnknownName, client_name
from bayesfed.data.ingest import (
    Empty,
    Missing,
    check_clients,
    read_arrays,
    read_frame,
    read_partitions,
    treat_missing,
)
from bayesfed.data.missing import missing_fields
from bayesfed.data.names import words
from bayesfed.data.plural import plural
from bayesfed.data.rows import padded_positions, rows_of_clients, split_rows


@dataclass(frozen=True, eq=False)
class Federation:
    """N clients, each with its own rows of the same named fields.

    Build one with :meth:`from_frame`, :meth:`from_arrays`, :meth:`from_partitioner` or :meth:`from_arrow`. A Pyro model
    takes it as its only argument and opens its two plates, :meth:`clients` and :meth:`observations`.

    Attributes:
        fields: field name to a tensor of shape ``(rows, *event)``, or to a column on disk (:meth:`from_arrow`);
            client i owns the rows ``offsets[i]:offsets[i + 1]``. ``federation[name]`` is always a tensor.
        offsets: int64 tensor of shape ``(N + 1,)``, always on the CPU.
        names: the N clients' names, in order; they become ArviZ's ``client`` coordinate.
        client_dim: the name of a client in the data, e.g. ``"county"`` (used in messages).
        gaps: fields may have missing values, NaN.
        counts: the number of rows that a client's rows represent, int64 ``(N,)``; None of as many as there are.
        weights: how often each row counts, ``(rows,)``; None where a client's rows count alike.
        moments: fewer rows with the same log likelihood under the fitted model, see :mod:`bayesfed.checks.sufficient`.

    Example:
        >>> import bayesfed as bf
        >>> federation = bf.Federation.from_arrays(
        ...     {"north": {"x": [1.0, 2.0], "y": [0.5, 1.5]}, "south": {"x": [3.0], "y": [2.0]}}
        ... )
        >>> federation
        Federation: 2 clients, 3 rows (1 to 2 a client), fields x, y
    """

    fields: Mapping[str, Tensor | Column | AbsentColumn]
    offsets: Tensor
    names: tuple[str, ...]
    client_dim: str = "client"
    gaps: bool = False
    counts: Tensor | None = None
    weights: Tensor | None = None
    moments: Federation | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", self.offsets.cpu())
        check_clients(self.fields, self.offsets, self.names)

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        client: Any,
        fields: Sequence[Any] | Mapping[str, Any] | None = None,
        missing: Missing = "fail",
    ) -> Federation:
        """Make one client per value of the column ``client``, in order of first appearance.

        Args:
            frame: one row per observation: a frame of pandas or polars, an Arrow table, or a mapping from column to
                values. Columns may hold numbers of any type that pandas has, or lists of numbers of one length.
            client: the column that names the client of each row, or a level of the index. Numbers become names, 1 and
                1.0 the name ``"1"``.
            fields: numeric columns to keep; by default all columns but ``client``. A mapping renames: ``{"y":
                "log_radon", "x": ["floor", "uranium"]}`` makes a number ``y`` and a vector ``x`` per row.
            missing: treatment of rows that hold a NaN: ``"fail"``, ``"drop"`` or ``"keep"``. A missing outcome that is
                kept does not enter the likelihood and can be predicted.

        Raises:
            KeyError: a column does not exist.
            ValueError: a row has no client; a NaN under ``missing="fail"``; a client has no rows left; two
                columns or two clients have one name; a number is infinite, or torch's default floating type cannot
                represent it (``torch.set_default_dtype(torch.float64)``).
            TypeError: a field is categorical, text or a date; ``frame`` is no table.

        Example:
            >>> import bayesfed as bf, pandas as pd
            >>> frame = pd.DataFrame({"county": ["A", "B", "A"], "log_radon": [0.1, 0.7, 0.3]})
            >>> bf.Federation.from_frame(frame, client="county", fields=["log_radon"]).names
            ('A', 'B')
        """
        return cls._build(*read_frame(frame, client, fields), str(client), missing)

    @classmethod
    def from_arrays(
        cls,
        clients: Mapping[str, Mapping[str, Any]],
        *,
        client_dim: str = "client",
        missing: Missing = "fail",
    ) -> Federation:
        """Make one client per entry of a mapping from client's name to field name to array.

        Arrays have shape ``(n_i, *event)``, with the same ``event`` shape for every client. Numbers become torch's
        default floating type; torch tensors keep their type.

        Args:
            clients: client's name to a mapping, or a frame, of arrays.
            client_dim: what a client is called, such as ``"hospital"``.
            missing: see :meth:`from_frame`.

        Raises:
            TypeError: ``clients`` has no names, or a field holds text.
            KeyError: a client lacks a field that others have, or has one that they lack.
            ValueError: there is no client, or one without rows; lengths differ within a client, or shapes between
                clients; a NaN under ``missing="fail"``; a number is infinite, or too large for the floating type.
        """
        return cls._build(*read_arrays(clients), client_dim, missing)

    @classmethod
    def from_partitioner(
        cls,
        dataset: Any,
        partitioner: Any,
        *,
        fields: Sequence[str] | None = None,
        missing: Missing = "fail",
        empty: Empty = "fail",
    ) -> Federation:
        """Make one client per partition of a Hugging Face dataset, split by a flwr-datasets partitioner.

        Args:
            dataset: a ``datasets.Dataset``.
            partitioner: one of ``flwr_datasets.partitioner`` (Dirichlet, shard, natural id, ...), not yet bound.
            fields: columns to keep; by default all of them.
            missing: see :meth:`from_frame`.
            empty: treatment of partitions without rows: ``"fail"``, or ``"drop"`` leaves them out with a warning.

        Clients are named by the partitioner's natural ids if it has them, otherwise by number.

        Raises:
            KeyError: a column does not exist.
            ValueError: a partition has no rows under ``empty="fail"``; otherwise as :meth:`from_arrays`.
        """
        clients, client_dim = read_partitions(dataset, partitioner, fields, empty == "drop")
        return cls.from_arrays(clients, client_dim=client_dim, missing=missing)

    @classmethod
    def from_arrow(
        cls,
        source: Any,
        *,
        client: str,
        fields: Sequence[str] | None = None,
        missing: Missing = "fail",
    ) -> Federation:
        """Make one client per value of the column ``client`` of data that stay on disk.

        A step reads its rows from the mapped file, fastest if a client's lie together; ``federation[name]`` all.

        Args:
            source: an Arrow file (IPC file or stream), a folder of ``*.arrow`` files as written by ``save_to_disk`` of
                a ``datasets.Dataset``, such a dataset, or a ``pyarrow.Table``.
            client: the column that names the client of each row.
            fields: columns to keep, of numbers or of lists of numbers of one length; by default all but ``client``.
            missing: treatment of rows that hold a null or a NaN: ``"fail"`` or ``"drop"``.

        Raises:
            FileNotFoundError: the file does not exist.
            KeyError: a column does not exist.
            ValueError: a row has no client; a missing number under ``missing="fail"``; a client has no rows left.
            TypeError: a field holds something other than numbers, or rows of different shapes.
            ImportError: pyarrow is missing: ``pip install 'bayesfed[arrow]'``.

        Example:
            >>> import bayesfed as bf, pyarrow as pa
            >>> table = pa.table({"county": ["A", "B", "A"], "log_radon": [0.5, 0.75, 0.25]})
            >>> federation = bf.Federation.from_arrow(table, client="county")
            >>> federation, federation["log_radon"].tolist()
            (Federation: 2 clients, 3 rows (1 to 2 a client), fields log_radon on disk, [0.5, 0.25, 0.75])
        """
        columns, offsets, names = read_table(source, client, fields, missing)
        return cls(columns, torch.as_tensor(offsets, dtype=torch.int64), names, client)

    @classmethod
    def _build(
        cls,
        columns: dict[str, Tensor],
        offsets: np.ndarray,
        names: tuple[str, ...],
        client_dim: str,
        missing: Missing,
    ) -> Federation:
        """Treat missing numbers and build the federation."""
        columns, offsets = treat_missing(columns, offsets, names, missing)
        gaps = missing == "keep" and any(bool(v.isnan().any()) for v in columns.values())
        return cls(columns, torch.as_tensor(offsets, dtype=torch.int64), names, client_dim, gaps)

    @property
    def rows(self) -> int:
        """The number of rows of all clients together."""
        return int(self.offsets[-1])

    @property
    def sufficient(self) -> Federation:
        """The rows that a log likelihood is computed from: those of :attr:`moments`, or all."""
        return self.moments or self

    @cached_property
    def lengths(self) -> Tensor:
        """n_i, the number of rows of each client: int64, shape ``(N,)``, on the CPU."""
        return self.offsets.diff()

    @cached_property
    def owner(self) -> Tensor:
        """The client index of every row: int64, shape ``(rows,)``."""
        return torch.arange(len(self), device="cpu").repeat_interleave(self.lengths).to(self.device)

    @cached_property
    def stream_ids(self) -> Tensor:
        """The identifiers of the clients' noise streams, computed from their names: int64, ``(N,)``."""
        return words(self.names).to(self.device)

    @cached_property
    def _ends(self) -> Tensor:
        """Each client's first row, and the number that its rows represent, on the device of the fields: ``(2, N)``."""
        counts = self.lengths if self.counts is None else self.counts.cpu()
        return torch.stack([self.offsets[:-1], counts]).to(self.device)

    @property
    def device(self) -> torch.device:
        """The device of the fields."""
        return next((value.device for value in self.fields.values()), self.offsets.device)

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of the fields; torch's default if no field is floating."""
        kinds = [v.dtype for v in self.fields.values() if v.is_floating_point()]
        return kinds[0] if kinds else torch.get_default_dtype()

    def event_shape(self, field: str) -> torch.Size:
        """Return the shape of one row of a field: ``()`` for a number, ``(P,)`` for a vector."""
        return self._stored(field).shape[1:]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, field: str) -> Tensor:
        value = self._stored(field)
        return value if isinstance(value, Tensor) else value.read()

    def _stored(self, field: str) -> Tensor | Column | AbsentColumn:
        fields: Any = self.fields
        return Fields(fields)[str(field)]

    def __repr__(self) -> str:
        shortest, longest = int(self.lengths.min()), int(self.lengths.max())
        fields = ", ".join(
            (name if value.ndim == 1 else f"{name}{list(value.shape[1:])}")
            + ("" if isinstance(value, Tensor) else value.place)
            for name, value in self.fields.items()
        )
        return (
            f"Federation: {plural(len(self), 'client')}, {plural(self.rows, 'row')} "
            f"({shortest:,} to {longest:,} a client), fields {fields}"
            + ("" if self.device.type == "cpu" else f", on {self.device}")
        )

    def index(self, clients: Iterable[str]) -> Tensor:
        """Return the positions of the named clients, int64; KeyError for a client that is not in the federation."""
        position = {name: i for i, name in enumerate(self.names)}
        wanted = [client_name(n) for n in ([clients] if isinstance(clients, str) else clients)]
        for name in wanted:
            if name not in position:
                known = ", ".join(self.names[:8]) + ", ..." * (len(self) > 8)
                raise UnknownName(f"no client {name!r} in this federation: {known}")
        return torch.tensor([position[name] for name in wanted], dtype=torch.int64)

    def select(self, clients: Iterable[str]) -> Federation:
        """Return the federation of the named clients only, in the order given."""
        chosen = self.index(clients).tolist()
        names, rows = tuple(self.names[i] for i in chosen), rows_of_clients(self.offsets, chosen)
        counts = None if self.counts is None else self.counts[chosen]
        weights = None if self.weights is None else self.weights[rows.to(self.device)]
        few = self.moments and self.moments.select(names)
        taken = self._take(rows, self.lengths[chosen], names)
        return replace(taken, counts=counts, weights=weights, moments=few)

    def hold_out(self, clients: Iterable[str]) -> tuple[Federation, Federation]:
        """Split the clients into ``(the others, the named clients)``, to keep the named clients out of training."""
        held = dict.fromkeys(self.names[i] for i in self.index(clients).tolist())
        return self.select(name for name in self.names if name not in held), self.select(held)

    def pool(self, name: str = "everyone") -> Federation:
        """Assign all rows to a single client, for a reference to compare with.

        Example:
            >>> import bayesfed as bf
            >>> bf.Federation.from_arrays({"a": {"y": [1.0]}, "b": {"y": [2.0, 3.0]}}).pool().lengths.tolist()
            [3]
        """
        return Federation(self.fields, self.offsets[[0, -1]], (name,), gaps=self.gaps)

    def split(self, *, test: float, seed: int) -> tuple[Federation, Federation]:
        """Split the rows *within* each client into ``(train, test)``.

        Every client has at least one row in each part; ``test`` is the fraction of rows, in (0, 1).

        Raises:
            ValueError: ``test`` is out of range, or a client has a single row.
        """
        first, second = split_rows(self.offsets, self.names, test, seed)
        return self._take(*first, self.names), self._take(*second, self.names)

    def to(
        self, device: str | torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Federation:
        """Return the same data on another device, or with floating fields of another type."""
        fields: dict[str, Any] = {
            name: value.to(device=device, dtype=dtype if value.is_floating_point() else None)
            for name, value in self.fields.items()
        }
        weights = None if self.weights is None else self.weights.to(device=device, dtype=dtype)
        few = self.moments and self.moments.to(device, dtype)
        return replace(self, fields=fields, weights=weights, moments=few)

    def _take(self, rows: Tensor, lengths: Tensor, names: tuple[str, ...]) -> Federation:
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        fields = {name: value[rows.to(self.device)] for name, value in self.fields.items()}
        return Federation(fields, offsets, names, self.client_dim, self.gaps)

    @property
    def numbers_per_row(self) -> int:
        """The count of numbers in the fields of one row."""
        return sum(value.shape[1:].numel() for value in self.fields.values())

    def batch(self, clients: Tensor | None = None, positions: Tensor | None = None) -> Batch:
        """Make the dense batch of some clients that a model runs on.

        Args:
            clients: int64 positions of K clients; by default all N.
            positions: int64 ``(K, B)``: positions of the rows among the client's own, -1 for none; by default all.

        Returns:
            A batch of fields ``(K, B, *event)``. Padding repeats the client's first row, within the field's support.
        """
        clients = torch.arange(len(self), device="cpu") if clients is None else clients
        if positions is None:
            positions = padded_positions(self.lengths[clients.cpu()])
        elif self.moments and positions.shape[1] == 1 and are_absent(self.fields):
            return self.moments.batch(clients, positions)  # what a client's rows have in common
        located = self.locate(clients.to(self.device), positions.to(self.device))
        return self.gather(clients.to(self.device), *located)

    def locate(self, clients: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convert positions in clients to rows of the flat storage, mask ``(..., K, B)`` and :attr:`Batch.scale`."""
        first, count = self._ends[:, clients, None]
        rows, mask = first + positions.clamp(min=0), positions >= 0
        if self.weights is None:
            scale = count / mask.sum(-1, keepdim=True)
        else:
            times = torch.where(mask, self.weights[rows], 0.0)
            scale = times * (count / times.sum(-1, keepdim=True))
        return rows, mask, scale.to(self.dtype)

    def gather(self, clients: Tensor, rows: Tensor, mask: Tensor, scale: Tensor) -> Batch:
        """Make the batch of K clients from located rows ``(K, B)``."""
        fields = {  # index_select is several times as fast as value[rows]
            name: value.index_select(0, rows.flatten()).unflatten(0, rows.shape)
            for name, value in self.fields.items()
        }
        return Batch(Fields(fields), mask, scale, clients, self.gaps)

    def with_gaps(self, like: Federation) -> Federation:
        """Add the fields of another federation that this one lacks, with missing values."""
        lacking = missing_fields(self.fields, like.fields, self.rows, self.device)
        more = {**self.fields, **lacking}
        return replace(self, fields=more, gaps=True, moments=None) if lacking else self

    @cached_property
    def _pooled(self) -> Batch:
        return self.batch()

    def head(self) -> Batch:
        """Return the clients with their first rows only."""
        return self.batch(positions=torch.zeros(len(self), 1, dtype=torch.int64))

    def of_clients(self, field: str) -> Tensor:
        """Return a field that is constant within each client, ``(N, 1, *event)``: a predictor for local variables."""
        return self._pooled.of_clients(field)

    def clients(self) -> AbstractContextManager[Any]:
        """Open ``pyro.plate("clients", N, dim=-2)``: the boundary between server and clients."""
        return self._pooled.clients()

    def observations(self) -> AbstractContextManager[Fields]:
        """Open ``pyro.plate("observations", dim=-1)``: all rows of every client, padded (once) and masked."""
        return self._pooled.observations()

    def jointly(self) -> AbstractContextManager[tuple[Fields, Tensor]]:
        """Provide all rows of each client as one event, see :meth:`Batch.jointly`."""
        return self._pooled.jointly()


Model = Callable[[Federation | Batch], Any]
"""A Pyro program that opens the plates of its argument."""
