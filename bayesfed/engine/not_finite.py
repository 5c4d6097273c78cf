"""The variables whose numbers are not finite, for the message of a run that stops.

The program is run again at draws of the guide, at the server's parameters and a client's initial ones. The first site
whose log density is not finite is named. A number that overflows elsewhere, such as in a gradient, is found in the
client's work of that round, whose tensors have the names of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo import elbo, handlers, noise
from bayesfed.elbo.log_density import log_density
from bayesfed.elbo.program import Params, Program
from bayesfed.engine.cohort import Cohort

if TYPE_CHECKING:
    from bayesfed.engine.run import Run

DRAWS = 8
_FAILURES = (RuntimeError, ValueError, KeyError, IndexError)
"""Errors of a program that is run at parameters that are not numbers."""


def name_globals(program: Program, params: Params) -> str:
    """Return the global variables that are not finite at draws, or whose log density is not, as text; or ``""``.

    Args:
        program: the model and its guide.
        params: the guide's global parameters; those that are not numbers are named if no site is.

    Example:
        >>> import bayesfed as bf, torch
        >>> from bayesfed import datasets, models
        >>> from bayesfed.engine.not_finite import name_globals
        >>> run = bf.start(models.eight_schools, datasets.eight_schools(), bf.FedAvg())
        >>> params = run.plan.algorithm.params(run.server)
        >>> name_globals(run.program, params), name_globals(run.program, params | {"tau.loc": torch.tensor(torch.nan)})
        ('', "site 'tau'")
    """
    bad = [name for name, value in params.items() if bool(value.isnan().any())]
    nodes = _trace(program, params, program.schema, local=False)
    sites = [
        site.name
        for site in program.globals
        if site.name in nodes and not _finite(nodes[site.name])
    ]
    return _listed("site", sites) or _listed("parameter", bad)


def name_in_client(
    run: Run, client: int, message: dict[str, Tensor], key: Tensor, rate: float
) -> str:
    """Return the first site of a client whose log density is not finite, with the row; or what of its work; or ``""``.

    Args:
        run: before the round, with the client's rows.
        client: its position.
        message: the server's, of this round.
        key: the noise key of the round.
        rate: the learning rate.
    """
    chunk = torch.tensor([client])
    batch = run.federation.batch(chunk)
    params = run.plan.algorithm.params(run.server)
    try:
        params = {**params, **run.program.init_locals(batch)}
    except _FAILURES:
        return ""
    for name, node in _trace(run.program, params, batch, local=True).items():
        if not _finite(node):
            return f"site {name!r}{_row(node, batch)}"
    try:
        _, job = Cohort(run).job(message, chunk, key, rate)
        work = run.plan.algorithm.work(job)
    except _FAILURES:
        return ""
    parts = [*work.upload.items(), *work.clients.items(), *work.memory.items()]
    bad = (n for _, part in parts for n, v in part.items() if not bool(v.isfinite().all()))
    return _listed("parameter", dict.fromkeys(bad))


@torch.no_grad()
def _trace(program: Program, params: Params, batch: Batch, *, local: bool) -> Mapping[str, Any]:
    """Return the sample sites of the model in a trace of some rows; none if the program cannot run there."""
    supplied = dict(program.noise(noise.key(0), DRAWS, local=False))
    if local:
        supplied |= program.noise(noise.key(1).reshape(1), DRAWS, local=True)
    starting = () if local else program.local_params
    try:
        _, model = elbo.run(program, params, {}, batch, supplied, DRAWS, starting)
    except _FAILURES:
        return {}
    return handlers.sample_sites(model)


def _finite(node: Mapping[str, Any]) -> bool:
    """Return whether a site's values and log densities are finite, but for rows that do not count."""
    return bool(node["value"].isfinite().all() | node["is_observed"]) and bool(
        log_density(node).isfinite().all()
    )


def _row(node: Mapping[str, Any], batch: Batch) -> str:
    """Return the first row of a client whose log density is not finite, as text; or ``""`` of another site."""
    wrong = ~log_density(node).isfinite()
    if wrong.ndim < 2 or wrong.shape[-1] != batch.mask.shape[-1] or not wrong.any():
        return ""
    return f", row {int(wrong.reshape(-1, wrong.shape[-1]).any(0).nonzero()[0])}"


def _listed(noun: str, names: Iterable[str]) -> str:
    """Return up to three names as text."""
    some = list(names)
    listed = ", ".join(map(repr, some[:3])) + (", ..." if len(some) > 3 else "")
    return f"{noun}{'s' * (len(some) > 1)} {listed}" if some else ""
