"""Curvature of clients' losses: squared gradients or Hessians, whole or their diagonals.

    F̄ = mean over rows (and, online, over the steps t) of ∇ log p(y | x, w_t) ∇ log p(y | x, w_t)ᵀ      (FOLA, eq. 19)
    diag F̄ = the same of (∇ log p(y | x, w_t))²                                                   (FOLA, eq. 21, 22)

A loss here is a function ``(w, batch) -> (K,)`` of the numbers ``(K, D)`` of K clients: the mean of their rows'
−log p(y | x, w).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bayesfed.data.batch import Batch, Fields
from bayesfed.data.chunks import GRADIENTS

Loss = Callable[[Tensor, Batch], Tensor]


def slopes(
    loss: Loss, w: Tensor, batch: Batch, kind: str | None, *, full: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradients of K clients' losses on a minibatch, and their curvature.

    Args:
        loss: of K clients.
        w: ``(K, D)``.
        batch: the minibatch.
        kind: ``"per-sample"``: the mean of the rows' squared gradients; ``"layers"``: the same where :func:`layered`
            says that they need no gradients of rows. ``"batch"``: the square of the mean gradient. ``"hessian"``: the
            Hessian, by one backward pass for each number; of its diagonal what is positive. None: 0.
        full: matrices, in place of their diagonals.

    Returns:
        The gradients ``(K, D)``; the curvature ``(K, D)`` or ``(K, D, D)``.

    Example:
        >>> import torch, bayesfed as bf
        >>> from bayesfed.steps.curvature import slopes
        >>> data = bf.Federation.from_arrays({"a": {"y": [1.0, 3.0]}})
        >>> def loss(w, batch):  # of y ~ N(w, 1), up to a constant
        ...     square = (batch.fields["y"] - w).square() * batch.mask
        ...     return 0.5 * square.sum(-1) / batch.mask.sum(-1)
        >>> w = torch.zeros(1, 1)
        >>> [slopes(loss, w, data.batch(), kind)[1].item() for kind in ("per-sample", "batch", "hessian")]
        [5.0, 4.0, 1.0]
    """
    if kind == "per-sample":
        return _row_by_row(loss, w, batch, full)
    if kind == "layers":
        return _at_once(loss, w, batch)[:2]
    leaf = w.detach().requires_grad_()
    (grad,) = torch.autograd.grad(loss(leaf, batch).sum(), leaf, create_graph=kind == "hessian")
    if kind == "batch":
        return grad, _squares_of(grad, full)
    if kind == "hessian":
        rows = _hessian_rows(grad, leaf)
        if full:
            return grad.detach(), torch.stack(list(rows), 1)
        diagonal = torch.stack([row[:, d] for d, row in enumerate(rows)], 1)
        return grad.detach(), diagonal.clamp(min=0)
    return grad, grad.new_zeros(())


def layered(loss: Loss, w: Tensor, batch: Batch) -> bool:
    """Return whether every number that the loss reads is a weight of one linear layer, as ``"layers"`` assumes.

    It is looked at, and tried on a few rows at a point near w.
    """
    w, mask = w[:2], batch.mask[:2, :3]
    fields = Fields({name: value[:2, :3] for name, value in batch.fields.items()})
    few = Batch(fields, mask, torch.ones_like(batch.scale[:2]), batch.index[:2], batch.gaps)
    generator = torch.Generator().manual_seed(0)
    near = w + 0.1 * torch.randn(w.shape, generator=generator, dtype=w.dtype, device="cpu").to(
        w.device
    )
    _, square, plain = _at_once(loss, near, few)
    if not plain:
        return False
    truth = _row_by_row(loss, near, few, full=False)[1]
    return torch.allclose(square, truth, rtol=1e-3, atol=1e-5 * float(truth.abs().max()))


def _at_once(loss: Loss, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor, bool]:
    """Means over a client's rows of the rows' gradients and of their squares: see :class:`_Linear`."""
    leaf = w.detach().requires_grad_()
    with _Layers() as layers:
        mean = loss(leaf, batch)
    (grad,) = torch.autograd.grad(mean.sum(), leaf, retain_graph=True)
    rows = batch.mask.sum(1)
    with _squared():
        (square,) = torch.autograd.grad((mean * rows).sum(), leaf)
    return grad, square / rows.reshape(-1, 1), layers.numbers > 0 and layers.plain


def _row_by_row(loss: Loss, w: Tensor, batch: Batch, full: bool) -> tuple[Tensor, Tensor]:
    """The same with every row run as a client of its own, for whatever model. Padding counts for nothing."""
    clients, width = batch.mask.shape
    mean, square = torch.zeros_like(w), _squares_of(torch.zeros_like(w), full)
    for columns in torch.arange(width, device=w.device).split(max(1, GRADIENTS // w.numel())):
        count = len(columns)
        one = batch.scale.new_ones(clients * count, 1)
        fields = {n: v[:, columns].flatten(0, 1)[:, None] for n, v in batch.fields.items()}
        index = batch.index.repeat_interleave(count)
        rows = Batch(Fields(fields), one.bool(), one, index, batch.gaps)
        leaf = w.detach().repeat_interleave(count, 0).requires_grad_()
        (grad,) = torch.autograd.grad(loss(leaf, rows).sum(), leaf)
        grad = grad.unflatten(0, (clients, count)) * batch.mask[:, columns, None]
        mean = mean + grad.sum(1)
        square = square + (grad.mT @ grad if full else grad.square().sum(1))
    rows_of = batch.mask.sum(1).reshape(-1, 1)
    return mean / rows_of, square / (rows_of[..., None] if full else rows_of)


def _squares_of(grad: Tensor, full: bool) -> Tensor:
    return grad[..., None] * grad[..., None, :] if full else grad.square()


class _Linear(torch.autograd.Function):
    """x Wᵀ + b, whose gradients in W and b may be taken as the sums of the rows' squares.

    A row's gradient in W is the outer product δ ⊗ x, so that Σ (δ ⊗ x)² = (δ²)ᵀ x².
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        back = delta @ weight if ctx.needs_input_grad[0] else None
        if _squares.get():
            x, delta = x.square(), delta.square()
        return back, delta.mT @ x, delta.sum(0) if ctx.biased else None


_squares: ContextVar[bool] = ContextVar("squares", default=False)


@contextmanager
def _squared() -> Iterator[None]:
    token = _squares.set(True)
    try:
        yield
    finally:
        _squares.reset(token)


class _Layers(TorchFunctionMode):
    """Linear layers by :class:`_Linear`.

    Attributes:
        numbers: of their weights and biases, together.
        plain: whether every layer takes a vector a row, and nothing else reads what a layer has read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.plain = 0, True
        self._own: list[Tensor] = []
        self._others: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not nn.functional.linear or kwargs:
            self._others += tree_leaves(args)
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        own = [weight] if bias is None else [weight, bias]
        self.numbers += sum(value.numel() for value in own)
        self._own += own
        self.plain &= x.ndim == 2
        return _Linear.apply(x, weight, bias)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        read = {id(value) for value in self._others}
        self.plain &= not any(id(value) in read for value in self._own)
        self._own, self._others = [], []


def _hessian_rows(grad: Tensor, leaf: Tensor) -> Iterator[Tensor]:
    """The D rows of the Hessians, ``(K, D)`` each, by a backward pass for each; zeros where a loss is linear."""
    for column in grad.unbind(1):
        if not column.requires_grad:
            yield torch.zeros_like(leaf)
            continue
        (row,) = torch.autograd.grad(column.sum(), leaf, retain_graph=True, materialize_grads=True)
        yield row
