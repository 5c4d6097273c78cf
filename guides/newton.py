"""Newton's method for K functions at once, each of a few variables."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._vmap_internals import _vmap
from torch.autograd.graph import _engine_run_backward

from bayesfed.tracing.compiler import tracing

NEWTON_STEPS = 6
TOLERANCE = 1e-4
"""A Newton step with twice its predicted gain below this, in nats, is the last one. It leaves a far smaller error."""
LARGEST = 1e15
"""The largest entry of a matrix whose eigenvalues are computed: its square is a number in single precision."""
FRACTIONS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.0)
"""Fractions of a Newton step that the line search tries."""


def newton(
    objective: Callable[[Tensor], Tensor],
    precision: Tensor,
    u: Tensor,
    steps: int = NEWTON_STEPS,
    tolerance: float = 0.0,
) -> Tensor:
    """The maxima ``(K, 1, P)`` of K functions, by Newton steps from u with a line search.

    Args:
        objective: a function of ``(S, K, 1, P)`` that returns ``(S, K)``. Several dimensions may stand in place of K.
        precision: a lower bound of the negative curvature, diagonal: ``(K, 1, P)``.
        u: the start, ``(K, 1, P)``.
        steps: the largest number of steps.
        tolerance: stop if twice the predicted gain of every step is below it. Only on a CPU: elsewhere, reading it
            would wait for the device.
    """
    for _ in range(steps):
        step, gain = newton_step(objective, precision, u)
        asks = tolerance > 0 and u.device.type == "cpu" and not tracing()
        if asks and float(gain.max()) < tolerance:
            break
        u = line_search(objective, u, step)
    return u


def newton_step(
    objective: Callable[[Tensor], Tensor], precision: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """A Newton step, and twice the gain that it has if the objective is quadratic ``(K,)``; see :func:`newton`.

    Along directions in which the objective curves upwards the step has the length of one against that curvature.
    """
    grad, hessian = curvature(objective, u)
    step = torch.linalg.solve_ex(magnitude(-hessian, precision), grad[..., None])[0].squeeze(-1)
    return step, (grad * step).detach().sum((-2, -1))


def is_going(gain: Tensor, u: Tensor, moved: Tensor) -> Tensor:
    """Whether K functions are worth another step after one from u to ``moved``, bool ``(K,)``.

    They are not where the line search found nothing better than u, to round-off: the next step would be the same.
    """
    return (gain > TOLERANCE) & (moved != u).any(-1).any(-1)


@torch.no_grad()
def line_search(objective: Callable[[Tensor], Tensor], u: Tensor, step: Tensor) -> Tensor:
    """Return u after the best of the fractions :data:`FRACTIONS` of a step."""
    fractions = torch.tensor(FRACTIONS, dtype=u.dtype, device=u.device).reshape(-1, *[1] * u.ndim)
    tried = u + fractions * step
    return highest(tried, objective(tried))


def highest(points: Tensor, values: Tensor) -> Tensor:
    """Return those of points ``(R, ..., K, 1, P)`` with the largest values ``(R, ..., K)``: ``(..., K, 1, P)``."""
    best = values.nan_to_num(-torch.inf).max(0).indices  # up to ten times as fast as argmax
    return points.gather(0, best[None, ..., None, None].expand_as(points[:1]))[0]


def curvature(f: Callable[[Tensor], Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
    """∇f ``(K, 1, P)`` and ∇²f ``(K, 1, P, P)`` at u ``(K, 1, P)``, f as in :func:`newton`."""
    return value_and_curvature(f, u)[1:]


def value_and_curvature(f: Callable[[Tensor], Tensor], u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """f ``(K,)``, and :func:`curvature`."""
    u = u.detach().requires_grad_()
    value = f(u[None])[0]
    return value.detach(), *_derivatives(value, u)


def attached_curvature(f: Callable[[Tensor], Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`curvature` at a u that requires gradients, and that may be computed from other variables of f."""
    return _derivatives(f(u[None]), u)


def _derivatives(value: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The first and second derivatives of values ``(..., K)`` in u ``(K, 1, P)``."""
    grad = attached_gradient(value, u)
    return grad, jacobian(grad, u)


def attached_gradient(value: Tensor, u: Tensor) -> Tensor:
    """The derivatives of values ``(..., K)`` in u ``(K, 1, P)``, which can be derived again."""
    value = value.sum()
    if not value.requires_grad:  # f does not depend on u
        value = value + 0.0 * u.sum()
    (grad,) = torch.autograd.grad(value, u, create_graph=True, materialize_grads=True)
    return grad


def jacobian(values: Tensor, x: Tensor) -> Tensor:
    """The derivatives of ``(..., P)`` in x ``(..., D)``, independent along the leading dimensions: ``(..., P, D)``."""
    return jacobians(values, x)[0]


def jacobians(values: Tensor, *xs: Tensor) -> list[Tensor]:
    """:func:`jacobian` in each of several variables, by one pass."""
    size = values.shape[-1]
    found: Sequence[Tensor | None] = [None] * len(xs)
    if values.requires_grad:
        each = torch.eye(size, dtype=values.dtype, device=values.device)
        each = each.reshape(size, *[1] * (values.ndim - 1), size).expand(size, *values.shape)
        found = pull_back(values, xs, each)
    return [
        x.new_zeros(*x.shape[:-1], size, x.shape[-1]) if d is None else d.movedim(0, -2)
        for x, d in zip(xs, found, strict=True)
    ]


def pull_back(
    values: Tensor,
    xs: Sequence[Tensor],
    vectors: Tensor,
    attached: bool = True,
    one_by_one: bool = False,
) -> Sequence[Tensor | None]:
    """The products of C vectors, ``(C, ...)`` of the shape of values, with their derivatives in each x: ``(C, ...)``.

    None where values do not depend on x. It is ``torch.autograd.grad(..., is_grads_batched=True)`` without its
    comparison of shapes, for which that imports SymPy: 0.4 s of the first fit in a process.

    Args:
        values: what is derived.
        xs: the variables.
        vectors: the C vectors.
        attached: the products can be derived again.
        one_by_one: compute the products one after another: at once, torch copies each matrix that values were
            multiplied with for each of them.
    """

    def product(vector: Tensor) -> Sequence[Tensor | None]:
        keep = attached or one_by_one
        return _engine_run_backward(
            (values,), (vector,), keep, attached, tuple(xs), True, accumulate_grad=False
        )

    if one_by_one:
        parts = zip(*[product(vector) for vector in vectors], strict=True)
        return [None if part[0] is None else torch.stack(part) for part in parts]
    return _vmap(product, 0, 0, allow_none_pass_through=True)(vectors)


def positive(precision: Tensor, least: Tensor) -> Tensor:
    """The matrix with its eigenvalues, in units of the diagonal ``least``, raised to at least 1."""
    if not bool(is_below(precision, least).any()):
        return precision
    values, vectors, units = _eigen(precision, least)
    return (vectors * values.clamp(min=1.0)[..., None, :]) @ vectors.mT * units


def is_below(precision: Tensor, least: Tensor) -> Tensor:
    """Return whether an eigenvalue of matrices ``(..., P, P)``, in units of the diagonal ``least``, is below 1."""
    return torch.linalg.cholesky_ex(precision - torch.diag_embed(least))[1] != 0


def magnitude(precision: Tensor, least: Tensor) -> Tensor:
    """The matrix with the absolute values of its eigenvalues, in units of the diagonal ``least``, raised to at least 1.

    Where a function curves away from its maximum, a step whose length rests on that curvature is not too long (Dauphin
    et al. 2014, *Identifying and attacking the saddle point problem in high-dimensional non-convex optimization*).
    """
    values, vectors, units = _eigen(precision, least)
    return (vectors * values.abs().clamp(min=1.0)[..., None, :]) @ vectors.mT * units


def _eigen(precision: Tensor, least: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the eigenvalues and eigenvectors of the matrix in units of the diagonal ``least``, and these units."""
    root = least.sqrt()
    units = root[..., None] * root[..., None, :]
    return *eigen(precision / units), units


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of :func:`within_range`; in double precision where single precision has none."""
    matrix = within_range(matrix)
    try:
        return tuple(torch.linalg.eigh(matrix))
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        values, vectors = torch.linalg.eigh(matrix.double())
        return values.to(matrix), vectors.to(matrix)


def within_range(matrix: Tensor) -> Tensor:
    """The matrix with NaN as 0 and entries so large as to overflow in an eigenvalue decomposition made smaller."""
    return matrix.nan_to_num().clamp(-LARGEST, LARGEST)
