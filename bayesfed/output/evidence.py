"""Estimates of log p(D_i | θ_s) at draws of θ, by adaptive quadrature around a Laplace approximation.

    log Σ_l c_l p(u_sl, D_i | θ_s) / N(u_sl; û_s, H_s⁻¹),   u_sl = û_s + H_s^{−½} z_l

u is the block of the client's local variables. q(u | θ) is fitted around the centre of q(θ), with a mean that is linear
in θ; at a draw of θ far from the centre it may be a poor proposal. The Normal used here is the Laplace approximation at
θ_s itself, found by Newton steps from the mean of q. If the likelihood is Gaussian in u, the ratio equals log p(D_i |
θ_s) at every point. Otherwise z_l and c_l are the nodes and weights of Gauss-Hermite quadrature in one or two
dimensions (Liu & Pierce 1994, *A note on Gauss-Hermite quadrature*; ``nAGQ`` of lme4), and beyond these points of a
mixture of Normals of several widths, in pairs around 0, which each client makes once for all θ_s: a Sobol sequence
with a random shift (Cranley & Patterson 1976, *Randomization of number theoretic methods for multiple integration*).
c_l is the density of a standard Normal over that of the mixture, scaled to Σ_l c_l = 1, which keeps the estimate exact
for a Normal (Owen & Zhou 2000, *Safe and effective importance sampling*). Points that are the same at all draws of θ
make an error that is smooth in θ, most of which cancels in importance weights. The errors of points that are drawn anew
at each θ_s add up over clients, and leave the weights of a thousand clients no information.

A draw from N(û_s, H_s⁻¹), chosen among several by its weight, is closer to a draw from the client's posterior given θ_s
than a draw from q.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.chunks import EACH_VARIABLE, chunks, weight
from bayesfed.elbo.elbo import Noise
from bayesfed.elbo.noise import fold, uniform, word
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.hierarchical import LOCAL
from bayesfed.output.conditionals import Conditionals, is_laplace, log_joint
from bayesfed.output.fitted import Fitted
from bayesfed.output.polynomials import find_polynomial
from bayesfed.tracing.blocks import in_blocks
from bayesfed.tracing.compiler import tracing
from bayesfed.tracing.repetition import Repetition

EACH = 4
"""Draws of a client's variables for one of θ, in pairs, of which one is chosen; points that are evaluated at once."""
NODES = {1: 7, 2: 4}
"""Nodes of quadrature along each of one or two variables."""
POINTS, MANY, ROWS = 16, 128, 2e3
"""The number of points of more variables; the largest number, and the number of rows of all clients at which there are
as many. In between the rows by the points are constant."""
WIDTHS, WIDEST = (1.0, 1.0, 1.25, 2.0), 8
"""The widths of equal shares of the points, for tails that are heavier than a Normal's, and the number of variables
above which all have a width of 1."""
FEWER, COMPARED, WORTH = (1, 3), 32, 1e7
"""Fewer nodes that are compared with these (more variables have one point, their mode, in place of all), the draws of θ
at which they are, and the number of all rows' densities by all points above which that pays."""
DEGREE, ERROR, ERROR_OF_SUM = 2, 0.001, 0.02
"""The degree of polynomials in θ in place of quadrature; their largest root mean square error, in nats, of a client and
of all clients."""
AT_ONCE = 25
"""Draws of θ for which the rows of a chunk of clients may be in memory; then one draw of them is about a block."""
ROUNDING = 20
"""The least standard deviation of a variable that is apart from its mode, in units of its round-off."""
EDGE = 1e-12
"""The least distance of a point of the unit cube from its faces."""
LOG_TAU = math.log(math.tau)
COST = 8
"""Time relative to a single draw from q, about."""


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
        """Choose one of the L draws by weight, ``(S, K, 1, P)``; ``keys`` are the clients' noise streams ``(K,)``.

        Draws that are not finite, or whose weights are not, are not chosen where others are.
        """
        usable = self.log_weights.isfinite() & self.draws.isfinite().all(-1).squeeze(-1)
        weights = self.log_weights.where(usable, -torch.inf).softmax(0).nan_to_num(0.0)
        below = weights.cumsum(0)
        size = below.shape[1]
        u = uniform(fold(keys, word("picked")), (size,)).mT
        first = (below < u * below[-1]).sum(0).clamp(max=len(below) - 1)
        return self.draws.gather(0, first[None, ..., None, None].expand_as(self.draws[:1]))[0]


class _Points(NamedTuple):
    """Points of quadrature over a standard Normal in P dimensions.

    Attributes:
        white: ``(L, 1, K or 1, 1, P)``.
        log_weights: log c_l, ``(L, 1, K or 1)``.
    """

    white: Tensor
    log_weights: Tensor

    def of_clients(self, clients: Tensor) -> _Points:
        """Return those of some of the clients, by position."""
        if self.white.shape[2] == 1:
            return self
        return _Points(self.white[:, :, clients], self.log_weights[..., clients])


def evidence_chunks(fitted: Fitted, count: int) -> Iterator[Tensor]:
    """Yield positions of clients, as many at a time as estimates at ``count`` draws of θ need memory for.

    These have all clients' variables at all draws of θ in memory, but rows at those of a block only, unless the guide
    reads these.
    """
    program, own = fitted.program, EACH_VARIABLE * fitted.program.variables
    if not is_laplace(program):
        return chunks_by_blocks(fitted, count, own)
    federation = fitted.federation
    own += program.variables**2  # the roots of the covariances
    size = weight(own, federation.numbers_per_row, EACH * count, program.points)
    return chunks(federation.lengths, *size)


def chunks_by_blocks(fitted: Fitted, count: int, numbers: int) -> Iterator[Tensor]:
    """Yield positions of clients, as many at a time as fit into memory if their rows are there at a block of draws.

    Args:
        fitted: q of the clients.
        count: the number of draws of θ.
        numbers: those of a client that are in memory for each of all draws.
    """
    federation, copies = fitted.federation, min(count, AT_ONCE)
    _, row = weight(0, federation.numbers_per_row, copies, fitted.program.points)
    return chunks(federation.lengths, count * numbers, row)


def _quadrature(
    program: Program,
    params: Params,
    batch: Batch,
    points: _Points,
    mode: Tensor,
    root: Tensor,
    z: Tensor,
) -> list[Tensor]:
    """Estimate log p(D_i | θ) by points around a Normal approximation, ``(S, K)``."""
    white, log_weights = points
    white = white[:, 0, :, 0].expand(-1, mode.shape[1], -1).to(root)
    apart = ~is_below_precision(mode, root)
    away = torch.einsum("lkp,skqp->lskq", white, root[:, :, 0])
    u = mode + torch.where(apart, away, 0.0)[..., None, :]
    with Repetition(z, len(u)) if tracing() else nullcontext() as repetition:
        repeated = z.repeat(len(u), 1, 1, 1) if repetition is None else repetition.repeated
        (found,) = log_joint(program, params, batch, u.flatten(0, 1), repeated)
    squares = white.square().sum(-1)[:, None] * apart[..., 0]
    over = (log_weights + squares / 2).to(found)
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
        mode: their modes, from :func:`~bayesfed.output.modes.laplace_approximation`.
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

    Of clients for whom fewer points give the same at some draws of θ, by these.

    Args:
        given: as of :func:`laplace_candidates`, with ``mode`` and ``root``.
        mode: û_s.
        root: a root of H_s⁻¹.
        keys: the clients' noise streams, ``(K,)``.
    """
    evidence = mode.new_empty(mode.shape[:2], dtype=torch.float64)
    for points, clients in _enough_points(given, mode, root, keys):
        own = given if len(clients) == len(keys) else given.of_clients(clients)
        evidence[:, clients] = _by_polynomial(own, mode[:, clients], root[:, clients], points)
    return evidence


def _enough_points(
    given: Conditionals, mode: Tensor, root: Tensor, keys: Tensor
) -> Iterator[tuple[_Points, Tensor]]:
    """Yield points of quadrature, and the positions of the clients for whom they are enough."""
    size, rest = mode.shape[-1], torch.ones_like(keys, dtype=torch.bool)
    if size in NODES:
        most = _grid(size, NODES[size], keys)
    else:
        most = _pairs(size, _number_of_points(given.program.rows), keys)
    if given.size * given.program.rows * len(most.log_weights) > WORTH:
        few = torch.linspace(0, given.size - 1, COMPARED, device=mode.device).long()
        some = given.at(few), mode[few], root[few]
        best = _by_points(*some, most)
        limit = min(ERROR, ERROR_OF_SUM / given.program.clients)
        for nodes in FEWER if size in NODES else FEWER[:1]:
            points = _grid(size, nodes, keys)
            errors = _by_points(*some, points) - best
            enough = rest & (errors.square().mean(0).sqrt() < limit)
            if bool(enough.any()):
                yield points, enough.nonzero()[:, 0]
            rest = rest & ~enough
    if bool(rest.any()):
        clients = rest.nonzero()[:, 0]
        yield most.of_clients(clients), clients


def _by_polynomial(given: Conditionals, mode: Tensor, root: Tensor, points: _Points) -> Tensor:
    """Estimate log p(D_i | θ_s) by quadrature at a few of many draws of θ, ``(S, K)``.

    A polynomial in θ that is fitted to its difference from Laplace's approximation gives it at the others, but not at
    draws that are far from these few, nor of clients for whom it is off at further draws.
    """
    polynomial = find_polynomial(given.z[:, 0, 0], DEGREE)
    if polynomial is None or len(points.log_weights) == 1:
        return _by_points(given, mode, root, points)
    level = log_volume(root)
    laplace = (given.log_joint(mode[None])[0] + level.squeeze(-1)).double()
    few, count = torch.cat([polynomial.few, polynomial.tests()]), len(polynomial.few)
    some = _by_points(given.at(few), mode[few], root[few], points)
    differences = some - laplace[few]
    fitted = polynomial.fitted(differences[:count])
    errors = fitted[few[count:]] - differences[count:]
    good = errors.square().mean(0).sqrt() < ERROR
    of_sum = errors[:, good].sum(1).square().mean().sqrt()
    if not bool(of_sum < ERROR_OF_SUM * mode.shape[1] / given.program.clients):
        good = torch.zeros_like(good)
    evidence = laplace + fitted
    evidence[few] = some
    if len(far := polynomial.far):
        evidence[far] = _by_points(given.at(far), mode[far], root[far], points)
    if len(poor := (~good).nonzero()[:, 0]):
        others = polynomial.others(torch.cat([few, far]))
        own, at = given.at(others).of_clients(poor), (others[:, None], poor)
        evidence[at] = _by_points(own, mode[at], root[at], points.of_clients(poor))
    return evidence


def _by_points(given: Conditionals, mode: Tensor, root: Tensor, points: _Points) -> Tensor:
    """Estimate log p(D_i | θ_s) by quadrature at all draws of θ, ``(S, K)``."""
    fixed = given.params, given.batch, points
    numbers = given.width * len(points.log_weights)
    return in_blocks(_quadrature, given.program, fixed, [mode, root, given.z], numbers)[0]


def _number_of_points(rows: int) -> int:
    """Return the number of points of clients that have ``rows`` rows altogether, a power of two."""
    most = MANY * ROWS / max(rows, 1)
    return max(POINTS, min(MANY, 2 ** math.floor(math.log2(most))))


def _pairs(size: int, count: int, keys: Tensor) -> _Points:
    """Return points of each client, in pairs around 0, that cover a mixture of Normals evenly."""
    widths = WIDTHS if size <= WIDEST else (1.0,)
    sobol = torch.quasirandom.SobolEngine(size).draw(count // 2, dtype=torch.float64)
    shift = uniform(fold(keys, word("points")), (size,))
    u = (sobol.to(keys.device)[:, None] + shift).frac().clamp(EDGE, 1 - EDGE)
    width = shift.new_tensor(widths).repeat_interleave(count // 2 // len(widths))
    half = torch.special.ndtri(u) * width[:, None, None]
    white = torch.cat([half, -half])
    square = white.square().sum(-1)
    mixture = [-square / 2 / one**2 - size * math.log(one) for one in widths]
    log_weights = -square / 2 - torch.stack(mixture).logsumexp(0)
    return _Points(white[:, None, :, None], log_weights.log_softmax(0)[:, None])


def _grid(size: int, nodes: int, like: Tensor) -> _Points:
    """Return the nodes of Gauss-Hermite quadrature along each axis, and their products; ``like`` is on the device."""
    found, weights = np.polynomial.hermite_e.hermegauss(nodes)
    axis, log_weight = (
        like.new_tensor(x, dtype=torch.float64) for x in (found, np.log(weights / weights.sum()))
    )
    white, each = (torch.cartesian_prod(*[x] * size).reshape(-1, size) for x in (axis, log_weight))
    return _Points(white[:, None, None, None], each.sum(1)[:, None, None])
