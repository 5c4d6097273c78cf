"""The local variables of clients made from θ and their own rows, some clients at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from bayesfed.algorithms.algorithm import Algorithm, draws_at_once
from bayesfed.data.federation import Federation
from bayesfed.elbo import noise
from bayesfed.elbo.program import Params, Program
from bayesfed.engine.batches import batches
from bayesfed.engine.states import States
from bayesfed.steps.job import Job


class OnDemand(Mapping[str, Tensor]):
    """Local parameters that are made when somebody asks for one of them.

    Args:
        make: from clients, the parameters, a row of each client.
        federation: the clients.
    """

    def __init__(self, make: Callable[[Federation], Params], federation: Federation) -> None:
        self._make, self._federation = make, federation
        self._made: Params | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def made(self) -> bool:
        """Whether somebody has asked."""
        return self._made is not None

    def of(self, federation: Federation) -> OnDemand:
        """Those of some of the clients: the others' are not made for it."""
        return OnDemand(self._make, federation)

    @property
    def _all(self) -> Params:
        if self._made is None:
            self._made = self._make(self._federation)
        return self._made


def gathered(federation: Federation, parts: Iterator[tuple[Tensor, Params]]) -> Params:
    """What :func:`personal` gives of all clients, together."""
    states = States(len(federation), device=federation.device)
    for chunk, found in parts:
        states.begin(chunk, {"params": found})
    return states.tensors.get("params", {})


def personal(
    algorithm: Algorithm,
    program: Program,
    params: Params,
    federation: Federation,
    batch_size: int | None,
    key: Tensor,
    wanted: Tensor | None = None,
    steps: int | None = None,
    lr: float | None = None,
) -> Iterator[tuple[Tensor, Params]]:
    """Positions of some clients and their local parameters, of those ``wanted`` (bool ``(N,)``, by default all).

    Parameters that the algorithm does not make stay where they start, such as a spread of the client's own under an
    algorithm of points. Nothing where the program has no local parameters.
    """
    if not program.local_params:
        return
    for some in program.chunks(federation, copies=4 * draws_at_once(algorithm, program)):
        chunk = some if wanted is None else some[wanted[some]]
        if not len(chunk):
            continue
        keys = noise.fold(key.to(federation.device), federation.stream_ids[chunk])
        rows = batches(federation, chunk, batch_size, keys)
        found = algorithm.personalize(Job(program, {"theta": params}, {}, rows, keys), steps, lr)
        if not set(program.local_params) <= found.keys():
            found = program.init_locals(rows(0)) | found
        yield chunk, found
