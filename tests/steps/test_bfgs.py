"""Minima of several functions at once, which are known."""

import torch

from bayesfed.steps.bfgs import minima

EYE = torch.eye(2, dtype=torch.float64)


def of(function, calls=None):
    def slope(u):
        leaf = u.detach().requires_grad_()
        values = function(leaf)
        (grad,) = torch.autograd.grad(values.sum(), leaf)
        if calls is not None:
            calls.append(1)
        return values.detach(), grad

    return slope


def functions(u):
    """A valley that bends; a barrier at 1; a double well from its ridge, whose other number is far off."""
    x, y = u.unbind(-1)
    bends = (1 - x[0]) ** 2 + 100 * (y[0] - x[0] ** 2) ** 2
    barrier = 5 * (x[1] - 2) ** 2 - torch.log(1 - x[1]) + y[1] ** 2
    wells = (x[2] ** 2 - 1) ** 2 + 0.01 * (y[2] - 30) ** 2
    return torch.stack([bends, barrier, wells])


def test_functions_end_at_their_minima_by_themselves():
    starts = torch.tensor([[-1.2, 1.0], [-1.0, 3.0], [0.1, 0.0]], dtype=torch.float64)
    inverse = EYE.expand(3, 2, 2)
    found = minima(of(functions), [starts], inverse)
    x = 1.5 - 0.5 * (1 + 0.4) ** 0.5  # 10 (x − 2) (1 − x) + 1 = 0
    truth = torch.tensor([[1.0, 1.0], [x, 0.0], [1.0, 30.0]], dtype=torch.float64)
    torch.testing.assert_close(found, truth, rtol=0.0, atol=5e-3)

    def second(u):
        return functions(torch.cat([starts[:1], u, starts[2:]]))[1:2]

    alone = minima(of(second), [starts[1:2]], inverse[:1])
    torch.testing.assert_close(alone, found[1:2], rtol=0.0, atol=1e-9)


def test_a_function_starts_where_it_is_lowest_and_a_known_curvature_takes_one_step():
    precision = torch.tensor([[1e4, 50.0], [50.0, 1.0]], dtype=torch.float64)
    calls = []

    def quadratic(u):
        return 0.5 * torch.einsum("ki,ij,kj->k", u - 1, precision, u - 1)

    starts = [torch.full((1, 2), value, dtype=torch.float64) for value in (torch.inf, 9.0, 0.5)]
    found = minima(of(quadratic, calls), starts, torch.linalg.inv(precision)[None])
    torch.testing.assert_close(found, torch.ones_like(found), rtol=0.0, atol=1e-9)
    assert len(calls) == len(starts) + 1
