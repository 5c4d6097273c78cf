"""Counts, means and covariances of clients whose rows are elsewhere, and the file that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bayesfed.data.chunks import PASS, chunks
from bayesfed.data.federation import Federation
from bayesfed.data.moments import Statistics, clients_of_moments, largest_leverage, statistics
from bayesfed.data.plural import plural
from bayesfed.engine.files import read_tensors, write_tensors

FEWEST_ROWS = 3
"""The fewest rows that moments may single out; DataSHIELD's default for the cells of a table (``nfilter.tab``)."""
_METADATA = "bayesfed moments"


class RowsSingledOut(ValueError):
    """The moments of a client would single out few of its rows; ``client`` is its name."""

    def __init__(self, client: str, rows: int, leverage: float, fewest_rows: int) -> None:
        super().__init__(
            f"client {client!r}: its moments single out fewer than {fewest_rows} of its {plural(rows, 'row')} (largest "
            f"leverage {leverage:.2f}): leave out fields, such as columns of rare categories, or the client, or set "
            "fewest_rows"
        )
        self.client = client


@dataclass(frozen=True, eq=False)
class Moments:
    """Counts, means and covariances of the rows of N clients: enough where the likelihood depends on nothing else.

    They are, of a Gaussian outcome whose mean is linear in the fields. Then any such model, prior and subset of the
    fields can be fitted to :meth:`federation`, and clients left out, without their rows. Predictions of rows,
    leave-one-out of rows and posterior predictive checks need the rows, and raise
    :class:`~bayesfed.data.absent.RowsAbsent`.

    Attributes:
        names: of the clients.
        client_dim: the name of a client in the data.
        kinds: field name to the shape of one row, and the type of its numbers.
        counts: n_i, int64 ``(N,)``.
        mean: the means of the d numbers of a row, in the order of the fields, double ``(N, d)``.
        covariance: their covariances, divided by n_i, double ``(N, d, d)``.

    Example:
        >>> import bayesfed as bf, torch
        >>> x = torch.arange(100.0)
        >>> moments = bf.Moments.of(bf.Federation.from_arrays({"north": {"x": x, "y": (x / 9).cos()}}))
        >>> moments
        Moments: 1 client, 100 rows, fields x, y
        >>> moments.federation()
        Federation: 1 client, 100 rows (100 to 100 a client), fields x elsewhere, y elsewhere
    """

    names: tuple[str, ...]
    client_dim: str
    kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    counts: Tensor
    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, federation: Federation, *, fewest_rows: int = FEWEST_ROWS) -> Moments:
        """Compute the moments of clients' rows.

        Args:
            federation: clients whose fields are floating numbers without gaps.
            fewest_rows: the fewest rows that the moments may single out. The moments have exactly the means of all
                fields over the rows in which a column is 1, if it is 0 in all others, and over any rows that a linear
                combination of columns singles out so; such rows have a leverage of 1 / m or more, if they are m. A
                client with a row of larger leverage than ``1 / fewest_rows`` is refused.

        Raises:
            ValueError: a field is not of floating numbers, or has missing values.
            RowsSingledOut: a ValueError; a client has a row of too large a leverage, as has each client with fewer rows
                than ``fewest_rows``, or than numbers in a row.

        Example:
            >>> import bayesfed as bf
            >>> bf.Moments.of(bf.Federation.from_arrays({"north": {"x": [1.0, 2.0, 4.0], "y": [0.5, 0.0, 1.0]}}))
            Traceback (most recent call last):
            bayesfed.engine.moments.RowsSingledOut: client 'north': its moments single out fewer than 3 of its ...
        """
        check_fields(federation)
        leverage = largest_leverage(federation)
        if bool((leverage > (1 + 1e-6) / fewest_rows).any()):
            worst = int(leverage.argmax())
            name, rows = federation.names[worst], int(federation.lengths[worst])
            raise RowsSingledOut(name, rows, float(leverage[worst]), fewest_rows)
        size = 4 * federation.numbers_per_row
        parts = [statistics(federation.batch(c)) for c in chunks(federation.lengths, 0, size, PASS)]
        found = Statistics(*(torch.cat(values).cpu() for values in zip(*parts, strict=True)))
        kinds = {n: (tuple(v.shape[1:]), v.dtype) for n, v in federation.fields.items()}
        counts = found.counts.to(torch.int64)
        return cls(
            federation.names, federation.client_dim, kinds, counts, found.mean, found.covariance
        )

    def federation(self) -> Federation:
        """Return the clients, to be fitted; their rows are elsewhere."""
        found = Statistics(self.counts.double(), self.mean, self.covariance)
        return clients_of_moments(self.names, self.client_dim, self.kinds, found)

    def and_those_of(self, other: Moments) -> Moments:
        """Return these clients and others with the same fields.

        Raises:
            ValueError: the fields differ, or clients have the same name.
        """
        if (self.client_dim, dict(self.kinds)) != (other.client_dim, dict(other.kinds)):
            raise ValueError(f"moments of other fields: {other!r} beside {self!r}")
        other = other.select(self.kinds)
        if both := set(self.names) & set(other.names):
            raise ValueError(f"a client is called {min(both)!r} in both: rename one")
        return replace(
            self,
            names=self.names + other.names,
            counts=torch.cat([self.counts, other.counts]),
            mean=torch.cat([self.mean, other.mean]),
            covariance=torch.cat([self.covariance, other.covariance]),
        )

    def select(self, fields: Iterable[str]) -> Moments:
        """Return the moments of these fields, in this order.

        Raises:
            KeyError: there is no such field.
        """
        sizes = [torch.Size(shape).numel() for shape, _ in self.kinds.values()]
        own = dict(zip(self.kinds, torch.arange(sum(sizes)).split(sizes), strict=True))
        kinds = {name: self.kinds[name] for name in fields}
        at = torch.cat([own[name] for name in kinds])
        mean, covariance = self.mean[:, at], self.covariance[:, at[:, None], at]
        return replace(self, kinds=kinds, mean=mean, covariance=covariance)

    def save(self, path: str | Path) -> None:
        """Write the moments to one safetensors file, atomically.

        The tensors are ``counts``, ``mean`` and ``covariance``. Share it only with people who may see them.

        Raises:
            OSError: the file cannot be written.
        """
        tensors = {"counts": self.counts, "mean": self.mean, "covariance": self.covariance}
        kinds = {name: (shape, str(dtype)) for name, (shape, dtype) in self.kinds.items()}
        about = {"names": self.names, "client_dim": self.client_dim, "fields": kinds}
        write_tensors(Path(path), tensors, _METADATA, about)

    @classmethod
    def load(cls, path: str | Path) -> Moments:
        """Read a file that :meth:`save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is another one.

        Example:
            >>> import bayesfed as bf, tempfile
            >>> moments = bf.Moments.of(bf.Federation.from_arrays({"north": {"y": [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]}}))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     moments.save(f"{folder}/moments.safetensors")
            ...     bf.Moments.load(f"{folder}/moments.safetensors")
            Moments: 1 client, 6 rows, fields y
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"there are no moments {path}")
        tensors, about = read_tensors(Path(path), _METADATA)
        if about is None:
            raise ValueError(f"{path} is a safetensors file, but not one of Moments.save")
        kinds = {
            name: (tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
            for name, (shape, dtype) in about["fields"].items()
        }
        return cls(tuple(about["names"]), about["client_dim"], kinds, **tensors)

    def __repr__(self) -> str:
        clients, rows = len(self.names), int(self.counts.sum())
        return f"Moments: {plural(clients, 'client')}, {plural(rows, 'row')}, fields {', '.join(self.kinds)}"


def check_fields(federation: Federation) -> None:
    """Fail on a field that has no moments.

    Raises:
        ValueError: names the field.
    """
    for name, value in federation.fields.items():
        if not value.is_floating_point():
            raise ValueError(
                f"field {name!r} holds {str(value.dtype).removeprefix('torch.')}, whose means and covariances say "
                "nothing: give it as floating numbers if the model is linear in it, or for each level a column of 0 "
                "and 1, or leave it out"
            )
    if federation.gaps:
        raise ValueError("fields have missing values: moments are of whole rows, missing='drop'")
