"""Whether a fit was still moving at the end of its run, beyond its noise: q(θ), and by the ELBO what clients keep.

Rates that fall make every fit look still in the end. So time is counted in what the rates add up to: twelve windows of
equal ∫ rate, of which the last six are kept as means of the guide's parameters. Three places of q in a row have two
moves between them; of a move that shrinks by r from one to the next |move| · r^{3/2} / (1 − r) is left when the run
ends (Aitken's extrapolation; the end is half a move past the last place). It is worked out from the last three windows
and from the six, two and two, and the lesser counts: of a guide that went over to another kind of steps, and of noise,
one of them may see what is no drift. The ELBO of a round is taken likewise.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.elbo import handlers, noise
from bayesfed.elbo.elbo import Noise
from bayesfed.elbo.program import Params, Program
from bayesfed.steps.gradients import elapsed
from bayesfed.tracing.compiler import traceable

WINDOWS, KEPT = 12, 6
SHARPEST = 0.8
"""The largest r over two windows: where a move that does not shrink will end nobody knows."""
ENOUGH = 20.0
"""Rounds at full rate, or more at lower ones, with less of which nothing can be told."""
FAR, TOO_FAR = 0.25, 1.0
"""How far q(θ) may have to go, in its standard deviations or its log standard deviation: beyond it said, warned of."""
NATS, NATS_A_ROW = 0.3, 0.001
"""By how much the ELBO may still have to rise before it is said."""
_DRAWS, _NUMBERS = 64, 2**22


def path(program: Program) -> Tensor:
    """Room for the means of the guide's global parameters over the last windows, and their weights: ``(6, 1 + P)``."""
    values = list(program.init.values()) if program.random else []
    first = next(iter(values), torch.zeros(()))
    return first.new_zeros(KEPT, 1 + sum(value.numel() for value in values))


def record(where: Tensor, params: Params, final: float, number: int, rounds: int) -> None:
    """Add a round, counted from 0, to its window, in place; ``final`` is what is left of the rates in the end."""
    if where.shape[1] == 1:
        return
    window, before = (_window(final, n, rounds) for n in (number, number - 1))
    row = where[window % KEPT]
    if window != before:
        row.zero_()
    now = [value.detach().reshape(-1) for value in params.values()]
    row.add_(torch.cat([row.new_ones(1), *now]), alpha=_weight(final, number, rounds))


def _window(final: float, number: int, rounds: int) -> int:
    return -1 if number < 0 else int(WINDOWS * elapsed(final, number / rounds))


def _wanted(final: float, done: int, rounds: int) -> range | None:
    """The windows to look at; None where there are too few rounds."""
    last = _window(final, done - 1, rounds)
    at_full_rate = rounds * (1 + final) / 2 * elapsed(final, done / rounds)
    return range(last - KEPT + 1, last + 1) if last >= KEPT and at_full_rate >= ENOUGH else None


def _weight(final: float, number: int, rounds: int) -> float:
    return elapsed(final, (number + 1) / rounds) - elapsed(final, number / rounds)


@torch.no_grad()
def to_go(
    program: Program, where: Tensor, params: Params, final: float, done: int, rounds: int
) -> dict[str, float] | None:
    """How far q(θ) had still to go, by global site, where that is more than :data:`FAR`; None where it cannot be told.

    In standard deviations of q, or in its log standard deviation, whichever is more; root mean square over the site's
    numbers. Points, which have no standard deviation, are never said to move.

    Args:
        program: the model/guide pair.
        where: see :func:`record`.
        params: the guide's global parameters in the end.
        final: what is left of the rates in the end.
        done: rounds done.
        rounds: rounds that there were to be.
    """
    if where.shape[1] == 1:
        return {}
    wanted = _wanted(final, done, rounds)
    if wanted is None:
        return None
    places = []
    for window in wanted:
        weight, *_ = row = where[window % KEPT]
        parts = (row[1:] / weight).split([value.numel() for value in params.values()])
        places.append(
            moments(program, {n: p.view_as(params[n]) for n, p in zip(params, parts, strict=True)})
        )
    found = {}
    for name in places[0]:
        means, sds = (torch.stack([place[name][i] for place in places]) for i in (0, 1))
        sure = means.isfinite().all(0) & sds.isfinite().all(0) & (sds[-1] > 0)
        if sure.any():
            means, sds = means[:, sure], sds[:, sure]
            farthest = max(left(means / sds[-1]), left(sds.clamp(min=1e-30).log()))
            if farthest > FAR:
                found[name] = farthest
    return found


def to_rise(elbo: Tensor, rows: int, final: float, rounds: int) -> float | None:
    """How many nats the ELBO had still to rise, 0 where that is little; None where it cannot be told.

    Args:
        elbo: of the rounds done, ``(done,)``.
        rows: of all clients.
        final: what is left of the rates in the end.
        rounds: rounds that there were to be.
    """
    wanted, numbers = _wanted(final, len(elbo), rounds), range(len(elbo))
    if wanted is None:
        return None
    window = torch.tensor([_window(final, n, rounds) for n in numbers])
    weight = torch.tensor([_weight(final, n, rounds) for n in numbers], dtype=elbo.dtype)
    last = [window == w for w in wanted]
    means = torch.stack([(elbo * weight)[some].sum() / weight[some].sum() for some in last])
    nats = left(means[:, None]) if means[-1] > means[-3] else 0.0
    return nats if nats > NATS + NATS_A_ROW * rows else 0.0


def left(values: Tensor) -> float:
    """How far numbers at six windows ``(6, P)`` have still to go, root mean square.

    Example:
        >>> import torch
        >>> from bayesfed.engine.stopping.drift import left
        >>> windows = torch.arange(6.0)[:, None]
        >>> decay = torch.exp(-windows / 2)  # at the end of the last window it has exp(-5.5 / 2) = .064 to go
        >>> round(left(decay), 2), round(left(windows), 1), left(torch.ones(6, 1))
        (0.06, 7.2, 0.0)
    """
    bends = (
        values.diff(n=2, dim=0).square().mean() / 6
    )  # of a window's mean, where there is nothing but noise
    sigma2 = torch.minimum(bends, values.diff(n=3, dim=0).square().mean() / 20)
    return min(
        _extrapolated(values[-3:], torch.zeros(()).to(sigma2), SHARPEST**0.5),
        _extrapolated(values.unflatten(0, (3, 2)).mean(1), sigma2, SHARPEST),
    )


def _extrapolated(places: Tensor, variance: Tensor, most: float) -> float:
    """How far is left after three places ``(3, P)``, whose differences have that variance."""
    before, move = (places[1:] - places[:-1]).square().mean(1)
    move = (move - 4 * variance).clamp(min=0.0).sqrt()
    shrinks = float((move / before.sqrt().clamp(min=1e-30)).clamp(max=most))
    return float(move) * shrinks**1.5 / (1 - shrinks)


def moments(program: Program, params: Params) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and standard deviation of the global sites, unconstrained, ``(D,)`` each, always at the same draws."""
    size = max(1, sum(site.event_shape.numel() for site in program.globals))
    draws = max(8, min(_DRAWS, _NUMBERS // size))
    device = program.schema.device
    return _moments(
        program, params, program.noise(noise.key(0).to(device), draws, local=False), draws
    )


@traceable
def _moments(
    program: Program, params: Params, supplied: Noise, draws: int
) -> dict[str, tuple[Tensor, Tensor]]:
    device, own = program.schema.device, program.local_params
    with (
        handlers.given(device, params, supplied, draws=draws, starting=own),
        poutine.trace() as tracer,
        handlers.Until([site.name for site in program.globals]),
    ):
        program.guide(program.schema)
    found = {}
    for site in program.globals:
        u = biject_to(site.support).inv(tracer.trace.nodes[site.name]["value"])
        if len(u) == draws:  # else a point
            u = u.reshape(draws, -1)
            found[site.name] = u.mean(0), u.std(0)
    return found


def caveat(moving: Mapping[str, float] | None, rising: float | None, rounds: int) -> str:
    """What is to be said of a fit that has not settled, in words; empty of one that has."""
    if moving is None or rising is None:
        return f"{rounds:,} rounds are too few to tell whether the fit still moves"
    worst = sorted(moving, key=lambda name: -moving[name])
    said = [f"{name} {moving[name]:.1f} sd" for name in worst[:4]]
    if len(worst) > 4:
        said.append(f"{len(worst) - 4} more")
    if rising:
        said.append(f"the ELBO {rising:,.1f} nats")
    if not said:
        return ""
    return f"still moving after {rounds:,} rounds, about this far from where it was going: {', '.join(said)}"


def warn_if_moving(said: str, moving: Mapping[str, float] | None) -> None:
    """Warn, with a :func:`caveat`, of a fit that has clearly not settled."""
    if moving and max(moving.values()) > TOO_FAR:
        warnings.warn(
            f"{said}. Give it more rounds or a higher lr; standardise the fields", stacklevel=3
        )
