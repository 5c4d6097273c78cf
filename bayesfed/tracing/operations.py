"""A function as the list of its tensor operations, and what that is written as: Python to run, a graph to compile."""

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
    """What is known of a tensor without its numbers; its offset in memory is from that of the first tensor there."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass(eq=False, slots=True)
class Value:
    """A tensor that an operation reads or gives.

    Attributes:
        form: its form.
        memory: a number for all that lie in the same memory.
        address: where that is while the tensor lives.
        constant: its numbers, where neither an input nor an operation gives them.
        made: it was made by operations that no input reaches, and belongs to nobody.
    """

    form: Form
    memory: int
    address: int
    constant: Tensor | None = None
    made: bool = False


@dataclass(eq=False, slots=True)
class Operation:
    """One of ATen's.

    Attributes:
        target: the operation.
        args: its arguments, values in place of tensors.
        kwargs: those by name.
        results: what it gives; None for what is no tensor.
        single: it gives one tensor, not a list.
        reads: the values among its arguments.
    """

    target: OpOverload
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[Value | None]
    single: bool
    reads: list[Value] = field(init=False)

    def __post_init__(self) -> None:
        self.reads = [*values(self.args), *values([*self.kwargs.values()])]

    def of(self, now: Mapping[Value, Value]) -> Operation:
        """The same, of other values."""
        if not any(value in now for value in self.reads):
            return self
        args = replaced(self.args, now)
        kwargs = {name: replaced(value, now) for name, value in self.kwargs.items()}
        return Operation(self.target, args, kwargs, self.results, self.single)

    def touches(self, memory: set[int]) -> bool:
        """Whether it reads there, or gives what lies there."""
        return any(
            value is not None and value.memory in memory for value in (*self.reads, *self.results)
        )

    @property
    def changes(self) -> bool:
        """Whether it changes what it reads."""
        return self.target._schema.is_mutable


def values(args: Sequence[Any]) -> Iterator[Value]:
    """Those among arguments."""
    for arg in args:
        if type(arg) is Value:
            yield arg
        elif type(arg) is list:
            yield from values(arg)


def replaced(arg: Any, by: Mapping[Value, Any]) -> Any:
    """An argument with other values, or what stands for them."""
    if type(arg) is Value:
        return by.get(arg, arg)
    return [replaced(part, by) for part in arg] if type(arg) is list else arg


def needed(operations: Sequence[Operation], results: Sequence[Value]) -> list[Operation]:
    """Those that the results depend on, and those that change memory."""
    wanted, kept = set(results), []
    for operation in reversed(operations):
        if operation.changes or not wanted.isdisjoint(operation.results):
            wanted.update(operation.reads)
            kept.append(operation)
    return kept[::-1]


def as_function(
    operations: Sequence[Operation], inputs: Sequence[Value], results: Sequence[Value]
) -> Callable[..., list[Tensor]]:
    """A Python function of the inputs, an operation a line; a name whose tensor is needed no more is used anew."""
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
        if type(arg) is list and [*values(arg)]:
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
    """Torch's binding of the operation if it has one: on small tensors half the time of the overload itself."""
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
    """The graph of ATen's operations."""
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
        args = tuple(replaced(arg, nodes) for arg in operation.args)
        kwargs = {name: replaced(arg, nodes) for name, arg in operation.kwargs.items()}
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
