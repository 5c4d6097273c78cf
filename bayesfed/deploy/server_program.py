"""The server's program, which is made from the sites' schemas: of made-up rows, since it has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bayesfed.data.federation import Federation
from bayesfed.deploy.messages import Schema, Tensors
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.elbo.elbo import client_terms
from bayesfed.elbo.program import Program
from bayesfed.engine.program import build_program
from bayesfed.engine.rounds import Question, answer
from bayesfed.engine.run import Run
from bayesfed.engine.states import States

ROWS = 3
"""Made-up rows of a client."""
MADE_UP = (1.0, 0.5, 0.0, 2.0)
"""What stands in them: the first of these that is no nonsense to the model."""


def federation_of(schemas: Sequence[Schema], filling: float) -> Federation:
    """All clients with made-up rows."""
    names = tuple(name for schema in schemas for name in schema.clients)
    first = schemas[0]
    fields = {
        name: torch.full(
            (ROWS * len(names), *kind.shape),
            filling if "float" in kind.dtype else 0,
            dtype=getattr(torch, kind.dtype),
        )
        for name, kind in first.fields.items()
    }
    offsets = ROWS * torch.arange(len(names) + 1)
    return Federation(fields, offsets, names, first.client_dim, first.gaps)


def program_of(plan: DeploymentPlan, schemas: Sequence[Schema]) -> tuple[Program, Federation]:
    """The program of all sites' clients, without a row of theirs.

    Raises:
        ValueError: the model fits no made-up rows.
    """
    first: Exception | None = None
    for filling in MADE_UP:
        federation = federation_of(schemas, filling)
        try:
            program = build_program(plan.model, federation, plan.algorithm, plan.seed)
            few = federation.batch(torch.arange(min(2, len(federation))))
            with torch.no_grad():
                keys = federation.stream_ids[few.index]
                supplied = program.noise(keys, 1, local=False) | program.noise(keys, 1, local=True)
                params = program.init | program.init_locals(few)
                client_terms(program, params, {}, few, supplied, 1)
        except Exception as error:
            first = first or error
            continue
        rows = sum(schema.rows for schema in schemas)
        return replace(program, rows=rows), federation
    assert first is not None
    raise ValueError(
        f"the server cannot make the model's program from the fields alone: {first}"
    ) from first


def form_of(run: Run, asked: Question) -> Tensors:
    """What an upload of a round looks like: that of a client with made-up rows."""
    kept = {
        part: {name: value.clone() for name, value in found.items()}
        for part, found in run.clients.tensors.items()
    }
    alone = replace(run, clients=States(1), client_terms=run.client_terms.clone())
    alone.clients.begin(torch.zeros(1, dtype=torch.int64), kept)
    return answer(alone, replace(asked, cohort=torch.zeros(1, dtype=torch.int64))).total
