"""Functions run in blocks from their recorded operations give the same numbers as when they run at once."""

import pyro.distributions as dist
import pytest
import torch

from bayesfed.guides import newton
from bayesfed.tracing import blocks


class Program:
    pass


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "CACHE", 60)  # 3 draws of 4 clients with 5 rows


def log_joint(program, rows, u, z):
    """As a logistic model's: a prior with a scale from z, and padded rows with counts."""
    prior = dist.Normal(z[:, 0, :1, None], z[:, 0, 1:, None].exp().expand(-1, 4, 1)).log_prob(u)
    logits = u[..., :1] + z[:, 0, 1:, None] * rows["x"]
    found = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, rows["y"].expand(logits.shape), reduction="none"
    )
    found = torch.where(rows["mask"], -found * rows["scale"], 0.0)
    return [prior.sum(-1) + found.sum(-1), u.exp()]


def rows(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(4, 5, generator=generator),
        "y": (torch.rand(4, 5, generator=generator) < 0.5).float(),
        "mask": torch.ones(4, 5, dtype=torch.bool),
        "scale": torch.ones(4, 1),
    }


@pytest.fixture
def draws():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(31, 4, 1, generator=generator), torch.randn(31, 1, 2, generator=generator)]


def check(function, program, fixed, draws):
    found = blocks.in_blocks(function, program, fixed, draws, 20)
    for one, other in zip(found, function(program, *fixed, *draws), strict=True):
        torch.testing.assert_close(one, other)


def test_each_call_is_specialised_to_its_own_rows(draws):
    """The same shapes, and so the same recording: rows without effect in one call have one in another."""
    program, first = Program(), rows(0)
    check(log_joint, program, (first,), draws)
    (kept,) = blocks._recordings[id(program)].values()
    numbers = [*first.values()]
    targets = [
        op.target for op in blocks.specialise(kept.recording, dict(enumerate(numbers))).operations
    ]
    assert torch.ops.aten.softplus.default in targets
    assert torch.ops.aten.where.self not in targets
    padded = rows(1) | {"mask": torch.arange(5) < torch.tensor([[5], [3], [1], [4]])}
    check(log_joint, program, (padded,), draws)
    check(log_joint, program, (rows(2) | {"scale": torch.full((4, 1), 2.0)},), draws)
    check(log_joint, program, (rows(3) | {"y": torch.full((4, 5), 0.3)},), draws)
    check(log_joint, program, (rows(4) | {"mask": torch.zeros(4, 5, dtype=torch.bool)},), draws)
    assert [*blocks._recordings[id(program)].values()] == [kept] and len(kept.checked) > 1


def predictor(program, rows, beta, w):
    """Covariates of globals, and of effects of each client."""
    fixed = (rows["X"] * beta[:, :, None]).sum(-1)
    return [fixed + (rows["X"] * w[:, :, None]).sum(-1)]


@pytest.mark.parametrize(("columns", "products"), [(1, 0), (2, 1), (20, 1)])
def test_linear_predictors_are_matrix_products(columns, products):
    """Of effects of each client they are products of columns, where these are few."""
    generator = torch.Generator().manual_seed(0)
    beta, w = (torch.randn(31, k, columns, generator=generator) for k in (1, 4))
    numbers = {"X": torch.randn(4, 5, columns, generator=generator)}
    program = Program()
    check(predictor, program, (numbers,), [beta, w])
    (kept,) = blocks._recordings[id(program)].values()
    special = blocks.specialise(kept.recording, {0: numbers["X"]})
    targets = [op.target for op in special.operations]
    assert targets.count(torch.ops.aten.matmul.default) == products
    sums = targets.count(torch.ops.aten.sum.dim_IntList)
    assert sums == (1 if columns == 20 else 0)
    assert targets.count(torch.ops.aten.addcmul.default) == (1 if columns == 2 else 0)


def test_products_that_are_read_elsewhere_or_summed_otherwise(draws):
    def function(program, x, z):
        product = x * z
        return [product.sum(-1), product.sum(1), product.exp(), product.sum(-1, keepdim=True)]

    check(function, Program(), (torch.randn(4, 2),), [draws[1].expand(31, 4, 2)])


def second_derivatives(program, weights, u, z):
    """Products of a matrix of each draw of θ with the vectors of all clients, and their Hessian in these."""
    matrix = weights * z[:, 0, :1, None].exp()[:, None]
    with torch.enable_grad():
        u = u.detach().requires_grad_()
        value = -(matrix @ u[..., None]).square().sum()
        (slope,) = torch.autograd.grad(value, u, create_graph=True)
        each = torch.eye(u.shape[-1])[:, None, None].expand(-1, *u.shape)
        (products,) = newton.pull_back(slope, [u], each, attached=False)
    return [slope.detach(), products.detach().movedim(0, -1)]


@pytest.mark.parametrize("clients", [1, 4])
def test_matrices_are_not_copied_for_each_vector(clients):
    generator = torch.Generator().manual_seed(0)
    u, z = torch.randn(31, clients, 5, generator=generator), torch.randn(31, 1, 2)
    weights, program = torch.randn(5, 5, generator=generator), Program()
    check(second_derivatives, program, (weights,), [u, z])
    (kept,) = blocks._recordings[id(program)].values()
    special = blocks.specialise(kept.recording, {0: weights})
    large = u.shape[-1] ** 2 * 5 * len(special.inputs[0].form.shape)  # a matrix for each vector
    copies = [op for op in special.operations if op.target is torch.ops.aten.clone.default]
    assert all(op.results[0].form.shape.numel() < large for op in copies)
    products = [op for op in special.operations if op.target is torch.ops.aten.bmm.default]
    assert {op.args[0].form.shape[0] for op in products} == {3}  # as many as draws in a block


def curvature_of_clients(program, rows, u, z):
    """That of logistic regressions with coefficients of each client's own."""

    def density(u):
        logits = z[..., 0] + (rows["X"] * u).sum(-1)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, rows["y"].expand(logits.shape), reduction="none"
        )
        return -losses.sum(-1) - u.square().sum((-2, -1)) / 2

    with torch.enable_grad():
        return [x.detach() for x in newton.value_and_curvature(density, u)]


@pytest.mark.parametrize(("clients", "number", "columns"), [(4, 20, 12), (1, 20, 12), (4, 9, 9)])
def test_second_derivatives_are_products_of_matrices(clients, number, columns):
    """Xᵀ W X of each client and draw, and no result with a number for each row and each pair of columns."""
    generator = torch.Generator().manual_seed(0)
    numbers = {
        "X": torch.randn(clients, number, columns, generator=generator),
        "y": (torch.rand(clients, number, generator=generator) < 0.5).float(),
    }
    u, z = (torch.randn(31, k, 1, p, generator=generator) for k, p in ((clients, columns), (1, 1)))
    program = Program()
    check(curvature_of_clients, program, (numbers,), [u, z])
    (kept,) = blocks._recordings[id(program)].values()
    special = blocks.specialise(kept.recording, dict(enumerate(numbers.values())))
    pairs = special.inputs[0].form.shape[0] * clients * number * columns**2
    results = [value for op in special.operations for value in op.results if value is not None]
    assert max(value.form.shape.numel() for value in results) < pairs / 2
    targets = [op.target for op in special.operations]
    assert torch.ops.aten.bmm.default in targets
    x, w = numbers["X"].double(), u.double()[:, :, 0]
    p = torch.sigmoid(z.double()[:, :, 0] + torch.einsum("knp,skp->skn", x, w))
    hessian = -torch.einsum("knp,skn,knq->skpq", x, p * (1 - p), x) - torch.eye(columns)
    _, _, found = blocks.in_blocks(curvature_of_clients, program, (numbers,), [u, z], 20)
    torch.testing.assert_close(found[:, :, 0].double(), hessian, rtol=1e-4, atol=1e-4)


def of_expanded(program, rows, z):
    """Arithmetic of an expansion, whose result is then read as it lies in memory."""
    every = z[:, 0, :1, None].exp().expand(-1, 4, 5)
    scale = (every * rows["scale"]).sin()
    return [scale.view(-1, 20)[:, None] + 1]


def test_views_of_what_is_computed_before_an_expansion(draws):
    check(of_expanded, Program(), (rows(0),), draws[1:])


def test_recordings_end_with_their_program(draws):
    program = Program()
    check(log_joint, program, (rows(0),), draws)
    number = id(program)
    assert number in blocks._recordings
    del program
    assert number not in blocks._recordings


def test_gradients_and_operations_in_place(draws):
    def gradient(program, scale, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            total = (scale * x).sin().sum() + x.select(1, 0).square().sum()
            return [*torch.autograd.grad(total, x)]

    def in_place(program, scale, x):
        made = torch.zeros_like(x)
        made[:, 1:] = (scale * x)[:, 1:]
        return [made.mul_(2.0)]

    for function in (gradient, in_place):
        check(function, Program(), (torch.full((4, 1), 1.5),), draws[:1])


def test_what_cannot_be_recorded_runs_as_it_is(draws):
    calls = []

    def branches(program, x):
        return [x if float(x.sum()) > -1e9 else -x]

    def counts(program, x):
        calls.append(None)
        return [x + len(calls)]

    check(branches, Program(), (), draws[:1])
    found = blocks.in_blocks(counts, Program(), (), draws[:1], 20)
    torch.testing.assert_close(found[0], draws[0] + len(calls))
