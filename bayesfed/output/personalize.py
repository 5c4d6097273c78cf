"""Local parameters of clients, made from θ and the clients' own rows."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from bayesfed.algorithms.algorithm import Algorithm, draws_at_once
from bayesfed.checks.data import check_data, check_rows
from bayesfed.data.federation import Federation
from bayesfed.elbo import noise
from bayesfed.elbo.program import Params, Program
from bayesfed.engine.batches import batches
from bayesfed.engine.states import States
from bayesfed.output.fitted import Fitted
from bayesfed.steps.job import Job
from bayesfed.tracing.compiler import Compiler, using


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


def personalize_new(
    fitted: Fitted,
    federation: Federation,
    seed: int,
    *,
    steps: int | None,
    lr: float | None,
    batch_size: int | None,
) -> tuple[Federation, Params]:
    """Make the local parameters of new clients; arguments as for :meth:`bayesfed.Posterior.personalize`.

    Returns:
        The clients, with missing values for outcomes that they lack, and their parameters.
    """
    check_rows(federation)
    key = noise.fold(noise.key(seed), noise.word("personalize"))
    lacking = fitted.federation.fields.keys() - federation.fields.keys()
    federation = federation.with_gaps(fitted.federation)
    try:
        check_data(fitted.program, federation)
    except (IndexError, RuntimeError) as error:
        if not lacking:
            raise
        raise ValueError(
            f"the model does not run on rows without {', '.join(sorted(lacking))}. Only outcomes may be missing, and "
            f"not where the model converts their type, obs['y'].long() ({str(error).splitlines()[0]})"
        ) from error
    how = fitted.algorithm, fitted.program, fitted.params, federation, batch_size, key
    with using(Compiler()):
        return federation, gather(federation, personalize(*how, steps=steps, lr=lr))


def gather(federation: Federation, parts: Iterator[tuple[Tensor, Params]]) -> Params:
    """Collect the results of :func:`personalize` for all clients into tensors with one row per client."""
    states = States(len(federation), device=federation.device)
    for chunk, found in parts:
        states.begin(chunk, {"params": found})
    return states.tensors.get("params", {})
