"""Fewer operations that give the same: without aliases, and nothing twice; to be run as they are, fewer still.

What a model and its gradients are written as leaves much that does nothing: a tensor times one, plus zero, expanded to
its own shape, a chain of views, the logarithm of ones. Inductor removes that itself; a graph that is run as it is pays
for each. Of memory that is changed in between everything stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from bayesfed.tracing.operations import Form, Operation, Value, replaced

aten = torch.ops.aten
_ALIASES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
"""Operations that give their argument; where gradients are over they are nothing."""
_NEUTRAL = {
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), 1),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar), 1),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar), 0),
}
"""The second argument that leaves the first as it is."""
_COMMUTE = (aten.mul.Tensor, aten.add.Tensor)
_COPIES = (aten._to_copy.default, aten.cat.default)
_SUMS = (aten.sum.dim_IntList, aten.mean.dim)
_ALIKE = (
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
)
"""Operations that read the form of their argument alone."""
_OTHER_NUMBERS = (aten._conj.default, aten._neg_view.default)
"""Views that read the same memory as other numbers."""
_EMPTY = (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided)
LARGEST = 4096
"""The most numbers of a constant that is kept in place of the operations that make it."""


class Kind(NamedTuple):
    """What is known of an operation: see the names above."""

    alias: bool
    neutral: int | None
    commutes: bool
    copies: bool
    sums: bool
    alike: bool
    empty: bool
    expands: bool
    views: bool
    pointwise: bool


@functools.cache
def _kind(target: OpOverload) -> Kind:
    return Kind(
        alias=target in _ALIASES,
        neutral=_NEUTRAL.get(target),
        commutes=target in _COMMUTE,
        copies=target in _COPIES,
        sums=target in _SUMS,
        alike=target in _ALIKE,
        empty=target.overloadpacket in _EMPTY,
        expands=target is aten.expand.default,
        views=target.is_view and target not in _OTHER_NUMBERS,
        pointwise=torch.Tag.pointwise in target.tags and not target._schema.is_mutable,
    )


@torch.no_grad()
def simplified(
    operations: Sequence[Operation], written: set[int], *, to_run: bool
) -> tuple[list[Operation], dict[Value, Value]]:
    """Fewer operations, and by what values others are replaced.

    Args:
        operations: in order.
        written: memory that one of them changes.
        to_run: as they are.
    """
    same: dict[Value, Value] = {}
    seen: dict[Any, Operation] = {}
    made: dict[Any, Value] = {}
    views: dict[Value, Operation] = {}
    kept: list[Operation] = []
    for operation in operations:
        operation = operation.of(same)
        if written and operation.touches(written):
            kept.append(operation)
            continue
        if operation.single:
            kind, result = _kind(operation.target), _result(operation)
            if to_run and kind.sums:
                operation = _unsummed(operation)
                kind = _kind(operation.target)
            argument = operation.reads[0] if kind.alias else None
            if to_run and argument is None:
                argument = _made(operation, kind, made) or _given(operation, kind, views)
            if argument is not None:
                same[result] = argument
                continue
            if to_run and kind.pointwise:
                operation = _unexpanded(operation, views)
            if to_run and kind.views:
                views[result] = operation
                operation = _viewed(operation, views)
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


def _given(operation: Operation, kind: Kind, views: dict[Value, Operation]) -> Value | None:
    """The argument that an operation gives as it is, if it does; or what that is a view of."""
    form, reads = _result(operation).form, operation.reads
    if kind.views:
        return next((v for v in (reads[0], _root(reads[0], views)) if v.form == form), None)
    if kind.copies:
        return reads[0] if len(reads) == 1 and reads[0].form == form else None
    if kind.neutral is None:
        return None
    first, second = operation.args
    for value, other in ((first, second), (second, first))[: 1 + kind.commutes]:
        if isinstance(value, Value) and value.form == form and _is(other, kind.neutral):
            return value
    return None


def _is(value: Any, number: int) -> bool:
    """Whether an argument is that number everywhere."""
    if not isinstance(value, Value):
        return bool(value == number)
    return value.made and value.constant is not None and bool((value.constant == number).all())


def _made(operation: Operation, kind: Kind, made: dict[Any, Value]) -> Value | None:
    """What an operation gives of no input, as a constant; ``made`` has those of before."""
    result = _result(operation)
    if kind.empty or result.form.shape.numel() > LARGEST:
        return None
    if not kind.alike and not all(value.made for value in operation.reads):
        return None
    key = _key(operation)
    if key not in made:
        known = {value: _stand_in(value) for value in operation.reads}
        args = replaced(operation.args, known)
        kwargs = {name: replaced(arg, known) for name, arg in operation.kwargs.items()}
        numbers = operation.target(*args, **kwargs)
        made[key] = Value(result.form, result.memory, result.address, numbers, made=True)
    return made[key]


def _stand_in(value: Value) -> Tensor:
    """Its numbers, or others where only its form is read."""
    if value.constant is not None:
        return value.constant
    shape, stride, _, dtype, device = value.form
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _unsummed(operation: Operation) -> Operation:
    """Over dimensions of one a sum is a view."""
    result, first = _result(operation), operation.reads[0]
    one, other = first.form, result.form
    alike = one[2:] == other[2:] and _dense(one) and _dense(other)
    if one.shape.numel() != other.shape.numel() or not alike:
        return operation
    return Operation(aten.view.default, [first, list(other.shape)], {}, [result], True)


def _dense(form: Form) -> bool:
    """Whether it lies in memory in order, without gaps."""
    size = 1
    for length, stride in zip(reversed(form.shape), reversed(form.stride), strict=True):
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def _unexpanded(operation: Operation, views: dict[Value, Operation]) -> Operation:
    """Numbers that an operation expands anyway, as they were before others did."""
    by: dict[Value, Value] = {}
    for value in operation.reads:
        if value in views and _kind(views[value].target).expands:
            source = views[value].reads[0]
            shapes = [(by | {value: source}).get(read, read).form.shape for read in operation.reads]
            if source.form.shape and _broadcast(shapes) == _result(operation).form.shape:
                by[value] = source
    return operation.of(by)


def _broadcast(shapes: Sequence[torch.Size]) -> tuple[int, ...]:
    """As :func:`torch.broadcast_shapes`, of shapes that fit each other."""
    most = max(map(len, shapes))
    whole = [(1,) * (most - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*whole, strict=True))


def _viewed(operation: Operation, views: dict[Value, Operation]) -> Operation:
    """A view of a view as one of what that is a view of."""
    result, source = _result(operation), operation.reads[0]
    root, form = _root(source, views), result.form
    plain = form.dtype == root.form.dtype and not form.dtype.is_complex
    if root is source or form.offset != root.form.offset or not plain:
        return operation
    args = [root, list(form.shape), list(form.stride)]
    return Operation(aten.as_strided.default, args, {}, [result], True)


def _root(value: Value, views: dict[Value, Operation]) -> Value:
    """What a view is a view of."""
    while value in views:
        value = views[value].reads[0]
    return value


def _key(operation: Operation) -> Any:
    """Something hashable that is equal where operations are: 1 is neither 1.0 nor True."""
    return operation.target, _of(operation.args), _of([*operation.kwargs.items()])


def _of(arg: Any) -> Any:
    if isinstance(arg, list | tuple):
        return tuple(map(_of, arg))
    return type(arg), repr(arg) if isinstance(arg, float) else arg
