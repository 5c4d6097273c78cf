"""The structure of a step's arguments and results: nesting, shapes and static values, apart from the tensors."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bayesfed.data.batch import Batch, Fields


class _Same:
    """A static argument, compared by identity: a graph is valid only for the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def flatten(value: Any, tensors: list[Tensor]) -> Any:
    """Append the tensors of a value to a list, and return its structure: hashable, all that a graph depends on.

    A float becomes a tensor without dimensions.

    Example:
        >>> from bayesfed.tracing.structure import flatten, unflatten
        >>> tensors = []
        >>> structure = flatten({"lr": 0.5, "steps": 3}, tensors)
        >>> unflatten(structure, iter(tensors))
        {'lr': tensor(0.5000, dtype=torch.float64), 'steps': 3}
    """
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor, value.shape, value.stride(), value.dtype, value.device
    if kind is float:
        return flatten(torch.tensor(value, dtype=torch.float64), tensors)
    if kind is dict or kind is Fields:
        return kind, tuple(value), *[flatten(v, tensors) for v in value.values()]
    if kind is Batch:
        return kind, *[flatten(v, tensors) for v in vars(value).values()]
    if issubclass(kind, list | tuple):
        return kind, *[flatten(v, tensors) for v in value]
    if kind in (int, bool, str, type(None)):
        return kind, value
    return _Same, _Same(value)


def unflatten(structure: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a value of that structure with these tensors."""
    kind, *parts = structure
    if kind is Tensor:
        return next(tensors)
    if kind is dict or kind is Fields:
        return kind(zip(parts[0], [unflatten(part, tensors) for part in parts[1:]], strict=True))
    if kind is list or kind is tuple:
        return kind([unflatten(part, tensors) for part in parts])
    if kind is Batch or issubclass(kind, tuple):
        return kind(*[unflatten(part, tensors) for part in parts])
    return parts[0].value if kind is _Same else parts[0]
