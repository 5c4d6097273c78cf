"""Local parameters of a run's clients, and the predictions of a cohort during a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from bayesfed.data.federation import Federation
from bayesfed.elbo import noise
from bayesfed.elbo.handlers import on_cpu
from bayesfed.elbo.program import Params
from bayesfed.engine import processes
from bayesfed.engine.batches import batches
from bayesfed.engine.execution import threads
from bayesfed.engine.run import PERSONAL, Run
from bayesfed.engine.watch import (
    warn_of_infinities,
    warn_of_missing_optima,
    warn_of_spreads,
    warn_of_unseen,
)
from bayesfed.output.draws import run_model, weighted_draws
from bayesfed.output.fitted import Fitted
from bayesfed.output.lazy_locals import LazyLocals
from bayesfed.output.personalize import gather, personalize
from bayesfed.steps.descent import descent_of_locals, without_optimum
from bayesfed.steps.job import Job
from bayesfed.steps.local_variational import LocalVariational, is_completed
from bayesfed.steps.noise_of_weights import PERSONAL_DRAWS
from bayesfed.tracing.compiler import using

UNSEEN_STEPS = 50
"""Number of steps in which clients that were in no cohort make their variables from θ at the end."""
LITTLE = 1_000_000
"""The largest size, in numbers, of all clients' variables that are computed at the end of a fit, with any warnings."""


def make_local_params(run: Run, params: Params, near: float | None = None) -> Mapping[str, Tensor]:
    """Return the local parameters of a run's clients, given the guide's global parameters.

    Those of stateful clients are in their states; clients that have taken few steps take more. Stateless clients, and
    those that were in no cohort, make them from θ: at once, or when they are first read if there are many. ``near`` is
    as for :meth:`~bayesfed.steps.local_variational.LocalVariational.complete`.
    """
    plan, group, on_disk = run.plan, run.plan.execution.group, run.plan.execution.states is not None
    key, size = noise.fold(noise.key(plan.seed), noise.word("personalize")), plan.batch_size
    make = partial(personalize, plan.algorithm, run.program, params, batch_size=size, key=key)

    def checked(federation: Federation, found: Params) -> Params:
        warn_of_infinities(federation.names, found)
        warn_of_spreads(run.program, federation, params, found)
        warn_of_missing_optima(
            run.program, federation.names, _missing(run, federation, params, found)
        )
        return found

    def compute(federation: Federation) -> Params:
        with on_cpu(), threads(run.numbers), using(run.compiler):
            return checked(federation, gather(federation, make(federation=federation)))

    states, unseen, part = run.clients.tensors, run.client_terms.isnan(), "params"
    if part not in states and group is None and not on_disk:
        many = len(run.federation) * run.program.variables > LITTLE
        return LazyLocals(compute, run.federation) if many else compute(run.federation)
    make = partial(make, federation=run.federation)
    mine = processes.own(torch.arange(len(run.federation)), group)
    with threads(run.numbers), using(run.compiler):
        if part not in states:
            part, unseen = PERSONAL, torch.zeros_like(unseen)
            for chunk, found in make(wanted=mine):
                run.clients.begin(chunk, {part: found})
        local_params = dict(run.clients.tensors.get(part, {}))
        completed = _is_completed(run)
        complete = _complete(run, params, mine & ~unseen, near) if completed else iter(())
        if on_disk:  # clients that were in no cohort are not made here: there may be very many
            warn_of_unseen(run.federation.names, unseen)
            for chunk, found in () if unseen.any() else complete:
                run.clients.begin(chunk, {PERSONAL: found})
                local_params = dict(run.clients.tensors[PERSONAL])
            return local_params
        if run.done < run.rounds or unseen.any() or completed:  # the states are changed in place
            local_params = {name: value.clone() for name, value in local_params.items()}
        for chunk, found in chain(make(wanted=mine & unseen, steps=UNSEEN_STEPS), complete):
            for name in local_params:
                local_params[name][chunk] = found[name]
    if group is not None:
        for value in local_params.values():
            value[~mine] = 0
        local_params = processes.sum_over_processes(local_params, group)
    return checked(run.federation, local_params)


def kept_local_params(run: Run, params: Params) -> Params | None:
    """Return the local parameters of stateful clients without further steps; None if clients keep none here."""
    unseen, execution = run.client_terms.isnan(), run.plan.execution
    elsewhere = execution.group is not None or execution.states is not None
    if elsewhere or unseen.any() or "params" not in run.clients.tensors:
        return None
    found = dict(run.clients.tensors["params"])
    if _is_completed(run):
        found = {name: value.clone() for name, value in found.items()}
        with threads(run.numbers), using(run.compiler):
            for chunk, moved in _complete(run, params, ~unseen, math.inf):
                for name in found:
                    found[name][chunk] = moved[name]
    return found


def _is_completed(run: Run) -> bool:
    """Return whether stateful clients may have other parameters at the end than in their states."""
    states = run.clients.tensors
    stateful = isinstance(run.plan.algorithm.steps, LocalVariational) and "params" in states
    return stateful and is_completed(run.program, states)


def _complete(
    run: Run, params: Params, wanted: Tensor, near: float | None
) -> Iterator[tuple[Tensor, Params]]:
    """Let clients complete their parameters; yield the positions of some clients with these."""
    local, federation = run.plan.algorithm.steps, run.federation.sufficient
    assert isinstance(local, LocalVariational)
    key = noise.fold(noise.key(run.plan.seed).to(federation.device), noise.word("complete"))
    for some in run.program.chunks(federation, copies=4 * PERSONAL_DRAWS):
        if len(chunk := some[wanted[some]]):
            keys = noise.fold(key, federation.stream_ids[chunk])
            rows = batches(federation, chunk, run.plan.batch_size, keys)
            states = run.clients.take(chunk)
            job = Job(run.program, {"theta": params}, states, rows, keys)
            yield chunk, local.complete(job, near=near)


def _missing(run: Run, federation: Federation, params: Params, own: Params) -> Tensor:
    """Return the clients whose own variables have no finite optimum, after a run that has converged: bool ``(N,)``."""
    missing, algorithm = torch.zeros(len(federation), dtype=torch.bool), run.plan.algorithm
    descent = descent_of_locals(algorithm.steps, run.program)
    if descent is not None and run.stopping.converged and algorithm.locals.stateful:
        federation = federation.sufficient
        for chunk in run.program.chunks(federation):
            keys = federation.stream_ids[chunk]
            rows = batches(federation, chunk, None, keys)
            job = Job(run.program, {"theta": params}, {}, rows, keys)
            found = without_optimum(descent, job, {n: v[chunk] for n, v in own.items()})
            missing[chunk.cpu()] = found.cpu()
    return missing


def fitted_cohort(run: Run, params: Params, names: Sequence[str]) -> Fitted:
    """Return the current q of some clients of a run; stateless clients are at the centre of their priors."""
    plan, few = run.plan, run.federation.select(names)
    params = {name: value.detach() for name, value in params.items()}
    if "params" in run.clients.tensors:
        own = run.clients.take(run.federation.index(names))["params"]
    else:
        key, size = noise.key(plan.seed), plan.batch_size
        made = personalize(plan.algorithm, run.program, params, few, size, key, steps=0)
        own = gather(few, made)
    return Fitted(run.program, few, params, own, {}, plan.algorithm, plan.seed)


def log_predictive(fitted: Fitted, rows: Federation, num_samples: int = 20) -> Tensor:
    """Compute Σ log p(y | D_i) over the rows of each client, averaged over draws inside the logarithm: ``(N,)``.

    Args:
        fitted: q of the clients.
        rows: rows of the same clients, in the same order.
        num_samples: number of draws; one is used for a point estimate.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.output.locals_of_run import log_predictive
        >>> train, test = datasets.digits(clients=5)
        >>> posterior = bf.fit(models.Network(models.mlp(64, 10)), train, bf.FedAvg(), rounds=20, batch_size=10)
        >>> bool((log_predictive(posterior, test) / test.lengths > -1).all())
        True
    """
    found = torch.zeros(len(rows), dtype=rows.dtype, device=rows.device)
    for chunk, draws in weighted_draws(fitted, num_samples, 0, rows):
        batch = rows.batch(chunk)
        nodes = run_model(fitted, fitted.program.model, draws, chunk, batch)
        weight = draws.normalised_log_weights(len(chunk)).to(batch.scale)
        for site in fitted.program.likelihood:
            density = nodes[site.name]["fn"].log_prob(nodes[site.name]["value"])
            if site.per_row:
                density = (weight[..., None] + density).logsumexp(0)
                there = batch.mask if nodes[site.name]["mask"] is None else nodes[site.name]["mask"]
                found[chunk] += density.where(there, 0.0).sum(-1)
            else:
                found[chunk] += (weight + density.squeeze(-1)).logsumexp(0)
    return found
