"""Whether q(θ) was still moving at the end of a run, beyond its noise.

Rates that fall make every fit look still in the end. So time is counted in what the rates add up to: twelve windows of
equal ∫ rate, of which the last six are kept as means of the guide's parameters. Taken two and two they give three
places of q in a row, with two moves between them; a move that shrinks by r from one to the next has still to go
|move| · r^{3/2} / (1 − r) from the end of the run (Aitken's extrapolation; the end is half a move past the last place).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.algorithms.schedules import elapsed
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.program import Params, Program

WINDOWS, KEPT = 12, 6
SHARPEST = 0.8
"""The largest r: of a move that does not shrink nobody knows where it ends, so what is said is a lower bound."""
FAR, TOO_FAR = 0.25, 1.0
"""How far q(θ) may have to go, in its standard deviations, or its log standard deviation: to be said, to be warned of."""
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
    weight = elapsed(final, (number + 1) / rounds) - elapsed(final, number / rounds)
    row[0] += weight
    row[1:] += weight * torch.cat([value.detach().reshape(-1) for value in params.values()])


def _window(final: float, number: int, rounds: int) -> int:
    return -1 if number < 0 else int(WINDOWS * elapsed(final, number / rounds))


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
    last = _window(final, done - 1, rounds)
    begun = {_window(final, number, rounds) for number in range(done)}
    wanted = range(last - KEPT + 1, last + 1)
    if not begun.issuperset(wanted):
        return None
    places = []
    for window in wanted:
        weight, *_ = row = where[window % KEPT]
        parts = (row[1:] / weight).split([value.numel() for value in params.values()])
        places.append(
            _moments(program, {n: p.view_as(params[n]) for n, p in zip(params, parts, strict=True)})
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


def left(values: Tensor) -> float:
    """How far numbers at six windows ``(6, P)`` have still to go, root mean square.

    Example:
        >>> import torch
        >>> from bayesfed.engine.moving import left
        >>> windows = torch.arange(6.0)[:, None]
        >>> decay = torch.exp(-windows / 2)  # at the end of the last window it has exp(-5.5 / 2) = .064 to go
        >>> round(left(decay), 2), round(left(windows), 1), left(torch.ones(6, 1))
        (0.05, 7.2, 0.0)
    """
    first, second, third = values.unflatten(0, (3, 2)).mean(1)
    bends = values[:-2] - 2 * values[1:-1] + values[2:]  # of noise the variance is 6 σ²
    sigma2 = bends.square().mean() / 6
    move, before = (x.square().mean() for x in (third - second, second - first))
    move = (move - 4 * sigma2).clamp(min=0.0).sqrt()
    shrinks = float((move / before.sqrt().clamp(min=1e-30)).clamp(max=SHARPEST))
    return float(move) * shrinks**1.5 / (1 - shrinks)


def _moments(program: Program, params: Params) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and standard deviation of the global sites' unconstrained coordinates, ``(D,)`` each, always at the same draws."""
    size = max(1, sum(site.event_shape.numel() for site in program.globals))
    draws = max(8, min(_DRAWS, _NUMBERS // size))
    device = program.schema.device
    supplied = program.noise(noise.key(0).to(device), draws, local=False)
    given = params | program.init_locals(program.schema)
    with (
        handlers.given(device, given, supplied, draws=draws),
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


def caveat(moving: Mapping[str, float] | None, rounds: int) -> str:
    """What is to be said of a fit that has not settled, in words; empty of one that has."""
    if moving is None:
        return f"{rounds:,} rounds are too few to tell whether q(θ) still moves"
    if not moving:
        return ""
    worst = sorted(moving, key=lambda name: -moving[name])
    some = ", ".join(f"{name} {moving[name]:.1f}" for name in worst[:4])
    more = f" and {len(worst) - 4} more" if len(worst) > 4 else ""
    return f"q(θ) was still moving after {rounds:,} rounds, with so many of its sds to go, or more: {some}{more}"


def warn_if_moving(moving: Mapping[str, float] | None, rounds: int) -> None:
    """Warn of a fit that has clearly not settled."""
    if moving and max(moving.values()) > TOO_FAR:
        warnings.warn(
            f"{caveat(moving, rounds)}. Give it more rounds or a higher lr; standardise the fields", stacklevel=3
        )
