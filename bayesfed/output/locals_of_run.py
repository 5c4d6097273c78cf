"""What the clients of a run have come to: their variables, and what they predict with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from bayesfed.data.federation import Federation
from bayesfed.elbo import noise
from bayesfed.elbo.handlers import on_cpu
from bayesfed.elbo.program import Params
from bayesfed.engine import processes
from bayesfed.engine.execution import threads
from bayesfed.engine.run import PERSONAL, Run
from bayesfed.engine.watch import warn_of_infinities, warn_of_spreads, warn_of_unseen
from bayesfed.output.draws import replayed, weighted
from bayesfed.output.personal import OnDemand, gathered, personal
from bayesfed.output.posterior import Posterior
from bayesfed.tracing.compiler import using

UNSEEN_STEPS = 50
"""Steps in which clients that were in no cohort make their variables from θ in the end."""
LITTLE = 1_000_000
"""Numbers of all clients' variables that are made at once: what is to be said of them is said when a fit ends."""


def of_clients(run: Run, params: Params) -> Mapping[str, Tensor]:
    """The clients' variables: kept by them, or made from θ; many of them when somebody asks."""
    group, on_disk = run.plan.execution.group, run.plan.execution.states is not None
    key = noise.fold(noise.key(run.plan.seed), noise.word("personalize"))
    plan = run.plan
    made = partial(
        personal, plan.algorithm, run.program, params, batch_size=plan.batch_size, key=key
    )

    def checked(federation: Federation, found: Params) -> Params:
        warn_of_infinities(federation.names, found)
        warn_of_spreads(run.program, federation, params, found)
        return found

    def on_demand(federation: Federation) -> Params:
        with on_cpu(), threads(run.numbers), using(run.compiler):
            return checked(federation, gathered(federation, made(federation=federation)))

    kept, unseen, part = run.clients.tensors, run.client_terms.isnan(), "params"
    if part not in kept and group is None and not on_disk:
        much = len(run.federation) * run.program.variables > LITTLE
        return OnDemand(on_demand, run.federation) if much else on_demand(run.federation)
    made = partial(made, federation=run.federation)
    mine = processes.own(torch.arange(len(run.federation)), group)
    with threads(run.numbers), using(run.compiler):
        if part not in kept:
            part, unseen = PERSONAL, torch.zeros_like(unseen)
            for chunk, found in made(wanted=mine):
                run.clients.begin(chunk, {part: found})
        local_params = dict(run.clients.tensors.get(part, {}))
        if on_disk:  # files of all clients are not read through
            warn_of_unseen(run.federation.names, unseen)
            return local_params
        if run.done < run.rounds or unseen.any():  # the next step changes them
            local_params = {name: value.clone() for name, value in local_params.items()}
        for chunk, found in made(wanted=mine & unseen, steps=UNSEEN_STEPS):
            for name in local_params:
                local_params[name][chunk] = found[name]
    if group is not None:
        for value in local_params.values():
            value[~mine] = 0
        local_params = processes.sum_over_processes(local_params, group)
    return checked(run.federation, local_params)


def of_cohort(run: Run, params: Params, names: Sequence[str]) -> Posterior:
    """What some clients would predict with now: those who keep nothing with the centre of their priors."""
    few = run.federation.select(names)
    params = {name: value.detach() for name, value in params.items()}
    if "params" in run.clients.tensors:
        own = run.clients.take(run.federation.index(names))["params"]
    else:
        plan, key = run.plan, noise.key(run.plan.seed)
        how = plan.algorithm, run.program, params, few, plan.batch_size, key
        own = gathered(few, personal(*how, steps=0))
    return Posterior(run.program, few, params, own, {}, run.plan.algorithm, run.plan.seed)


def log_predictive(posterior: Posterior, rows: Federation, num_samples: int = 20) -> Tensor:
    """Σ log p(y | D_i) over the rows of each client, the mean over draws inside the logarithm: ``(N,)``.

    Args:
        posterior: of the clients.
        rows: of the same clients, in the same order.
        num_samples: draws; a point is one.

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
    for chunk, draws in weighted(posterior, num_samples, 0, rows):
        batch = rows.batch(chunk)
        nodes = replayed(posterior, posterior.program.model, draws, chunk, batch)
        weight = draws.log_probabilities(len(chunk)).to(batch.scale)
        for site in posterior.program.likelihood:
            density = nodes[site.name]["fn"].log_prob(nodes[site.name]["value"])
            if site.per_row:
                density = (weight[..., None] + density).logsumexp(0)
                there = batch.mask if nodes[site.name]["mask"] is None else nodes[site.name]["mask"]
                found[chunk] += density.where(there, 0.0).sum(-1)
            else:
                found[chunk] += (weight + density.squeeze(-1)).logsumexp(0)
    return found
