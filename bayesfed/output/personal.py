"""The local variables of clients made from θ and their own rows, some clients at a time."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from bayesfed.algorithms.protocol import Algorithm, Job
from bayesfed.data.federation import Federation
from bayesfed.elbo import noise
from bayesfed.elbo.program import Params, Program
from bayesfed.engine.batches import batches


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
    for some in program.chunks(federation, copies=4 * algorithm.particles * algorithm.draws):
        chunk = some if wanted is None else some[wanted[some]]
        if not len(chunk):
            continue
        keys = noise.fold(key.to(federation.device), federation.stream_ids[chunk])
        rows = batches(federation, chunk, batch_size, keys)
        found = algorithm.personalize(Job(program, params, {}, rows, keys), steps, lr)
        if not set(program.local_params) <= found.keys():
            found = program.init_locals(rows(0)) | found
        yield chunk, found
