"""Simplification of recorded operations: no aliases and no repetitions, and for graphs run as Python even fewer.

A model and its gradients contain many operations without effect: a tensor times one, plus zero, expanded to its own
shape, a chain of views, the logarithm of ones. Inductor removes them itself; a graph that runs as Python pays for each.
Operations on memory that is changed in place are left unchanged.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from bayesfed.tracing.operations import Form, Operation, Value, replace_values

aten = torch.ops.aten
_ALIASES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
"""Operations that return their argument; without gradients they have no effect."""
_NEUTRAL = {
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), 1),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar), 1),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar), 0),
}
"""Operation to the second argument with which it returns the first unchanged."""
_COMMUTE = (aten.mul.Tensor, aten.add.Tensor)
_COPIES = (aten._to_copy.default, aten.cat.default)
_SUMS = (aten.sum.dim_IntList, aten.mean.dim)
_ALIKE = (
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
)
"""Operations that read only the layout of their argument."""
_OTHER_NUMBERS = (aten._conj.default, aten._neg_view.default)
"""Views whose numbers differ from those in memory."""
_EMPTY = (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided)
LARGEST = 4096
"""The most numbers in a constant that replaces the operations that compute it."""


@functools.cache
def _is_view(target: OpOverload) -> bool:
    """Return whether an operation returns a view of the same numbers."""
    return target.is_view and target not in _OTHER_NUMBERS


@functools.cache
def is_pointwise(target: OpOverload) -> bool:
    """Return whether an operation computes each number from the numbers at its place, not in place."""
    return torch.Tag.pointwise in target.tags and not target._schema.is_mutable


def is_allocation(target: OpOverload) -> bool:
    """Return whether the numbers in the result are not set."""
    return target.overloadpacket in _EMPTY


def reads_layout_only(target: OpOverload) -> bool:
    """Return whether the numbers in the arguments do not matter."""
    return target in _ALIKE


@torch.no_grad()
def simplify(
    operations: Sequence[Operation], written: set[int], *, to_run: bool
) -> tuple[list[Operation], dict[Value, Value]]:
    """Return fewer operations with the same results, and a mapping from replaced values to their replacements.

    Args:
        operations: in order.
        written: memory that one of them changes.
        to_run: the operations are to run as Python, so remove those that Inductor would remove.
    """
    same: dict[Value, Value] = {}
    seen: dict[Any, Operation] = {}
    made: dict[Any, Value] = {}
    views: dict[Value, Operation] = {}
    exponents: dict[Value, Value] = {}
    kept: list[Operation] = []
    for operation in operations:
        operation = operation.with_values(same)
        if written and operation.touches(written):
            kept.append(operation)
            continue
        if operation.single:
            result = _result(operation)
            if to_run and operation.target in _SUMS:
                operation = _sum_as_view(operation)
            argument = operation.reads[0] if operation.target in _ALIASES else None
            if to_run and argument is None:
                argument = _fold_constant(operation, made) or unchanged_argument(operation, views)
            if argument is not None:
                same[result] = argument
                continue
            if to_run and is_pointwise(operation.target):
                operation = _without_expansions(operation, views)
                if operation.target is aten.exp.default:
                    exponents[result] = operation.reads[0]
                *viewed, operation = _without_logarithm(operation, exponents, views)
                kept += viewed
            if to_run and _is_view(operation.target):
                views[result] = operation
                operation = _view_of_root(operation, views)
        first = seen.setdefault(_key(operation), operation)
        if first is operation:
            kept.append(operation)
            continue
        for value, earlier in zip(operation.results, first.results, strict=True):
            if value is not None and earlier is not None:
                same[value] = earlier
    return kept, same


def _result(operation: Operation) -> Value:
    (result,) = operation.results
    assert result is not None
    return result


def unchanged_argument(operation: Operation, views: Mapping[Value, Operation]) -> Value | None:
    """Return the argument that the result is equal to, or the tensor that it is a view of; None if there is none."""
    form, reads, target = _result(operation).form, operation.reads, operation.target
    if _is_view(target):
        return next((v for v in (reads[0], _root(reads[0], views)) if v.form == form), None)
    if target in _COPIES:
        return reads[0] if len(reads) == 1 and reads[0].form == form else None
    if target not in _NEUTRAL:
        return None
    first, second = operation.args
    for value, other in ((first, second), (second, first))[: 1 + (target in _COMMUTE)]:
        if (
            isinstance(value, Value)
            and value.form == form
            and _is_everywhere(other, _NEUTRAL[target])
        ):
            return value
    return None


def _is_everywhere(value: Any, number: int) -> bool:
    """Return whether all entries of an argument are that number."""
    if not isinstance(value, Value):
        return bool(value == number)
    return value.constant is not None and value.made and bool((value.constant == number).all())


def _fold_constant(operation: Operation, made: dict[Any, Value]) -> Value | None:
    """Return the result of an operation that depends on no input as a constant; ``made`` caches them."""
    result = _result(operation)
    if is_allocation(operation.target) or result.form.shape.numel() > LARGEST:
        return None
    if not reads_layout_only(operation.target) and not all(value.made for value in operation.reads):
        return None
    key = _key(operation)
    if key not in made:
        known = {value: stand_in(value) for value in operation.reads}
        args = replace_values(operation.args, known)
        kwargs = {name: replace_values(arg, known) for name, arg in operation.kwargs.items()}
        numbers = operation.target(*args, **kwargs)
        made[key] = Value(result.form, result.memory, result.address, numbers, made=True)
    return made[key]


def stand_in(value: Value) -> Tensor:
    """Return its numbers, or any numbers in its layout if only that is read."""
    if value.constant is not None:
        return value.constant
    shape, stride, _, dtype, device = value.form
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _sum_as_view(operation: Operation) -> Operation:
    """Replace a sum over dimensions of size one by a view."""
    result, first = _result(operation), operation.reads[0]
    one, other = first.form, result.form
    alike = one[2:] == other[2:] and is_dense(one) and is_dense(other)
    if one.shape.numel() != other.shape.numel() or not alike:
        return operation
    return Operation(aten.view.default, [first, list(other.shape)], {}, [result], True)


def is_dense(form: Form) -> bool:
    """Return whether the numbers lie in memory in order, without gaps."""
    size = 1
    for length, stride in zip(reversed(form.shape), reversed(form.stride), strict=True):
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def broadcast_shape(shapes: Sequence[torch.Size]) -> torch.Size:
    """Return the shape to which these, which fit together, are broadcast; torch's function takes thrice as long."""
    longest = max(map(len, shapes))
    padded = [(1,) * (longest - len(shape)) + tuple(shape) for shape in shapes]
    return torch.Size(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def _without_expansions(operation: Operation, views: dict[Value, Operation]) -> Operation:
    """Read arguments before their expansion if the operation broadcasts them itself."""
    by: dict[Value, Value] = {}
    for value in operation.reads:
        if value in views and views[value].target is aten.expand.default:
            source = views[value].reads[0]
            shapes = [(by | {value: source}).get(read, read).form.shape for read in operation.reads]
            if source.form.shape and broadcast_shape(shapes) == _result(operation).form.shape:
                by[value] = source
    return operation.with_values(by)


def _without_logarithm(
    operation: Operation, exponents: Mapping[Value, Value], views: dict[Value, Operation]
) -> list[Operation]:
    """Return x log(exp(y)) as a product, as in the log density of a Poisson distribution with a log link.

    Where exp(y) is read by a view of it, the same view of y comes first.
    """
    if operation.target is not aten.xlogy.Tensor:
        return [operation]
    x, exponential = operation.args
    root = _root(exponential, views)
    y = exponents.get(root)
    if y is None or y.form != root.form:
        return [operation]
    if exponential is root:
        return [Operation(aten.mul.Tensor, [x, y], {}, operation.results, True)]
    form = exponential.form
    same = Value(form, y.memory, y.address)
    args = [y, list(form.shape), list(form.stride), form.offset]
    views[same] = Operation(aten.as_strided.default, args, {}, [same], True)
    return [views[same], Operation(aten.mul.Tensor, [x, same], {}, operation.results, True)]


def _view_of_root(operation: Operation, views: dict[Value, Operation]) -> Operation:
    """Replace a view of a view by a view of the root."""
    result, source = _result(operation), operation.reads[0]
    root, form = _root(source, views), result.form
    plain = form.dtype == root.form.dtype and not form.dtype.is_complex
    if root is source or form.offset != root.form.offset or not plain:
        return operation
    args = [root, list(form.shape), list(form.stride)]
    return Operation(aten.as_strided.default, args, {}, [result], True)


def _root(value: Value, views: Mapping[Value, Operation]) -> Value:
    """Return the tensor at the start of a chain of views."""
    while value in views:
        value = views[value].reads[0]
    return value


def _key(operation: Operation) -> Any:
    """Return a hashable key that is equal for equal operations; 1 differs from 1.0 and True."""
    return operation.target, _hashable(operation.args), _hashable([*operation.kwargs.items()])


def _hashable(arg: Any) -> Any:
    if isinstance(arg, list | tuple):
        return tuple(map(_hashable, arg))
    return type(arg), repr(arg) if isinstance(arg, float) else arg
