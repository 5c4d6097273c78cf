"""A function's graph, written down while it runs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten
ALIASES = (aten.detach.default, aten.alias.default)
"""Operations that give their argument; where gradients are over they are nothing."""
VARYING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Of operations that give Python a number, or a tensor whose shape depends on numbers."""


class Recorder(TorchDispatchMode):
    """Notes each ATen operation in a block, those of autograd's backward passes too, as a node of a graph.

    The operations run as they would have run, at a few microseconds more for each: tracing by ``make_fx`` calls for
    ten times as much, and for a run of its own. What is neither an input nor made in the block is a constant.

    Attributes:
        operations: how many there were.
        bytes: that they wrote.

    Example:
        >>> import torch
        >>> from bayesfed.tracing.recorder import Recorder
        >>> recorder, x = Recorder(), torch.ones(3)
        >>> with recorder.of([x]):
        ...     y = torch.where(x > 0, 2 * x, 3 * x)
        >>> recorder.graph([y])(torch.tensor([1.0, -1.0, 2.0]))
        [tensor([ 2., -3.,  4.])]
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.bytes = 0
        self._graph = Graph()
        self._nodes = WeakTensorKeyDictionary()
        self._root = torch.nn.Module()
        self._written: set[int] = set()  # memory that an operation changes
        self._memory: dict[Node, set[int]] = {}

    def of(self, inputs: Sequence[Tensor]) -> Recorder:
        """Itself, with what the graph is a function of; no two may be the same object."""
        for number, x in enumerate(inputs):
            self._nodes[x] = self._graph.placeholder(f"input_{number}")
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and note it.

        Raises:
            ValueError: it draws random numbers, or what follows may depend on numbers that were computed.
        """
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.operations += 1
        if isinstance(result, Tensor) and not func.is_view:
            self.bytes += result.numel() * result.element_size()
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ValueError(
                f"it draws random numbers of its own ({func}); a guide's sites are given theirs"
            )
        if VARYING & set(func.tags):
            raise ValueError(f"what it does depends on numbers that it has computed ({func})")
        memory = {_memory(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor)}
        if func._schema.is_mutable:
            places = zip(args, func._schema.arguments, strict=False)
            self._written |= {_memory(x) for x, place in places if place.is_write}
        given = map_aggregate((args, kwargs), self._lowered)
        node = self._graph.create_node("call_function", func, *given)
        self._made(node, result, memory)
        return result

    def graph(self, results: Sequence[Tensor], *, to_compile: bool = False) -> GraphModule:
        """The graph of these tensors, once: of ATen's operations to compile, or what Python calls them by to run."""
        self._graph.output([self._node(x) for x in results])
        self._simplify()
        self._graph.eliminate_dead_code(_matters)
        for node in self._graph.nodes:
            if not to_compile and isinstance(node.target, OpOverload):
                node.target = _binding(node.target)
        return GraphModule(self._root, self._graph)

    def _made(self, node: Node, result: Any, memory: set[int]) -> None:
        """Tie results to the node that gives them."""
        if isinstance(result, Tensor):
            self._nodes[result] = node
            self._memory[node] = memory | {_memory(result)}
        elif isinstance(result, list | tuple):
            self._memory[node] = memory
            for place, part in enumerate(result):
                if isinstance(part, Tensor):
                    item = self._graph.call_function(operator.getitem, (node, place))
                    self._made(item, part, memory)

    def _lowered(self, value: Any) -> Any:
        return self._node(value) if isinstance(value, Tensor) else value

    def _node(self, x: Tensor) -> Node:
        if x not in self._nodes:
            name = f"constant_{len(list(self._root.buffers()))}"
            self._root.register_buffer(name, x.detach())
            self._nodes[x] = self._graph.get_attr(name)
        return self._nodes[x]

    def _simplify(self) -> None:
        """Without aliases, and nothing twice; what is in memory that is changed in between stays as it is."""
        seen: dict[Any, Node] = {}
        for node in list(self._graph.nodes):
            if node.op != "call_function" or self._memory.get(node, set()) & self._written:
                continue
            if node.target in ALIASES:
                same = node.args[0]
            else:
                same = seen.setdefault(_key((node.target, node.args, node.kwargs)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                self._graph.erase_node(node)


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


def _matters(node: Node) -> bool:
    """Whether a node does something beside giving its result."""
    return node.op in ("placeholder", "output") or (
        isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    )


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _key(value: Any) -> Any:
    """Something hashable that is equal where a node's arguments are: 1 is neither 1.0 nor True."""
    if isinstance(value, list | tuple):
        return tuple(_key(part) for part in value)
    if isinstance(value, dict):
        return tuple((name, _key(part)) for name, part in value.items())
    return type(value), repr(value) if isinstance(value, float) else value
