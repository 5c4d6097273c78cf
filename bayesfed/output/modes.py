"""Laplace's approximation of clients' posteriors at draws of θ: modes by Newton's method, and widths.

Newton's method finds the mode of a concave log density, whose curvature there is a width. Where the density is not
concave, other starts are tried; where it is not smooth, gradients some way from the mode give the width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.noise import Draw, fold, key, word
from bayesfed.elbo.program import Params, Program
from bayesfed.guides import newton
from bayesfed.guides.triangular import inverse_root
from bayesfed.output.conditionals import Conditionals, is_exact, is_laplace, log_joint, normal_prior
from bayesfed.output.polynomials import find_polynomial
from bayesfed.tracing.blocks import in_blocks

STEPS = 10
"""Largest number of Newton steps; a likelihood that is Gaussian in u needs none from the mean of q."""
TOLERANCE = 0.01
"""A Newton step with twice its predicted gain below this, in nats, is the last one: the draws are weighted."""
SHORTER = 0.01
"""How much shorter Newton steps are tried where the usual fractions of one are all too long, as near an inflection."""
STARTS, WIDER = 32, 1.02
"""Draws from the prior at which further searches for a mode may start, of clients whose density is not concave; how
much larger a variance than the prior's shows that."""
ROUND_OFF = 1e-5
"""That of a precision, relative to its largest entry."""
PILOT, SPAN, SECANTS, SAME, LEAST_SECANT = 8, 1.5, 8, 0.1, 0.04
"""Draws of θ at which clients are examined; how many standard deviations from the mode gradients are compared with the
curvature; the most times that a precision comes from gradients, the change that ends it, and the least precision
each time, which makes a variable five times as wide."""
SKEWED, NARROW = 8, 0.15
"""The number of a client's variables above which a density has kinks only if secants that are this short curve more,
too: of many directions a smooth density is skewed in some, and secants in all take long."""
KINKED = 1.2
"""The factor on the width that gradients give: a density with kinks has heavier tails than a Normal."""
LEAST_CURVATURE = 0.05
"""The least curvature along an axis, in units of the prior's precision."""
DEGREE = 2
"""The degree of polynomials in θ in place of modes."""


def laplace_approximation(given: Conditionals) -> tuple[Tensor, Tensor]:
    """Return û_s ``(S, K, 1, P)`` and a root of H_s⁻¹ ``(S, K, 1, P, P)``.

    Of many draws of θ, the modes at a few are found by Newton's method. A polynomial in θ that is fitted to these is so
    close to the others that one Newton step is enough at most of them.

    Args:
        given: posteriors of a program for which :func:`~bayesfed.output.conditionals.has_block` is true.
    """
    if is_laplace(given.program):
        return _approximation_of_guide(given)
    different, draws = _without_repetition(given)
    u, precision = _fitted_modes(different) or _modes(different)
    u, root = _higher_modes(different, u, inverse_root(precision))
    return u[draws], _secant_roots(different, u, root)[draws]


@torch.no_grad()
def _approximation_of_guide(given: Conditionals) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`laplace_approximation` where q(u | θ) is the approximation.

    Of many draws of θ it is found at a few, and at others by one step from a polynomial, as :func:`_fitted_modes` does.
    """
    polynomial = None if is_exact(given.program) else find_polynomial(given.z[:, 0, 0], DEGREE)
    if polynomial is None:
        return _guide_at_draws(given)
    start = polynomial.fitted(_guide_at_draws(given.at(polynomial.few))[0])
    guide, found = given.program.guide, []
    for part in given.program.draw_blocks(len(given.batch), given.size):
        q, gain = guide.laplace_near(given.params, given.batch, start[part], given.z[part])
        found.append((q.mean, q.scale_tril, gain))
    u, root, gain = (torch.cat(values) for values in zip(*found, strict=True))
    far = (~(gain < TOLERANCE)).any(1).nonzero()[:, 0]
    if len(far):
        u[far], root[far] = _guide_at_draws(given.at(far))
    return u, root


def _guide_at_draws(given: Conditionals) -> tuple[Tensor, Tensor]:
    """Return the mean of q(u | θ_s) and a root of its covariance."""
    parts = given.program.draw_blocks(len(given.batch), given.size)
    every = torch.arange(given.size, device=given.z.device)
    blocks = [given.at(every[part]).block() for part in parts]
    return torch.cat([q.mean for q in blocks]), torch.cat([q.scale_tril for q in blocks])


def _without_repetition(given: Conditionals) -> tuple[Conditionals, Tensor]:
    """Return the posteriors at different draws of θ, and the position of each draw of θ among them, ``(S,)``."""
    z, every = given.z[:, 0, 0], torch.arange(given.size)
    if not z.shape[1]:
        return given.at(every[:1]), torch.zeros_like(every)
    values, position = torch.unique(z[:, 0], return_inverse=True)
    one = torch.empty(len(values), dtype=torch.int64).index_copy_(0, position.cpu(), every)
    if len(values) == given.size or not torch.equal(z[one][position], z):
        return given, every
    return given.at(one), position


def _fitted_modes(given: Conditionals) -> tuple[Tensor, Tensor] | None:
    """Return modes and precisions as :func:`_modes`, most of them by one Newton step from a polynomial in θ.

    Return None if the draws are too few, or if clients' variables have priors that are not Normal.
    """
    polynomial = find_polynomial(given.z[:, 0, 0], DEGREE)
    if polynomial is None:
        return None
    _, scale = normal_prior(given)
    if not bool(scale.isfinite().all()):
        return None
    u = polynomial.fitted(_modes(given.at(polynomial.few))[0])
    least = LEAST_CURVATURE / scale.square()
    _, gradient, hessian = _derivatives(given, u, torch.arange(given.size))
    precision, step = _newton_step(gradient, hessian, least)
    gain = (gradient * step).sum((-2, -1))
    far = (~(gain < TOLERANCE)).any(1).nonzero()[:, 0]
    u = u + step
    if len(far):
        u[far], precision[far] = _modes(given.at(far), u[far])
    return u, precision


def _higher_modes(given: Conditionals, u: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Return modes and roots, from other starts where these find higher modes.

    Newton's method may end at a lower mode, or on a plateau, of clients whose density is not concave: it curves less
    than the prior alone at some draws from it. Theirs starts again, at the best of these and of the median of the
    client's modes.
    """
    loc, scale = (x.expand_as(u) for x in normal_prior(given))
    spread = _spread(given, scale)
    draws = Draw("normal", (STARTS, u.shape[-1]))(fold(key(0), word("starts")), torch.float64)
    draws = draws.to(u)[:, None, None, None]
    few = _few(given.size).to(u.device)
    points = loc[few] + spread[few] * draws[: len(few), 0]
    hessian = _derivatives(given.at(few), points, torch.arange(len(few)))[2]
    curvature = -spread[few][..., None] * hessian * spread[few][..., None, :]
    round_off = ROUND_OFF * curvature.diagonal(dim1=-2, dim2=-1).abs().amax(-1, keepdim=True)
    above = curvature - torch.diag_embed((1 / WIDER - round_off).expand(curvature.shape[:-1]))
    concave = torch.linalg.cholesky_ex(above.nan_to_num(0.0, 0.0, 0.0))[1] == 0
    clients = (~concave).any(-1).any(0).nonzero()[:, 0]
    if not len(clients):
        return u, root
    own, mode = given.of_clients(clients), u[:, clients]
    loc, spread = loc[:, clients], spread[:, clients]
    start = _best_of_draws(own, mode.median(0, keepdim=True).values, loc, spread, draws)
    found, precision, reached = _climb(own, start, LEAST_CURVATURE / spread.square())
    higher = (reached > own.log_joint(mode[None])[0])[..., None, None]
    u, root = u.clone(), root.clone()
    u[:, clients] = torch.where(higher, found, mode)
    root[:, clients] = torch.where(higher[..., None], inverse_root(precision), root[:, clients])
    return u, root


def _best_of_draws(
    given: Conditionals, median: Tensor, loc: Tensor, spread: Tensor, white: Tensor
) -> Tensor:
    """Return the best of medians ``(1, K, 1, P)`` and of draws from the prior at each draw of θ, ``(S, K, 1, P)``.

    Args:
        given: the posteriors, whose densities are compared.
        median: one value of each client's variables.
        loc: the location of the prior, ``(S, K, 1, P)``, with ``spread``.
        spread: its scale.
        white: draws of a standard Normal, ``(R, 1, 1, 1, P)``.
    """
    fixed, numbers = (given.params, given.batch, median, white), given.width * (1 + len(white))
    return in_blocks(_best_point, given.program, fixed, [loc, spread, given.z], numbers)[0]


def _best_point(
    program: Program,
    params: Params,
    batch: Batch,
    median: Tensor,
    white: Tensor,
    loc: Tensor,
    spread: Tensor,
    z: Tensor,
) -> list[Tensor]:
    """Return the result of :func:`_best_of_draws` of some draws of θ."""
    points = torch.cat([median.expand_as(loc)[None], loc + spread * white])
    (found,) = log_joint(
        program, params, batch, points.flatten(0, 1), z.repeat(len(points), 1, 1, 1)
    )
    return [newton.highest(points, found.unflatten(0, points.shape[:2]))]


def _few(size: int) -> Tensor:
    """Return the positions of some of so many draws of θ, at which clients are examined."""
    return torch.linspace(0, size - 1, min(PILOT, size)).long()


def _secant_roots(given: Conditionals, u: Tensor, root: Tensor) -> Tensor:
    """Return roots of the covariances, by secants in place of the curvature where that fails.

    A log density with absolute values, such as Laplace's, curves nowhere but at its kinks. Clients for whom secants
    curve more than twice as much at some draws of θ, and short ones do where they have many variables, have the
    precision of secants. Where a density is not concave it may be almost flat at its mode and steep beyond, as where
    the peaks of a Student-t prior and of the likelihood merge. It curves less than the prior there; these draws of θ
    have the precision of secants, too, where a client has one variable. Of several, some draws of θ far from the
    posterior have candidates that are no numbers by these.
    """
    few = _few(given.size).to(u.device)
    some = given.at(few), u[few], root[few]
    kinked = (_secants(*some) - 1).amax((0, -3, -2, -1)) > 1
    if u.shape[-1] > SKEWED and bool(kinked.any()):
        kinked &= (_secants(*some, NARROW) - 1).amax((0, -3, -2, -1)) > 1
    clients = kinked.nonzero()[:, 0]
    root = root.clone()
    if len(clients):
        own = given.of_clients(clients)
        root[:, clients] = _roots_by_secants(own, u[:, clients], root[:, clients], LEAST_SECANT)
    if u.shape[-1] > 1:
        return root
    spread = _spread(given, normal_prior(given)[1])
    wide = (root.square().sum(-1).sqrt() > WIDER * spread).any((-2, -1)) & ~kinked
    draws = wide.any(1).nonzero()[:, 0]
    if len(draws):
        own, mode, old = given.at(draws), u[draws], root[draws]
        narrow = (_secants(own, mode, old) - 1).amax((-3, -2, -1)) > 1
        flat = wide[draws] & narrow
        narrower = _roots_by_secants(own, mode, old, least=1.0)
        root[draws] = narrower.where(flat[..., None, None, None], old)
    return root


def _roots_by_secants(given: Conditionals, u: Tensor, root: Tensor, least: float) -> Tensor:
    """Return roots of the covariances that gradients some way from the mode show.

    The precision is that of the secants between û − c L e_j and û + c L e_j, for the columns of L = ``root``. It is
    found again with the new L until it stays, and is the curvature where the density is Normal.
    """
    new = root
    for _ in range(SECANTS):
        secant = _secants(given, u, new)
        new = new @ inverse_root(newton.positive(secant, torch.full_like(u, least)))
        if bool(((secant - torch.eye(u.shape[-1]).to(u)).abs() < SAME).all()):
            break
    new = KINKED * new
    proper = new.isfinite().all((-2, -1)) & (new.diagonal(dim1=-2, dim2=-1) > 0).all(-1)
    return new.where(proper[..., None, None], root)


def _secants(given: Conditionals, u: Tensor, root: Tensor, span: float = SPAN) -> Tensor:
    """Return the precision ``(S, K, 1, P, P)`` that secants show, in the coordinates of L = ``root``."""
    away = span * root.mT.movedim(-2, 0)  # the columns, (P, S, K, 1, P)
    ends = torch.cat([u + away, u - away])
    (slopes,) = given.run(
        _gradient, 2 * given.width, ends.flatten(0, 1), given.z.repeat(len(ends), 1, 1, 1)
    )
    up, down = slopes.unflatten(0, (2, -1, given.size)).unbind()
    secant = root.mT @ ((down - up) / (2 * span)).movedim(0, -1)
    return (secant + secant.mT) / 2


def _gradient(program: Program, params: Params, batch: Batch, u: Tensor, z: Tensor) -> list[Tensor]:
    """Compute the gradient of the log density at u."""
    with torch.enable_grad():
        u = u.detach().requires_grad_()
        value = log_joint(program, params, batch, u, z)[0]
        return [newton.attached_gradient(value, u).detach()]


def _modes(given: Conditionals, *near: Tensor) -> tuple[Tensor, Tensor]:
    """Return û_s ``(S, K, 1, P)`` and H_s ``(S, K, 1, P, P)``, perhaps from points that may be near them."""
    return _climb(given, *_start(given, *near))[:2]


def _climb(given: Conditionals, start: Tensor, least: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where Newton's method ends, the precision there, and the log density a step before, ``(S, K)``.

    Newton steps, with a line search where a whole step makes the density lower, go on for each client and draw of θ
    until they gain less than a tolerance, whichever other clients are there. They end likewise where the search finds
    nothing better by that much, as at the kinks of a density with absolute values.
    """
    u, precision = start.clone(), start.new_empty(*start.shape, start.shape[-1])
    reached, step = u.new_full(u.shape[:2], -torch.inf), torch.zeros_like(u)
    ended = torch.zeros_like(reached, dtype=torch.bool)
    moving = torch.arange(given.size, device=u.device)
    for number in range(1 + STEPS):
        active, before = ~ended[moving], reached[moving]
        found = _derivatives(given, u, moving)
        late = active & ~(found[0] >= before) & (number > 0)
        far = late.any(1).nonzero()[:, 0]
        if len(far):
            some = moving[far]
            shorter = _shortened(given.at(some), u[some] - step[some], step[some])
            u[some] = torch.where(late[far][..., None, None], shorter, u[some])
            for value, new in zip(found, _derivatives(given, u, some), strict=True):
                value[far] = new
        stalled = late & ~(found[0] > before + TOLERANCE)
        reached[moving], gradient, hessian = found
        here, new = _newton_step(gradient, hessian, least[moving])
        new = new.nan_to_num(0.0)
        precision[moving] = torch.where(active[..., None, None, None], here, precision[moving])
        last = ~((gradient * new).sum((-2, -1)) > TOLERANCE)
        taken = active & ~stalled & (last | (number < STEPS))
        step[moving] = torch.where(taken[..., None, None], new, 0.0)
        u[moving] += step[moving]
        ended[moving] |= last | stalled
        moving = moving[~ended[moving].all(1)]
        if not len(moving):
            break
    return u, precision, reached


def _shortened(given: Conditionals, u: Tensor, step: Tensor) -> Tensor:
    """Return u after the best of several fractions of a step, of :data:`SHORTER` as long a one where none is better."""
    found = newton.line_search(given.log_joint, u, step)
    stuck = (found == u).all(-1, keepdim=True)
    if not bool(stuck.any()):
        return found
    return torch.where(stuck, newton.line_search(given.log_joint, u, SHORTER * step), found)


def _newton_step(gradient: Tensor, hessian: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Return the precision, of eigenvalues that are not below the least, and a step as :func:`newton.newton_step`."""
    below = newton.is_below(-hessian, least)
    bent, precision = bool(below.any()), -hessian
    if bent:
        least = least.expand(precision.shape[:-1])
        precision[below] = newton.positive(precision[below], least[below])
    step = torch.linalg.solve_ex(precision, gradient[..., None])[0].squeeze(-1)
    if bent:
        shorter = newton.magnitude(-hessian[below], least[below])
        step[below] = torch.linalg.solve_ex(shorter, gradient[below][..., None])[0].squeeze(-1)
    return precision, step


def _derivatives(given: Conditionals, u: Tensor, draws: Tensor) -> list[Tensor]:
    """Return the log density at u of some draws of θ, its gradient and its curvature."""
    numbers = given.width * (2 + u.shape[-1])
    return given.run(_value_and_curvature, numbers, u[draws], given.z[draws])


def _value_and_curvature(
    program: Program, params: Params, batch: Batch, u: Tensor, z: Tensor
) -> list[Tensor]:
    """Compute the log density at u, its gradient and its curvature."""

    def density(u: Tensor) -> Tensor:
        return log_joint(program, params, batch, u[0], z)[0][None]

    with torch.enable_grad():
        return [x.detach() for x in newton.value_and_curvature(density, u)]


@torch.no_grad()
def _start(given: Conditionals, *near: Tensor) -> tuple[Tensor, Tensor]:
    """Return where Newton's method starts, and the least curvature, ``(S, K, 1, P)`` each.

    The mean of q is linear in θ, and far from the posterior where θ is far from the centre of q(θ). The location of the
    prior, or one of other points, is taken where it has the largest density.
    """
    q = given.block()
    prior, scale = normal_prior(given)
    points = torch.stack([q.mean, prior.expand_as(q.mean), *near])
    start = newton.highest(points, given.log_joint(points))
    return start, (LEAST_CURVATURE / _spread(given, scale).square()).expand_as(start)


def _spread(given: Conditionals, scale: Tensor) -> Tensor:
    """Return the scale of Normal priors, and about the spread of others."""
    return torch.where(scale.isfinite(), scale, given.program.guide.block_scaling.scale.to(scale))
