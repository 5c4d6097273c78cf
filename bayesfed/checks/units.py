"""Warnings of fields in units that do not fit the priors, such as dollars and calendar years.

A slope with prior N(0, 1) on a year changes a prediction by two thousand, and is almost collinear with the intercept; a
fit then needs many more rounds, or ends elsewhere. Units may not matter, for a model may standardise a field itself. So
the model is run at draws of its prior, with the field as it is and standardised.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.batch import Batch, Fields
from bayesfed.data.federation import Federation
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.program import Program

SHIFTED, LARGE = 30.0, 100.0
"""A field is checked if its mean is so many standard deviations from zero, or its standard deviation so large."""
WORSE = 100.0
"""The factor by which a field in its own units must increase −log p of a row under the prior, in nats."""
CLIENTS, ROWS, DRAWS = 16, 64, 64
"""The numbers of clients, rows of each and draws of the prior."""
_Change = Callable[[Tensor], Tensor]
_NEVER = 1e9  # −log p of a row that is impossible


@torch.no_grad()
def warn_of_units(program: Program, federation: Federation) -> None:
    """Warn of fields whose units make the rows very unlikely under the prior, while standardised fields would not."""
    some = torch.linspace(0, len(federation) - 1, min(CLIENTS, len(federation))).round().long()
    lengths = federation.lengths[some, None]
    slots = torch.arange(min(ROWS, int(lengths.max())))
    batch = federation.batch(some, torch.where(slots < lengths, slots, -1))
    wild = {}
    for name, value in batch.fields.items():
        if value.is_floating_point() and (found := _wild(value[batch.mask])) is not None:
            wild[name] = found
    if not wild:
        return

    @cache
    def cost(*changes: tuple[str, _Change]) -> float:
        fields = {name: change(batch.fields[name]) for name, change in changes}
        return _cost(program, replace(batch, fields=Fields(batch.fields | fields)))

    if cost() < WORSE:
        return
    usable: dict[str, _Change] = {}
    for name, (_, changes) in wild.items():
        possible = [change for change in changes if cost((name, change)) < float("inf")]
        if possible:
            usable[name] = possible[0]
    best = cost(*usable.items())
    for name, change in usable.items():
        worse = cost(*(item for item in usable.items() if item[0] != name))
        if worse > WORSE * max(best, 1.0):
            what, (standardise, *_) = wild[name]
            advice = "(x - mean) / sd, as bayesfed.datasets.standardise does"
            warnings.warn(
                f"field {name!r} is {what}, units that do not fit the priors: at draws of the prior a row costs "
                f"{worse:.2g} nats, with the field {'standardised' if change is standardise else 'over its mean'} "
                f"{best:.2g}. The fit may need many more rounds, or end elsewhere. Give it "
                f"{advice if change is standardise else 'in a unit near its mean'}, or priors in its units",
                stacklevel=3,
            )


def _wild(rows: Tensor) -> tuple[str, list[_Change]] | None:
    """Describe the suspicious entries of a field ``(R, *event)``, and the changes that would mend them.

    These standardise the entries or, if they are positive as times are, divide them by their mean. None if no entry is
    suspicious.
    """
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
    changes: list[_Change] = [lambda value: (value - origin) / unit]
    if (rows > 0).all():
        changes.append(lambda value: value / torch.where(wild, mean, 1.0))
    return what, changes


def _cost(program: Program, batch: Batch) -> float:
    """The median over draws of the prior of −log p(row); infinite if the model cannot use such rows."""
    params = program.init | program.init_locals(batch)
    try:
        with noise.seeded(0), handlers.given(batch.device, params, draws=DRAWS):
            nodes = poutine.trace(program.model).get_trace(batch).nodes
    except (IndexError, ValueError, RuntimeError):  # an index is not a quantity
        return float("inf")
    total = torch.zeros(DRAWS, device=batch.device)
    for site in program.observed:
        fn, value = nodes[site.name]["fn"], nodes[site.name]["value"]
        inside, density = fn.support.check(value), fn.log_prob(value)
        if site.per_row:
            inside, density = inside | ~batch.mask, density.where(batch.mask, 0.0)
        if not inside.all():  # neither is a count
            return float("inf")
        total = total - density.where(density.isfinite(), -_NEVER).sum((-2, -1))
    return float(total.median() / batch.mask.sum())
