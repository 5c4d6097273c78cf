"""Draws of clients' variables given θ: from q(w_i | θ), or by importance sampling where q is poor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from pyro import poutine
from torch import Size, Tensor

from bayesfed.data.chunks import PASS
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.program import Params
from bayesfed.guides.family import GLOBAL
from bayesfed.guides.hierarchical import LOCAL
from bayesfed.output.conditionals import Conditionals, has_block, is_laplace
from bayesfed.output.defensive import (
    WIDTHS,
    Centre,
    centre_of_draws,
    defensive_candidates,
    draw_mixture,
    unstack,
)
from bayesfed.output.evidence import (
    EACH,
    WIDEST,
    Candidates,
    is_below_precision,
    laplace_candidates,
    laplace_evidence,
)
from bayesfed.output.fitted import Fitted
from bayesfed.output.modes import laplace_approximation
from bayesfed.output.shared_points import shared_points
from bayesfed.output.sums_over_points import (
    evidence_by_shared_points,
    normals_by_shared_points,
)

CHOSEN_FROM = 32
"""Number of candidates of a client's variables from which one is chosen: a draw from q(w_i | θ), and defensive ones."""
CANDIDATES, FOR_EVIDENCE, STABLE, PLAUSIBLE = 64, 256, 0.02, 20.0
"""Number of defensive candidates by which evidence is estimated, and the number if estimates from the former differ
from these by a variance above this, among draws of θ at which log p(D_i | θ) is so close to its largest value. The
error does not shrink with the draws of θ, since all have the same candidates."""
LEAST_PROBED, PROBED, SHARE = 4, 25, 30
"""The least and the largest number of draws of θ at which Laplace estimates are compared with those of more candidates,
and the number of draws altogether for each of them."""
POOR, NARROWER = 0.2, (1.1, 2.0)
"""The mean square of the differences beyond which wider candidates are used; the widths of those that are compared."""
WIDER = 1.1, 2.0, 4.0, 8.0
"""The widths of the wider ones."""
AFFORDABLE = 2e7
"""The largest size of a client's rows and variables, in numbers, over all these candidates."""


def draw_guide_locals(
    fitted: Fitted, theta: Params, count: int, chunk: Tensor, key: Tensor
) -> Params:
    """Draw the guide's local random sites of K clients given S draws of θ, ``(S, K, 1, *event)``.

    They are draws from q(w_i | θ), or by importance sampling if the correction or ``fitted.resampled`` says so.
    """
    fitted = fitted.sufficient
    names = fitted.federation.names
    poor = [names[client] in fitted.resampled for client in chunk.tolist()]
    others = [k for k, is_poor in enumerate(poor) if not is_poor]
    parts: list[tuple[list[int], Params]] = []
    if others and fitted.laplace:
        keys = noise.fold(key, fitted.federation.stream_ids[chunk[others]])
        candidates = _by_laplace(fitted, theta, count, chunk[others], key)
        parts.append((others, {LOCAL: candidates.resample(keys)}))
    elif others:
        parts.append((others, _draw_from_guide(fitted, theta, count, chunk[others], key)))
    for some in _together(fitted, count, chunk, [k for k, is_poor in enumerate(poor) if is_poor]):
        parts.append((some, _resample_clients(fitted, theta, count, chunk[some], key)))
    order = torch.tensor([k for some, _ in parts for k in some], device=chunk.device).argsort()
    return {
        name: torch.cat([found[name] for _, found in parts], 1)[:, order] for name in parts[0][1]
    }


def _together(
    fitted: Fitted, count: int, chunk: Tensor, positions: Sequence[int]
) -> Iterator[list[int]]:
    """Yield those of the clients at some positions of a chunk that are resampled together.

    They are those whose candidates for all ``count`` draws of θ fit into memory; others are resampled one by one, so
    that the blocks of draws of a client do not depend on the others.
    """
    federation = fitted.federation
    together: list[int] = []
    widest = 0
    for k in positions:
        length = int(federation.lengths[chunk[k]])
        numbers = CHOSEN_FROM * (length * federation.numbers_per_row + fitted.program.size)
        widest = max(widest, numbers)
        if together and count * widest * (len(together) + 1) > PASS:
            yield together
            together, widest = [], numbers
        together.append(k)
    if together:
        yield together


def _draw_from_guide(
    fitted: Fitted, theta: Params, count: int, chunk: Tensor, key: Tensor
) -> Params:
    """Draw the guide's local random sites of K clients from q(w_i | θ): ``(S, K, 1, *event)``."""
    program, federation = fitted.program, fitted.federation
    rows = None if program.needs_rows else torch.zeros(len(chunk), 1, dtype=torch.int64)
    batch, params = federation.batch(chunk, rows), fitted.params_of(chunk)
    supplied = program.noise(noise.fold(key, federation.stream_ids[chunk]), count, local=True)
    found: dict[str, list[Tensor]] = {name: [] for name in supplied}
    for part in program.draw_blocks(len(chunk), count):
        size, own = part.stop - part.start, select_draws(supplied, part)
        some = {name: value[part] for name, value in theta.items()}
        with torch.no_grad(), handlers.given(batch.device, params, own, some, size):
            nodes = poutine.trace(program.guide).get_trace(batch).nodes
        for name, values in found.items():
            value = nodes[name]["value"]
            values.append(value.expand(size, len(chunk), *value.shape[2:]).clone())
    return {name: torch.cat(values) for name, values in found.items()}


def select_draws(supplied: Mapping[str, Sequence[Tensor]], part: slice) -> dict[str, list[Tensor]]:
    """Select the noise of some draws."""
    return {name: [x[part] for x in parts] for name, parts in supplied.items()}


def _resample_clients(
    fitted: Fitted, theta: Params, count: int, chunk: Tensor, key: Tensor
) -> Params:
    """Draw some clients' variables given each draw of θ by importance sampling, some draws of θ at a time."""
    parts, centre = [], None
    if has_block(fitted.program):
        centre = proposal_centre(fitted, theta, count, chunk, key, CHOSEN_FROM)
    blocks = _defensive_blocks(
        fitted, theta, count, chunk, key, WIDTHS, centre, each=CHOSEN_FROM, from_normal=True
    )
    for block, found, shapes in blocks:
        keys = noise.fold(block, fitted.federation.stream_ids[chunk])
        parts.append(unstack(found.resample(keys).to(fitted.federation.dtype), shapes))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _defensive_blocks(
    fitted: Fitted,
    theta: Params,
    count: int,
    chunk: Tensor,
    key: Tensor,
    widths: Sequence[float],
    found: Centre | None = None,
    *,
    each: int = CANDIDATES,
    common: bool = False,
    from_normal: bool = False,
) -> Iterator[tuple[Tensor, Candidates, Mapping[str, Size]]]:
    """Yield noise keys, ``each`` defensive candidates of K clients and their shapes, for some draws of θ at a time.

    The candidates lie around ``found``, or else around the centre that :func:`proposal_centre` finds. If ``common``,
    their distances from it are the same at all draws of θ; for ``from_normal`` see :func:`draw_mixture`.
    """
    program, federation = fitted.program, fitted.federation
    batch, params = federation.batch(chunk), fitted.params_of(chunk)
    numbers = int(federation.lengths[chunk].max()) * federation.numbers_per_row + program.size
    if common:  # draws do not depend on the blocks, and densities have blocks of their own
        numbers = 4 * program.variables
    together = max(1, PASS // (each * len(chunk) * numbers))
    streams, drawn = federation.stream_ids[chunk], None
    for at in range(0, count, together):
        size = min(together, count - at)
        some = {name: value[at : at + size] for name, value in theta.items()}
        block = noise.fold(key, at)
        centre = (
            proposal_centre(fitted, some, size, chunk, block, CANDIDATES)
            if found is None
            else found.at(slice(at, at + size))
        )
        given = Conditionals(program, params, some, batch, size)
        if drawn is None or not common:
            drawn = draw_mixture(
                noise.fold(block, streams),
                each,
                centre,
                widths,
                common=common,
                from_normal=from_normal,
            )
        yield block, defensive_candidates(given, centre, drawn), centre.shapes


def proposal_centre(
    fitted: Fitted, theta: Params, count: int, chunk: Tensor, key: Tensor, each: int
) -> Centre:
    """Find the mean and the covariance of defensive proposals of K clients' variables at S = ``count`` draws of θ.

    Args:
        fitted: q of the clients.
        theta: draws of the guide's global random sites, ``(S, 1, 1, *event)``.
        count: S.
        chunk: positions of the clients.
        key: noise key.
        each: number of draws from q(w_i | θ) that they are those of, at each θ, if it is not one Normal vector.
    """
    batch, params = fitted.federation.batch(chunk), fitted.params_of(chunk)
    given = Conditionals(fitted.program, params, theta, batch, count)
    if fitted.laplace and not is_laplace(fitted.program):
        mode, curved = laplace_approximation(given)
        q = given.block()
        # the curvature overflows at absurd draws of θ
        known = curved.isfinite().all((-2, -1), keepdim=True)
        spread = torch.diag_embed(q.stddev)
        return _centre(mode.where(known[..., 0], q.mean), curved.where(known, spread))
    if has_block(fitted.program):
        q = given.block()
        root = getattr(q, "scale_tril", None)
        return _centre(q.mean, torch.diag_embed(q.stddev) if root is None else root)
    repeated = {name: value.repeat(each, *[1] * (value.ndim - 1)) for name, value in theta.items()}
    return centre_of_draws(_draw_from_guide(fitted, repeated, each * count, chunk, key), count)


def _centre(mean: Tensor, root: Tensor) -> Centre:
    """Return the centre of proposals that lie around a Normal approximation of the block."""
    return Centre(mean.double(), root.double(), {LOCAL: mean.shape[3:]})


def _by_laplace(
    fitted: Fitted, theta: Params, count: int, chunk: Tensor, key: Tensor
) -> Candidates:
    """Draw candidates of some clients' variables from Laplace approximations at each draw of θ."""
    program, federation = fitted.program, fitted.federation
    keys = noise.fold(key, federation.stream_ids[chunk])
    supplied = program.noise(keys, EACH // 2 * count, local=True)
    given = Conditionals(program, fitted.params_of(chunk), theta, federation.batch(chunk), count)
    return laplace_candidates(given, *_normals(fitted, given, chunk), supplied)


def _normals(fitted: Fitted, given: Conditionals, chunk: Tensor) -> tuple[Tensor, Tensor]:
    """Return Normals near the posteriors of some clients: locations ``(S, K, 1, P)`` and roots ``(S, K, 1, P, P)``."""
    points = shared_points(fitted, given.z[:, 0, 0])
    normals = points and normals_by_shared_points(points.of_clients(chunk), given)
    if not normals:
        return laplace_approximation(given)
    mean, root = normals
    missing = mean.isnan().flatten(2).any(2)
    for draws, clients, _ in _parts(missing):
        own = given.at(draws).of_clients(clients)
        mean[draws[:, None], clients], root[draws[:, None], clients] = laplace_approximation(own)
    return mean, root


def _parts(wanted: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield the draws and the clients of parts that have all wanted pairs ``(S, K)``, and whether all draws are.

    Clients that are wanted at all draws are one part.
    """
    at_all = wanted.all(0)
    for part, every in ((wanted & at_all, True), (wanted & ~at_all, False)):
        draws, clients = part.any(1).nonzero()[:, 0], part.any(0).nonzero()[:, 0]
        if len(draws):
            yield draws, clients, every


def evidence_by_laplace(
    fitted: Fitted, theta: Params, count: int, chunk: Tensor, key: Tensor
) -> Tensor:
    """Estimate log p(D_i | θ_s) of some clients, ``(S, K)``, in double precision.

    Of many rows by points that all θ_s share, where these give it; else from Laplace approximations.
    """
    points = shared_points(fitted, theta[GLOBAL][:, 0, 0]) if GLOBAL in theta else None
    if points is None:
        return evidence_around_modes(fitted, theta, count, chunk, key)
    program, federation = fitted.program, fitted.federation
    given = Conditionals(program, fitted.params_of(chunk), theta, federation.batch(chunk), count)
    evidence = evidence_by_shared_points(points.of_clients(chunk), given)
    missing = evidence.isnan()
    return torch.where(missing, evidence_where(missing, fitted, theta, chunk, key), evidence)


def evidence_where(
    wanted: Tensor, fitted: Fitted, theta: Params, chunk: Tensor, key: Tensor
) -> Tensor:
    """Estimate log p(D_i | θ_s) of some clients from Laplace approximations where ``wanted``, else 0: ``(S, K)``.

    Clients for whom it is wanted at some draws only have smooth densities, so that wider candidates are not compared.
    Other arguments as of :func:`evidence_by_laplace`.
    """
    evidence = torch.zeros(wanted.shape, dtype=torch.float64, device=wanted.device)
    for draws, clients, every in _parts(wanted):
        some = {name: value[draws] for name, value in theta.items()}
        own = chunk[clients.to(chunk.device)]
        evidence[draws[:, None], clients] = evidence_around_modes(
            fitted, some, len(draws), own, key, every
        )
    return evidence.where(wanted, 0.0)


def evidence_around_modes(
    fitted: Fitted, theta: Params, count: int, chunk: Tensor, key: Tensor, compared: bool = True
) -> Tensor:
    """Estimate log p(D_i | θ_s) of some clients from Laplace approximations, ``(S, K)``.

    If ``compared``, all estimates of clients with skewed or heavy-tailed posteriors, which differ from those with more
    and wider candidates at the first draws of θ, are made with these. Other arguments as of
    :func:`evidence_by_laplace`.
    """
    program, federation = fitted.program, fitted.federation
    given = Conditionals(program, fitted.params_of(chunk), theta, federation.batch(chunk), count)
    mode, root = laplace_approximation(given)
    evidence = laplace_evidence(given, mode, root, noise.fold(key, federation.stream_ids[chunk]))
    if not compared or mode.shape[-1] > WIDEST:
        return evidence
    first = min(count, max(LEAST_PROBED, min(PROBED, count // SHARE)))
    centre = _centre(mode, root)
    some = {name: value[:first] for name, value in theta.items()}
    near = centre.at(slice(first))
    wider = _defensive_blocks(fitted, some, first, chunk, key, NARROWER, near, common=True)
    below = is_below_precision(mode, root).squeeze(-1)  # where other candidates are no better
    differences = evidence[:first] - torch.cat([block.evidence() for _, block, _ in wider])
    differences[below[:first]] = 0.0
    poor = differences.nan_to_num(0.0, 0.0, 0.0).square().mean(0) > POOR
    for k in poor.nonzero()[:, 0].tolist():
        client = chunk[k : k + 1]
        numbers = int(federation.lengths[client]) * federation.numbers_per_row
        affordable = int(AFFORDABLE / (count * (numbers + fitted.program.variables)))
        each = min(FOR_EVIDENCE, affordable // len(WIDER) * len(WIDER))
        if each >= CANDIDATES:
            own = centre.at(slice(None), slice(k, k + 1))
            if each > CANDIDATES:
                few, many = (
                    _wider_evidence(fitted, some, first, client, key, own.at(slice(first)), each=n)
                    for n in (CANDIDATES, each)
                )
                plausible = many > many.max() - PLAUSIBLE
                differing = (few - many)[plausible]
                if len(differing) and float(differing.var(correction=0)) < STABLE:
                    each = CANDIDATES
            better = _wider_evidence(fitted, theta, count, client, key, own, each=each)
            evidence[:, k] = torch.where(below[:, k], evidence[:, k], better)
    return evidence


def _wider_evidence(
    fitted: Fitted, theta: Params, count: int, client: Tensor, key: Tensor, at: Centre, *, each: int
) -> Tensor:
    """Estimate log p(D_i | θ_s) of one client from defensive candidates of several widths, ``(S,)``."""
    blocks = _defensive_blocks(fitted, theta, count, client, key, WIDER, at, each=each, common=True)
    return torch.cat([block.evidence()[:, 0] for _, block, _ in blocks])
