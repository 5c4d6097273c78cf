"""A recorded graph is the function, at other numbers too."""

from __future__ import annotations

import pytest
import torch

from bayesfed.tracing.recorder import Recorder


def recorded(function, *inputs):
    recorder = Recorder()
    with recorder.of(inputs):
        result = function(*inputs)
    return recorder.graph([result])


def writes_in_place(x):
    """Views of memory that is changed between two readings of it."""
    room = torch.zeros(3)
    first = room[:2]
    before = first * 2
    room.add_(x)
    again = torch.zeros(3)
    again[1:] = x[1:]
    return before.sum() + (first * 2).sum() + again.sum() + room.detach().sum()


def writes_into_a_copy(x):
    one, two = x.clone(), x.clone()
    one.mul_(3)
    return one + two


def differentiates(x):
    w = (2 * x).requires_grad_()
    y = (w.tanh() * w).sum()
    (slope,) = torch.autograd.grad(y, w, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), w)
    return slope.detach() + bend


def several(x):
    values, vectors = torch.linalg.eigh(torch.outer(x, x) + torch.eye(3))
    low, high = torch.stack([x, -x]).unbind()
    return values + vectors.abs().sum(0) + low * high + torch.cat([x, x]).reshape(2, 3).amax(0)


CONSTANT = torch.tensor([0.5, -0.25, 1.0])


@pytest.mark.parametrize(
    "function",
    [
        writes_in_place,
        writes_into_a_copy,
        differentiates,
        several,
        lambda x: torch.where(x > 0, x * CONSTANT, 1.0),
        lambda x: x * 1 + x * 1.0 + x * True,
        lambda x: x,
    ],
)
def test_at_other_numbers(function):
    graph = recorded(function, torch.tensor([0.3, -1.0, 2.0]))
    with torch.no_grad():
        for other in ([0.3, -1.0, 2.0], [1.0, 2.0, -3.0], [0.0, 0.1, 0.2]):
            x = torch.tensor(other)
            (found,) = graph(x)
            with torch.enable_grad():
                expected = function(x).detach()
            assert torch.equal(found, expected)


def test_nothing_is_done_twice():
    graph = recorded(lambda x: (x * 2).exp() + (x * 2).exp().detach(), torch.ones(2))
    operations = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert len(operations) == 3


def test_a_number_and_a_truth_are_two():
    """1, 1.0 and True are equal in Python and not to an operation."""
    x = torch.tensor([1, 2])
    graph = recorded(lambda x: (x * 1).double() + x * 1.0 + x.clamp(max=True), x)
    (found,) = graph(x)
    assert torch.equal(found, (x * 1).double() + x * 1.0 + x.clamp(max=True))


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x + torch.randn(3), "random numbers of its own"),
        (lambda x: x if float(x[0]) > 0 else -x, "depends on numbers"),
        (lambda x: x[x > 0], "depends on numbers"),
    ],
)
def test_what_no_graph_can_be_of(function, why):
    with pytest.raises(ValueError, match=why):
        recorded(function, torch.ones(3))


def test_a_constant_is_read_where_it_is():
    """As a function that runs eagerly reads it: what its owner changes is seen."""
    weight = torch.ones(2)
    graph = recorded(lambda x: x * weight, torch.ones(2))
    weight.fill_(3.0)
    assert graph(torch.ones(2))[0].tolist() == [3.0, 3.0]
