"""The clients' data: ragged, stored once, flat, with offsets; never padded at rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bayesfed.data.arrow import Column, of_table
from bayesfed.data.batch import Batch, Fields
from bayesfed.data.columns import UnknownName, check_columns
from bayesfed.data.ingest import Missing, of_arrays, of_frame, without_missing
from bayesfed.data.names import words


@dataclass(frozen=True, eq=False)
class Federation:
    """N clients, each with its own rows of the same named fields.

    Build one with :meth:`from_frame`, :meth:`from_arrays`, :meth:`from_partitioner` or :meth:`from_arrow`. A Pyro model
    takes it as its only argument and opens its two plates, :meth:`clients` and :meth:`observations`.

    Attributes:
        fields: field name to a tensor of shape ``(rows, *event)``, or to a column on disk (:meth:`from_arrow`);
            client i owns the rows ``offsets[i]:offsets[i + 1]``. ``federation[name]`` always is a tensor.
        offsets: int64 tensor of shape ``(N + 1,)``, on the CPU wherever the fields lie.
        names: the N clients' names, in order; they become ArviZ's ``client`` coordinate.
        client_dim: what a client is called in the data, e.g. ``"county"`` (used in messages).
        gaps: fields may have missing values, NaN (``missing="keep"``).

    Example:
        >>> import bayesfed as bf
        >>> federation = bf.Federation.from_arrays(
        ...     {"north": {"x": [1.0, 2.0], "y": [0.5, 1.5]}, "south": {"x": [3.0], "y": [2.0]}}
        ... )
        >>> federation
        Federation: 2 clients, 3 rows (1 to 2 a client), fields x, y
        >>> federation.lengths.tolist()
        [2, 1]
        >>> federation.select(["south"])["y"].tolist()
        [2.0]
    """

    fields: Mapping[str, Tensor | Column]
    offsets: Tensor
    names: tuple[str, ...]
    client_dim: str = "client"
    gaps: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", self.offsets.cpu())
        if not self.names:
            raise ValueError("a federation needs at least one client; none was given")
        if len(set(self.names)) != len(self.names):
            twice = next(n for n in self.names if self.names.count(n) > 1)
            raise ValueError(f"client {twice!r} appears twice; clients' names must be unique")
        empty = (self.lengths <= 0).nonzero().flatten().tolist()
        if empty:
            raise ValueError(
                f"client {self.names[empty[0]]!r} is empty (no rows): leave it out of the federation"
            )
        for name, value in self.fields.items():
            if value.shape[:1] != (self.rows,):
                raise ValueError(
                    f"field {name!r} has {value.shape[0]} rows, the clients have {self.rows} together"
                )

    # -- construction -----------------------------------------------------------------------------

    @classmethod
    def from_frame(
        cls,
        frame: pd.DataFrame,
        *,
        client: str,
        fields: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
        missing: Missing = "fail",
    ) -> Federation:
        """One client per value of the column ``client``, in order of first appearance.

        Args:
            frame: one row per observation.
            client: the column that says whose row it is.
            fields: numeric columns to keep; by default all columns but ``client``. A mapping renames:
                ``{"y": "log_radon", "x": ["floor", "uranium"]}`` makes a field ``y`` with a number
                a row and a field ``x`` with a vector a row.
            missing: what to do with a row that holds a NaN: ``"fail"``, ``"drop"``, or ``"keep"``: a missing outcome
                then counts for nothing, and can be predicted.

        Raises:
            KeyError: a column is not there.
            ValueError: a row has no client; a NaN under ``missing="fail"``; no row left for a client.
            TypeError: a field is categorical, text or a date.

        Example:
            >>> import bayesfed as bf, pandas as pd
            >>> frame = pd.DataFrame({"county": ["A", "B", "A"], "log_radon": [0.1, 0.7, 0.3]})
            >>> bf.Federation.from_frame(frame, client="county", fields=["log_radon"]).names
            ('A', 'B')
        """
        columns, offsets, names = of_frame(frame, client, fields)
        return cls._checked(columns, offsets, names, client, missing)

    @classmethod
    def from_arrays(
        cls,
        clients: Mapping[str, Mapping[str, Any]],
        *,
        client_dim: str = "client",
        missing: Missing = "fail",
    ) -> Federation:
        """One mapping of field name to array per named client.

        Arrays have shape ``(n_i, *event)`` and the same ``event`` shape for every client. Numbers
        become torch's default floating type; torch tensors keep the type they have.

        Raises:
            TypeError: ``clients`` has no names, or a field holds text.
            KeyError: a client lacks a field that others have, or has one that they lack.
            ValueError: lengths differ within a client; a NaN under ``missing="fail"``.
        """
        columns, offsets, names = of_arrays(clients)
        return cls._checked(columns, offsets, names, client_dim, missing)

    @classmethod
    def from_partitioner(
        cls,
        dataset: Any,
        partitioner: Any,
        *,
        fields: Sequence[str] | None = None,
        missing: Missing = "fail",
    ) -> Federation:
        """One client per partition of a Hugging Face dataset, split by a flwr-datasets partitioner.

        Args:
            dataset: a ``datasets.Dataset``.
            partitioner: any of ``flwr_datasets.partitioner`` (Dirichlet, pathological, shard, natural
                id, ...), not yet bound to a dataset.
            fields: columns to keep; by default all of them.
            missing: see :meth:`from_frame`.

        Clients are called by the partitioner's natural ids where it has them, else by number.
        """
        partitioner.dataset = dataset
        ids = getattr(partitioner, "partition_id_to_natural_id", None) or {}
        clients = {}
        for number in range(partitioner.num_partitions):
            rows = partitioner.load_partition(number).with_format("numpy")
            keep = rows.column_names if fields is None else fields
            check_columns("dataset", keep, rows.column_names)
            # ids exist in the mapping only after the first load
            ids = ids or getattr(partitioner, "partition_id_to_natural_id", None) or {}
            clients[str(ids.get(number, number))] = {field: rows[field][:] for field in keep}
        dim = getattr(partitioner, "_partition_by", None) if ids else None
        return cls.from_arrays(clients, client_dim=dim or "client", missing=missing)

    @classmethod
    def from_arrow(
        cls,
        source: Any,
        *,
        client: str,
        fields: Sequence[str] | None = None,
        missing: Missing = "fail",
    ) -> Federation:
        """One client per value of the column ``client`` of data on disk, which stay there.

        A step reads the rows that it uses from the mapped file; ``federation[name]`` reads a whole field. It is
        fastest where a client's rows lie together.

        Args:
            source: an Arrow file (IPC file or stream), a folder of ``*.arrow`` files as ``save_to_disk`` of a
                ``datasets.Dataset`` makes, such a dataset, or a ``pyarrow.Table``.
            client: the column that says whose row it is.
            fields: columns to keep, of numbers or of lists of numbers of one length; by default all but
                ``client``.
            missing: what to do with a row that holds a null or a NaN: ``"fail"`` or ``"drop"``.

        Raises:
            FileNotFoundError: no such file.
            KeyError: a column is not there.
            ValueError: a row has no client; a missing number under ``missing="fail"``; no row left for a client.
            TypeError: a field holds something else than numbers, or rows of different shapes.
            ImportError: pyarrow is missing: ``pip install 'bayesfed[arrow]'``.

        Example:
            >>> import bayesfed as bf, pyarrow as pa
            >>> table = pa.table({"county": ["A", "B", "A"], "log_radon": [0.5, 0.75, 0.25]})
            >>> federation = bf.Federation.from_arrow(table, client="county")
            >>> federation, federation["log_radon"].tolist()
            (Federation: 2 clients, 3 rows (1 to 2 a client), fields log_radon on disk, [0.5, 0.25, 0.75])
        """
        columns, offsets, names = of_table(source, client, fields, missing)
        return cls(columns, torch.as_tensor(offsets, dtype=torch.int64), names, client)

    @classmethod
    def _checked(
        cls,
        columns: dict[str, Tensor],
        offsets: np.ndarray,
        names: tuple[str, ...],
        client_dim: str,
        missing: Missing,
    ) -> Federation:
        """Fail on NaN, drop the rows that hold one or keep them, and build."""
        columns, offsets = without_missing(columns, offsets, names, missing)
        gaps = missing == "keep" and any(
            v.is_floating_point() and bool(v.isnan().any()) for v in columns.values()
        )
        return cls(columns, torch.as_tensor(offsets, dtype=torch.int64), names, client_dim, gaps)

    # -- what is in it ----------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Number of rows of all clients together."""
        return int(self.offsets[-1])

    @cached_property
    def lengths(self) -> Tensor:
        """n_i, the number of rows of each client: int64, shape ``(N,)``, on the CPU."""
        return self.offsets.diff()

    @cached_property
    def owner(self) -> Tensor:
        """The client index of every row: int64, shape ``(rows,)``."""
        return torch.repeat_interleave(torch.arange(len(self), device="cpu"), self.lengths).to(
            self.device
        )

    @cached_property
    def _spans(self) -> tuple[Tensor, Tensor]:
        """Offsets and lengths where the fields lie."""
        return self.offsets.to(self.device), self.lengths.to(self.device)

    @cached_property
    def stream_ids(self) -> Tensor:
        """What tells the clients' noise streams apart, from their names alone: int64, ``(N,)``."""
        return words(self.names).to(self.device)

    @property
    def device(self) -> torch.device:
        """Where the data lie."""
        return next((value.device for value in self.fields.values()), self.offsets.device)

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of the fields; torch's default where no field is floating."""
        kinds = [v.dtype for v in self.fields.values() if v.is_floating_point()]
        return kinds[0] if kinds else torch.get_default_dtype()

    def event_shape(self, field: str) -> torch.Size:
        """The shape of one row of a field: ``()`` for a number, ``(P,)`` for a vector."""
        return self._stored(field).shape[1:]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, field: str) -> Tensor:
        value = self._stored(field)
        return value.read() if isinstance(value, Column) else value

    def _stored(self, field: str) -> Tensor | Column:
        fields: Any = self.fields
        return Fields(fields)[field]

    def __repr__(self) -> str:
        shortest, longest = int(self.lengths.min()), int(self.lengths.max())
        fields = ", ".join(
            (name if value.ndim == 1 else f"{name}{list(value.shape[1:])}")
            + (" on disk" if isinstance(value, Column) else "")
            for name, value in self.fields.items()
        )
        where = "" if self.device.type == "cpu" else f", on {self.device}"
        plural = "client" if len(self) == 1 else "clients"
        return (
            f"Federation: {len(self):,} {plural}, {self.rows:,} rows "
            f"({shortest:,} to {longest:,} a client), fields {fields}{where}"
        )

    # -- other federations from this one ----------------------------------------------------------

    def index(self, clients: Iterable[str]) -> Tensor:
        """The positions of the named clients: int64. KeyError for a client that is not here."""
        position = {name: i for i, name in enumerate(self.names)}
        wanted = [clients] if isinstance(clients, str) else list(clients)
        for name in wanted:
            if str(name) not in position:
                raise UnknownName(
                    f"no client {name!r} in this federation: {_shortened(self.names)}"
                )
        return torch.tensor([position[str(name)] for name in wanted], dtype=torch.int64)

    def select(self, clients: Iterable[str]) -> Federation:
        """The federation of the named clients only, in the order given."""
        chosen = self.index(clients).tolist()
        rows = torch.cat(
            [torch.arange(int(self.offsets[i]), int(self.offsets[i + 1])) for i in chosen]
            or [torch.empty(0, dtype=torch.int64)]
        )
        return self._take(rows, self.lengths[chosen], tuple(self.names[i] for i in chosen))

    def hold_out(self, clients: Iterable[str]) -> tuple[Federation, Federation]:
        """``(the others, the named clients)``: the second part takes no part in training."""
        wanted = [clients] if isinstance(clients, str) else list(clients)
        held = set(self.index(wanted).tolist())
        return self.select([n for i, n in enumerate(self.names) if i not in held]), self.select(
            wanted
        )

    def pool(self, name: str = "everyone") -> Federation:
        """All rows as those of a single client: what federated results are compared with.

        Example:
            >>> import bayesfed as bf
            >>> bf.Federation.from_arrays({"a": {"y": [1.0]}, "b": {"y": [2.0, 3.0]}}).pool().lengths.tolist()
            [3]
        """
        offsets = self.offsets[[0, -1]]
        return Federation(self.fields, offsets, (name,), gaps=self.gaps)

    def split(self, *, test: float, seed: int) -> tuple[Federation, Federation]:
        """Split the rows *within* each client into ``(train, test)``.

        Every client keeps at least one row in each part; ``test`` is the fraction of rows, in (0, 1).

        Raises:
            ValueError: ``test`` out of range, or a client with a single row.
        """
        if not 0 < test < 1:
            raise ValueError(f"test is {test}; it is the fraction of rows to hold out, in (0, 1)")
        generator = torch.Generator().manual_seed(seed)
        train, held = [], []
        for i, name in enumerate(self.names):
            n = int(self.lengths[i])
            if n < 2:
                raise ValueError(f"client {name!r} has a single row: it cannot be split")
            rows = torch.randperm(n, generator=generator) + self.offsets[i].cpu()
            n_test = min(max(round(test * n), 1), n - 1)
            held.append(rows[:n_test].sort().values)
            train.append(rows[n_test:].sort().values)
        return tuple(  # type: ignore[return-value]
            self._take(torch.cat(p), torch.tensor([len(r) for r in p]), self.names)
            for p in (train, held)
        )

    def to(
        self, device: str | torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Federation:
        """The same data on another device, or with floating fields of another type."""

        def move(value: Tensor | Column) -> Tensor | Column:
            return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

        return replace(self, fields={name: move(value) for name, value in self.fields.items()})

    def _take(self, rows: Tensor, lengths: Tensor, names: tuple[str, ...]) -> Federation:
        rows = rows.to(self.device)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        fields = {name: value[rows] for name, value in self.fields.items()}
        return Federation(fields, offsets, names, self.client_dim, self.gaps)

    # -- what a model sees ------------------------------------------------------------------------

    @property
    def numbers_per_row(self) -> int:
        """How many numbers the fields of one row hold."""
        return sum(value.shape[1:].numel() for value in self.fields.values())

    def batch(self, clients: Tensor | None = None, positions: Tensor | None = None) -> Batch:
        """The dense view of some clients that a model runs on.

        Args:
            clients: int64 positions of K clients; by default all N.
            positions: int64, shape ``(K, B)``: which of its own rows each client uses, with -1 for
                none. By default every row (the full batch).

        Returns:
            A :class:`~bayesfed.data.batch.Batch` whose fields have shape ``(K, B, *event)``. Padding
            repeats the client's first row, so that masked entries too lie in a field's support.
        """
        clients = torch.arange(len(self), device="cpu") if clients is None else clients
        if positions is None:
            lengths = self.lengths[clients.cpu()]
            positions = torch.arange(int(lengths.max()), device="cpu")
            positions = torch.where(positions < lengths[:, None], positions, -1)
        clients = clients.to(self.device)
        return self.gather(clients, *self.locate(clients, positions.to(self.device)))

    def locate(self, clients: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the flat storage and mask ``(..., K, B)`` and scale ``(..., K, 1)`` of clients' own positions."""
        offsets, lengths = (values[clients, None] for values in self._spans)
        mask = positions >= 0
        rows = offsets + positions.clamp(min=0)
        return rows, mask, (lengths / mask.sum(-1, keepdim=True)).to(self.dtype)

    def gather(self, clients: Tensor, rows: Tensor, mask: Tensor, scale: Tensor) -> Batch:
        """The batch of K clients' located rows ``(K, B)``."""
        fields = {  # index_select is several times as fast as value[rows]
            name: value.index_select(0, rows.flatten()).unflatten(0, rows.shape)
            for name, value in self.fields.items()
        }
        return Batch(Fields(fields), mask, scale, clients, self.gaps)

    def with_gaps(self, like: Federation) -> Federation:
        """The same rows with the fields of another federation that they lack, missing."""
        lacking = {
            name: torch.full((self.rows, *value.shape[1:]), torch.nan, dtype=value.dtype)
            for name, value in like.fields.items()
            if name not in self.fields and value.is_floating_point()
        }
        if not lacking:
            return self
        found = {name: value.to(self.device) for name, value in lacking.items()}
        return replace(self, fields={**self.fields, **found}, gaps=True)

    @cached_property
    def _pooled(self) -> Batch:
        return self.batch()

    def head(self) -> Batch:
        """Every client with its first row only, for what does not depend on the rows."""
        return self.batch(positions=torch.zeros(len(self), 1, dtype=torch.int64))

    def of_clients(self, field: str) -> Tensor:
        """A field that is the same in all rows of a client, ``(N, 1, *event)``: a predictor for local variables.

        Example:
            >>> import bayesfed as bf, pyro, pyro.distributions as dist
            >>> def model(federation):
            ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
            ...     beds = federation.of_clients("beds")
            ...     with federation.clients():
            ...         level = pyro.sample("level", dist.Normal(slope * beds, 1.0))
            ...         with federation.observations() as obs:
            ...             pyro.sample("y", dist.Normal(level, 1.0), obs=obs.get("y"))
            >>> rows = {"north": {"beds": [2.0, 2.0], "y": [1.0, 3.0]}, "south": {"beds": [5.0], "y": [2.0]}}
            >>> federation = bf.Federation.from_arrays(rows)
            >>> federation.of_clients("beds").flatten().tolist()
            [2.0, 5.0]
            >>> bf.fit(model, federation, rounds=2).sample(10)["level"].shape
            torch.Size([10, 2])
        """
        return self._pooled.of_clients(field)

    def clients(self) -> AbstractContextManager[Any]:
        """``pyro.plate("clients", N, dim=-2)``: the boundary between server and clients."""
        return self._pooled.clients()

    def observations(self) -> AbstractContextManager[Fields]:
        """``pyro.plate("observations", dim=-1)``: all rows of every client, masked where ragged.

        The padded copy that a pooled run needs is made at the first call and kept.
        """
        return self._pooled.observations()

    def jointly(self) -> AbstractContextManager[tuple[Fields, Tensor]]:
        """All rows of every client as one event of its own, see :meth:`Batch.jointly`."""
        return self._pooled.jointly()


def _shortened(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


Model = Callable[[Federation | Batch], Any]
"""A Pyro program that opens the plates of what it is given."""
