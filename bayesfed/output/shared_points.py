"""Estimates of log p(D_i | θ_s) from densities of a client's rows at points that all θ_s share.

    log Σ_l c p(D_i | v_l, z̄) p(u_sl | θ_s),   u_sl = v_l − M (z_s − z̄)

z are the global variables and u the block of the client's local ones, both unconstrained. In many models rows depend on
the globals only as they depend on u: a random intercept and slope move the linear predictor as the average intercept
and slope do. Then a matrix M satisfies p(D_i | u, z) = p(D_i | u + M (z − z̄), z̄) for all u and z, and the rows are read
at the points v_l once, however many θ_s there are; at each of these only the prior of u is evaluated, a Normal, whose
logarithm is a polynomial. M is found from gradients. Where there is none, as with the scale of the outcome among the
globals, nothing is estimated here.

The points are a lattice around the mode of u given z̄, whose sum is exact but for terms that fall exponentially with the
square of the density of points, for any smooth density (Trefethen & Weideman 2014, *The exponentially convergent
trapezoidal rule*). The sum over every second point shows the error, and the share of the outermost ones what lies
beyond.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.noise import Draw, key
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.family import GLOBAL
from bayesfed.output.conditionals import Conditionals, has_block
from bayesfed.output.evidence import ERROR_OF_SUM, evidence_chunks, is_below_precision
from bayesfed.output.fitted import Fitted
from bayesfed.output.modes import laplace_approximation
from bayesfed.output.polynomials import find_polynomial
from bayesfed.steps.optimizer import where_active
from bayesfed.tracing.blocks import in_blocks

SomeFitted = TypeVar("SomeFitted", bound=Fitted)
SPACING, REACH = {1: 0.7, 2: 0.9}, 5.5
"""The distance between neighbours in the lattices of one or two variables, and from the mode to the farthest points, in
standard deviations of Laplace's approximation."""
COMPARED, EXAMINED, NEAR = 6, 20, 0.3
"""The values of z and of u at which gradients are compared; the clients that show whether there may be such a matrix,
and how far from the middle of the prior of u they are examined, in units of its spread."""
SAME, NOTHING = 1e-3, 1e-5
"""The largest error of a gradient in a global by those in the client's variables, relative to the largest such
gradient; the gradient, relative to the largest in any variable, that is none."""
POOR, BEYOND = 0.02, 0.01
"""The difference from the sum over half of the points above which a client needs others; the mass beyond the lattice,
relative to that of its outermost points."""
MANY, FEWEST = 3e5, 16
"""The number of all clients' rows times draws of θ above which it pays to look for points that these share, and the
least number of draws."""
TOGETHER, DEGREE, ASIDE = 500_000, 2, 0.2
"""Numbers that are added up at once; the degree of polynomials in θ in place of moments, and the distance of a mean, in
standard deviations, at which they are not used."""


class SharedPoints(NamedTuple):
    """Points for K clients, and the densities of their rows there.

    Attributes:
        moved: M, ``(P, D)``.
        centre: z̄, ``(1, 1, 1, D)``.
        mode: the mode of u given z̄, ``(K, 1, P)``.
        root: a root of the covariance of Laplace's approximation there, ``(K, 1, P, P)``.
        log_densities: log p(D_i | v_l, z̄) and the logarithm of a point's volume, ``(K, L)``, in double precision.
    """

    moved: Tensor
    centre: Tensor
    mode: Tensor
    root: Tensor
    log_densities: Tensor

    def of_clients(self, clients: Tensor) -> SharedPoints:
        """Return those of some of the clients, by position."""
        each = {name: getattr(self, name)[clients] for name in ("mode", "root", "log_densities")}
        return self._replace(**each)

    def around(self, white: Tensor) -> Tensor:
        """Return û + H^{−½} x for x ``(L, P)``: ``(L, K, 1, P)``."""
        return _around(self.mode[None], self.root[None], white)


_sharing: dict[int, bool] = {}
"""Of each program, by its identity, whether there is a matrix M for some clients."""
_found: WeakKeyDictionary[Fitted, SharedPoints | None] = WeakKeyDictionary()
"""Of each posterior the points."""


@torch.no_grad()
def share_points(fitted: Fitted, z: Tensor, count: int) -> bool:
    """Return whether some clients have a matrix M and Normal priors, and shared points pay for so many draws of θ.

    Args:
        fitted: q, of whose clients no parameters are read.
        z: a few draws of θ, ``(S, D)``.
        count: the number of draws.
    """
    if not _pay(fitted, count):
        return False
    program = fitted.program
    if id(program) not in _sharing:
        few = z[torch.linspace(0, len(z) - 1, COMPARED, device=z.device).long(), None, None]
        _sharing[id(program)] = _some_share_points(fitted, few)
        weakref.finalize(program, _sharing.pop, id(program), None)
    return _sharing[id(program)]


@torch.no_grad()
def shared_points(fitted: Fitted, z: Tensor) -> SharedPoints | None:
    """Return points of all clients; None if there is no M, or if they would not pay for so many draws of θ.

    They are found once for each ``fitted``, around the median of the first draws.

    Args:
        fitted: q of the clients.
        z: draws of θ, ``(S, D)``.
    """
    if not share_points(fitted, z, len(z)):
        return None
    if fitted not in _found:
        _found[fitted] = _find_points(fitted, z[:, None, None])
    return _found[fitted]


def evidence_by_shared_points(points: SharedPoints, given: Conditionals) -> Tensor:
    """Estimate log p(D_i | θ_s), ``(S, K)`` in double precision; NaN where shared points do not give it.

    That is of clients for whom the points are too few, and at draws of θ too far from the others.

    Args:
        points: those of these clients.
        given: their posteriors.
    """
    prior = _quadratic_priors(points, given)
    if prior is None:
        return points.log_densities.new_full((given.size, len(points.mode)), torch.nan)
    lattice, second, outermost = _lattice(given.program)
    which = torch.stack([torch.ones_like(lattice[:, 0]), 2 * second, outermost])
    (total, half, beyond), level = _sums(points, lattice, prior, which)
    found, half, beyond = total.log() + level, half.log() + level, beyond / total
    errors = (half - found).square() / 4 + BEYOND * beyond
    poor = ~((half - found).abs().nanmedian(0).values < POOR)
    poor |= is_below_precision(points.mode, points.root).squeeze(-1)
    limit = ERROR_OF_SUM * len(poor) / given.program.clients
    far = ~(errors[:, ~poor].sum(1) < limit)
    found[:, poor], found[far] = torch.nan, torch.nan
    return found


def normals_by_shared_points(
    points: SharedPoints, given: Conditionals
) -> tuple[Tensor, Tensor] | None:
    """Return means ``(S, K, 1, P)`` of u given θ_s and roots of the covariances, ``(S, K, 1, P, P)``, about.

    They are NaN of clients for whom the points are too few. Of many draws of θ they are computed at a few, and are
    polynomials in θ at the others, if these are close at some of the farthest. None where the prior of u is not Normal.

    Args:
        points: those of these clients.
        given: their posteriors.
    """
    polynomial = find_polynomial(given.z[:, 0, 0], DEGREE)
    some = torch.arange(given.size)
    if polynomial is not None:
        some = torch.cat([polynomial.few, polynomial.tests()])
    if (found := _moments(points, given.at(some))) is None:
        return None
    mean, root = found
    if polynomial is not None:
        count = len(polynomial.few)
        fitted_mean, fitted_root = (polynomial.fitted(x[:count]) for x in found)
        fitted_mean[some], fitted_root[some] = mean, root
        close = torch.linalg.solve_triangular(
            root, (polynomial.fitted(mean[:count])[some] - mean)[..., None], upper=False
        )
        mean, root = fitted_mean, fitted_root
        if not bool((close[count:].nan_to_num(0.0).abs() < ASIDE).all()):
            rest = polynomial.others(some)
            others = _moments(points, given.at(rest))
            assert others is not None
            mean[rest], root[rest] = others
    own = points.root.double()
    offset = ((given.z - points.centre) @ points.moved.mT).double()
    u = points.mode + (own @ mean[:, :, None, :, None]).squeeze(-1) - offset
    return u.to(points.mode), (own @ root[:, :, None]).to(points.mode)


@torch.no_grad()
def with_moments(fitted: SomeFitted, z: Tensor) -> SomeFitted:
    """Return q with clients' factors by which q(w_i | θ) has the moments of their posteriors at the centre of q(θ).

    A posterior with skewness γ makes log weights of a variance of γ² / 6, by Laplace's approximation 5 γ² / 12. Clients
    for whom the points are too few keep what they have; all do where there are none.

    Args:
        fitted: q of the clients.
        z: draws of θ, ``(S, D)``.
    """
    points, guide = shared_points(fitted, z), fitted.program.guide
    if points is None:
        return fitted
    parts: list[Params] = []
    for chunk in evidence_chunks(fitted, len(points.log_densities[0])):
        params, batch = fitted.params_of(chunk), fitted.federation.batch(chunk)
        centre = guide.block_prior_at_centre(params, batch).z[:1, None]
        given = Conditionals(fitted.program, params, {GLOBAL: centre}, batch, 1)
        phi = {name: params[name] for name in fitted.local_params}
        normals = normals_by_shared_points(points.of_clients(chunk), given)
        if normals is None:
            return fitted
        mean, root = (value[0] for value in normals)
        moved = guide.with_moments(params, phi, batch, mean, root)
        known = torch.cat([v.flatten(1) for v in moved.values()], 1).isfinite().all(1)
        parts.append(where_active(phi, moved, known))
    local_params = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    found = replace(fitted, local_params=local_params)
    _found[found] = points
    return found


def _moments(points: SharedPoints, given: Conditionals) -> tuple[Tensor, Tensor] | None:
    """Return the mean ``(S, K, P)`` of x, v = û + H^{−½} x, and a root of its covariance, ``(S, K, P, P)``.

    They are NaN of clients for whom the points are too few at most draws, or do not give a covariance at some.
    """
    if (prior := _quadratic_priors(points, given)) is None:
        return None
    lattice, second, _ = _lattice(given.program)
    sums, _ = _sums(points, lattice, prior, torch.cat([_powers(lattice).mT, 2.0 * second[None]]))
    half, moments = sums[-1] / sums[0], (sums[1:-1] / sums[0]).movedim(0, -1)
    size = points.mode.shape[-1]
    mean, (row, column) = moments[..., :size], torch.triu_indices(size, size)
    covariance = moments.new_empty(*moments.shape[:2], size, size)
    covariance[..., row, column] = covariance[..., column, row] = moments[..., size:]
    covariance = covariance - mean[..., :, None] * mean[..., None, :]
    root, failed = torch.linalg.cholesky_ex(covariance.nan_to_num())
    poor = ~((half.log().abs().nanmedian(0).values < POOR) & (failed == 0).all(0))
    poor |= ~torch.cat([mean, root.flatten(2)], 2).isfinite().all(2).all(0)
    mean[:, poor], root[:, poor] = torch.nan, torch.nan
    return mean, root


def _pay(fitted: Fitted, count: int) -> bool:
    """Return whether clients have a block of few local variables, and rows and draws of θ are many."""
    if count < FEWEST or count * fitted.rows_read < MANY or not has_block(fitted.program):
        return False
    guide = fitted.program.guide
    return guide.structure is None and len(guide.block_scaling.loc) in SPACING


def _some_share_points(fitted: Fitted, z: Tensor) -> bool:
    """Return whether some clients have a matrix M and Normal priors at draws of θ, ``(S, 1, 1, D)``."""
    program, federation = fitted.program, fitted.federation
    batch = federation.batch(torch.arange(min(EXAMINED, len(federation))))
    scaling, params = program.guide.block_scaling, {**program.init_locals(batch), **fitted.params}
    mode = scaling.loc.to(z).expand(len(batch), 1, -1)
    root = NEAR * scaling.scale.to(z).diag().expand(len(batch), 1, -1, -1)
    u = _around(mode[None], root[None], _white(mode.shape[-1]))
    moved = _moved_by_globals(program, params, batch, u, z)
    if moved is None:
        return False
    points = SharedPoints(moved, z[:1], mode, root, root.new_zeros(0))
    return (
        _quadratic_priors(points, Conditionals(program, params, {GLOBAL: z}, batch, len(z)))
        is not None
    )


def _find_points(fitted: Fitted, z: Tensor) -> SharedPoints | None:
    """Return points of all clients around the median of draws of θ ``(S, 1, 1, D)``; None if there is no M."""
    centre, lattice = z.median(0, keepdim=True).values, _lattice(fitted.program)[0]
    parts: list[SharedPoints] = []
    for chunk in evidence_chunks(fitted, len(lattice)):
        program, params, batch = (
            fitted.program,
            fitted.params_of(chunk),
            fitted.federation.batch(chunk),
        )
        given = Conditionals(program, params, {GLOBAL: centre}, batch, 1)
        mode, root = laplace_approximation(given)
        few = z[torch.linspace(0, len(z) - 1, COMPARED, device=z.device).long()]
        u = _around(mode, root, _white(mode.shape[-1]))
        moved = _moved_by_globals(program, params, batch, u, few)
        if moved is None or (parts and not torch.allclose(moved, parts[0].moved, SAME, NOTHING)):
            return None
        points = SharedPoints(moved, centre, mode[0], root[0], root.new_zeros(0))
        parts.append(points._replace(log_densities=_log_densities(points, given)))
    own = ("mode", "root", "log_densities")
    return parts[0]._replace(**{n: torch.cat([getattr(part, n) for part in parts]) for n in own})


def _white(size: int) -> Tensor:
    """Return draws of a standard Normal at which gradients are compared, ``(S, P)``."""
    return Draw("normal", (COMPARED, size))(key(0), torch.float64)


def _moved_by_globals(
    program: Program, params: Params, batch: Batch, u: Tensor, z: Tensor
) -> Tensor | None:
    """Return M, ``(P, D)``; None if the rows depend on the globals in another way.

    Args:
        program: the model and its guide.
        params: parameters of the program and of K clients.
        batch: their rows.
        u: some values of the block, ``(S, K, 1, P)``.
        z: as many draws of θ, ``(S, 1, 1, D)``.
    """
    guide = program.guide
    with torch.enable_grad():
        u, z = (x.detach().clone().requires_grad_() for x in (u, z.expand(-1, len(batch), -1, -1)))
        rows = guide.block_log_density_of_rows(params, batch, u, z)
        of_u, of_z = (
            grad.flatten(0, 2).double()
            for grad in torch.autograd.grad(rows.sum(), [u, z], materialize_grads=True)
        )
    both = rows + guide.block_log_prior(params, batch.head(), u, z)
    joint = guide.block_log_joint(params, batch, u, z)
    if not torch.allclose(both, joint, rtol=SAME, atol=SAME):  # the prior reads the rows
        return None
    moved = torch.linalg.pinv(of_u) @ of_z
    largest = float(torch.cat([of_u, of_z], 1).abs().max())
    allowed = (SAME * of_z.abs().amax(0)).clamp(min=NOTHING * largest)
    same = bool(((of_z - of_u @ moved).abs().amax(0) <= allowed).all())
    return moved.to(z) if same else None


def _lattice(program: Program) -> tuple[Tensor, Tensor, Tensor]:
    """Return the points of the lattice around 0, ``(L, P)``, which every second of them are, and the outermost."""
    size = len(program.guide.block_scaling.loc)
    spacing = SPACING[size]
    most = int(REACH / spacing)
    axis = torch.arange(-most, most + 1, device=program.schema.device)
    steps = torch.cartesian_prod(*[axis] * size).reshape(-1, size)
    distance = spacing * steps.double().norm(dim=1)
    near = distance <= REACH
    return (
        spacing * steps[near].double(),
        steps[near].sum(1) % 2 == 0,
        distance[near] > REACH - spacing,
    )


def _log_densities(points: SharedPoints, given: Conditionals) -> Tensor:
    """Return the densities of the rows at the points, with the volume of each: ``(K, L)``."""
    white, _, _ = _lattice(given.program)
    u = points.around(white)
    z = points.centre.expand(len(u), 1, 1, -1)
    (found,) = given.run(_log_density_of_rows, given.width, u, z)
    size = white.shape[1]
    volume = points.root.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1)) + size * math.log(
        SPACING[size]
    )
    return (found.double() + volume).mT


def _log_density_of_rows(
    program: Program, params: Params, batch: Batch, u: Tensor, z: Tensor
) -> list[Tensor]:
    """Compute log p(D_i | u, z) at values of the block ``(S, K, 1, P)`` and z ``(S, 1, 1, D)``: ``(S, K)``."""
    found = program.guide.block_log_density_of_rows(params, batch, u, z)
    return [torch.as_tensor(found).expand(len(u), len(batch))]


def _quadratic_priors(points: SharedPoints, given: Conditionals) -> Tensor | None:
    """Return the coefficients of log p(u_s | θ_s) in the powers of x, v = û + H^{−½} x: ``(K, F, S)``.

    They are fitted to as many points, and compared with others. They are no numbers at draws of θ where the prior is
    not finite; None if it is no Normal.
    """
    size = points.mode.shape[-1]
    away = REACH * torch.eye(size, dtype=torch.float64, device=points.mode.device)
    if size == 1:
        fitted, others = torch.cat([0 * away, away, -away]), torch.cat([away, -away]) / 2
    else:
        diagonal = away.new_tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0]]) * REACH / math.sqrt(2)
        fitted = torch.cat([0 * away[:1], away, -away, diagonal[:1]])
        others = torch.cat([diagonal[1:], away / 2])
    at = points.around(torch.cat([fitted, others]))
    fixed = given.params, given.batch.head(), at
    offset = (given.z - points.centre) @ points.moved.mT
    (found,) = in_blocks(_log_priors, given.program, fixed, [offset, given.z], at.numel())
    values = found.double().permute(2, 1, 0)
    coefficients = torch.linalg.solve(_powers(fitted), values[:, : len(fitted)])
    errors = _powers(others) @ coefficients - values[:, len(fitted) :]
    normal = errors.abs() <= SAME * (1 + values.abs().amax(1, keepdim=True))
    finite = values.isfinite().all(1, keepdim=True)
    return coefficients if bool((normal | ~finite).all()) and bool(finite.any()) else None


def _log_priors(
    program: Program, params: Params, head: Batch, points: Tensor, offset: Tensor, z: Tensor
) -> list[Tensor]:
    """Compute log p(v − M (z − z̄) | z) at points ``(L, K, 1, P)`` and draws of θ, ``(S, L, K)``."""
    count = len(points)
    u, every = (points - offset[:, None]).flatten(0, 1), z.repeat_interleave(count, 0)
    prior = program.guide.block_log_prior(params, head, u, every)
    return [prior.unflatten(0, (len(z), count))]


def _sums(
    points: SharedPoints, lattice: Tensor, prior: Tensor, which: Tensor
) -> tuple[Tensor, Tensor]:
    """Return sums over the points of p(D_i | v_l, z̄) p(u_sl | θ_s) times some numbers of each point.

    Args:
        points: those of K clients.
        lattice: the points around 0, ``(L, P)``.
        prior: coefficients of log p(u_s | θ_s), ``(K, F, S)``.
        which: the numbers of each point, ``(R, L)``.

    Returns:
        The sums divided by the largest term, ``(R, S, K)``, and its logarithm, ``(S, K)``, in double precision.
    """
    level = points.log_densities.amax(1, keepdim=True)
    rows = (points.log_densities - level)[..., None]
    features = torch.cat([_powers(lattice).expand(len(rows), -1, -1), rows], -1).float()
    coefficients = torch.cat([prior, torch.ones_like(prior[:, :1])], 1).float()
    which, sums, most = which.float(), [], []
    each = max(1, TOGETHER // (features.shape[1] * prior.shape[2]))
    for some, own in zip(features.split(each), coefficients.split(each), strict=True):
        logs = some @ own
        most.append(logs.amax(1))
        sums.append(which @ logs.sub_(most[-1][:, None]).exp_())
    return torch.cat(sums).double().permute(1, 2, 0), (torch.cat(most).double() + level).mT


def _around(mode: Tensor, root: Tensor, white: Tensor) -> Tensor:
    """Return û + H^{−½} x for x ``(L, P)``: ``(L, K, 1, P)``; of ``(1, K, 1, P)`` and ``(1, K, 1, P, P)``."""
    return mode + (root @ white.to(root)[:, None, None, :, None]).squeeze(-1)


def _powers(x: Tensor) -> Tensor:
    """Return the powers and products of up to degree two of coordinates ``(L, P)``: ``(L, F)``."""
    products = x[:, :, None] * x[:, None]
    upper = torch.triu_indices(*[x.shape[1]] * 2)
    return torch.cat([torch.ones_like(x[:, :1]), x, products[:, upper[0], upper[1]]], 1)
