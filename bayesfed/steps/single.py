"""A single step of a client down its objective: at rate 1, with its own variables at their optimum given θ.

The mean of such steps is the gradient of the algorithm's objective, see :mod:`bayesfed.rules.quasi_newton`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bayesfed.elbo.program import Params, Program
from bayesfed.guides.fisher import prior_units, scaled
from bayesfed.guides.newton import curvature, line_search, newton_step, within_range
from bayesfed.steps.gradients import gradients

FEW, NEWTON_STEPS, TOLERANCE = 20, 20, 1e-6
"""The largest number of a client's variables whose optimum is looked for; the most steps; twice the last one's gain."""
WEAKEST, LONGEST = 1e-3, 2.0
"""The smallest curvature that Newton's method assumes, and the longest step in one number, in units of the priors."""


def dimensions(program: Program) -> int:
    """Return the number of a client's variables."""
    return sum(site.start.numel() for site in program.guide.locals.values())


def few(program: Program) -> bool:
    """Return whether clients have point estimates of few variables, and nothing else."""
    alone = len(program.local_params) == len(program.guide.locals)
    return alone and dimensions(program) <= FEW


def step_down(program: Program, loss: Tensor, own: Params) -> Params:
    """Return leaves after a step down losses ``(K,)`` at rate 1 in the units of the priors."""
    units = prior_units(program)
    steps = scaled(scaled(gradients(loss, own), units), units)
    return {name: value.detach() - steps[name] for name, value in own.items()}


def lowest(program: Program, loss: Callable[[Params], Tensor], start: Params) -> Params:
    """Return the values ``(K, 1, ...)`` of K clients at which their losses ``(K,)``, in nats, are lowest.

    Newton's method in the units of the priors, from a start; each client ends by itself, whoever else is here.
    """
    gain, u, values = in_units(program, loss, start)
    least = WEAKEST * torch.ones_like(u)
    with torch.enable_grad():
        for _ in range(NEWTON_STEPS):
            step, left = newton_step(gain, least, u)
            moving = ~(left < TOLERANCE)
            if not moving.any():
                break
            step = torch.where(moving[:, None, None], step.detach(), 0.0)
            u = line_search(gain, u, step * (LONGEST / step.abs().clamp(min=LONGEST)))
    return values(u)


def flat(program: Program, loss: Callable[[Params], Tensor], at: Params) -> Tensor:
    """Return whose loss has next to no curvature in some direction, at values that are lowest: bool ``(K,)``.

    Such a loss falls for ever, though less and less: that of a log rate, where all counts are 0.
    """
    gain, u, _ = in_units(program, loss, at)
    with torch.enable_grad():
        hessian = curvature(gain, u)[1].detach().squeeze(1)
    return torch.linalg.eigvalsh(-within_range(hessian))[..., 0] < WEAKEST


def in_units(
    program: Program, loss: Callable[[Params], Tensor], start: Params
) -> tuple[Callable[[Tensor], Tensor], Tensor, Callable[[Tensor], Params]]:
    """Return −loss of vectors ``(S, K, 1, P)``, with what :func:`as_vectors` returns."""
    first, values = as_vectors(program, start)

    def gain(u: Tensor) -> Tensor:
        return torch.stack([-loss(values(each)) for each in u])

    return gain, first, values


def as_vectors(program: Program, start: Params) -> tuple[Tensor, Callable[[Tensor], Params]]:
    """Return values as vectors ``(K, 1, P)`` in the units of the priors, and a function from vectors to values."""
    units = prior_units(program)
    unit = {
        n: units[n].expand_as(v) if n in units else torch.ones_like(v) for n, v in start.items()
    }
    sizes = [value[0].numel() for value in start.values()]

    def values(u: Tensor) -> Params:
        parts = zip(start.items(), u.split(sizes, -1), strict=True)
        return {n: part.reshape(v.shape) * unit[n] for (n, v), part in parts}

    first = torch.cat([(v / unit[n]).flatten(1)[:, None] for n, v in start.items()], -1).detach()
    return first, values
