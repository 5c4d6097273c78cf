"""What algorithms of points share: where clients start, what they lose, and how their numbers meet parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.elbo import Losses, client_losses, local_priors
from bayesfed.elbo.program import Params, Program
from bayesfed.steps.job import Job


def sharing(program: Program, name: str) -> Program:
    """The program, if there is anything that its clients share.

    Raises:
        ValueError: there is not; says what the algorithm of that name lacks, and which others do without it.
    """
    if not program.init:
        raise ValueError(
            f"{name} learns what clients share, and the model shares nothing: it has no site and no pyro.param outside "
            "`with federation.clients():`. Use Local for a point of each client's own, SFVI for a posterior; or "
            "sample outside what clients have in common, such as the location of a local prior"
        )
    return program


def owning(program: Program, name: str) -> Program:
    """The program, if its clients have variables of their own.

    Raises:
        ValueError: they have none; says what would do.
    """
    if not program.locals:
        raise ValueError(
            f"{name} needs variables of a client's own, and the model samples none: use FedAvg, or move a site inside "
            "`with federation.clients():`"
        )
    return program


def centre(program: Program, theta: Mapping[str, Tensor], batch: Batch) -> Params:
    """The centre of p(w_i | θ) of K clients, ``(K, 1, ...)``, differentiable in θ; for Normals q(w_i) = p(w_i | θ)."""
    return program.guide.at(local_priors(program, at_rest(program, theta, batch), batch))


def at_rest(program: Program, params: Mapping[str, Tensor], batch: Batch) -> Params:
    """The parameters, with those of K clients' own that points leave where they start, such as a spread of each."""
    missing = [name for name in program.resting if name not in params]
    if not missing:
        return dict(params)
    own = program.init_locals(batch)
    return {**params, **{name: own[name] for name in missing}}


def beginning(program: Program, theta: Params, batch: Batch) -> Params:
    """K clients' variables at that centre, apart from θ, with what else is their own as it starts; θ a copy each."""
    own = program.init_locals(batch)
    found = centre(program, theta | own, batch)
    return own | {name: value.detach().clone() for name, value in found.items()}


def loss_of(program: Program, params: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """(−log p(D_i | w_i, θ) − log p(θ) / N) / n_i of K clients, ``(K,)``, of points for θ and w_i."""
    return a_row(program, client_losses(program, at_rest(program, params, batch), batch, {}, 1))


def a_row(program: Program, losses: Losses) -> Tensor:
    """(nll − log p(θ) / N) / n_i of K clients' losses, ``(K,)``."""
    return (losses.nll + losses.hyper / program.clients) / losses.rows


def everyone(job: Job, steps: int) -> Tensor:
    """A schedule of which all K clients take every step, ``(steps, K)``."""
    return torch.ones(steps, len(job), dtype=torch.bool)


def squared(own: Params, other: Params) -> Tensor | float:
    """‖own − other‖² of each client, ``(K,)``."""
    parts = [(value - other[name]).square().flatten(1).sum(1) for name, value in own.items()]
    return sum(parts, start=0.0)


def inner(own: Params, other: Params) -> Tensor:
    """⟨own, other⟩ of each client, ``(K,)``."""
    return torch.stack([(v * other[n]).flatten(1).sum(1) for n, v in own.items()]).sum(0)


def zeros(params: Mapping[str, Tensor]) -> Params:
    """As many zeros."""
    return {name: torch.zeros_like(value) for name, value in params.items()}


def against(per_client: Tensor, value: Tensor) -> Tensor:
    """Numbers ``(K,)`` or ``(K, 1)`` against values ``(K, ...)``."""
    return per_client.reshape(-1, *[1] * (value.ndim - 1))
