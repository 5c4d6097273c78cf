"""The server's program: made from the institutions' schemas and made-up rows, since the server has no data."""

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
"""The number of made-up rows of a client."""
MADE_UP = (1.0, 0.5, 0.0, 2.0)
"""Candidates for the value of all fields: the first that the model accepts is used."""


def made_up_federation(schemas: Sequence[Schema], filling: float) -> Federation:
    """Return all clients with made-up rows."""
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


def build_server_program(
    plan: DeploymentPlan, schemas: Sequence[Schema]
) -> tuple[Program, Federation]:
    """Return the program of all institutions' clients, made without a row of theirs.

    Raises:
        ValueError: the model accepts no made-up rows.
    """
    first: Exception | None = None
    for filling in MADE_UP:
        federation = made_up_federation(schemas, filling)
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


def upload_form(run: Run, asked: Question) -> Tensors:
    """Return a tensor like each part of a round's upload: the upload of a client with made-up rows."""
    states = {
        part: {name: value.clone() for name, value in found.items()}
        for part, found in run.clients.tensors.items()
    }
    alone = replace(run, clients=States(1), client_terms=run.client_terms.clone())
    alone.clients.begin(torch.zeros(1, dtype=torch.int64), states)
    return answer(alone, replace(asked, cohort=torch.zeros(1, dtype=torch.int64))).total
