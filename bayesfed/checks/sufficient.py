"""Whether few rows can replace many: where rows repeat, or the log likelihood is quadratic in the fields of a row."""

from dataclasses import replace

import torch
from torch import Tensor

from bayesfed.algorithms.algorithm import Algorithm
from bayesfed.checks.data import check_data
from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation
from bayesfed.data.moments import rows_of_moments
from bayesfed.data.patterns import rows_of_patterns
from bayesfed.elbo import noise
from bayesfed.elbo.elbo import client_terms, draw
from bayesfed.elbo.program import Params, Program
from bayesfed.steps.gradients import gradients, leaves

FEWEST = 5_000
"""Rows of all clients below which fewer rows save nothing."""
WORTH = 0.5
"""The largest share of the rows that may be left."""
DRAWS = 4
"""Draws of the variables at which gradients are compared."""
TOLERANCE = 0.02
"""The largest difference of gradients along each number that is taken for round-off, relative to their size and times
√rows: about the standard deviations by which it could move a posterior mean."""
ENOUGH = (
    "They are enough for a Gaussian outcome whose mean is linear in the fields, and whose standard deviation is the "
    "same in all rows of a client (for a category give each level but one a column of 0 and 1; log an outcome "
    "beforehand): write the model so, or fit it to the rows themselves, in rounds"
)
"""What moments are enough for, and the remedies."""


def with_sufficient_rows(
    program: Program, federation: Federation, algorithm: Algorithm
) -> Federation:
    """Return the clients with fewer rows that have the same likelihood as their own, if there are such.

    These are their distinct rows, weighted (:mod:`bayesfed.data.patterns`), or else rows with their moments
    (:mod:`bayesfed.data.moments`). All clients' terms are compared, and their gradients along each parameter and each
    variable, at draws that are generic, so that two functions that agree there agree everywhere.

    Args:
        program: the model/guide pair.
        federation: the clients' data.
        algorithm: the method; one that reads single rows has all of them.

    Returns:
        The federation, with :attr:`~bayesfed.Federation.sufficient` rows that are fewer, or its own.
    """
    federation = replace(federation, moments=None)
    if algorithm.steps.reads_single_rows(program) or not _has_independent_rows(program, federation):
        return federation
    few = rows_of_patterns(federation, WORTH) or _few_rows_of_moments(federation)
    same = few is not None and _same(program, federation, few, federation.rows)
    return replace(federation, moments=few) if same else federation


def _few_rows_of_moments(federation: Federation) -> Federation | None:
    """Return rows with the moments of the clients' own, where all fields are numbers and they are few enough."""
    left = int(federation.lengths.clamp(max=federation.numbers_per_row + 1).sum())
    numbers = all(value.is_floating_point() for value in federation.fields.values())
    return rows_of_moments(federation) if numbers and left <= WORTH * federation.rows else None


def check_moments(
    algorithm: Algorithm, program: Program, rows: Federation, few: Federation
) -> None:
    """Fail unless a log likelihood depends on the moments of the rows only, and the method on the likelihood.

    Args:
        algorithm: the method.
        program: the model/guide pair.
        rows: the clients' rows; or any with the moments of ``few``, where the clients' are elsewhere.
        few: the rows of their moments.

    Raises:
        ValueError: names the site, and gives what moments are enough for.
    """
    sites = program.likelihood
    names = ", ".join(repr(site.name) for site in sites)
    apart = [s.name for s in sites if not s.per_row or s.joint or s.conditional or s.factor]
    if not sites or apart:
        what = f"site {apart[0]!r} is no outcome of single rows" if apart else "there is no outcome"
        raise ValueError(f"moments: {what}. {ENOUGH}")
    if algorithm.steps.reads_single_rows(program):
        raise ValueError(
            f"moments: {algorithm} uses single rows, not their sum alone: use SFVI(), which does not"
        )
    if program.needs_rows:
        raise ValueError(
            f"moments: {program.guide_name} reads the clients' rows: use a guide that does not, as SFVI() has"
        )
    count = few.rows if few.counts is None else int(few.counts.sum())
    try:
        check_data(program, few)
    except (ValueError, IndexError) as error:  # whose message may have a number of a client's
        raise ValueError(
            f"moments: {names} cannot be observed at means, as where an outcome is discrete or a field a number of a "
            f"level. {ENOUGH}"
        ) from error
    if not _same(program, rows, few, count):
        raise ValueError(
            f"moments: the log likelihood of {names} depends on more than counts, means and covariances of the fields. "
            f"{ENOUGH}"
        )


def _same(program: Program, rows: Federation, few: Federation, count: int) -> bool:
    """Return whether all clients' terms and their gradients are the same for two federations' rows.

    Differences are compared with the round-off of ``count`` rows.
    """
    totals: dict[str, Tensor] = {}
    for chunk in program.chunks(rows, copies=4 * DRAWS):
        both = [_gradients(program, own.batch(chunk)) for own in (rows, few)]
        for name, one in both[0].items():
            parts = torch.stack([one.square(), (one - both[1][name]).square()])
            sums = parts.flatten(1, 2).sum(1)  # over clients and draws
            totals[name] = totals.get(name, 0.0) + sums
    size, difference = torch.cat([v.flatten(1) for v in totals.values()], 1)
    return bool((difference <= TOLERANCE**2 / count * size).all())


def _has_independent_rows(program: Program, federation: Federation) -> bool:
    """Return whether rows are many, all there, independent, and read by the likelihood alone."""
    sites = program.likelihood
    per_row = all(s.per_row and not (s.joint or s.conditional or s.factor) for s in sites)
    whole = not federation.gaps and federation.rows >= FEWEST
    return bool(sites) and whole and per_row and not program.needs_rows


def _gradients(program: Program, batch: Batch) -> Params:
    """Return the gradients of K clients' terms at generic points, by parameter or site ``(K, S or 1, ...)``.

    The terms are there too, ``(K, 1, 1)``, under no name.
    """
    key = noise.fold(noise.key(0).to(batch.device), noise.word("sufficient rows"))
    drawn = draw(program, program.init, program.noise(key, DRAWS, local=False), DRAWS)
    theta = leaves({n: v.expand(-1, len(batch), *v.shape[2:]) for n, v in drawn.items()})
    own = {
        n: v.expand(len(batch), 1, *v.shape) for n, v in program.init.items() if n in program.direct
    }
    own |= program.init_locals(batch)
    with noise.seeded(0):
        own = leaves({n: v + torch.randn_like(v[:1]) for n, v in own.items()})
    local = program.noise(noise.fold(key, batch.index), DRAWS, local=True)
    term = client_terms(program, program.init | own, theta, batch, local, DRAWS).mean(0)
    found = gradients(term, theta | own)
    terms = {"": term.detach()[:, None, None]}
    return terms | {n: v.movedim(1, 0) if n in theta else v[:, None] for n, v in found.items()}
