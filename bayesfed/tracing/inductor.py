"""A graph compiled by Inductor, with the matrix products as the batches of small networks of a cohort need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
"""Multiplications of a product that is none for BLAS."""


def compiled(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., list[Tensor]]:
    """The graph as a function of tensors like these, which Inductor keeps on disk for other processes.

    It does so for Dynamo, who says by what shapes are known; here all are numbers.
    """
    options: dict[str, Any] = {"post_grad_custom_pre_pass": Products()}
    if graph.graph.find_nodes(op="call_function", target=aten.__rshift__.Scalar):
        # a hash reads each of its intermediates twice: inlining them all would take ten times as long to compile
        options["realize_opcount_threshold"] = 10
    with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        run = torch._inductor.compile(graph, list(inputs), options=options)
    return captured(run, inputs) if inputs[0].is_cuda else run


def captured(
    run: Callable[..., list[Tensor]], inputs: Sequence[Tensor]
) -> Callable[..., list[Tensor]]:
    """The function's kernels as one CUDA graph, launched at once, for tensors like these on a GPU.

    Inputs are copied to where the graph reads them, results from where it writes them.
    """
    places = [_once(value).clone() for value in inputs]
    read = [place.expand_as(value) for place, value in zip(places, inputs, strict=True)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are chosen and loaded before anything is recorded
        for _ in range(3):
            run(*read)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(*read)

    def replay(*values: Tensor) -> list[Tensor]:
        torch._foreach_copy_(places, [_once(value) for value in values])
        graph.replay()
        return [result.clone() for result in results]

    return replay


def _once(value: Tensor) -> Tensor:
    """The tensor without its repetitions: one entry of every dimension that was expanded."""
    return value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())]


class Products(CustomGraphPass):
    """Batched matrix products of a cohort's small networks.

    A gradient XᵀD of many inputs and few outputs is taken as (DᵀX)ᵀ: BLAS is up to four times as fast where there are
    more columns than rows, and the layout is that of the weights, so that the optimiser reads it in order. Products
    of a few numbers are multiplications and a sum, without BLAS.
    """

    def __call__(self, graph: Graph) -> None:
        """Rewrite the products, in place."""
        for node in list(graph.find_nodes(op="call_function", target=aten.bmm.default)):
            left, right = node.args
            inner = left.meta["val"].shape[2]
            _, rows, columns = node.meta["val"].shape
            with graph.inserting_before(node):
                if rows * columns * inner <= SMALL:
                    pairs = _call(
                        graph,
                        aten.mul.Tensor,
                        _call(graph, aten.unsqueeze.default, left, 3),
                        _call(graph, aten.unsqueeze.default, right, 1),
                    )
                    product = _call(graph, aten.sum.dim_IntList, pairs, [2])
                elif columns < rows:
                    wide = _call(graph, aten.bmm.default, *(_mt(graph, m) for m in (right, left)))
                    product = _mt(graph, wide)
                else:
                    continue
            node.replace_all_uses_with(product)
            graph.erase_node(node)

    def uuid(self) -> str:
        """What a cached graph depends on."""
        return "bayesfed: products, 2"


def _mt(graph: Graph, matrix: Any) -> Node:
    return _call(graph, aten.permute.default, matrix, [0, 2, 1])


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    """A new node, with what it would return as Inductor wants to know it."""
    node = graph.call_function(target, args)
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
    node.meta["val"] = target(*values)
    return node
