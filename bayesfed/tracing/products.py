"""Sums of products over a short last dimension, such as linear predictors of a few covariates.

``(x * beta).sum(-1)`` writes each product, and torch adds up two or three neighbouring numbers at a fraction of the
speed at which it adds up columns.
"""

from __future__ import annotations

from typing import Any

import torch

from bayesfed.tracing.operations import Operation, Value, constant_value, new_value
from bayesfed.tracing.simplify import is_dense

aten = torch.ops.aten
SHORT = 8
"""The longest dimension whose products are added up one after another, where there is no matrix product."""


def sum_of_products(total: Operation, product: Operation | None) -> list[Operation] | None:
    """Return operations with the same result as the sum of a product over its last dimension; None if there are none.

    They are a matrix product where one factor is constant and the factors vary along different other dimensions, as
    draws and rows do, and else products of the entries along that dimension, added up one after another.

    Args:
        total: a sum.
        product: the operation that made its argument, if it is known.
    """
    if product is None or product.target is not aten.mul.Tensor or len(product.reads) != 2:
        return None
    form, (result,) = total.reads[0].form, total.results
    if result is None or total.kwargs or total.args[2:] not in ([], [False]):
        return None
    if total.args[1] not in ([-1], [len(form.shape) - 1]):
        return None
    one, other = product.reads
    if one.constant is not None:
        one, other = other, one
    number = form.shape[-1]
    sizes = [(value.form.shape[-1:], value.form.dtype) for value in (one, other)]
    if other.constant is None or sizes != [((number,), form.dtype)] * 2:
        return None
    return _matrix_product(one, other, result) or _one_after_another(one, other, result, number)


def _matrix_product(one: Value, constant: Value, result: Value) -> list[Operation] | None:
    """Return the matrix product, if the leading dimensions are those of one factor, and the others the constant's."""
    shape, number = result.form.shape, one.form.shape[-1]
    ours, others = (
        (1,) * (len(shape) + 1 - len(value.form.shape)) + tuple(value.form.shape[:-1])
        for value in (one, constant)
    )
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


def _constant(number: torch.Tensor, like: Value) -> Value:
    """Return a constant that lies in memory as its numbers do."""
    form = like.form._replace(shape=number.shape, stride=number.stride(), offset=0)
    return constant_value(number, form)


def _operation(target: Any, args: list[Any], result: Value) -> Operation:
    return Operation(target, args, {}, [result], True)
