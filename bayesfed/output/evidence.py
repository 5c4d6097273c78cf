"""Estimates of log p(D_i | θ_s) at draws of θ, by adaptive quadrature around a Laplace approximation.

    log Σ_l c_l p(u_sl, D_i | θ_s) / N(u_sl; û_s, H_s⁻¹),   u_sl = û_s + H_s^{−½} z_l

u is the block of the client's local variables. q(u | θ) is fitted around the centre of q(θ), with a mean that is linear
in θ; at a draw of θ far from the centre it may be a poor proposal. The Normal used here is the Laplace approximation at
θ_s itself, found by Newton steps from the mean of q. If the likelihood is Gaussian in u, the ratio equals log p(D_i |
θ_s) at every point. Otherwise z_l and c_l are the nodes and weights of Gauss-Hermite quadrature in one or two
dimensions (Liu & Pierce 1994, *A note on Gauss-Hermite quadrature*; ``nAGQ`` of lme4), and beyond these draws of a
standard Normal, in pairs around 0, which each client makes once for all θ_s. Points that are the same at all
draws of θ make an error that is smooth in θ, most of which cancels in importance weights. The errors of points that
are drawn anew at each θ_s add up over clients, and leave the weights of a thousand clients no information.

A draw from N(û_s, H_s⁻¹), chosen among several by its weight, is closer to a draw from the client's posterior given θ_s
than a draw from q.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo import handlers
from bayesfed.elbo.elbo import Noise
from bayesfed.elbo.noise import Draw, fold, uniform, word
from bayesfed.elbo.program import Params, Program
from bayesfed.guides import newton
from bayesfed.guides.family import GLOBAL
from bayesfed.guides.hierarchical import LOCAL
from bayesfed.guides.triangular import inverse_root
from bayesfed.output.polynomials import find_polynomial
from bayesfed.tracing.blocks import in_blocks

EACH = 4
"""Draws of a client's variables for one of θ, in pairs, of which one is chosen; points that are evaluated at once."""
NODES, POINTS = {1: 7, 2: 4}, 16
"""Nodes of quadrature along each of one or two variables; the number of points of more."""
STEPS = 10
"""Largest number of Newton steps; a likelihood that is Gaussian in u needs none from the mean of q."""
TOLERANCE = 0.01
"""A Newton step with twice its predicted gain below this, in nats, is the last one: the draws are weighted."""
LEAST_CURVATURE = 0.05
"""The least curvature along an axis, in units of the precision of a Normal prior, or else of q."""
DEGREE, ERROR, ERROR_OF_SUM = 2, 0.001, 0.02
"""The degree of polynomials in place of modes and quadrature; the largest root mean square error of the latter, in
nats, of a client and of all clients."""
ROUNDING = 20
"""The least standard deviation of a variable that is apart from its mode, in units of its round-off."""
LOG_TAU = math.log(math.tau)
COST = 8
"""Time relative to a single draw from q, about."""


def has_block(program: Program) -> bool:
    """Return whether all local variables are one Normal vector in the guide, as this estimate needs."""
    return set(program.randomness) - set(program.random) == {LOCAL}


def rows_width(program: Program, batch: Batch) -> int:
    """Return how many numbers the clients' rows hold for one draw of θ and one value of their variables, about."""
    rows = batch.mask.shape[1] * program.points
    return len(batch) * max(rows, *(value[0].numel() for value in batch.fields.values()))


class Candidates(NamedTuple):
    """Draws of a block of local variables, and their log importance weights for S draws of θ and K clients.

    Attributes:
        draws: ``(L, S, K, 1, P)``.
        log_weights: log p(u_sl, D_i | θ_s) / N(u_sl), ``(L, S, K)``.
    """

    draws: Tensor
    log_weights: Tensor

    def evidence(self) -> Tensor:
        """Estimate log p(D_i | θ_s) by the mean of the weights, ``(S, K)``."""
        return self.log_weights.logsumexp(0) - math.log(len(self.log_weights))

    def resample(self, keys: Tensor) -> Tensor:
        """Choose one of the L draws by weight, ``(S, K, 1, P)``; ``keys`` are the clients' noise streams ``(K,)``."""
        below = self.log_weights.softmax(0).cumsum(0)
        size = below.shape[1]
        u = uniform(fold(keys, word("picked")), (size,)).mT
        first = (below < u * below[-1]).sum(0).clamp(max=len(below) - 1)
        return self.draws.gather(0, first[None, ..., None, None].expand_as(self.draws[:1]))[0]


class Conditionals(NamedTuple):
    """The posteriors p(w_i | θ_s, D_i) of K clients' variables at S draws of θ.

    Attributes:
        program: the model and its guide.
        params: parameters of the program and of these clients.
        theta: draws of the guide's global sites, ``(S, 1, 1, *event)``.
        batch: the clients' rows.
        size: S.
    """

    program: Program
    params: Mapping[str, Tensor]
    theta: Mapping[str, Tensor]
    batch: Batch
    size: int

    def at(self, draws: Tensor) -> Conditionals:
        """Return those at some of the draws, by position."""
        some = {name: value[draws] for name, value in self.theta.items()}
        return self._replace(theta=some, size=len(draws))

    def of_clients(self, clients: Tensor) -> Conditionals:
        """Return those of some of the clients, by position."""
        own = self.program.local_params
        params = {n: value[clients] if n in own else value for n, value in self.params.items()}
        return self._replace(params=params, batch=self.batch.select(clients))

    @property
    def z(self) -> Tensor:
        """The guide's global vector, ``(S, 1, 1, D)``, D = 0 if it has none."""
        return self.theta.get(GLOBAL, self.batch.scale.new_zeros(self.size, 1, 1, 0))

    @torch.no_grad()
    def block(self) -> Any:
        """Return q(u | θ_s), over ``(S, K, 1, P)``."""
        with handlers.given(self.batch.device, self.params, {}, self.theta, self.size):
            rows = self.batch if self.program.needs_rows else self.batch.head()
            nodes = poutine.trace(self.program.guide).get_trace(rows).nodes
        return nodes[LOCAL]["fn"].detached

    @property
    def width(self) -> int:
        """The result of :func:`rows_width`."""
        return rows_width(self.program, self.batch)

    def log_joint(self, u: Tensor) -> Tensor:
        """Compute log p(u, D_i | θ_s) of values of the block ``(R, S, K, 1, P)``: ``(R, S, K)``."""
        z = self.z.repeat(len(u), 1, 1, 1)
        (found,) = self.run(_log_joint, self.width, u.flatten(0, 1), z)
        return found.unflatten(0, u.shape[:2])

    def run(self, function: Any, numbers: int, *draws: Tensor) -> list[Tensor]:
        """Compute a function of (program, params, rows, draws) for blocks of draws."""
        return in_blocks(function, self.program, (self.params, self.batch), draws, numbers)


def _log_joint(
    program: Program, params: Params, batch: Batch, u: Tensor, z: Tensor
) -> list[Tensor]:
    """Compute log p(u, D_i | θ) of values of the block ``(S, K, 1, P)`` at z ``(S, 1, 1, D)``: ``(S, K)``."""
    found = program.guide.block_log_joint(params, batch, u, z)
    return [torch.as_tensor(found).expand(len(z), len(batch))]


def _value_and_curvature(
    program: Program, params: Params, batch: Batch, u: Tensor, z: Tensor
) -> list[Tensor]:
    """Compute the log density at u, its gradient and its curvature, as :func:`_log_joint`."""

    def log_joint(u: Tensor) -> Tensor:
        return _log_joint(program, params, batch, u[0], z)[0][None]

    with torch.enable_grad():
        return [x.detach() for x in newton.value_and_curvature(log_joint, u)]


def _quadrature(
    program: Program,
    params: Params,
    batch: Batch,
    points: tuple[Tensor, Tensor],
    mode: Tensor,
    root: Tensor,
    z: Tensor,
) -> list[Tensor]:
    """Estimate log p(D_i | θ) by the points of :func:`_points` around a Normal approximation, ``(S, K)``."""
    white, log_weights = points
    white = torch.where(is_below_precision(mode, root)[..., None], 0.0, white.to(root))
    columns = zip(root.unbind(-1), white.unsqueeze(-2).unbind(-1), strict=True)
    u = mode + sum(column * number for column, number in columns)
    (found,) = _log_joint(program, params, batch, u.flatten(0, 1), z.repeat(len(u), 1, 1, 1))
    over = (log_weights[:, None, None] + white.square().sum(-1).squeeze(-1) / 2).to(found)
    level = log_volume(root)
    total = (found.unflatten(0, u.shape[:2]) + over).nan_to_num(-torch.inf).logsumexp(0)
    return [total.double() + level.squeeze(-1)]


def log_volume(root: Tensor) -> Tensor:
    """Return −log of the density of a Normal at its mean, ``(...)``, from a triangular root ``(..., P, P)``."""
    return root.diagonal(dim1=-2, dim2=-1).log().sum(-1) + root.shape[-1] / 2 * LOG_TAU


def is_below_precision(mode: Tensor, root: Tensor) -> Tensor:
    """Return where variables are so close to their mode that numbers hardly tell them apart, ``(S, K, 1)``.

    Points around the mode round to it there, so that only Laplace's approximation itself gives an estimate. Likelihoods
    are constant over such distances, but for those of data that are no more precise than numbers.
    """
    spread = root.diagonal(dim1=-2, dim2=-1)
    return (spread < ROUNDING * torch.finfo(mode.dtype).eps * mode.abs()).any(-1)


def laplace_candidates(given: Conditionals, mode: Tensor, root: Tensor, noise: Noise) -> Candidates:
    """Draw clients' variables from a Laplace approximation at each draw of θ, and compute their log weights.

    Args:
        given: posteriors of a program for which :func:`has_block` is true.
        mode: their modes, from :func:`laplace_approximation`.
        root: roots of the covariances there, from the same function.
        noise: noise of the block, for ``EACH / 2 * S`` draws.
    """
    eps = noise[LOCAL][0].unflatten(0, (-1, given.size))
    away = (root @ eps[..., None]).squeeze(-1)
    draws = torch.cat([mode + away, mode - away])
    with torch.no_grad():
        level = log_volume(root)
        density = -eps.square().sum(-1) / 2 - level
        found = given.log_joint(draws).double() - torch.cat([density, density]).squeeze(-1).double()
    return Candidates(draws, found.nan_to_num(-torch.inf))


def laplace_evidence(given: Conditionals, mode: Tensor, root: Tensor, keys: Tensor) -> Tensor:
    """Estimate log p(D_i | θ_s) by quadrature, ``(S, K)`` in double precision.

    Of many draws of θ, quadrature is computed at a few. A polynomial in θ that is fitted to its difference from
    Laplace's approximation gives it at the others, but not at draws that are far from these few, nor of clients for
    whom it is off at further draws.

    Args:
        given: as of :func:`laplace_candidates`, with ``mode`` and ``root``.
        mode: û_s.
        root: a root of H_s⁻¹.
        keys: the clients' noise streams, ``(K,)``.
    """
    polynomial = find_polynomial(given.z[:, 0, 0], DEGREE)
    if polynomial is None:
        return _by_points(given, mode, root, keys)
    level = log_volume(root)
    laplace = (given.log_joint(mode[None])[0] + level.squeeze(-1)).double()
    few, count = torch.cat([polynomial.few, polynomial.tests()]), len(polynomial.few)
    some = _by_points(given.at(few), mode[few], root[few], keys)
    differences = some - laplace[few]
    fitted = polynomial.fitted(differences[:count])
    errors = fitted[few[count:]] - differences[count:]
    good = errors.square().mean(0).sqrt() < ERROR
    of_sum = errors[:, good].sum(1).square().mean().sqrt()
    if not bool(of_sum < ERROR_OF_SUM * len(keys) / given.program.clients):
        return _by_points(given, mode, root, keys)
    evidence = laplace + fitted
    evidence[few] = some
    if len(far := polynomial.far):
        evidence[far] = _by_points(given.at(far), mode[far], root[far], keys)
    if len(poor := (~good).nonzero()[:, 0]):
        own = given.of_clients(poor)
        evidence[:, poor] = _by_points(own, mode[:, poor], root[:, poor], keys[poor])
    return evidence


def _by_points(given: Conditionals, mode: Tensor, root: Tensor, keys: Tensor) -> Tensor:
    """Estimate log p(D_i | θ_s) by quadrature at all draws of θ; arguments as of :func:`laplace_evidence`."""
    white, log_weights = _points(mode.shape[-1], keys)
    fixed = given.params, given.batch, (white, log_weights)
    numbers = given.width * len(white)
    return in_blocks(_quadrature, given.program, fixed, [mode, root, given.z], numbers)[0]


def _points(size: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return z ``(L, 1, K or 1, 1, P)`` and log c ``(L,)`` of quadrature over a standard Normal in P dimensions."""
    if size not in NODES:
        half = Draw("normal", (POINTS // 2, size))(fold(keys, word("points")), torch.float64)
        z = torch.cat([half, -half], 1).transpose(0, 1)[:, None, :, None]
        return z, z.new_full((POINTS,), -math.log(POINTS))
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES[size])
    axis, log_weight = keys.new_tensor(nodes, dtype=torch.float64), np.log(weights / weights.sum())
    z = torch.cartesian_prod(*[axis] * size).reshape(-1, 1, 1, 1, size)
    each = torch.cartesian_prod(*[keys.new_tensor(log_weight, dtype=torch.float64)] * size)
    return z, each.reshape(len(z), size).sum(1)


def laplace_approximation(given: Conditionals) -> tuple[Tensor, Tensor]:
    """Return û_s ``(S, K, 1, P)`` and a root of H_s⁻¹ ``(S, K, 1, P, P)``; ``given`` as of :func:`laplace_candidates`.

    Of many draws of θ, the modes at a few are found by Newton's method. A polynomial in θ that is fitted to these is so
    close to the others that one Newton step is enough at most of them.
    """
    if given.program.guide.structure is not None:  # q is the approximation
        q = given.block()
        return q.mean, q.scale_tril
    different, draws = _without_repetition(given)
    u, precision = _fitted_modes(different) or _modes(different)
    return u[draws], inverse_root(precision)[draws]


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
    _, scale = _prior(given)
    if not bool(scale.isfinite().all()):
        return None
    u = polynomial.fitted(_modes(given.at(polynomial.few))[0])
    least = LEAST_CURVATURE / scale.square()
    _, gradient, hessian = _derivatives(given, u, torch.arange(given.size))
    precision = newton.positive(-hessian, least)
    step = torch.linalg.solve_ex(precision, gradient[..., None])[0].squeeze(-1)
    gain = (gradient * step).sum((-2, -1))
    far = (~(gain < TOLERANCE)).any(1).nonzero()[:, 0]
    u = u + step
    if len(far):
        u[far], precision[far] = _modes(given.at(far))
    return u, precision


def _modes(given: Conditionals) -> tuple[Tensor, Tensor]:
    """Return û_s ``(S, K, 1, P)`` and H_s ``(S, K, 1, P, P)``.

    Newton steps, with a line search where a whole step makes the density lower, go on for each client and draw of θ
    until they gain less than a tolerance, whichever other clients are there.
    """
    start, least = _start(given)
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
            shorter = newton.line_search(given.at(some).log_joint, u[some] - step[some], step[some])
            u[some] = torch.where(late[far][..., None, None], shorter, u[some])
            for value, new in zip(found, _derivatives(given, u, some), strict=True):
                value[far] = new
        reached[moving], gradient, hessian = found
        here = newton.positive(-hessian, least[moving])
        precision[moving] = torch.where(active[..., None, None, None], here, precision[moving])
        new = torch.linalg.solve_ex(here, gradient[..., None])[0].squeeze(-1).nan_to_num(0.0)
        last = ~((gradient * new).sum((-2, -1)) > TOLERANCE)
        taken = active & last if number == STEPS else active
        step[moving] = torch.where(taken[..., None, None], new, 0.0)
        u[moving] += step[moving]
        ended[moving] |= last
        moving = moving[~ended[moving].all(1)]
        if not len(moving):
            break
    return u, precision


def _derivatives(given: Conditionals, u: Tensor, draws: Tensor) -> list[Tensor]:
    """Return the log density at u of some draws of θ, its gradient and its curvature."""
    numbers = given.width * (2 + u.shape[-1])
    return given.run(_value_and_curvature, numbers, u[draws], given.z[draws])


@torch.no_grad()
def _start(given: Conditionals) -> tuple[Tensor, Tensor]:
    """Return where Newton's method starts, and the least curvature, ``(S, K, 1, P)`` each.

    The mean of q is linear in θ, and far from the posterior where θ is far from the centre of q(θ). The location of the
    prior is taken where it has the larger density.
    """
    q = given.block()
    prior, scale = _prior(given)
    both = torch.stack([q.mean, prior.expand_as(q.mean)])
    best = given.log_joint(both).nan_to_num(-torch.inf).argmax(0)
    start = both.gather(0, best[None, ..., None, None].expand_as(both[:1]))[0]
    variance = torch.where(scale.isfinite(), scale.square(), q.variance)
    return start, LEAST_CURVATURE / variance


def has_normal_prior(given: Conditionals) -> bool:
    """Return whether the clients' variables are a block with Normal priors."""
    return has_block(given.program) and bool(_prior(given)[1].isfinite().all())


@torch.no_grad()
def _prior(given: Conditionals) -> tuple[Tensor, Tensor]:
    """Return location and scale of the block's Normal priors, over ``(S, K, 1, P)``; infinite scales of others."""
    program, params, _, batch, size = given
    with handlers.given(batch.device, params, noise={}, draws=size):
        prior: tuple[Tensor, Tensor] = program.guide.block_prior(given.z, batch.head())
    return prior
