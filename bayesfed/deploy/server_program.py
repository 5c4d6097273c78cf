"""The server's program: made from the institutions' schemas and made-up rows, since the server has no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from bayesfed.data.federation import Federation
from bayesfed.deploy.messages import Schema, Tensors
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.elbo.program import Program
from bayesfed.engine.made_up import build_without_rows
from bayesfed.engine.rounds import Question, answer
from bayesfed.engine.run import Run
from bayesfed.engine.states import States


def build_server_program(
    plan: DeploymentPlan, schemas: Sequence[Schema]
) -> tuple[Program, Federation]:
    """Return the program of all institutions' clients, made without a row of theirs.

    Raises:
        ValueError: the model accepts no made-up rows.
    """
    first, names = schemas[0], [name for schema in schemas for name in schema.clients]
    fields = {n: (kind.shape, getattr(torch, kind.dtype)) for n, kind in first.fields.items()}
    how = plan.model, plan.algorithm, plan.seed, names, fields, first.client_dim
    program, federation = build_without_rows(*how, gaps=first.gaps)
    rows = sum(schema.rows for schema in schemas)
    return replace(program, rows=rows), federation


Form = tuple[tuple[str, torch.dtype, torch.Size], ...]
"""Name, type and shape of each tensor of a message."""


@dataclass
class UploadForms:
    """Tensors like the uploads of a run's rounds, computed once for each form of the rounds' messages.

    Where the learning rates fall it is computed in each round, since a rule's upload may depend on the rate.

    Attributes:
        run: the server's.
    """

    run: Run
    _found: dict[tuple[Form, float, bool], Tensors] = field(default_factory=dict)

    def of(self, asked: Question) -> Tensors:
        """Return a tensor like each part of a round's upload."""
        form = tuple((n, v.dtype, v.shape) for n, v in sorted(asked.message.items()))
        key = form, asked.rate, asked.noisy
        if key not in self._found:
            self._found[key] = _made_up_upload(self.run, asked)
        return self._found[key]


def _made_up_upload(run: Run, asked: Question) -> Tensors:
    """Return the upload of a client with made-up rows."""
    states = {
        part: {name: value.clone() for name, value in found.items()}
        for part, found in run.clients.tensors.items()
    }
    alone = replace(run, clients=States(1), client_terms=run.client_terms.clone())
    alone.clients.begin(torch.zeros(1, dtype=torch.int64), states)
    return answer(alone, replace(asked, cohort=torch.zeros(1, dtype=torch.int64))).total
