"""Squared gradients of rows: through linear layers at once, or row by row, are the same numbers."""

import pytest
import torch
from torch import nn

import bayesfed as bf
from bayesfed import FOLA, models
from bayesfed.steps import curvature
from bayesfed.steps.laplace_steps import _loss

LENGTHS = (9, 4, 6)


class Tied(nn.Module):
    """One matrix, used once as a layer and once transposed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return torch.tanh(self.layer(x)) @ self.layer.weight


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Positions(nn.Module):
    """A layer at each of two places: a row's gradient is a sum before it is squared."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def forward(self, x):
        return self.layer(x.unflatten(1, (2, 2))).sum(1)


def problem(module, clients=LENGTHS):
    """A loss of clients with ragged rows, weights for each, and their rows, in double precision."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    data = bf.Federation.from_arrays(
        {
            f"c{i}": {"x": normal(n, 4), "y": torch.randint(0, 3, (n,), generator=generator)}
            for i, n in enumerate(clients)
        }
    )
    guide = FOLA().program(models.Network(module.double(), local=()), data).guide
    w = 0.5 * normal(len(clients), len(guide.start))
    return _loss(guide), w, data.batch()


@pytest.mark.parametrize(
    ("module", "at_once"),
    [
        (models.mlp(4, 3), True),
        (models.mlp(4, 6, 3), True),
        (nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)), True),
        (nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), False),
        (nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.Flatten()), False),
        (Tied(), False),
        (Twice(), False),
        (Positions(), False),
    ],
    ids=["logistic", "mlp", "no bias", "layer norm", "convolution", "tied", "twice", "positions"],
)
@pytest.mark.parametrize("clients", [LENGTHS, (5,)])
def test_squares_of_rows_at_once_are_those_row_by_row(module, at_once, clients, float64):
    loss, w, batch = problem(module, clients)
    mean, square = curvature.slopes(loss, w, batch, "per-sample")
    assert square.min() >= 0
    assert square.max() > 0
    assert curvature.layered(loss, w, batch) == at_once
    if at_once:
        found = curvature.slopes(loss, w, batch, "layers")
        torch.testing.assert_close(found, (mean, square), rtol=1e-10, atol=1e-14)


def test_weights_that_a_layer_takes_otherwise_are_found_out(float64):
    """Twice the numbers in a layer: its squares are four times, but once the chain rule's share."""
    loss, w, batch = problem(models.mlp(4, 3))

    def doubled(w, batch):
        return loss(2 * w, batch)

    assert curvature.layered(loss, w, batch)
    assert not curvature.layered(doubled, w, batch)


@pytest.mark.parametrize("model", ["local", "learnt", "hyper", "head"])
def test_networks_take_the_fast_way(float64, model):
    """Whatever of a network is common to clients, and however its centre is given."""
    how = {
        "local": {},
        "learnt": {"spread": "learnt"},
        "hyper": {"hyper_scale": 0.5},
        "head": {"local": ["2."], "spread": "learnt"},
    }[model]
    generator = torch.Generator().manual_seed(0)
    data = bf.Federation.from_arrays(
        {
            f"c{i}": {"x": torch.randn(n, 4, generator=generator), "y": torch.arange(n) % 3}
            for i, n in enumerate(LENGTHS)
        }
    )
    guide = (
        FOLA(fisher="per-sample").program(models.Network(models.mlp(4, 8, 3), **how), data).guide
    )
    assert guide.layered


@pytest.mark.parametrize("kind", ["per-sample", "batch", "hessian"])
def test_diagonals_are_those_of_matrices(float64, kind):
    loss, w, batch = problem(models.mlp(4, 3))
    grad, diagonal = curvature.slopes(loss, w, batch, kind)
    again, matrix = curvature.slopes(loss, w, batch, kind, full=True)
    torch.testing.assert_close(again, grad)
    torch.testing.assert_close(matrix, matrix.mT)
    torch.testing.assert_close(matrix.diagonal(0, -2, -1).clamp(min=0), diagonal)
    if kind == "hessian":
        one = torch.autograd.functional.hessian(lambda v: loss(v, batch).sum(), w)
        for i in range(len(w)):
            torch.testing.assert_close(matrix[i], one[i, :, i])
