"""Checks of a run in progress and at its end: numbers that are not finite, an ELBO that falls, scales that diverge."""

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.chunks import PASS
from bayesfed.data.federation import Federation
from bayesfed.data.plural import plural
from bayesfed.elbo.elbo import local_priors
from bayesfed.elbo.moments import Moments
from bayesfed.elbo.program import Params, Program
from bayesfed.steps.optimizer import State

TOO_FAR = 1000.0
"""The factor by which the scale of a local prior may change in a fit: beyond it, it has diverged or collapsed."""
FAR = 10.0
"""The factor by which it may fall if what is left of it comes from the clients' uncertainty."""


def is_finite(terms: Tensor, upload: Mapping[str, Tensor], state: State) -> Tensor:
    """Mark clients whose terms ``(K,)``, uploads ``(K, ...)`` and states ``(K, ...)`` are all finite: bool ``(K,)``."""
    found = terms.isfinite()
    for value in (*upload.values(), *(v for part in state.values() for v in part.values())):
        found = found & ((0 * value).reshape(len(terms), -1).sum(-1) == 0)  # else NaN
    return found


def warn_of_refused(names: Sequence[str], refused: Tensor) -> None:
    """Warn of clients whose uploads did not count, ``refused`` int64 ``(N,)`` times."""
    if (
        most := refused.sort(descending=True, stable=True)
        .indices[: int((refused > 0).sum())]
        .tolist()
    ):
        some = ", ".join(f"{names[i]!r} ({int(refused[i])})" for i in most[:5])
        warnings.warn(
            f"{plural(int(refused.sum()), 'upload')} of {plural(len(most), 'client')}, not finite or of steps that "
            f"went uphill, did not count: {some}{', ...' if len(most) > 5 else ''}. Look for extreme values among "
            "their rows, standardise the fields, or lower the learning rates",
            stacklevel=3,
        )


def warn_of_uphill(rounds: int) -> None:
    """Warn of a fit whose learning rates were halved in so many rounds."""
    if rounds:
        warnings.warn(
            f"in {plural(rounds, 'round')} the steps of clients went uphill, did not count, and the learning rates "
            f"were halved: they ended at 1/{2**rounds} of what the algorithm gives. Give it lower rates, or "
            "standardise the fields and their priors, for steps that suit all variables",
            stacklevel=3,
        )


def refusal_message(names: Sequence[str], terms: Tensor | None, where: str = "") -> str:
    """The message of a run that stops as uploads of these clients are not finite, with what may help.

    Args:
        names: the clients.
        terms: their ELBO terms, if the server may see them.
        where: the variable of the first client, if it has been found.
    """
    of_term = terms is not None and not terms[0].isfinite()
    what = f"ELBO term ({float(terms[0])})" if terms is not None and of_term else "upload"
    others = "" if len(names) == 1 else f" and of {plural(len(names) - 1, 'other')}"
    where = f" ({where})" if where else ""
    return (
        f"the {what} of client {names[0]!r}{others} is not finite{where}. Look for extreme values among its rows, "
        "standardise the fields, or lower the learning rates"
    )


def warn_if_falling(elbo: Sequence[float], rows: int) -> None:
    """Warn if the last tenth of 50 rounds or more has a clearly lower ELBO than an earlier tenth.

    Clearly means by more than three times its standard deviation, there and in most tenths, and by more than a nat
    for each row or a tenth of the gain since the first round. A fall by less than one nat in all does not count: a fit
    that has converged has hardly any noise, and one whose rates decay may lose a little of what its clients had gained.
    """
    # NaN: hidden by privacy, or no upload counted
    elbo = [value for value in elbo if not math.isnan(value)]
    tenth = len(elbo) // 10
    if tenth < 5:
        return
    tenths = [elbo[i * tenth : (i + 1) * tenth] for i in range(9)] + [elbo[-tenth:]]
    best = max(tenths, key=statistics.median)
    before, last = statistics.median(best), statistics.median(tenths[-1])
    spread = max(statistics.stdev(best), statistics.median(statistics.stdev(t) for t in tenths))
    if before - last > max(3 * spread, min((before - elbo[0]) / 10, rows), 1.0):
        warnings.warn(
            f"the ELBO fell from {before:,.1f} to {last:,.1f}: the fit has diverged, do not use it. Lower "
            "lr and local_lr, or standardise the fields",
            stacklevel=3,
        )


def check_growth(program: Program, params: Params) -> None:
    """Fail if the scale of a Normal local prior has grown without bound, whatever parameters it depends on.

    Raises:
        FloatingPointError: names the site and the parameters.
    """
    own = program.init_locals(program.schema) if _learnt_scales(program) else {}
    before = _log_scales(program, program.init | own, program.schema)
    for site, now in _log_scales(program, params | own, program.schema).items():
        grown = float((now - before[site]).max().exp())
        if grown > TOO_FAR:
            raise FloatingPointError(
                f"{_scale_of(program, site)} has grown {grown:.0f}-fold: the fit has diverged. Lower the learning "
                "rates, or give it a prior"
            )


def warn_of_spreads(
    program: Program, federation: Federation, params: Params, local_params: Params
) -> None:
    """Warn if the scale of a Normal local prior has collapsed, or that of a single client has grown without bound.

    It has collapsed if it has fallen 1000-fold; or tenfold for all clients, and their q(w_i) lie no further from the
    centre than they are wide: what is left of the scale then comes from the clients' uncertainty, not from their
    differences.
    """
    learnt = _learnt_scales(program)
    least: Params = {}  # by site: the smallest and largest change of the log scale over the clients
    most: Params = {}
    excess: Params = {}  # Σ_i (width of q(w_i)² − distance of q(w_i) from the centre²)
    for chunk in program.chunks(federation) if learnt else ():
        batch = federation.batch(chunk, torch.zeros(len(chunk), 1, dtype=torch.int64))
        start = program.init_locals(batch)
        phi = start | {name: value[chunk] for name, value in local_params.items()}
        before = _log_scales(program, program.init | start, batch)
        now, q = local_priors(program, params | phi, batch), _posteriors(program, phi)
        for site in learnt:
            change = now[site].scale.log() - before[site]
            at = q.get(site, now[site]._replace(scale=torch.zeros_like(change)))
            wider = (at.scale.square() - (at.loc - now[site].loc).square()).sum(0)
            low, high = change.amin(0), change.amax(0)
            least[site] = torch.minimum(low, least.get(site, low))
            most[site] = torch.maximum(high, most.get(site, high))
            excess[site] = wider + excess.get(site, torch.zeros_like(wider))
    for site in learnt:
        fallen = float((-least[site]).max().exp())
        if fallen > TOO_FAR or ((excess[site] > 0) & (most[site] < -math.log(FAR))).any():
            warnings.warn(
                f"{_scale_of(program, site)} has fallen to 1/{fallen:.0f} of what it was: the clients hardly differ "
                "in it, or the approximation, which treats their variables as independent, misses that they do. "
                "Compare with SFVI, give it a prior that keeps it off zero, or make the variable a global one",
                stacklevel=3,
            )
        elif (grown := float(most[site].max().exp())) > TOO_FAR:
            warnings.warn(
                f"{_scale_of(program, site)} has grown {grown:.0f}-fold: the fit has diverged",
                stacklevel=3,
            )


def warn_of_unseen(names: Sequence[str], unseen: Tensor) -> None:
    """Warn of clients that were in no cohort, whose variables have their initial values: bool ``(N,)``."""
    if unseen.any():
        first = names[int(unseen.nonzero()[0])]
        warnings.warn(
            f"{int(unseen.sum())} of {plural(len(names), 'client was', 'clients were')} in no cohort, such as "
            f"{first!r}: their "
            "variables have initial values that do not depend on data. Run more rounds, or use personalize() for them",
            stacklevel=3,
        )


def warn_of_infinities(names: Sequence[str], local_params: Params) -> None:
    """Warn of clients whose local parameters are not finite."""
    sound, bad = torch.ones(len(names), dtype=torch.bool), list[str]()
    for name, value in local_params.items():
        flat = value.reshape(len(names), -1)
        together = max(1, PASS // max(1, flat.shape[1]))
        own = torch.cat([part.isfinite().all(1) for part in flat.split(together)]).cpu()
        sound &= own
        bad += [repr(name)] * (not own.all())
    if not sound.all():
        lost = [names[i] for i in (~sound).nonzero().flatten().tolist()]
        warnings.warn(
            f"the variables of {plural(len(lost), 'client')} are not finite, such as {lost[0]!r} (parameters "
            f"{', '.join(bad[:3])}): their steps have diverged. "
            "The global variables can be used. Lower lr, or give personalize() fewer steps at a lower rate",
            stacklevel=3,
        )


def warn_of_missing_optima(program: Program, names: Sequence[str], missing: Tensor) -> None:
    """Warn of clients whose own variables have no finite optimum, bool ``(N,)``."""
    if missing.any():
        first = names[int(missing.nonzero()[0])]
        which = ", ".join(repr(site.name) for site in program.locals)
        warnings.warn(
            f"the rows of {int(missing.sum())} of {plural(len(names), 'client')}, such as {first!r}, have no finite "
            f"optimum of {which}, as where all counts are 0, all answers are alike or a field separates them: their "
            "values are where the steps ended, and the others and the global variables have converged. PFedMAP, Ditto "
            "and FedABML hold a client's variables near those of the others",
            stacklevel=3,
        )


def _learnt_scales(program: Program) -> list[str]:
    """The local sites with a Normal prior whose scale depends on parameters: where globals are point estimates."""
    return [site for site, anchor in program.anchors.items() if not anchor.fixed]


@torch.no_grad()
def _log_scales(program: Program, params: Params, batch: Batch) -> Params:
    """The log of the prior's scale, ``(K, 1, *shape)``, by site of :func:`_learnt_scales`."""
    learnt = _learnt_scales(program)
    priors = local_priors(program, params, batch) if learnt else {}
    return {site: priors[site].scale.log() for site in learnt}


def _posteriors(program: Program, phi: Params) -> Mapping[str, Moments]:
    """The moments of q(w_i), of a guide that has them in closed form."""
    of = getattr(program.guide, "moments", None)
    return of(phi) if of else {}


def _scale_of(program: Program, site: str) -> str:
    """A local site's scale and its parameters, in words."""
    anchor = program.anchors[site]
    names = [anchor.log_scale] if anchor.log_scale else sorted(program.reads[site] - {anchor.loc})
    which = ", ".join(repr(name) for name in names)
    return f"the scale of local site {site!r} (parameter{'s'[: len(names) > 1]} {which})"
