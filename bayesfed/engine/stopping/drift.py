"""The distance of q(θ) and the ELBO from convergence, beyond noise, at the end of a given number of rounds.

The ELBO represents the states of clients, which only they see. Rates that fall make every fit look converged in
the end. So time is counted in what the rates add up to: twelve windows of equal ∫ rate, of which the last six are kept
as means of the guide's parameters. Three places of q in a row have two moves between them; of a move that shrinks by r
from one to the next |move| · r^{3/2} / (1 − r) is left when the run ends (Aitken's extrapolation; the end is half a
move past the last place). It is worked out from the last three windows and from the six, two and two, and the smaller
result counts: after a change of the guide's kind of steps, and under noise, one of them may see what is no drift. The
ELBO of a round is treated likewise.
"""

import warnings
from collections.abc import Mapping

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.data.plural import plural
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.elbo import Noise
from bayesfed.elbo.program import Params, Program
from bayesfed.engine.stopping.rule import BOUND
from bayesfed.steps.gradients import elapsed
from bayesfed.tracing.compiler import traceable

WINDOWS, KEPT = 12, 6
SLOWEST = 0.8
"""The largest r over two windows: the end of a move that does not shrink cannot be extrapolated."""
ENOUGH = 20.0
"""Fewer rounds at full rate, or more at lower ones, are too few to assess convergence."""
FAR, TOO_FAR = 0.25, 1.0
"""Distances of q(θ) beyond which the result has a caveat, or the run a warning: in its standard deviations, or in its
log standard deviation."""
NATS, NATS_PER_ROW = 0.3, 0.001
"""The rise of the ELBO that counts as none."""
_DRAWS, _NUMBERS = 64, 2**22


def empty_windows(program: Program) -> Tensor:
    """Zeros for the weights of the last windows and their means of the guide's global parameters: ``(6, 1 + P)``."""
    values = list(program.init.values()) if program.random else []
    first = next(iter(values), torch.zeros(()))
    return first.new_zeros(KEPT, 1 + sum(value.numel() for value in values))


def add_round(windows: Tensor, params: Params, final: float, number: int, rounds: int) -> None:
    """Add a round, counted from 0, to its window, in place; ``final`` is what is left of the rates at the end."""
    if windows.shape[1] == 1:
        return
    window, before = (_window(final, n, rounds) for n in (number, number - 1))
    row = windows[window % KEPT]
    if window != before:
        row.zero_()
    now = [value.detach().reshape(-1) for value in params.values()]
    row.add_(torch.cat([row.new_ones(1), *now]), alpha=_weight(final, number, rounds))


def _window(final: float, number: int, rounds: int) -> int:
    return -1 if number < 0 else int(WINDOWS * elapsed(final, number / rounds))


def _last_windows(final: float, done: int, rounds: int) -> range | None:
    """The last six windows; None where there are too few rounds."""
    last = _window(final, done - 1, rounds)
    at_full_rate = rounds * (1 + final) / 2 * elapsed(final, done / rounds)
    return range(last - KEPT + 1, last + 1) if last >= KEPT and at_full_rate >= ENOUGH else None


def _weight(final: float, number: int, rounds: int) -> float:
    return elapsed(final, (number + 1) / rounds) - elapsed(final, number / rounds)


@torch.no_grad()
def distances_left(
    program: Program, windows: Tensor, params: Params, final: float, done: int, rounds: int
) -> dict[str, float] | None:
    """The distance of q(θ) from where it was going, by global site, where beyond :data:`FAR`; None of too few rounds.

    In standard deviations of q, or in its log standard deviation, whichever is larger; root mean square over the site's
    coordinates. Point estimates, which have no standard deviation, are left out.

    Args:
        program: the model/guide pair.
        windows: see :func:`add_round`.
        params: the guide's global parameters at the end.
        final: what is left of the rates at the end.
        done: rounds done.
        rounds: rounds that were planned.
    """
    if windows.shape[1] == 1:
        return {}
    last_windows = _last_windows(final, done, rounds)
    if last_windows is None:
        return None
    places = []
    for window in last_windows:
        weight, *_ = row = windows[window % KEPT]
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
            farthest = max(extrapolate(means / sds[-1]), extrapolate(sds.clamp(min=1e-30).log()))
            if farthest > FAR:
                found[name] = farthest
    return found


def elbo_left(elbo: Tensor, rows: int, final: float, rounds: int) -> float | None:
    """The rise of the ELBO that is left, in nats, 0 where it counts as none; None of too few rounds.

    Args:
        elbo: of the rounds done, ``(done,)``.
        rows: number of rows of all clients.
        final: what is left of the rates at the end.
        rounds: rounds that were planned.
    """
    last_windows, numbers = _last_windows(final, len(elbo), rounds), range(len(elbo))
    if last_windows is None:
        return None
    window = torch.tensor([_window(final, n, rounds) for n in numbers])
    weight = torch.tensor([_weight(final, n, rounds) for n in numbers], dtype=elbo.dtype)
    last = [window == w for w in last_windows]
    means = torch.stack([(elbo * weight)[some].sum() / weight[some].sum() for some in last])
    nats = extrapolate(means[:, None]) if means[-1] > means[-3] else 0.0
    return nats if nats > NATS + NATS_PER_ROW * rows else 0.0


def extrapolate(values: Tensor) -> float:
    """The distance that numbers at six windows ``(6, P)`` have left, by extrapolation, root mean square.

    Example:
        >>> import torch
        >>> from bayesfed.engine.stopping.drift import extrapolate
        >>> windows = torch.arange(6.0)[:, None]
        >>> decay = torch.exp(-windows / 2)  # at the end of the last window exp(-5.5 / 2) = 0.064 is left
        >>> round(extrapolate(decay), 2), round(extrapolate(windows), 1), extrapolate(torch.ones(6, 1))
        (0.06, 7.2, 0.0)
    """
    # the variance of a window's mean, where there is nothing but noise
    bends = values.diff(n=2, dim=0).square().mean() / 6
    sigma2 = torch.minimum(bends, values.diff(n=3, dim=0).square().mean() / 20)
    return min(
        _extrapolate_three(values[-3:], torch.zeros(()).to(sigma2), SLOWEST**0.5),
        _extrapolate_three(values.unflatten(0, (3, 2)).mean(1), sigma2, SLOWEST),
    )


def _extrapolate_three(places: Tensor, variance: Tensor, slowest: float) -> float:
    """The distance that is left after three places ``(3, P)``, whose differences have this variance."""
    before, move = (places[1:] - places[:-1]).square().mean(1)
    move = (move - 4 * variance).clamp(min=0.0).sqrt()
    shrinks = float((move / before.sqrt().clamp(min=1e-30)).clamp(max=slowest))
    return float(move) * shrinks**1.5 / (1 - shrinks)


def moments(program: Program, params: Params) -> dict[str, tuple[Tensor, Tensor]]:
    """Means and standard deviations of the global sites, unconstrained, ``(D,)`` each, always of the same draws."""
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
        program.guide_of_globals(program.schema)
    found = {}
    for site in program.globals:
        u = biject_to(site.support).inv(tracer.trace.nodes[site.name]["value"])
        if len(u) == draws:  # else a point estimate
            u = u.reshape(draws, -1)
            found[site.name] = u.mean(0), u.std(0)
    return found


def caveat(
    moving: Mapping[str, float] | None,
    rising: float | None,
    rounds: int,
    converged: bool | None,
) -> str:
    """A sentence about a fit that has not converged; empty for one that has.

    Args:
        moving: distances by global site, see :meth:`~bayesfed.engine.stopping.rule.Stopping.remaining`.
        rising: nats; None of a run whose server takes quasi-Newton steps.
        rounds: rounds done.
        converged: None of a run with a given number of rounds.
    """
    if moving is None and rounds >= BOUND and converged is False:
        if rising is None:
            return (
                f"not converged after {plural(rounds, 'round')}: the server's steps on θ have not become short, and "
                "this is no noise. The objective has a kink at its optimum, or no finite optimum. With rounds= "
                "clients take the usual steps"
            )
        return (
            f"not converged after {plural(rounds, 'round')}: noise hides the distance from where it was going. With "
            "rounds= the learning rates fall, which averages noise out"
        )
    if moving is None or rising is None:
        return f"{plural(rounds, 'round is', 'rounds are')} too few to tell whether the fit has converged"
    worst = sorted(moving, key=lambda name: -moving[name])
    distances = [f"{name} {moving[name]:.1f} sd" for name in worst[:4]]
    if len(worst) > 4:
        distances.append(f"{len(worst) - 4} more")
    if rising:
        distances.append(f"the ELBO {rising:,.1f} nats")
    if not distances:
        return ""
    return (
        f"not converged after {plural(rounds, 'round')}, about this far from where it was going: "
        f"{', '.join(distances)}"
    )


def warn_if_moving(caveat: str, moving: Mapping[str, float] | None) -> None:
    """Warn, with a :func:`caveat`, of a fit that has clearly not converged."""
    if moving and max(moving.values()) > TOO_FAR:
        warnings.warn(
            f"{caveat}. Give it more rounds or a higher lr; standardise the fields", stacklevel=3
        )
