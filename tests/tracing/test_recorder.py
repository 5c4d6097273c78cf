"""Tests that a recorded graph computes the function, also at other numbers."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch

from bayesfed.tracing.recorder import Recorder


def recorded(function, *inputs, **kwargs):
    return noted(function, *inputs, **kwargs)[0]


def noted(function, *inputs, to_compile=False):
    """Return the graph and the number of its operations."""
    recorder = Recorder()
    with recorder.with_inputs(inputs):
        result = function(*inputs)
    made = recorder.graph if to_compile else recorder.function
    return made([result]), recorder.left


def writes_in_place(x):
    """Read views of memory that is changed in between."""
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


def picks(x):
    """Read by whole numbers, those of a constant and those that it computes, and differentiate that."""
    w = torch.stack([x, 2 * x]).requires_grad_()
    chosen = w[:, torch.tensor([2, 0, 0])] * w[(w > 0).long(), torch.arange(3)]
    (slope,) = torch.autograd.grad(chosen.square().sum(), w)
    return slope


def below_the_diagonal(x):
    """A mask that is computed from no input, and its gradient, as in the prior of a correlation matrix."""
    rows = torch.arange(3)
    w = x.clone().requires_grad_()
    chosen = (w[:, None] * w * torch.arange(1.0, 4.0))[..., rows < rows[:, None]]
    (slope,) = torch.autograd.grad(chosen.exp().sum(), w)
    return slope


def log_volume_of_correlations(x):
    transform = torch.distributions.biject_to(torch.distributions.constraints.corr_cholesky)
    return transform.log_abs_det_jacobian(x, transform(x))


CONSTANT = torch.tensor([0.5, -0.25, 1.0])


@pytest.mark.parametrize(
    "function",
    [
        writes_in_place,
        writes_into_a_copy,
        differentiates,
        several,
        picks,
        below_the_diagonal,
        log_volume_of_correlations,
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


def twice(x):
    return (x * 2).exp() + (x * 2).exp().detach()


def test_nothing_is_done_twice():
    for to_compile in (False, True):
        assert noted(twice, torch.ones(2), to_compile=to_compile)[1] == 3


def test_numbers_and_truth_values_are_distinguished():
    """The constants 1, 1.0 and True are equal in Python but not for an operation."""
    x = torch.tensor([1, 2])
    graph = recorded(lambda x: (x * 1).double() + x * 1.0 + x.clamp(max=True), x)
    (found,) = graph(x)
    assert torch.equal(found, (x * 1).double() + x * 1.0 + x.clamp(max=True))


EIGHT = torch.tensor(8.0)


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: (x * 1.0 + 0.0 - 0) / 1, 0),
        (lambda x: 1 * x**1.0 + torch.zeros_like(x), 0),
        (lambda x: torch.ones_like(x) * torch.cat([x]), 0),
        (lambda x: x * torch.ones(3).log().add(1.0), 0),
        (lambda x: x.expand(3).float().reshape(3), 0),
        (lambda x: x[None].expand(2, 3)[:, None].expand(2, 4, 3).reshape(8, 3)[:1], 3),
        (lambda x: x[None, :, None].transpose(0, 1).squeeze(0), 1),
        (lambda x: x.expand(2, 3) * torch.arange(2.0)[:, None], 1),
        (lambda x: x.exp()[:, None].sum(-1), 2),
        (lambda x: x[:, None].mean(-1) - x.expand(1, 3)[0], 1),
        (lambda x: x * torch.eye(3) + torch.eye(3), 2),
        # different operations
        (lambda x: x + 0.0 * x, 2),
        (lambda x: x * torch.ones(2, 3), 1),
        (lambda x: x.double() * 1 + x, 2),
        (lambda x: x * EIGHT.log() + EIGHT.log() * 1, 3),
        (lambda x: x[:1].expand(3) * x[1:2].expand(3), 4),
        (lambda x: torch.add(x, torch.ones(3), alpha=0) * torch.sub(torch.zeros(3), x), 3),
        (lambda x: x[1:][:2].neg(), 3),
        (lambda x: torch.complex(x, x).conj().imag.neg(), 9),
    ],
)
def test_operations_without_effect_are_left_out(function, left):
    graph, found = noted(function, torch.tensor([0.3, -1.0, 2.0]))
    assert found <= left
    for other in ([0.3, -1.0, 2.0], [1.0, torch.inf, -3.0]):
        x = torch.tensor(other)
        expected = function(x)
        assert (graph(x)[0].shape, graph(x)[0].dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(graph(x)[0], expected, rtol=0, atol=0, equal_nan=True)


def with_one_dimension_more(x):
    return torch.xlogy(x.round().abs(), x[:, None].exp()[:, 0])


def changed_afterwards(x):
    rate = x.exp()
    found = torch.xlogy(x.round().abs(), rate)
    return found + rate.add_(1.0)


def of_another_number(x):
    return torch.xlogy(x.exp(), x.abs())


@pytest.mark.parametrize(
    ("function", "logarithms"),
    [
        (lambda x: torch.xlogy(x.round().abs(), x.exp()), 0),
        (lambda x: torch.xlogy(x.round().abs().expand(2, 3), (x.expand(2, 3) * 0.5).exp()), 0),
        (with_one_dimension_more, 0),
        (changed_afterwards, 1),
        (of_another_number, 1),
    ],
)
def test_logarithms_of_exponentials_are_not_computed(function, logarithms):
    x = torch.tensor([0.3, -1.0, 2.0])
    recorder = Recorder()
    with recorder.with_inputs([x]):
        result = function(x)
    operations = recorder.recording([result]).operations
    assert sum(one.target is torch.ops.aten.xlogy.Tensor for one in operations) == logarithms
    graph = recorder.function([result])
    for other in ([0.3, -1.0, 2.0], [0.1, 80.0, -3.0]):
        x = torch.tensor(other)
        torch.testing.assert_close(graph(x)[0], function(x), rtol=1e-6, atol=1e-6)


def written_over(a, _):
    """Change a tensor after a view of it was taken."""
    v = a.clone()
    first = v[..., :1]
    v.add_(1.0)
    return v * first


def written_into(a, b):
    v = torch.zeros(a.shape)
    v.add_(a).mul_(3.0)
    v[..., 0] = 5.0
    return v + b


CONSTANT_ROW = torch.arange(3.0)
PIECES = [
    lambda a, b: a * 1 + b,
    lambda a, b: 0.0 + a * b,
    lambda a, b: a - b,
    lambda a, b: a * torch.ones_like(b),
    lambda a, b: torch.zeros_like(a) + b,
    lambda a, b: torch.full_like(a, 2.0).log() * b,
    lambda a, _: a.unsqueeze(0),
    lambda a, _: a.unsqueeze(-1),
    lambda a, _: a.expand(2, *a.shape),
    lambda a, _: a.sum(-1),
    lambda a, _: a.mean(0, keepdim=True),
    lambda a, _: a.transpose(0, -1),
    lambda a, _: a[..., :2],
    lambda a, _: a[..., 1:],
    lambda a, _: a[0],
    lambda a, _: a.reshape(-1),
    lambda a, _: a.squeeze(),
    lambda a, _: a.permute(*reversed(range(a.ndim))),
    lambda a, _: torch.cat([a]),
    lambda a, b: torch.cat([a, b], -1),
    lambda a, _: a.split(1, -1)[0],
    lambda a, _: a.contiguous().detach(),
    lambda a, _: a.double().float(),
    lambda a, _: a**1.0 / 1,
    lambda a, _: a.exp().clamp(max=3.0),
    lambda a, b: torch.where(a > b, a, torch.ones(())),
    lambda a, _: a * CONSTANT_ROW.log1p()[: a.shape[-1]],
    lambda a, _: torch.eye(3)[: a.shape[-1], :1].squeeze(-1) * a,
    written_over,
    written_into,
]


def random_program(seed):
    """Compose a random function of two tensors, as far as shapes allow."""

    def program(x, y):
        chance, values = random.Random(seed), [x, y]
        for _ in range(chance.randint(3, 25)):
            piece, a, b = (chance.choice(some) for some in (PIECES, values, values))
            with suppress(RuntimeError, IndexError, TypeError):
                value = piece(a, b)
                values += [value] if value.numel() < 500 else []
        return [chance.choice(values), values[-1], values[-2]]

    return program


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 3), (3, 1), (4, 1, 2)])
def test_random_programs(shape):
    """Both forms of the graph give the program's results at other numbers, and change no input."""
    generator = torch.Generator().manual_seed(0)

    def numbers():
        return [torch.randn(shape, generator=generator) for _ in range(2)]

    for seed in range(60):
        program = random_program(seed)
        for to_compile in (False, True):
            recorder, inputs = Recorder(), numbers()
            with recorder.with_inputs(inputs):
                results = program(*inputs)
            graph = (recorder.graph if to_compile else recorder.function)(results)
            inputs = numbers()
            before = [x.clone() for x in inputs]
            found, expected = graph(*inputs), program(*before)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, equal_nan=True)
            assert all(map(torch.equal, inputs, before))


def test_a_constant_result_is_copied():
    """The caller may change the results of a graph."""
    graph = recorded(lambda x: torch.zeros_like(x) + torch.ones(3), torch.ones(3))
    graph(torch.ones(3))[0].fill_(7.0)
    assert graph(torch.ones(3))[0].tolist() == [1.0, 1.0, 1.0]


def test_memory_that_is_used_again_is_another_memory():
    """Addresses differ from run to run, but the graph, by which Inductor's cache is searched, does not."""

    def function(x):
        for _ in range(5):
            torch.zeros(3).add_(x).sum()
        return (x * 2).exp() + (x * 2).exp()

    assert {noted(function, torch.ones(3))[1] for _ in range(5)} == {13}


def test_memory_is_kept_no_longer_than_needed():
    """A chain of operations needs memory for two of its tensors, however long it is."""

    def chain(x):
        for _ in range(20):
            x = x.exp().clamp(max=1.0)
        return x.sum()

    graph, x = recorded(chain, torch.ones(4)), torch.ones(2**20)
    with torch.profiler.profile(profile_memory=True) as profiler:
        graph(x)
    held, most = 0, 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert 2 * x.nbytes <= most <= 3 * x.nbytes


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x + torch.randn(3), "random numbers of its own"),
        (lambda x: x if float(x[0]) > 0 else -x, "depends on numbers"),
        (lambda x: x[x > 0], "depends on numbers"),
        (lambda x: x[CONSTANT > 0], "depends on numbers"),  # its owner may change it
        (lambda x: x[torch.zeros(3).copy_(x) > 0], "depends on numbers"),
    ],
)
def test_functions_without_a_graph_are_refused(function, why):
    with pytest.raises(ValueError, match=why):
        recorded(function, torch.ones(3))


def test_a_constant_is_read_where_it_is():
    """A graph reads a constant at each call, as an eager function does, so that changes by its owner are seen."""
    weight = torch.ones(2)
    graph = recorded(lambda x: x * weight, torch.ones(2))
    weight.fill_(3.0)
    assert graph(torch.ones(2))[0].tolist() == [3.0, 3.0]
