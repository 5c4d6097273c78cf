"""Draws as a table, one row for each draw and one column for each number, in the layout of R's ``posterior``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from bayesfed.output.fitted import Fitted
from bayesfed.output.predictions import derived, sample

if TYPE_CHECKING:
    import pandas as pd

CHAIN, ITERATION, DRAW = ".chain", ".iteration", ".draw"
"""The columns that ``posterior::as_draws_df`` reads the position of a draw from, counted from 1."""


def draws_table(fitted: Fitted, num_samples: int, *, seed: int = 0) -> pd.DataFrame:
    """Return draws of the global variables, of each client's own, and of the values that the model derives from them.

    The columns ``.chain``, ``.iteration`` and ``.draw`` come first. A number of a vector is called ``beta[1]``, counted
    from 1, or has its level's name; that of a client has the client's name, ``a[north]`` and ``b[north,2]``, as brms
    has them.
    A comma or a bracket in a name becomes an underscore. Auxiliary variables, ``_name``, and values of single rows are
    left out. Of a posterior without rows there are the global variables.

    Args:
        fitted: a posterior.
        num_samples: number of draws, of chains in all.
        seed: seed of the draws, which are those of ``posterior.sample``.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=5)
        >>> posterior.to_frame(100).columns.tolist()[:6]
        ['.chain', '.iteration', '.draw', 'mu', 'tau', 'theta[A]']
    """
    import pandas as pd

    program, federation = fitted.program, fitted.federation
    chains = 1 if fitted.correction is None else fitted.correction.chains
    each = max(1, num_samples // chains)
    inside: dict[str, tuple[str, ...]] = {
        site.name: ("client",) if site.local else () for site in program.latent
    }
    values = {n: v for n, v in sample(fitted, chains * each, seed).items() if n[0] != "_"}
    if program.derived:
        inside |= program.derived
        more = derived(fitted, federation, chains * each, seed)
        values |= {name: value for name, value in more.items() if "observation" not in inside[name]}
    by_chain = torch.arange(chains * each).view(each, chains).T.flatten()
    levels = getattr(program.model, "coords", {})
    columns: dict[str, np.ndarray] = {
        CHAIN: np.repeat(np.arange(1, chains + 1), each),
        ITERATION: np.tile(np.arange(1, each + 1), chains),
        DRAW: np.arange(1, chains * each + 1),
    }
    for name, value in values.items():
        clients = federation.names if inside[name] else None
        columns |= dict(_numbers(name, value.detach().cpu()[by_chain], clients, levels))
    return pd.DataFrame(columns)


def _numbers(
    name: str, value: Tensor, clients: Sequence[str] | None, levels: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and draws of each number of draws ``(S, *event)``, or ``(S, N, *event)`` of clients."""
    event = value.shape[1 if clients is None else 2 :]
    indices: list[Sequence[object]] = [] if clients is None else [clients]
    for j, size in enumerate(event):
        indices.append(levels.get(f"{name}_dim_{j}", range(1, size + 1)))
    flat = value.reshape(len(value), -1).numpy()
    for place, draws in zip(itertools.product(*indices), flat.T, strict=True):
        inner = ",".join(re.sub(r"[\[\],]", "_", str(part)) for part in place)
        yield f"{name}[{inner}]" if place else name, draws
