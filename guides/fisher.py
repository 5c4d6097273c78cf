"""The diagonal Laplace guide's curvature: squared gradients of a client's loss, taken online or at one point.

    F̄ = mean over rows (and, online, over the steps t) of (∇ log p(y | x, w_t))²        (FOLA, eq. 22)

A loss here is a function ``(w, batch) -> (K,)`` of the weights ``(K, D)`` of K clients: the mean of their rows'
−log p(y | x, w).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bayesfed.plates import Batch, Fields

FISHERS = ("per-sample", "batch", "hessian")
Loss = Callable[[Tensor, Batch], Tensor]
_NUMBERS = 20_000_000  # how many numbers the gradients of a chunk of rows may hold


def slopes(loss: Loss, w: Tensor, batch: Batch, kind: str | None) -> tuple[Tensor, Tensor]:
    """The gradients of K clients' losses on a minibatch, and their curvature.

    Args:
        loss: of K clients.
        w: ``(K, D)``.
        batch: the minibatch.
        kind: ``"per-sample"``: the mean of the rows' squared gradients. ``"batch"``: the square of the mean
            gradient. ``"hessian"``: the diagonal of the Hessian, what of it is positive, by one backward pass for
            each weight. None: zeros.

    Returns:
        Both ``(K, D)``.

    Example:
        >>> import torch, bayesfed as bf
        >>> from bayesfed.guides.fisher import slopes
        >>> data = bf.Federation.from_arrays({"a": {"y": [1.0, 3.0]}})
        >>> def loss(w, batch):  # of y ~ N(w, 1), up to a constant
        ...     square = (batch.fields["y"] - w).square() * batch.mask
        ...     return 0.5 * square.sum(-1) / batch.mask.sum(-1)
        >>> w = torch.zeros(1, 1)
        >>> [slopes(loss, w, data.batch(), kind)[1].item() for kind in ("per-sample", "batch", "hessian")]
        [5.0, 4.0, 1.0]
    """
    if kind == "per-sample":
        return _per_row(loss, w, batch)
    leaf = w.detach().requires_grad_()
    (grad,) = torch.autograd.grad(loss(leaf, batch).sum(), leaf, create_graph=kind == "hessian")
    if kind == "batch":
        return grad, grad.square()
    if kind == "hessian":
        return grad.detach(), _diagonal(grad, leaf).clamp(min=0)
    return grad, torch.zeros_like(grad)


def _per_row(loss: Loss, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Means over a client's rows of the rows' gradients and of their squares.

    Every row is run as a client of its own, so this holds for whatever model. Padding repeats a row, and counts for
    nothing.
    """
    clients, width = batch.mask.shape
    mean, square = torch.zeros_like(w), torch.zeros_like(w)
    for columns in torch.arange(width, device=w.device).split(max(1, _NUMBERS // w.numel())):
        count = len(columns)
        one = batch.scale.new_ones(clients * count, 1)
        fields = {n: v[:, columns].flatten(0, 1)[:, None] for n, v in batch.fields.items()}
        rows = Batch(Fields(fields), one.bool(), one, batch.index.repeat_interleave(count))
        leaf = w.detach().repeat_interleave(count, 0).requires_grad_()
        (grad,) = torch.autograd.grad(loss(leaf, rows).sum(), leaf)
        grad = grad.unflatten(0, (clients, count))
        grad = grad * batch.mask[:, columns].reshape(clients, count, *[1] * (w.ndim - 1))
        mean, square = mean + grad.sum(1), square + grad.square().sum(1)
    rows_of = batch.mask.sum(1).reshape(-1, *[1] * (w.ndim - 1))
    return mean / rows_of, square / rows_of


def _diagonal(grad: Tensor, leaf: Tensor) -> Tensor:
    """The Hessians' diagonals ``(K, D)`` from the gradients: a backward pass for each of the D weights."""
    rows = []
    for d, column in enumerate(grad.flatten(1).unbind(1)):
        (row,) = torch.autograd.grad(
            column.sum(), leaf, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        rows.append(row.flatten(1)[:, d])
    return torch.stack(rows, 1).reshape(grad.shape)
