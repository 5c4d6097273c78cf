"""Writes under vmap into tensors that have no dimensions of draws and clients yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class Writes(TorchFunctionMode):
    """Let a program write into a tensor that it has made, such as ``p = torch.zeros(3)`` and ``p[0] = effect``.

    vmap refuses such a write, as the tensor is one for all draws and clients and the number is not. So the tensor gets
    these dimensions first. A write into memory that other tensors share is left to vmap, which refuses it.

    Example:
        >>> import torch
        >>> from bayesfed.vmap.writes import Writes
        >>> def padded(x):
        ...     p = torch.zeros(3)
        ...     p[0] = x
        ...     return p
        >>> with Writes():
        ...     torch.vmap(padded)(torch.tensor([1.0, 2.0]))
        tensor([[1., 0., 0.],
                [2., 0., 0.]])
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if getattr(func, "__self__", None) is Tensor.data:
            return args[0].detach()
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or name.startswith("__i") or name == "__setitem__":
            target, *rest = args
            for value in tree_leaves((rest, kwargs)):
                if isinstance(value, Tensor) and {*_levels(value)}.difference(_levels(target)):
                    _give_levels(target, value)
            if name == "__setitem__" and _is_mask(rest[0], target):
                mask = rest[0].reshape(rest[0].shape + (1,) * (target.ndim - rest[0].ndim))
                return target.copy_(torch.where(mask, rest[1], target))
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any, target: Tensor) -> bool:
    """Return whether an index is a mask of bools that differs between draws or clients."""
    return isinstance(index, Tensor) and index.dtype == torch.bool and bool([*_levels(index)])


def _levels(value: Tensor) -> Iterator[int]:
    """The levels of vmap at which a tensor has a dimension."""
    while _functorch.is_batchedtensor(value):
        yield _functorch.maybe_get_level(value)
        value = _functorch.get_unwrapped(value)


def _give_levels(target: Tensor, like: Tensor) -> None:
    """Give a tensor the levels of another, unless other tensors would not see what is written."""
    if not _is_shared(target):
        true = torch.ones_like(like, dtype=torch.bool).all()
        torch._C._swap_tensor_impl(target, torch.where(true, target, target))


def _is_shared(value: Tensor) -> bool:
    """Return whether another tensor has the same memory: this one and its storage here have two references to it."""
    while _functorch.is_batchedtensor(value):
        value = _functorch.get_unwrapped(value)
    return torch._C._storage_Use_Count(value.untyped_storage()._cdata) > 2
