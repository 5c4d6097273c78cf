"""A function as the list of its tensor operations, written out as Python to run or as a graph to compile."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node


class Form(NamedTuple):
    """The layout of a tensor; its offset is relative to the first recorded tensor in the same memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False, slots=True)
class Value:
    """A tensor that an operation reads or returns.

    Attributes:
        form: its layout.
        memory: a number that all values in the same memory share.
        address: the address of that memory while the tensor lives.
        constant: its numbers, if it is neither an input nor the result of an operation.
        made: the constant was computed while tracing, by operations that depend on no input.
    """

    form: Form
    memory: int
    address: int
    constant: Tensor | None = None
    made: bool = False


@dataclass(eq=False, slots=True)
class Operation:
    """A call of an ATen operation.

    Attributes:
        target: the operation.
        args: its positional arguments, with values in place of tensors.
        kwargs: its keyword arguments.
        results: its results; None for a result that is no tensor.
        single: it returns one tensor, not a list.
        reads: the values among its arguments.
    """

    target: OpOverload
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[Value | None]
    single: bool
    reads: list[Value] = field(init=False)

    def __post_init__(self) -> None:
        self.reads = [*values_in(self.args), *values_in([*self.kwargs.values()])]

    def with_values(self, now: Mapping[Value, Value]) -> Operation:
        """Return the same operation of other values."""
        if not any(value in now for value in self.reads):
            return self
        args = replace_values(self.args, now)
        kwargs = {name: replace_values(value, now) for name, value in self.kwargs.items()}
        return Operation(self.target, args, kwargs, self.results, self.single)

    def touches(self, memory: set[int]) -> bool:
        """Return whether one of its arguments or results lies in some memory."""
        return any(
            value is not None and value.memory in memory for value in (*self.reads, *self.results)
        )

    @property
    def changes(self) -> bool:
        """The operation changes one of its arguments in place."""
        return self.target._schema.is_mutable


class Recording(NamedTuple):
    """A function as the list of its operations.

    Attributes:
        operations: in order.
        inputs: its arguments.
        ends: its results.
    """

    operations: list[Operation]
    inputs: list[Value]
    ends: list[Value]


def new_value(shape: Sequence[int], like: Value) -> Value:
    """Return a new value of this shape, its numbers in order."""
    strides, size = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        strides[dim] = size
        size *= shape[dim]
    form = like.form._replace(shape=torch.Size(shape), stride=tuple(strides), offset=0)
    return Value(form, -1, -1)


def constant_value(number: Tensor, form: Form) -> Value:
    """Return the value of numbers that depend on no input."""
    return Value(form, -1, -1, number, made=True)


def values_in(args: Sequence[Any]) -> Iterator[Value]:
    """Yield the values among arguments, lists included."""
    for arg in args:
        if type(arg) is Value:
            yield arg
        elif type(arg) is list:
            yield from values_in(arg)


def replace_values(arg: Any, by: Mapping[Value, Any]) -> Any:
    """Return an argument with its values replaced."""
    if type(arg) is Value:
        return by.get(arg, arg)
    return [replace_values(part, by) for part in arg] if type(arg) is list else arg


def needed_operations(operations: Sequence[Operation], results: Sequence[Value]) -> list[Operation]:
    """Return the operations that the results depend on, and those that change memory."""
    wanted, kept = set(results), []
    for operation in reversed(operations):
        if operation.changes or not wanted.isdisjoint(operation.results):
            wanted.update(operation.reads)
            kept.append(operation)
    return kept[::-1]


def as_function(
    operations: Sequence[Operation], inputs: Sequence[Value], results: Sequence[Value]
) -> Callable[..., list[Tensor]]:
    """Compile a Python function of the inputs, one operation per line; names are reused to free tensors early."""
    scope: dict[str, Any] = {}
    names = {value: f"x{number}" for number, value in enumerate(inputs)}
    lines = [f"def graph({', '.join(names.values())}):"]

    def named(prefix: str, thing: Any) -> str:
        name = f"{prefix}{len(scope)}"
        scope[name] = thing
        return name

    def name_of(value: Value) -> str:
        if value not in names:
            names[value] = named("c", value.constant)
        return names[value]

    def written(arg: Any) -> str:
        if type(arg) is Value:
            return name_of(arg)
        if type(arg) is list and [*values_in(arg)]:
            return f"[{', '.join(map(written, arg))}]"
        if arg is None or type(arg) in (int, bool):
            return repr(arg)
        return named("a", arg)

    last = dict.fromkeys(results, len(operations))
    for place in range(len(operations) - 1, -1, -1):
        for value in operations[place].reads:
            last.setdefault(value, place)
    calls: dict[OpOverload, str] = {}
    free: list[str] = []
    for place, operation in enumerate(operations):
        call = calls.get(operation.target)
        if call is None:
            call = calls[operation.target] = named("f", _binding(operation.target))
        given = [written(arg) for arg in operation.args]
        given += [f"{name}={written(arg)}" for name, arg in operation.kwargs.items()]
        free += {names[v] for v in operation.reads if last[v] == place and v.constant is None}
        made = []
        for result in operation.results:
            if result is None or result not in last:
                made.append("_")
                continue
            names[result] = free.pop() if free else f"v{place}_{len(made)}"
            made.append(names[result])
        comma = "" if operation.single else ","
        lines.append(f" {', '.join(made)}{comma} = {call}({', '.join(given)})")
    ends = [f"{name_of(v)}.clone()" if v.made else name_of(v) for v in results]
    lines.append(f" return [{', '.join(ends)}]")
    exec(compile("\n".join(lines), "<a traced graph>", "exec"), scope)
    function: Callable[..., list[Tensor]] = scope["graph"]
    return function


def _binding(operation: OpOverload) -> Any:
    """Return torch's own binding of the operation, if any: on small tensors it takes half the time of the overload.

    The bindings of ``x[index]`` and its gradient take no None among the indices.
    """
    if any(
        str(argument.type) == "List[Optional[Tensor]]" for argument in operation._schema.arguments
    ):
        return operation
    name = operation.overloadpacket.__name__
    for where in (torch, torch.Tensor):
        found = getattr(where, name, None)
        if operation.namespace == "aten" and isinstance(
            found, BuiltinFunctionType | MethodDescriptorType
        ):
            return found
    return operation


def as_graph(
    operations: Sequence[Operation], inputs: Sequence[Value], results: Sequence[Value]
) -> GraphModule:
    """Build the graph of ATen operations."""
    graph, root = Graph(), torch.nn.Module()
    nodes: dict[Value, Node] = {}
    for number, value in enumerate(inputs):
        nodes[value] = graph.placeholder(f"input_{number}")

    def read(values: Sequence[Value]) -> None:
        for value in values:
            if value not in nodes:
                name = f"constant_{len(list(root.buffers()))}"
                root.register_buffer(name, value.constant)
                nodes[value] = graph.get_attr(name)

    for operation in operations:
        read(operation.reads)
        args = tuple(replace_values(arg, nodes) for arg in operation.args)
        kwargs = {name: replace_values(arg, nodes) for name, arg in operation.kwargs.items()}
        node = graph.call_function(operation.target, args, kwargs)
        for number, result in enumerate(operation.results):
            if result is not None:
                part = (node, number)
                nodes[result] = (
                    node if operation.single else graph.call_function(operator.getitem, part)
                )
    read(results)
    graph.output([nodes[value] for value in results])
    graph.eliminate_dead_code()
    return GraphModule(root, graph)
