"""Sums of products, such as linear predictors and their derivatives, and products of matrices.

``(x * beta).sum(-1)`` writes each product, and torch adds up two or three neighbouring numbers at a fraction of the
speed at which it adds up columns. For the products of one matrix with many vectors torch copies the matrix for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bayesfed.tracing.operations import Operation, Value, constant_value, new_value
from bayesfed.tracing.simplify import is_dense

aten = torch.ops.aten
SHORT = 8
"""The longest dimension whose products are added up one after another, where there is no matrix product."""


def sum_of_products(total: Operation, product: Operation | None) -> list[Operation] | None:
    """Return operations with the same result as the sum of a product over one dimension; None if there are none.

    They are a matrix product where one factor is constant and the factors vary along different other dimensions, as
    draws and rows do; products of matrices where both vary along some, as effects and rows of each client do; and of a
    few entries products of each, added up one after another.

    Args:
        total: a sum.
        product: the operation that made its argument, if it is known.
    """
    if product is None or product.target is not aten.mul.Tensor or len(product.reads) != 2:
        return None
    form, (result,) = total.reads[0].form, total.results
    if result is None or total.kwargs or len(total.args[1]) != 1:
        return None
    one, other = product.reads
    if one.constant is not None:
        one, other = other, one
    if other.constant is None or one.constant is not None:
        return None
    if {one.form.dtype, other.form.dtype} != {form.dtype} or not is_dense(result.form):
        return None
    dim, number = total.args[1][0] % len(form.shape), form.shape[-1]
    of_last = dim == len(form.shape) - 1 and total.args[2:] in ([], [False])
    found = None
    if of_last and {value.form.shape[-1:] for value in (one, other)} == {(number,)}:
        found = _matrix_product(one, other, result)
        found = found or _one_after_another(one, other, result, number)
    return found or _matrix_products(one, other, form.shape, dim, result)


def _matrix_product(one: Value, constant: Value, result: Value) -> list[Operation] | None:
    """Return the matrix product, if the leading dimensions are those of one factor, and the others the constant's."""
    shape, number = result.form.shape, one.form.shape[-1]
    ours, others = (_padded(value.form.shape[:-1], len(shape)) for value in (one, constant))
    split = next((i for i in range(len(shape) + 1) if set(ours[i:]) <= {1}), len(shape))
    if set(others[:split]) - {1} or not is_dense(one.form) or constant.constant is None:
        return None
    matrix = constant.constant.reshape(-1, number).mT.contiguous()
    rows, at_rows = (
        new_value((*shape[:split], number), one),
        new_value((*shape[:split], matrix.shape[1]), one),
    )
    return [
        _operation(aten.view.default, [one, [*shape[:split], number]], rows),
        _operation(aten.matmul.default, [rows, _constant(matrix, constant)], at_rows),
        _operation(aten.view.default, [at_rows, [*shape]], result),
    ]


def _matrix_products(
    one: Value, constant: Value, shape: Sequence[int], inner: int, result: Value
) -> list[Operation] | None:
    """Return one matrix product for each index along the dimensions along which both factors vary.

    Args:
        one: the factor that is not constant.
        constant: the other one.
        shape: of the product.
        inner: the dimension that is summed.
        result: the sum.

    None if the matrices are small.
    """
    ours, others = (_padded(value.form.shape, len(shape)) for value in (one, constant))
    if ours[inner] != others[inner] or constant.constant is None:
        return None
    dims = [dim for dim in range(len(shape)) if dim != inner]
    both = [dim for dim in dims if ours[dim] > 1 and others[dim] > 1]
    rows = [dim for dim in dims if ours[dim] > 1 and others[dim] == 1]
    columns = [dim for dim in dims if ours[dim] == 1]
    width = math.prod(others[dim] for dim in columns)
    if min(width, shape[inner]) <= SHORT:
        return None
    stack = math.prod(shape[dim] for dim in both)
    height, length = math.prod(shape[dim] for dim in rows), shape[inner]
    matrices = constant.constant.reshape(others).permute(*both, *rows, inner, *columns)
    matrices = matrices.reshape(stack, length, width).contiguous()
    whole, factor = new_value(ours, one), new_value((stack, height, length), one)
    turned = new_value([ours[dim] for dim in (*both, *columns, *rows, inner)], one)
    each = new_value((stack, height, width), one)
    operations = [
        _operation(aten.reshape.default, [one, [*ours]], whole),
        _operation(aten.permute.default, [whole, [*both, *columns, *rows, inner]], turned),
        _operation(aten.reshape.default, [turned, [*factor.form.shape]], factor),
        _operation(aten.bmm.default, [factor, _constant(matrices, constant)], each),
    ]
    order = [*both, *rows, inner, *columns]
    sizes = [1 if dim == inner else shape[dim] for dim in order]
    back = [order.index(dim) for dim in range(len(shape))]
    last = _reordered(each, sizes, back, operations)
    return [*operations, _operation(aten.view.default, [last, [*result.form.shape]], result)]


def _one_after_another(
    one: Value, constant: Value, result: Value, number: int
) -> list[Operation] | None:
    """Return the products of the entries, each added to those before, if they are few."""
    if number > SHORT or constant.constant is None:
        return None
    operations, before = [], None
    for i in range(number):
        shape, stride, *_ = one.form
        own = Value(one.form._replace(shape=shape[:-1], stride=stride[:-1], offset=0), -1, -1)
        entry = _constant(constant.constant.select(-1, i).contiguous(), constant)
        value = result if i == number - 1 else new_value(result.form.shape, result)
        operations.append(_operation(aten.select.int, [one, -1, i], own))
        if before is None:
            operations.append(_operation(aten.mul.Tensor, [own, entry], value))
        else:
            operations.append(_operation(aten.addcmul.default, [before, own, entry], value))
        before = value
    return operations


def product_of_copies(
    product: Operation, made: Mapping[Value, Operation]
) -> list[Operation] | None:
    """Return operations with the same result as a product of copies of matrices with others, without the copies.

    Args:
        product: of B matrices with B others, ``(B, T, U)`` and ``(B, U, N)``.
        made: earlier operations by their results.

    None unless the first are R copies of S matrices, one set after another.
    """
    copies, others = product.args
    copied = copies
    for target in (aten._unsafe_view.default, aten.clone.default):
        if copied not in made or made[copied].target is not target:
            return None
        copied = made[copied].reads[0]
    (*front, rows, columns), stride = copied.form.shape, copied.form.stride
    repeated = next((i for i, step in enumerate(stride) if step), len(stride))
    (result,) = product.results
    times, sets = math.prod(front[:repeated]), front[repeated:]
    whole = copies.form.shape == (math.prod(front), rows, columns) and is_dense(others.form)
    if result is None or not whole or len(sets) != 1 or times == 1:
        return None
    width, found, matrices = others.form.shape[-1], [], copied
    for _ in range(repeated):
        shape, steps = matrices.form.shape[1:], matrices.form.stride[1:]
        one = Value(matrices.form._replace(shape=shape, stride=steps), -1, -1)
        found.append(_operation(aten.select.int, [matrices, 0, 0], one))
        matrices = one
    beside = _reordered(others, (times, *sets, columns, width), (1, 2, 0, 3), found)
    joined = new_value((*sets, columns, times * width), others)
    found.append(_operation(aten.view.default, [beside, [*joined.form.shape]], joined))
    each = new_value((*sets, rows, times * width), others)
    found.append(_operation(aten.bmm.default, [matrices, joined], each))
    apart = _reordered(each, (*sets, rows, times, width), (2, 0, 1, 3), found)
    return [*found, _operation(aten.view.default, [apart, [*result.form.shape]], result)]


def _reordered(
    value: Value, shape: Sequence[int], order: Sequence[int], operations: list[Operation]
) -> Value:
    """Return a value with its dimensions in another order in memory; append the operations that make it."""
    seen, copy = new_value(shape, value), new_value([shape[i] for i in order], value)
    steps = tuple(seen.form.stride[i] for i in order)
    turned = Value(copy.form._replace(stride=steps), -1, -1)
    contiguous = {"memory_format": torch.contiguous_format}
    operations += [
        _operation(aten.view.default, [value, [*shape]], seen),
        _operation(aten.permute.default, [seen, [*order]], turned),
        Operation(aten.clone.default, [turned], contiguous, [copy], True),
    ]
    return copy


def _padded(shape: Sequence[int], length: int) -> tuple[int, ...]:
    """Return a shape with as many dimensions of size one in front as it lacks."""
    return (1,) * (length - len(shape)) + tuple(shape)


def _constant(number: torch.Tensor, like: Value) -> Value:
    """Return a constant that lies in memory as its numbers do."""
    form = like.form._replace(shape=number.shape, stride=number.stride(), offset=0)
    return constant_value(number, form)


def _operation(target: Any, args: list[Any], result: Value) -> Operation:
    return Operation(target, args, {}, [result], True)
