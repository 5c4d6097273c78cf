"""Steps of clients on the parameters of q(w_i | θ), θ drawn by the server: what SFVI, SFVIAvg and PVI share."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.algorithms.protocol import Algorithm
from bayesfed.data.batch import Batch
from bayesfed.data.chunks import NOISE
from bayesfed.data.federation import Federation, Model
from bayesfed.data.minibatches import Minibatches
from bayesfed.elbo import noise
from bayesfed.elbo.build import build
from bayesfed.elbo.elbo import Noise, client_terms
from bayesfed.elbo.program import Params, Program
from bayesfed.elbo.sites import Site, sites
from bayesfed.guides.family import Family
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.hierarchical import automatic
from bayesfed.guides.mean_field import MeanField
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import annealed, gradients, leaves
from bayesfed.steps.job import Job
from bayesfed.tracing.compiler import traceable

FULL_RANK_UP_TO = 100
"""The largest number of global dimensions for which full rank is taken where nothing is chosen.

SFVI's clients keep and send D × D numbers, and its rounds have 2 D draws: with correlated columns ten rounds have the
posterior of 100 coefficients, and of 200, which take eight times as long.
"""
CONDITIONED_UP_TO = 50
"""The same for local variables that are conditioned on them, whose weights every client keeps."""
EPS = 0.1
"""Adam's ε for φ_i: an ELBO gradient of less than a tenth of a nat a unit is noise, not to be chased at full rate."""
_DOUBT = 2.0
"""Standard errors by which what a client has learnt must be worse than its closed form to be given up."""
PERSONAL_DRAWS, PERSONAL_DECAY = 16, 0.01
"""Draws of θ and w_i in a step of ``personalize``, and what is left of its rate at the end."""


class Structured(Algorithm):
    """Clients keep φ_i, the parameters of q(w_i | θ), and take Adam steps on them."""

    local_lr: float = 0.03
    personal_steps: int = 500

    def start_clients(self, program: Program, server: Any, batch: Batch) -> optimizer.State:
        """What :func:`begun` gives."""
        return begun(program, batch)

    def personalize(self, job: Job, steps: int | None = None, lr: float | None = None) -> Params:
        """φ_i of K clients: from its closed form, steps on their terms alone, θ drawn from q(θ) at each."""
        program, params, rows = job.program, job.message, job.rows(None)
        clients = moved(program, params, begun(program, rows), rows)
        steps = self.personal_steps if steps is None else steps
        lr = self.local_lr if lr is None else lr
        streams = noise_of_steps(program, job.keys, steps, PERSONAL_DRAWS, theta=True)
        for step, supplied in enumerate(streams):
            rate = lr * annealed(PERSONAL_DECAY, step / steps)
            clients = personal_step(program, params, clients, job.rows(step), supplied, rate)
        return clients["params"]


def hierarchical(
    model: Model, federation: Federation, family: Family | None, conditioned: bool | None
) -> Program:
    """The model with the automatic guide; what is None is chosen by the number of global dimensions.

    Raises:
        ValueError: there is nothing to learn.
    """
    found = sites(model, federation)
    size = dimensions(found)
    if family is None and size > FULL_RANK_UP_TO:
        warnings.warn(
            f"the {size} global dimensions are taken to be independent (mean-field): where they are correlated their "
            "standard deviations come out too small. global_guide=FullRank() has the correlations, for "
            f"{size} × {size} numbers a client; global_guide=MeanField() chooses this one",
            stacklevel=4,
        )
    family = family or (FullRank() if size <= FULL_RANK_UP_TO else MeanField())
    conditioned = size <= CONDITIONED_UP_TO if conditioned is None else conditioned
    guide = automatic(model, found, federation, family, conditioned)
    program = build(model, guide, federation)
    if not (program.init or program.locals):
        raise ValueError(
            "the model has nothing to learn: variables of a row are integrated out, and it has no other, and no "
            "pyro.param. Sample what clients share outside `with federation.clients():`, what is a client's own inside"
        )
    return program


def dimensions(found: Mapping[str, Site]) -> int:
    """D, how many numbers the global latent sites are, unconstrained."""
    return sum(
        biject_to(site.support).inverse_shape(site.event_shape).numel()
        for site in found.values()
        if not site.local and not site.observed
    )


def family_of(program: Program) -> Family:
    """The family of q(z) in a program of :func:`hierarchical`."""
    return program.guide.family


def begun(program: Program, batch: Batch) -> optimizer.State:
    """φ_i of K clients at first, Adam's moments, and the origin of φ_i, see :func:`moved`."""
    clients = optimizer.init(program.init_locals(batch), rows=len(batch))
    clients["origin"] = {n: clients["params"][n].clone() for n in program.laplace_params}
    return clients


def moved(
    program: Program, params: Mapping[str, Tensor], clients: optimizer.State, rows: Batch
) -> optimizer.State:
    """φ_i, moved by the change of its closed-form origin since the client's last visit.

    What gradient steps have learnt is kept as a correction to the origin; see
    :mod:`bayesfed.guides.client_factor`. Guides that have no closed form are left as they are.
    """
    if not program.laplace_params:
        return clients
    origin = program.laplace(params, clients["params"], rows)
    return _shifted(clients, origin)


@traceable
def _shifted(clients: optimizer.State, origin: Params) -> optimizer.State:
    """φ_i and its origin, moved to another; of clients to whom that gives no numbers, as they are."""
    phi = clients["params"]
    finite = torch.cat([value.flatten(1) for value in origin.values()], 1).isfinite().all(1)
    there, shifted = {}, {}
    for name, before in clients["origin"].items():
        keep = finite.reshape(-1, *[1] * (before.ndim - 1))
        there[name] = torch.where(keep, origin[name], before)
        shifted[name] = phi[name] + there[name] - before
    return clients | {"params": phi | shifted, "origin": there}


@traceable
def serving(
    program: Program,
    params: Mapping[str, Tensor],
    clients: optimizer.State,
    theta: Mapping[str, Tensor],
    batch: Batch,
    supplied: Noise,
    draws: int,
) -> optimizer.State:
    """Clients as :func:`moved` leaves them, at the origin itself where what they had learnt makes their term worse.

    A correction that was learnt around a wide q(θ) may be far off around a narrow one, and a term that it makes wrong
    is one whose factor keeps q(θ) where it is. It is given up where that is worth more than ``_DOUBT`` standard errors
    of the draws, which come in antithetic pairs; so is one that gives no numbers.

    Args:
        program: the model/guide pair.
        params: the global parameters (unconstrained).
        clients: the K clients' φ_i, with their origins.
        theta: draws of θ, ``(S, K, 1, *event)``, the second half antithetic to the first.
        batch: the cohort's rows.
        supplied: the noise of the local sites.
        draws: S.
    """
    phi, origin = clients["params"], clients["origin"]
    with torch.no_grad():
        learnt = client_terms(program, {**params, **phi}, theta, batch, supplied, draws)
        closed = client_terms(program, {**params, **phi, **origin}, theta, batch, supplied, draws)
    gain = (learnt - closed).unflatten(0, (2, draws // 2)).mean(0)
    keep = gain.mean(0) >= -_DOUBT * gain.std(0, correction=0) / math.sqrt(max(1, draws // 2 - 1))
    keep = keep | (learnt.isfinite() & ~closed.isfinite()).any(0)
    kept = {
        name: torch.where(keep.reshape(-1, *[1] * (there.ndim - 1)), phi[name], there)
        for name, there in origin.items()
    }
    return clients | {"params": phi | kept}


def local_steps(
    program: Program,
    theta: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    clients: optimizer.State,
    batch: Minibatches,
    keys: Tensor,
    *,
    steps: int,
    draws: int,
    lr: float,
) -> tuple[optimizer.State, dict[str, Tensor], Tensor]:
    """Steps of K clients on their φ_i, with the gradients of their terms in what the server sent.

    Args:
        program: the model/guide pair.
        theta: draws for every step, ``(steps · S, 1, 1, *event)``.
        params: the global parameters (unconstrained).
        clients: the K clients' φ_i and Adam moments.
        batch: the cohort's rows at a step.
        keys: int64 ``(K,)``: the clients' noise streams of this round.
        steps: number of Adam steps.
        draws: S.
        lr: Adam's rate.

    Returns:
        The clients' next states. For each random site the gradients of the mean term in its draws,
        ``(K, draws, *event)``, over the steps' second half, when φ_i has caught up with θ; likewise for
        each parameter that is read directly, ``(K, steps, ...)``. The clients' mean terms over those steps, ``(K,)``.
    """
    uploads: dict[str, list[Tensor]] = {name: [] for name in (*program.random, *program.direct)}
    terms = []
    for step, supplied in enumerate(noise_of_steps(program, keys, steps, draws)):
        now = {n: v[step * draws : (step + 1) * draws] for n, v in theta.items()}
        clients, grad, term = local_step(
            program, now, params, clients, batch(step), supplied, draws, lr
        )
        if step < steps // 2:
            continue
        for name in uploads:
            uploads[name].append(grad[name])
        terms.append(term)
    upload = {name: torch.cat(parts, 1) / len(terms) for name, parts in uploads.items()}
    return clients, upload, torch.stack(terms).mean(0)


def noise_of_steps(
    program: Program, keys: Tensor, steps: int, draws: int, *, theta: bool = False
) -> Iterator[Noise]:
    """The noise of K clients at each step, drawn for several steps at once where it is little.

    That of their local sites, and with ``theta`` that of the global ones, for draws of each client's own.
    """
    wanted = (True, False) if theta else (True,)
    numbers = sum(
        math.prod(draw.tail)
        for name, parts in program.randomness.items()
        if (name not in program.random) in wanted
        for draw in parts
    )
    together = max(1, min(steps, NOISE // (len(keys) * draws * max(1, numbers))))
    for some in torch.arange(steps, device=keys.device).split(together):
        streams = noise.fold(keys, some[:, None])
        drawn: dict[str, list[Tensor]] = {}
        for local in wanted:
            drawn |= program.noise(streams, draws, local=local)
        for i in range(len(some)):
            yield {name: [part[i] for part in parts] for name, parts in drawn.items()}


@traceable
def local_step(
    program: Program,
    theta: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    clients: optimizer.State,
    batch: Batch,
    supplied: Noise,
    draws: int,
    lr: float,
) -> tuple[optimizer.State, dict[str, Tensor], Tensor]:
    """One Adam step of K clients on their φ_i, from draws ``(S, 1, 1, *event)`` of θ.

    Returns:
        The clients' next states; the gradients of their terms in the draws ``(K, S, *event)`` and in the direct
        parameters ``(K, 1, ...)``; the terms ``(K,)``.
    """
    size = len(batch)
    theta = leaves({n: v.expand(-1, size, *v.shape[2:]) for n, v in theta.items()})
    direct = leaves({n: params[n].expand(size, 1, *params[n].shape) for n in program.direct})
    phi = leaves(clients["params"])
    term = client_terms(program, {**params, **direct, **phi}, theta, batch, supplied, draws).mean(0)
    grad = gradients(term, {**theta, **direct, **phi})
    upload = {name: grad[name].movedim(1, 0).squeeze(2) for name in theta}
    upload |= {name: grad[name] for name in direct}
    with torch.no_grad():
        clients = optimizer.ascend(clients, {name: grad[name] for name in phi}, lr, EPS)
    return clients, upload, term.detach()


@traceable
def personal_step(
    program: Program,
    params: Mapping[str, Tensor],
    clients: optimizer.State,
    batch: Batch,
    supplied: Noise,
    lr: float,
) -> optimizer.State:
    """One Adam step of K clients on their φ_i, each with draws of θ of its own."""
    phi = leaves(clients["params"])
    term = client_terms(program, {**params, **phi}, {}, batch, supplied, PERSONAL_DRAWS).mean(0)
    return optimizer.ascend(clients, gradients(term, phi), lr, EPS)
