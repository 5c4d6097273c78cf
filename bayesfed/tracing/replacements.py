"""Functions that are replaced while operations are recorded, since they read numbers or copy what need not be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import one_hot
from torch.overrides import TorchFunctionMode


class Replacements(TorchFunctionMode):
    """Replace functions that cannot be recorded, or whose records take long, by others with the same results.

    - ``torch.equal`` compares places in memory, not numbers: GPyTorch's kernels call it only to save work.
    - ``one_hot`` does not read its argument to check it first.
    - Products of stacks of matrices do not copy a matrix for each of many that it is multiplied with.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.equal:
            one, other = ((x.data_ptr(), x.shape, x.stride()) for x in args)
            return one == other
        if func is one_hot and (classes := _classes(*args[1:], **kwargs)) > 0:
            zeros = args[0].new_zeros(*args[0].shape, classes)
            return zeros.scatter(-1, args[0][..., None], 1)  # an error if a class is too large
        if func in (torch.matmul, torch.Tensor.matmul) and _differ_in_front(args):
            return torch.einsum("...ij,...jk->...ik", *args)
        return func(*args, **kwargs)


def _classes(num_classes: int = -1) -> int:
    """Return the argument of ``one_hot`` with this name."""
    return num_classes


def _differ_in_front(args: Sequence[Any]) -> bool:
    """Return whether these are two stacks of matrices, which broadcast."""
    return (
        len(args) == 2
        and min(x.ndim for x in args) > 2
        and args[0].shape[:-2] != args[1].shape[:-2]
    )
