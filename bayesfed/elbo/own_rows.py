"""Clients' rows with the evidence of all their own rows, on which a program conditions its sites.

The evidence is that at given parameters, such as those at which a round starts, and does not change in the round.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.minibatches import Minibatches
from bayesfed.elbo import handlers
from bayesfed.elbo.program import Params, Program

_CENTRE = {"normal": 0.0, "uniform": 0.5}


def given_own_rows(program: Program, params: Params, rows: Minibatches, use: str) -> Minibatches:
    """Return K clients' rows with the evidence of all of them, at the centre of the guide.

    Args:
        program: the model and its guide.
        params: of the globals, and of the clients.
        rows: the clients' rows.
        use: ``"given"`` or ``"trained"``, see :class:`~bayesfed.elbo.handlers.GivenOwnRows`.
    """
    own = rows(None)
    centre = {
        name: parts
        for local in (False, True)
        for name, parts in centre_noise(program, own.index, 1, local=local).items()
    }
    with torch.no_grad():
        with handlers.given(own.device, params, centre, draws=1):
            guide = poutine.trace(program.guide).get_trace(own)
        with handlers.FindEvidence() as evidence, handlers.given(own.device, params, draws=1):
            poutine.replay(program.model, trace=guide)(own)
    found = {use: {name: value.squeeze(0) for name, value in evidence.found.items()}}
    return replace(rows, at=lambda step: replace(rows.at(step), given=found))


def centre_noise(
    program: Program, keys: Tensor, count: int, *, local: bool
) -> dict[str, list[Tensor]]:
    """Return noise at which the guide's local or global sites lie at their centres."""
    return {
        name: [
            torch.full_like(part, _CENTRE[random.kind])
            for part, random in zip(parts, program.randomness[name], strict=True)
        ]
        for name, parts in program.noise(keys, count, local=local).items()
    }
