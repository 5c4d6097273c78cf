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
beyond. Where the prior is narrower along an axis than the points are apart there is no estimate, since both sums may be
wrong alike.
"""

from __future__ import annotations

import math
import weakref
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bayesfed.data.absent import are_absent
from bayesfed.data.batch import Batch
from bayesfed.elbo.noise import Draw, key
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.family import GLOBAL
from bayesfed.output.conditionals import Conditionals, has_block
from bayesfed.output.evidence import evidence_chunks
from bayesfed.output.fitted import Fitted
from bayesfed.output.modes import laplace_approximation
from bayesfed.tracing.blocks import in_blocks

SPACING, REACH = {1: 0.7, 2: 0.9}, 5.5
"""The distance between neighbours in the lattices of one or two variables, and from the mode to the farthest points, in
standard deviations of Laplace's approximation."""
COMPARED, EXAMINED, NEAR = 6, 20, 0.3
"""The values of z and of u at which gradients are compared; the clients that show whether there may be such a matrix,
and how far from the middle of the prior of u they are examined, in units of its spread."""
SAME, NOTHING = 1e-3, 1e-5
"""The largest error of a gradient in a global by those in the client's variables, relative to the largest such
gradient; the gradient, relative to the largest in any variable, that is none."""
CLIENTS, EACH, ENOUGH = 20, 100, 200
"""The least number of clients for points that all θ share, and of rows of each unless clients are enough: of few
clients θ is uncertain, and where it matters more than their rows, the points are too far from their posteriors at many
draws of it."""
MANY, FEWEST = 3e5, 16
"""The number of rows of all clients times draws of θ above which the points pay, and the least number of draws."""

OF_CLIENTS = ("mode", "root", "log_densities")
"""The attributes of :class:`SharedPoints` that have a row for each client."""


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
        return self._replace(**{name: getattr(self, name)[clients] for name in OF_CLIENTS})

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


def keep_points(fitted: Fitted, points: SharedPoints) -> None:
    """Take these points for another q of the same clients."""
    _found[fitted] = points


def _pay(fitted: Fitted, count: int) -> bool:
    """Return whether clients have a block of few local variables, and clients, rows here and draws of θ are many."""
    program, guide = fitted.program, fitted.program.guide
    if are_absent(fitted.federation.fields):
        return False
    few = program.clients < (CLIENTS if program.rows >= EACH * program.clients else ENOUGH)
    many = count >= FEWEST and count * fitted.rows_read >= MANY
    if few or not many or not has_block(program):
        return False
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
        quadratic_priors(points, Conditionals(program, params, {GLOBAL: z}, batch, len(z)))
        is not None
    )


def _find_points(fitted: Fitted, z: Tensor) -> SharedPoints | None:
    """Return points of all clients around the median of draws of θ ``(S, 1, 1, D)``; None if there is no M."""
    centre, white = z.median(0, keepdim=True).values, lattice_points(fitted.program)[0]
    parts: list[SharedPoints] = []
    for chunk in evidence_chunks(fitted, len(white)):
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
    together = {n: torch.cat([getattr(part, n) for part in parts]) for n in OF_CLIENTS}
    return parts[0]._replace(**together)


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


def lattice_points(program: Program) -> tuple[Tensor, Tensor, Tensor]:
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
    white, _, _ = lattice_points(given.program)
    u = points.around(white)
    z = points.centre.expand(len(u), 1, 1, -1)
    (found,) = given.run(_log_density_of_rows, given.width, u, z)
    return (found.double() + point_volumes(points.root)).mT


def point_volumes(root: Tensor) -> Tensor:
    """Return the logarithm of the volume of a point of each client's lattice, ``(K,)``, from roots ``(K, 1, P, P)``."""
    size = root.shape[-1]
    return root.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1)) + size * math.log(SPACING[size])


def _log_density_of_rows(
    program: Program, params: Params, batch: Batch, u: Tensor, z: Tensor
) -> list[Tensor]:
    """Compute log p(D_i | u, z) at values of the block ``(S, K, 1, P)`` and z ``(S, 1, 1, D)``: ``(S, K)``."""
    found = program.guide.block_log_density_of_rows(params, batch, u, z)
    return [torch.as_tensor(found).expand(len(u), len(batch))]


def quadratic_priors(points: SharedPoints, given: Conditionals) -> Tensor | None:
    """Return the coefficients of log p(u_s | θ_s) in the powers of x, v = û + H^{−½} x: ``(K, F, S)``.

    They are fitted to as many points, and compared with others. They are no numbers at draws of θ where the prior is
    not finite, or differs by round-off; None if it is no Normal at most draws.
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
    coefficients = torch.linalg.solve(powers(fitted), values[:, : len(fitted)])
    errors = powers(others) @ coefficients - values[:, len(fitted) :]
    normal = errors.abs() <= SAME * (1 + values.abs().amax(1, keepdim=True))
    finite = values.isfinite().all(1, keepdim=True)
    known, usable = finite.all(0)[0], (normal & finite).all(0).all(0)
    if not bool(usable.sum() > known.sum() / 2):
        return None
    coefficients[..., ~usable] = torch.nan
    return coefficients


def _log_priors(
    program: Program, params: Params, head: Batch, points: Tensor, offset: Tensor, z: Tensor
) -> list[Tensor]:
    """Compute log p(v − M (z − z̄) | z) at points ``(L, K, 1, P)`` and draws of θ, ``(S, L, K)``."""
    count = len(points)
    u, every = (points - offset[:, None]).flatten(0, 1), z.repeat_interleave(count, 0)
    prior = program.guide.block_log_prior(params, head, u, every)
    return [prior.unflatten(0, (len(z), count))]


def _around(mode: Tensor, root: Tensor, white: Tensor) -> Tensor:
    """Return û + H^{−½} x for x ``(L, P)``: ``(L, K, 1, P)``; of ``(1, K, 1, P)`` and ``(1, K, 1, P, P)``."""
    return mode + (root @ white.to(root)[:, None, None, :, None]).squeeze(-1)


def powers(x: Tensor) -> Tensor:
    """Return the powers and products of up to degree two of coordinates ``(L, P)``: ``(L, F)``."""
    products = x[:, :, None] * x[:, None]
    upper = torch.triu_indices(*[x.shape[1]] * 2)
    return torch.cat([torch.ones_like(x[:, :1]), x, products[:, upper[0], upper[1]]], 1)
