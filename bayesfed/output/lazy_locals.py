"""Local parameters that are computed when they are first read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from bayesfed.data.federation import Federation
from bayesfed.elbo.program import Params


class LazyLocals(Mapping[str, Tensor]):
    """Local parameters of a federation's clients, computed when the first of them is read.

    Args:
        compute: returns the local parameters of given clients, with one row per client.
        federation: the clients.
    """

    def __init__(self, compute: Callable[[Federation], Params], federation: Federation) -> None:
        self._compute, self._federation = compute, federation
        self._params: Params | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    @property
    def computed(self) -> bool:
        """True once the parameters have been computed."""
        return self._params is not None

    def of(self, federation: Federation) -> LazyLocals:
        """Return the parameters of some of the clients, without computing those of the others."""
        return LazyLocals(self._compute, federation)

    def _read(self) -> Params:
        if self._params is None:
            self._params = self._compute(self._federation)
        return self._params
