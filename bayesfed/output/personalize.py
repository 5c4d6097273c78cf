"""Local parameters of clients, made from θ and the clients' own rows."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from bayesfed.algorithms.algorithm import Algorithm, draws_at_once
from bayesfed.data.federation import Federation
from bayesfed.elbo import noise
from bayesfed.elbo.program import Params, Program
from bayesfed.engine.batches import batches
from bayesfed.engine.states import States
from bayesfed.steps.job import Job


def personalize(
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
    """Make local parameters for some clients at a time; yield the clients' positions with their parameters.

    Parameters that the algorithm does not make, such as a client's own scale under a point-estimate algorithm, keep
    their initial values. Yields nothing if the program has no local parameters.

    Args:
        algorithm: makes the parameters, by its ``personalize``.
        program: the model and its guide.
        params: global parameters.
        federation: N clients.
        batch_size: rows of a step; None for all.
        key: root noise key.
        wanted: the clients whose parameters are made, bool ``(N,)``; by default all.
        steps: number of steps; by default the algorithm's ``personal_steps``.
        lr: learning rate; by default the algorithm's.
    """
    if not program.local_params:
        return
    federation = federation.sufficient
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


def gather(federation: Federation, parts: Iterator[tuple[Tensor, Params]]) -> Params:
    """Collect the results of :func:`personalize` for all clients into tensors with one row per client."""
    states = States(len(federation), device=federation.device)
    for chunk, found in parts:
        states.begin(chunk, {"params": found})
    return states.tensors.get("params", {})
