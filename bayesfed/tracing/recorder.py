"""A recorder of a function's operations while it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.utils.weak import WeakTensorKeyDictionary

from bayesfed.tracing.dispatch_mode import DispatchMode
from bayesfed.tracing.operations import (
    Form,
    Operation,
    Recording,
    Value,
    as_function,
    as_graph,
    needed_operations,
    values_in,
)
from bayesfed.tracing.simplify import simplify

VARYING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations that return a Python number, or a tensor whose shape depends on numbers."""


class Recorder(DispatchMode):
    """Record each ATen operation in a block, those of autograd's backward passes included.

    The operations run as usual, each a few microseconds slower; tracing by ``make_fx`` costs ten times as much, and a
    separate run. A tensor that is neither an input nor made in the block is a constant.

    Attributes:
        operations: the number of recorded operations.
        bytes: the number of bytes that they wrote.
        left: the number of operations after simplification.

    Example:
        >>> import torch
        >>> from bayesfed.tracing.recorder import Recorder
        >>> recorder, x = Recorder(), torch.ones(3)
        >>> with recorder.with_inputs([x]):
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
        self._outside: list[Value] = []  # inputs and constants, which live as long as the recorder
        self._offsets: list[int] = []  # offset of the first tensor in each memory
        self._written: set[int] = set()  # memory that an operation changes
        self._varying: set[int] = set()  # memory whose numbers depend on an input or a constant

    def with_inputs(self, inputs: Sequence[Tensor]) -> Recorder:
        """Set the inputs of the graph, no two of which may be the same object, and return the recorder."""
        self._inputs = [self._value_of(x, self._outside) for x in inputs]
        self._outside += self._inputs
        self._varying.update(value.memory for value in self._inputs)
        self._values.update(zip(inputs, self._inputs, strict=True))
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and record it.

        Raises:
            ValueError: it draws random numbers, or later operations may depend on computed numbers.
        """
        result = func(*args, **kwargs) if kwargs else func(*args)
        self.operations += 1
        if isinstance(result, Tensor) and not func.is_view:
            self.bytes += result.numel() * result.element_size()
        refusal = _reason_not_to_trace(func)
        indexes = func is torch.ops.aten.index.Tensor
        if refusal and not (indexes and self._are_fixed(_masks(args[1]))):
            raise ValueError(f"{refusal} ({func})")
        self.note(func, args, kwargs or {}, result)
        return result

    def _are_fixed(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the numbers in these tensors are computed from no input and no constant."""
        values = [self._values.get(x) for x in tensors]
        return all(value is not None and value.memory not in self._varying for value in values)

    def note(self, func: OpOverload, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        """Record an operation and its result."""
        operation = Operation(
            func,
            [self._to_values(arg) for arg in args],
            {name: self._to_values(arg) for name, arg in kwargs.items()},
            [],
            single=isinstance(result, Tensor),
        )
        written: set[int] = set()
        for place, name in places_written(func):
            changed = operation.args[place] if place < len(args) else operation.kwargs.get(name)
            written |= {value.memory for value in values_in([changed])}
        self._written |= written
        for part in (result,) if operation.single else result or ():
            value = None
            if isinstance(part, Tensor):
                self._values[part] = value = self._value_of(part, operation.reads)
            operation.results.append(value)
        if any(value.memory in self._varying for value in operation.reads):
            self._varying |= written | {value.memory for value in operation.results if value}
        self._noted.append(operation)

    def recording(self, results: Sequence[Tensor]) -> Recording:
        """Return the operations that compute these tensors, without those that have no effect."""
        return Recording(*self._simplify(results, to_run=True))

    def function(self, results: Sequence[Tensor]) -> Callable[..., list[Tensor]]:
        """Return a Python function of the inputs that computes these tensors."""
        return as_function(*self._simplify(results, to_run=True))

    def graph(self, results: Sequence[Tensor]) -> GraphModule:
        """Return the graph of these tensors, to be compiled."""
        return as_graph(*self._simplify(results, to_run=False))

    def _simplify(
        self, results: Sequence[Tensor], *, to_run: bool
    ) -> tuple[list[Operation], list[Value], list[Value]]:
        ends = [self._to_values(x) for x in results]
        operations = needed_operations(self._noted, ends)
        operations, same = simplify(operations, self._written, to_run=to_run)
        ends = [same.get(value, value) for value in ends]
        operations = needed_operations(operations, ends)
        self.left = len(operations)
        return operations, self._inputs, ends

    def _to_values(self, arg: Any) -> Any:
        """Return an argument with values in place of tensors."""
        if isinstance(arg, Tensor):
            value = self._values.get(arg)
            if value is None:
                self._values[arg] = value = self._value_of(arg, self._outside)
                value.constant = arg.detach()
                self._outside.append(value)
                self._varying.add(value.memory)
            return value
        return [self._to_values(part) for part in arg] if isinstance(arg, list | tuple) else arg

    def _value_of(self, x: Tensor, others: Sequence[Value]) -> Value:
        """Make a value in the memory of one of some living values, or in its own; addresses of dead ones are reused."""
        address, offset = x.untyped_storage()._cdata, int(x.storage_offset())
        memory = next((v.memory for v in others if v.address == address), None)
        if memory is None:
            memory = len(self._offsets)
            self._offsets.append(offset)
        form = Form(x.shape, x.stride(), offset - self._offsets[memory], x.dtype, x.device)
        return Value(form, memory, address)


@functools.cache
def _reason_not_to_trace(func: OpOverload) -> str:
    """Say why no graph can contain the operation; an empty string if it can."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return "it draws random numbers of its own; a guide's sample sites receive theirs as inputs"
    if VARYING & set(func.tags):
        return "its control flow or a shape depends on numbers that it has computed"
    return ""


def _masks(indices: Sequence[Tensor | None]) -> list[Tensor]:
    """Return those of the indices in ``x[indices]`` on whose numbers the shape of the result depends."""
    whole = torch.int64, torch.int32
    return [index for index in indices if index is not None and index.dtype not in whole]


@functools.cache
def places_written(func: OpOverload) -> list[tuple[int, str]]:
    """Return the positions and names of the arguments that an operation changes in place."""
    arguments = enumerate(func._schema.arguments)
    return [
        (place, argument.name)
        for place, argument in arguments
        if (alias := argument.alias_info) is not None and alias.is_write
    ]
