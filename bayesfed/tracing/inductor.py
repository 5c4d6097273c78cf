"""Compilation by Inductor, with a pass that rewrites the matrix products of a cohort's small networks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

aten = torch.ops.aten
SMALL = 512
"""The most multiplications in a matrix product that is computed without BLAS."""


def compile_graph(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., list[Tensor]]:
    """Compile the graph to a function of tensors like these; Inductor caches it on disk for other processes.

    The cache needs a tracing context with a shape environment, as Dynamo provides; here all shapes are constants.
    """
    options: dict[str, Any] = {"post_grad_custom_pre_pass": Products()}
    if graph.graph.find_nodes(op="call_function", target=aten.__rshift__.Scalar):
        # a hash reads each of its intermediate results twice: inlining them all makes compilation ten times as slow
        options["realize_opcount_threshold"] = 10
    on_gpu = inputs[0].is_cuda
    places, read = copies(inputs) if on_gpu else ([], list(inputs))
    with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        run = torch._inductor.compile(graph, [*read], options=options)
    return capture(run, places, read) if on_gpu else run


def copies(inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return copies of tensors, each number once, and the tensors' values read from these.

    A copy is dense, so that what is read may have other strides than the tensor, such as a column of a matrix.
    """
    places = [_without_repetitions(value).clone() for value in inputs]
    return places, [place.expand_as(value) for place, value in zip(places, inputs, strict=True)]


def capture(
    run: Callable[..., list[Tensor]], places: list[Tensor], read: list[Tensor]
) -> Callable[..., list[Tensor]]:
    """Capture the function's kernels as one CUDA graph, launched at once, which reads :func:`copies` on a GPU.

    A function that waits for the GPU, such as one with an eigenvalue decomposition, cannot be captured: it is returned
    as it is.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # choose and load the kernels before the capture
        for _ in range(3):
            run(*read)
        waits = _waits(lambda: run(*read))
    torch.cuda.current_stream().wait_stream(side)
    if waits:
        return run
    graph = torch.cuda.CUDAGraph()
    try:
        with _generator_apart(read[0].device), torch.cuda.graph(graph):
            results = run(*read)
    except RuntimeError:  # a library call that no capture allows, such as an allocation of its own
        torch.cuda.synchronize()
        return run
    return _Captured(graph, places, results, run)


@dataclass(frozen=True)
class _Captured:
    """A CUDA graph as a function: inputs are copied to the memory that it reads, results from what it writes."""

    graph: torch.cuda.CUDAGraph
    places: list[Tensor]
    results: list[Tensor]
    source: Callable[..., list[Tensor]]
    """The compiled function. It owns the constants that the graph reads, whose memory must not be used again."""

    def __call__(self, *values: Tensor) -> list[Tensor]:
        torch._foreach_copy_(self.places, [_without_repetitions(value) for value in values])
        self.graph.replay()
        return [result.clone() for result in self.results]


def _waits(run: Callable[[], object]) -> bool:
    """Return whether a function waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


@contextmanager
def _generator_apart(device: torch.device) -> Iterator[None]:
    """Let a capture have a copy of the device's random state: a capture that fails leaves its state unusable."""
    generator = torch.cuda.default_generators[device.index or 0]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(state)


def _without_repetitions(value: Tensor) -> Tensor:
    """Return the tensor with one entry in every dimension that was expanded."""
    return value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())]


class Products(CustomGraphPass):
    """A pass that rewrites the batched matrix products of a cohort's small networks.

    A gradient XᵀD of many inputs and few outputs is computed as (DᵀX)ᵀ: BLAS is up to four times as fast with more
    columns than rows, and the layout is that of the weights, so that the optimiser reads it in order. Products of a few
    numbers become multiplications and a sum, without BLAS.
    """

    def __call__(self, graph: Graph) -> None:
        """Rewrite the products, in place."""
        for node in list(graph.find_nodes(op="call_function", target=aten.bmm.default)):
            left, right = node.args
            inner = left.meta["val"].shape[2]
            _, rows, columns = node.meta["val"].shape
            with graph.inserting_before(node):
                if rows * columns * inner <= SMALL:
                    pairs = _add_node(
                        graph,
                        aten.mul.Tensor,
                        _add_node(graph, aten.unsqueeze.default, left, 3),
                        _add_node(graph, aten.unsqueeze.default, right, 1),
                    )
                    product = _add_node(graph, aten.sum.dim_IntList, pairs, [2])
                elif columns < rows:
                    wide = _add_node(
                        graph, aten.bmm.default, *(_transpose(graph, m) for m in (right, left))
                    )
                    product = _transpose(graph, wide)
                else:
                    continue
            node.replace_all_uses_with(product)
            graph.erase_node(node)

    def uuid(self) -> str:
        """Identify this version of the pass in Inductor's cache."""
        return "bayesfed: products, 2"


def _transpose(graph: Graph, matrix: Any) -> Node:
    """Add the transpose of a batch of matrices."""
    return _add_node(graph, aten.permute.default, matrix, [0, 2, 1])


def _add_node(graph: Graph, target: Any, *args: Any) -> Node:
    """Add a node, with the example result that Inductor needs."""
    node = graph.call_function(target, args)
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
    node.meta["val"] = target(*values)
    return node
