"""A function's operations, written down while it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from bayesfed.tracing.operations import (
    Form,
    Operation,
    Value,
    as_function,
    as_graph,
    needed,
    values,
)
from bayesfed.tracing.simplify import simplified

VARYING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Of operations that give Python a number, or a tensor whose shape depends on numbers."""


class Recorder(TorchDispatchMode):
    """Notes each ATen operation in a block, those of autograd's backward passes too.

    The operations run as they would have run, at a few microseconds more for each: tracing by ``make_fx`` calls for
    ten times as much, and for a run of its own. What is neither an input nor made in the block is a constant.

    Attributes:
        operations: how many there were.
        bytes: that they wrote.
        left: how many were left of them.

    Example:
        >>> import torch
        >>> from bayesfed.tracing.recorder import Recorder
        >>> recorder, x = Recorder(), torch.ones(3)
        >>> with recorder.of([x]):
        ...     y = torch.where(x > 0, 2 * x, 3 * x)
        >>> recorder.function([y])(torch.tensor([1.0, -1.0, 2.0]))
        [tensor([ 2., -3.,  4.])]
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.bytes = self.left = 0
        self._noted: list[Operation] = []
        self._values = WeakTensorKeyDictionary()
        self._inputs: list[Value] = []
        self._outside: list[Value] = []  # inputs and constants, which live as long as this
        self._offsets: list[int] = []  # of the first tensor in each memory
        self._written: set[int] = set()  # memory that an operation changes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nobody traces this by Dynamo; keeping it out takes as long as an operation."""
        return False

    def of(self, inputs: Sequence[Tensor]) -> Recorder:
        """Itself, with what the graph is a function of; no two may be the same object."""
        self._inputs = [self._value_of(x, self._outside) for x in inputs]
        self._outside += self._inputs
        self._values.update(zip(inputs, self._inputs, strict=True))
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and note it.

        Raises:
            ValueError: it draws random numbers, or what follows may depend on numbers that were computed.
        """
        result = func(*args, **kwargs) if kwargs else func(*args)
        self.operations += 1
        if isinstance(result, Tensor) and not func.is_view:
            self.bytes += result.numel() * result.element_size()
        if refusal := _refusal(func):
            raise ValueError(f"{refusal} ({func})")
        self.note(func, args, kwargs or {}, result)
        return result

    def note(self, func: OpOverload, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        """An operation, and what it gave."""
        operation = Operation(
            func,
            [self._lowered(arg) for arg in args],
            {name: self._lowered(arg) for name, arg in kwargs.items()},
            [],
            single=isinstance(result, Tensor),
        )
        for place, name in _places_written(func):
            changed = operation.args[place] if place < len(args) else operation.kwargs.get(name)
            self._written |= {value.memory for value in values([changed])}
        for part in (result,) if operation.single else result or ():
            value = None
            if isinstance(part, Tensor):
                self._values[part] = value = self._value_of(part, operation.reads)
            operation.results.append(value)
        self._noted.append(operation)

    def function(self, results: Sequence[Tensor]) -> Callable[..., list[Tensor]]:
        """A function of the inputs that gives these tensors, to be run as it is."""
        return as_function(*self._simplified(results, to_run=True))

    def graph(self, results: Sequence[Tensor]) -> GraphModule:
        """The graph of these tensors, to be compiled."""
        return as_graph(*self._simplified(results, to_run=False))

    def _simplified(
        self, results: Sequence[Tensor], *, to_run: bool
    ) -> tuple[list[Operation], list[Value], list[Value]]:
        ends = [self._lowered(x) for x in results]
        operations = needed(self._noted, ends)
        operations, same = simplified(operations, self._written, to_run=to_run)
        ends = [same.get(value, value) for value in ends]
        operations = needed(operations, ends)
        self.left = len(operations)
        return operations, self._inputs, ends

    def _lowered(self, arg: Any) -> Any:
        """An argument, values in place of tensors."""
        if isinstance(arg, Tensor):
            value = self._values.get(arg)
            if value is None:
                self._values[arg] = value = self._value_of(arg, self._outside)
                value.constant = arg.detach()
                self._outside.append(value)
            return value
        return [self._lowered(part) for part in arg] if isinstance(arg, list | tuple) else arg

    def _value_of(self, x: Tensor, others: Sequence[Value]) -> Value:
        """A new one, in the memory of one of the others that live or in its own: addresses are used again."""
        address, offset = x.untyped_storage()._cdata, int(x.storage_offset())
        memory = next((v.memory for v in others if v.address == address), None)
        if memory is None:
            memory = len(self._offsets)
            self._offsets.append(offset)
        form = Form(x.shape, x.stride(), offset - self._offsets[memory], x.dtype, x.device)
        return Value(form, memory, address)


@functools.cache
def _refusal(func: OpOverload) -> str:
    """Why no graph can have the operation; empty where it can."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return "it draws random numbers of its own; a guide's sites are given theirs"
    if VARYING & set(func.tags):
        return "what it does depends on numbers that it has computed"
    return ""


@functools.cache
def _places_written(func: OpOverload) -> list[tuple[int, str]]:
    """Which of its arguments an operation changes."""
    arguments = enumerate(func._schema.arguments)
    return [(place, argument.name) for place, argument in arguments if argument.is_write]
