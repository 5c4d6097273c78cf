"""Specialisation of recorded operations to numbers that stay the same over many runs, such as clients' rows.

What depends on these alone is computed once. What has no effect for them is left out: the mask of rows without
padding, a scale of 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from bayesfed.tracing.operations import (
    Operation,
    Recording,
    Value,
    constant_value,
    needed_operations,
    new_value,
    replace_values,
)
from bayesfed.tracing.products import product_of_copies, sum_of_products
from bayesfed.tracing.simplify import (
    broadcast_shape,
    is_allocation,
    is_dense,
    is_pointwise,
    reads_layout_only,
    stand_in,
    unchanged_argument,
)

aten = torch.ops.aten
_SLOW = (
    aten.log.default,
    aten.log1p.default,
    aten.exp.default,
    aten.tanh.default,
    aten.sigmoid.default,
)
"""Functions of single numbers that take ten times as long where these do not lie in order, such as in a diagonal."""
_OF_MEMORY = (aten.as_strided.default, aten.view.default)
"""Views that depend on how the numbers lie in memory."""
_CROSS_ENTROPY = aten.binary_cross_entropy_with_logits.default


@torch.no_grad()
def specialise(recording: Recording, numbers: Mapping[int, Tensor]) -> Recording:
    """Return a recording with some inputs, by position, replaced by numbers; the other inputs remain.

    Example:
        >>> import torch
        >>> from bayesfed.tracing.operations import as_function
        >>> from bayesfed.tracing.recorder import Recorder
        >>> from bayesfed.tracing.specialise import specialise
        >>> recorder, x, scale = Recorder(), torch.tensor([1.0, 2.0]), torch.tensor([3.0])
        >>> with recorder.with_inputs([x, scale]):
        ...     y = x * (scale.exp() - 1)
        >>> once = specialise(recorder.recording([y]), {1: torch.zeros(1)})
        >>> len(once.operations), as_function(*once)(torch.ones(2))
        (1, [tensor([0., 0.])])
    """
    operations, inputs, ends = recording
    rest = [value for place, value in enumerate(inputs) if place not in numbers]
    same = {
        inputs[place]: constant_value(number, inputs[place].form)
        for place, number in numbers.items()
    }
    written = {value.memory for op in operations if op.changes for value in op.reads}
    kept = []
    made: dict[Value, Operation] = {}
    for operation in operations:
        in_place = operation.touches(written)
        operation = operation.with_values(same)
        if in_place:
            kept.append(operation)
            continue
        if _is_constant(operation):
            for result, number in zip(operation.results, _numbers(operation), strict=True):
                if result is not None:
                    same[result] = constant_value(number, result.form)
            continue
        if not operation.single:
            kept.append(operation)
            continue
        if (argument := _argument_without_effect(operation)) is not None:
            (result,) = operation.results
            assert result is not None
            same[result] = argument
            continue
        for new in _in_memory(operation, made) or _faster(operation, made):
            made[new.results[0]] = new  # type: ignore[index]
            kept.append(new)
    ends = [same.get(value, value) for value in ends]
    return Recording(needed_operations(kept, ends), rest, ends)


def _is_constant(operation: Operation) -> bool:
    """Return whether an operation reads no input."""
    if is_allocation(operation.target):
        return False
    return reads_layout_only(operation.target) or all(
        v.constant is not None for v in operation.reads
    )


def _numbers(operation: Operation) -> Sequence[Any]:
    """Compute the results of an operation that reads no input."""
    known = {value: stand_in(value) for value in operation.reads}
    kwargs = {name: replace_values(arg, known) for name, arg in operation.kwargs.items()}
    found = operation.target(*replace_values(operation.args, known), **kwargs)
    return [found] if operation.single else found


def _argument_without_effect(operation: Operation) -> Value | None:
    """Return the argument that the result is equal to, or None if there is none."""
    if operation.target is not aten.where.self:
        return unchanged_argument(operation, {})
    condition, *others = operation.args
    (result,) = operation.results
    if condition.constant is None or result is None:
        return None
    for value, holds in zip(others, (True, False), strict=True):
        if value.form == result.form and bool((condition.constant == holds).all()):
            return cast(Value, value)
    return None


def _faster(operation: Operation, made: Mapping[Value, Operation]) -> list[Operation]:
    """Return operations with the same result; ``made`` has the earlier ones by their results."""
    if operation.target is aten.sum.dim_IntList:
        product = made.get(operation.reads[0])
        return sum_of_products(operation, product) or _sum_before_sign(operation, made)
    if operation.target is aten.bmm.default:
        return product_of_copies(operation, made) or [operation]
    if operation.target is _CROSS_ENTROPY:
        return _softplus(operation) or [operation]
    if not is_pointwise(operation.target):
        return [operation]
    found = _before_expansion(operation, made)
    if found == [operation] and operation.target in _SLOW:
        return _in_order(operation)
    return found


def _in_memory(operation: Operation, made: Mapping[Value, Operation]) -> list[Operation] | None:
    """Copy the argument of a view if it has become an expansion, and no longer lies in memory as recorded."""
    if operation.target not in _OF_MEMORY:
        return None
    argument = operation.reads[0]
    source = made.get(argument)
    if source is None or source.target is not aten.expand.default or not is_dense(argument.form):
        return None
    return _copy_first(operation, argument)


def _before_expansion(operation: Operation, made: Mapping[Value, Operation]) -> list[Operation]:
    """Compute each number once where the arguments are expanded, and expand the result."""
    (result,) = operation.results
    assert result is not None
    sources = {
        value: made[value].reads[0]
        for value in operation.reads
        if value in made and made[value].target is aten.expand.default
    }
    if not sources:
        return [operation]
    shapes = [sources.get(value, value).form.shape for value in operation.reads]
    shape = broadcast_shape(shapes)
    if len(shape) < len(result.form.shape):
        return [operation]
    if shape == result.form.shape:
        return [operation.with_values(sources)]
    small = new_value(shape, result)
    before = operation.with_values(sources)
    before = Operation(before.target, before.args, before.kwargs, [small], True)
    return [
        before,
        Operation(aten.expand.default, [small, list(result.form.shape)], {}, [result], True),
    ]


def _in_order(operation: Operation) -> list[Operation]:
    """Copy the argument if its numbers do not lie in order."""
    (argument,) = operation.reads
    if is_dense(argument.form):
        return [operation]
    return _copy_first(operation, argument)


def _copy_first(operation: Operation, argument: Value) -> list[Operation]:
    """Copy an argument, so that its numbers lie in order, before the operation."""
    copy = new_value(argument.form.shape, argument)
    return [
        Operation(
            aten.clone.default, [argument], {"memory_format": torch.contiguous_format}, [copy], True
        ),
        operation.with_values({argument: copy}),
    ]


def _sum_before_sign(operation: Operation, made: Mapping[Value, Operation]) -> list[Operation]:
    """Change the sign of a sum, not of each number in it."""
    first = made.get(operation.reads[0])
    (result,) = operation.results
    if first is None or first.target is not aten.neg.default or result is None:
        return [operation]
    total = new_value(result.form.shape, result)
    args = [first.reads[0], *operation.args[1:]]
    return [
        Operation(operation.target, args, operation.kwargs, [total], True),
        Operation(aten.neg.default, [total], {}, [result], True),
    ]


def _softplus(operation: Operation) -> list[Operation] | None:
    """Compute −log Bernoulli(y | logits x) as softplus((1 − 2 y) x), if all y are 0 or 1."""
    logits, outcome, *rest = operation.args
    (result,) = operation.results
    if rest != [None, None, 0] or operation.kwargs or outcome.constant is None or result is None:
        return None
    y = _without_repetition(outcome.constant)
    if logits.form.shape != result.form.shape or not bool(((y == 0) | (y == 1)).all()):
        return None
    sign = constant_value(1 - 2 * y, outcome.form._replace(shape=y.shape))
    signed = new_value(result.form.shape, result)
    return [
        Operation(aten.mul.Tensor, [logits, sign], {}, [signed], True),
        Operation(aten.softplus.default, [signed], {}, [result], True),
    ]


def _without_repetition(x: Tensor) -> Tensor:
    """Return a tensor without its expansions, with dimensions of size 1 in their place."""
    for dim, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x
