"""Errors for indices out of range on a GPU, before its kernel runs.

On a CPU an index out of range raises an ``IndexError``. On a GPU the kernel fails after the call has returned, and the
device is unusable for the rest of the process. Models run for the first time at the start of a fit, where an index
out of range is an error in the model or in the data, or says that the model is written for one client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from bayesfed.tracing.dispatch_mode import DispatchMode

aten = torch.ops.aten
_LISTS = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
_ALONG = {aten.gather, aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_}
_ALONG |= {aten.index_select, aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_}


def checked_indices(device: torch.device) -> AbstractContextManager[object]:
    """Raise an ``IndexError`` for an index out of range in a block, if tensors are on a device other than the CPU.

    Example:
        >>> import torch
        >>> from bayesfed.elbo.index_checks import checked_indices
        >>> with checked_indices(torch.device("cuda")):
        ...     torch.arange(3.0)[torch.tensor([0, 5])]
        Traceback (most recent call last):
        IndexError: index 5 is out of bounds for dimension 0 with size 3
    """
    return nullcontext() if device.type == "cpu" else _CheckedIndices()


class _CheckedIndices(DispatchMode):
    """Check the indices of every operation before it runs, which waits for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        packet = func.overloadpacket
        for dim, size, index in _indices(packet, args):
            least = -size if packet in _LISTS else 0  # x[-1] is the last
            outside = (index < least) | (index >= size)
            if outside.any():
                raise IndexError(
                    f"index {int(index[outside][0])} is out of bounds for dimension {dim} with size {size}"
                )
        return func(*args, **(kwargs or {}))


def _indices(packet: Any, args: Sequence[Any]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the dimension, its size and the index of each tensor of whole numbers that an operation indexes by."""
    if packet in _LISTS:
        dim = 0
        for index in args[1]:
            masks = index is not None and index.dtype in (torch.bool, torch.uint8)
            if index is not None and not masks:
                yield dim, args[0].shape[dim], index
            dim += index.ndim if masks else 1
    elif packet in _ALONG and args[0].ndim:
        yield args[1], args[0].shape[args[1]], args[2]
    elif packet is aten.embedding:
        yield 0, args[0].shape[0], args[1]
    elif packet is aten.nll_loss_forward:
        known = args[1] != args[4]  # the target that is ignored
        yield 1, args[0].shape[-1], args[1][known]
