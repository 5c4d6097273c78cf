"""A program made from the names, shapes and types of fields alone, with made-up rows, as a server has no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bayesfed.algorithms.algorithm import Algorithm
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.elbo import client_terms
from bayesfed.elbo.program import Program
from bayesfed.engine.program import build_program

ROWS = 3
"""The number of made-up rows of a client."""
MADE_UP = (1.0, 0.5, 0.0, 2.0)
"""Candidates for the value of all fields: the first that the model accepts is used."""
Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Field name to the shape of one row, and the type of its numbers."""


def made_up_federation(
    names: Sequence[str], fields: Shapes, client_dim: str, *, gaps: bool, filling: float
) -> Federation:
    """Return clients with made-up rows.

    Example:
        >>> import torch
        >>> from bayesfed.engine.made_up import made_up_federation
        >>> made_up_federation(("a", "b"), {"y": ((), torch.float32)}, "client", gaps=False, filling=0.5)
        Federation: 2 clients, 6 rows (3 to 3 a client), fields y
    """
    rows = {
        name: torch.full(
            (ROWS * len(names), *shape), filling if dtype.is_floating_point else 0, dtype=dtype
        )
        for name, (shape, dtype) in fields.items()
    }
    offsets = ROWS * torch.arange(len(names) + 1)
    return Federation(rows, offsets, tuple(names), client_dim, gaps)


def build_without_rows(
    model: Model,
    algorithm: Algorithm,
    seed: int,
    names: Sequence[str],
    fields: Shapes,
    client_dim: str,
    *,
    gaps: bool,
) -> tuple[Program, Federation]:
    """Return the program of clients without a row of theirs, and the made-up rows that it was made from.

    Raises:
        ValueError: the model accepts no made-up rows.
    """
    first: Exception | None = None
    for filling in MADE_UP:
        federation = made_up_federation(names, fields, client_dim, gaps=gaps, filling=filling)
        try:
            program = build_program(model, federation, algorithm, seed)
            few = federation.batch(torch.arange(min(2, len(federation))))
            with torch.no_grad():
                keys = federation.stream_ids[few.index]
                supplied = program.noise(keys, 1, local=False) | program.noise(keys, 1, local=True)
                params = program.init | program.init_locals(few)
                client_terms(program, params, {}, few, supplied, 1)
        except Exception as error:
            first = first or error
            continue
        return program, federation
    assert first is not None
    raise ValueError(
        f"the model's program cannot be made from the fields alone: {first}"
    ) from first
