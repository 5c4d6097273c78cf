"""Data in units that the priors do not know, such as dollars and calendar years: named before the first round.

A slope with prior N(0, 1) on a year moves a prediction by two thousand, and goes with the intercept but for half a per
cent; a fit needs many more rounds then, or ends elsewhere. Whether a field's units matter is for the program to say,
which may well centre a field itself: it is run at draws of its prior, with the field as it is and standardised.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.batch import Batch, Fields
from bayesfed.data.federation import Federation
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.program import Program

SHIFTED, LARGE = 30.0, 100.0
"""Fields whose mean is so many standard deviations off zero, or whose standard deviation is so large, are looked at."""
WORSE = 100.0
"""By what factor a field in its own units must make rows less likely under the prior, in nats a row."""
CLIENTS, ROWS, DRAWS = 16, 64, 64
"""What is looked at."""
_NEVER = 1e9  # −log p of a row that is impossible


@torch.no_grad()
def warn_of_units(program: Program, federation: Federation) -> None:
    """Warn of fields in whose units the rows have no chance under the prior, but would if these were standardised."""
    some = torch.linspace(0, len(federation) - 1, min(CLIENTS, len(federation))).round().long()
    lengths = federation.lengths[some, None]
    slots = torch.arange(min(ROWS, int(lengths.max())))
    batch = federation.batch(some, torch.where(slots < lengths, slots, -1))
    wild = {}
    for name, value in batch.fields.items():
        if value.is_floating_point() and (found := _wild(value[batch.mask])) is not None:
            wild[name] = found
    if not wild or _cost(program, batch) < WORSE:
        return

    def cost(*standardised: str) -> float:
        fields = {n: wild[n][0](batch.fields[n]) for n in standardised}
        return _cost(program, replace(batch, fields=Fields(batch.fields | fields)))

    usable = [name for name in wild if cost(name) < float("inf")]
    best = cost(*usable)
    for name in usable:
        worse = cost(*(other for other in usable if other != name))
        if worse > WORSE * max(best, 1.0):
            warnings.warn(
                f"field {name!r} is {wild[name][1]}, units that the priors do not know: at draws of the prior a row "
                f"costs {worse:.2g} nats, with the field standardised {best:.2g}. The fit may need many more rounds, "
                "or end elsewhere. Give it (x - mean) / sd, as bayesfed.datasets.standardise does, or priors in its "
                "units",
                stacklevel=3,
            )


def _wild(rows: Tensor) -> tuple[Callable[[Tensor], Tensor], str] | None:
    """How to standardise what is wild in a field ``(R, *event)``, and what that is; None where nothing is."""
    rows = rows[~rows.reshape(len(rows), -1).isnan().any(-1)]
    mean, sd = rows.mean(0), rows.std(0, correction=0)
    varies = sd > 1e-6 * mean.abs()
    wild = (sd > LARGE) | (varies & (mean.abs() > SHIFTED * sd))
    if not wild.any():
        return None
    first = int(wild.flatten().nonzero()[0])
    at = f" in entry {first}" if rows.ndim > 1 else ""
    what = f"about {float(mean.flatten()[first]):.4g} ± {float(sd.flatten()[first]):.2g}{at}"
    origin, unit = torch.where(wild, mean, 0.0), torch.where(wild, sd, 1.0)
    return lambda value: (value - origin) / unit, what


def _cost(program: Program, batch: Batch) -> float:
    """The median over draws of the prior of −log p(row); infinite where the program cannot do with such rows."""
    params = program.init | program.init_locals(batch)
    try:
        with noise.seeded(0), handlers.given(batch.device, params, draws=DRAWS):
            nodes = poutine.trace(program.model).get_trace(batch).nodes
    except (IndexError, ValueError, RuntimeError):  # what is an index is no quantity
        return float("inf")
    total = torch.zeros(DRAWS, device=batch.device)
    for site in program.observed:
        fn, value = nodes[site.name]["fn"], nodes[site.name]["value"]
        inside, density = fn.support.check(value), fn.log_prob(value)
        if site.per_row:
            inside, density = inside | ~batch.mask, density.where(batch.mask, 0.0)
        if not inside.all():  # a count is none either
            return float("inf")
        total = total - density.where(density.isfinite(), -_NEVER).sum((-2, -1))
    return float(total.median() / batch.mask.sum())
