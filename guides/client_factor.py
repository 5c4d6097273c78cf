"""A client's Gaussian factor in closed form: the curvature of its likelihood, at the centre of q(θ).

    û = argmax log p(D_i | u, z̄) + log p(u | z̄)          a few Newton steps (Tierney & Kadane 1986)
    H = −∇²_u log p(D_i | û, z̄) = C Cᵀ                   the factor's precision
    a = û + H⁻¹ ∇_u log p(D_i | û, z̄)                    its location
    C⁻¹ ∂²log p / ∂u∂z, ∂ log diag H / ∂z                 how they move with the globals (A and R)

Exact where the likelihood is Gaussian in u. A client takes it at each visit as the origin of what it learns:
φ_i moves by the change of this factor since the last visit, so that what it learnt by gradient steps is a
correction, and neither a first visit nor a shift of q(θ) between two rare visits leaves it far from its optimum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bayesfed.tracing.compiler import tracing

NEWTON_STEPS = 6
THERE = 1e-4
"""What a Newton step may be worth, in nats, to be the last: it leaves the mode far less than that."""
WEAKEST = 1e-2
"""The smallest eigenvalue of a factor's precision, in units of the prior's."""
FURTHEST = 3.0
"""How far a may lie from û along any axis of H, in units of the prior's spread: a flat likelihood with a slope would
put it anywhere, so H is raised until it does not."""
SIZES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.0)
"""Fractions of a Newton step of which the best is taken."""


def newton(
    objective: Callable[[Tensor], Tensor],
    precision: Tensor,
    u: Tensor,
    steps: int = NEWTON_STEPS,
    tolerance: float = 0.0,
) -> Tensor:
    """The mode of ``objective``, climbed from u with K rows at once.

    Args:
        objective: of ``(S, K, 1, P)``; gives ``(S, K)``. In place of K there may be several dimensions.
        precision: what the objective's curvature is at least, diagonal: ``(K, 1, P)``.
        u: where to start, ``(K, 1, P)``.
        steps: how many.
        tolerance: leave off where no step is worth more than this; on a CPU only, for asking waits for a device.
    """
    for _ in range(steps):
        step, worth = newton_step(objective, precision, u)
        asks = tolerance > 0 and u.device.type == "cpu" and not tracing()
        if asks and float(worth.max()) < tolerance:
            break
        u = best(objective, u, step)
    return u


def newton_step(
    objective: Callable[[Tensor], Tensor], precision: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """A Newton step, and twice what it is worth where all is quadratic: ``(K,)``; arguments as for :func:`newton`."""
    grad, hessian = curvature(objective, u)
    step = torch.linalg.solve_ex(positive(-hessian, precision), grad[..., None])[0].squeeze(-1)
    return step, (grad * step).detach().sum((-2, -1))


@torch.no_grad()
def best(objective: Callable[[Tensor], Tensor], u: Tensor, step: Tensor) -> Tensor:
    """Where the best fraction of a step leads."""
    sizes = torch.tensor(SIZES, dtype=u.dtype, device=u.device).reshape(-1, *[1] * u.ndim)
    tried = u + sizes * step
    first = objective(tried).nan_to_num(-torch.inf).argmax(0)
    return tried.gather(0, first[None, ..., None, None].expand(1, *u.shape))[0]


def curvature(f: Callable[[Tensor], Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
    """∇f ``(K, 1, P)`` and ∇²f ``(K, 1, P, P)`` at u ``(K, 1, P)``, f as in :func:`newton`."""
    return slope(f, u.detach().requires_grad_())


def slope(f: Callable[[Tensor], Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`curvature` at a u that requires gradients and may be made from other variables of f."""
    value = f(u[None]).sum()
    if not value.requires_grad:  # a variable that reaches the rows through others only
        value = value + 0.0 * u.sum()
    (grad,) = torch.autograd.grad(value, u, create_graph=True, materialize_grads=True)
    return grad, _rows(grad, u)


def _rows(values: Tensor, x: Tensor) -> Tensor:
    """The derivatives of ``(..., P)`` in x ``(..., D)``, rows apart: ``(..., P, D)``."""
    size, found = values.shape[-1], None
    if values.requires_grad:
        each = torch.eye(size, dtype=values.dtype, device=values.device)
        each = each.reshape(size, *[1] * (values.ndim - 1), size).expand(size, *values.shape)
        (found,) = torch.autograd.grad(
            values, x, each, create_graph=True, allow_unused=True, is_grads_batched=True
        )
    if found is None:
        return x.new_zeros(*x.shape[:-1], size, x.shape[-1])
    return found.movedim(0, -2)


def positive(precision: Tensor, least: Tensor) -> Tensor:
    """The matrix with its eigenvalues, in units of the diagonal ``least``, raised to 1 where they are below."""
    root = least.sqrt()
    units = root[..., None] * root[..., None, :]
    values, vectors = torch.linalg.eigh((precision / units).nan_to_num())
    return (vectors * values.clamp(min=1.0)[..., None, :]) @ vectors.mT * units


def factor(
    log_likelihood: Callable[[Tensor, Tensor], Tensor], mode: Tensor, z: Tensor
) -> dict[str, Tensor]:
    """The parameters of :func:`~bayesfed.guides.local.conditional` for K clients, one unit of c being one of z.

    Args:
        log_likelihood: of u ``(S, K, 1, P)`` and z ``(K, 1, D)``; gives ``(S, K)``.
        mode: û, ``(K, 1, P)``.
        z: the centre of q(θ), ``(K, 1, D)``.
    """
    z = z.detach().requires_grad_()
    grad, hessian = curvature(lambda u: log_likelihood(u, z), mode)
    values, vectors = torch.linalg.eigh(-hessian.detach().nan_to_num())
    pull = (vectors.mT @ grad.detach()[..., None]).squeeze(-1).abs()
    least = (pull / FURTHEST).clamp(min=WEAKEST)  # so that a is not far from û
    amount = (vectors * values.maximum(least)[..., None, :]) @ vectors.mT
    root = torch.linalg.cholesky_ex(amount).L
    further = torch.cholesky_solve(grad.detach()[..., None], root)
    at_loc = grad + (hessian @ further).squeeze(-1)  # ∇ log p at a, to second order
    moves = _rows(at_loc, z).detach()
    width = root.diagonal(dim1=-2, dim2=-1)
    widens = _rows(-hessian.diagonal(dim1=-2, dim2=-1), z).detach() / amount.diagonal(
        dim1=-2, dim2=-1
    ).unsqueeze(-1)
    return {
        "loc": mode + further.squeeze(-1),
        "log_precision": 2 * width.log(),
        "tril": (root / width[..., None]).tril(-1),
        "loc_weight": torch.linalg.solve_triangular(root, moves, upper=False),
        "precision_weight": widens,
    }
