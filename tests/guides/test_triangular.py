"""Entry by entry, many small triangular matrices give what LAPACK gives."""

import pytest
import torch

from bayesfed.guides import triangular
from bayesfed.guides.triangular import (
    SMALL,
    TriangularNormal,
    inverse_root,
    outer,
    solve_lower,
)


@pytest.fixture(autouse=True)
def by_entries(monkeypatch):
    """Take the way of many matrices with few."""
    monkeypatch.setattr(triangular, "MANY", 1)


def roots(size):
    generator = torch.Generator().manual_seed(size)
    below = torch.randn(5, 1, size, size, generator=generator, dtype=torch.float64).tril(-1)
    return below + torch.diag_embed(torch.rand(5, 1, size, generator=generator).double() + 0.5)


@pytest.mark.parametrize("size", [1, 2, 3, SMALL, SMALL + 2])
def test_values_are_those_of_lapack(size):
    root = roots(size)
    columns = torch.randn(3, 5, 1, size, 2, dtype=torch.float64)
    expand = root.expand(3, *root.shape)
    torch.testing.assert_close(
        solve_lower(root, columns), torch.linalg.solve_triangular(expand, columns, upper=False)
    )
    torch.testing.assert_close(
        solve_lower(root, columns, transposed=True),
        torch.linalg.solve_triangular(expand.mT, columns, upper=True),
    )
    torch.testing.assert_close(outer(root), root @ root.mT)
    found = inverse_root(outer(root))
    assert found.equal(found.tril())
    torch.testing.assert_close(found @ found.mT, torch.linalg.inv(root @ root.mT))
    value, loc = columns[..., 0], torch.zeros(size, dtype=torch.float64)
    torch.testing.assert_close(
        TriangularNormal(loc, scale_tril=root).log_prob(value),
        torch.distributions.MultivariateNormal(loc, scale_tril=root).log_prob(value),
    )


@pytest.mark.parametrize("size", [2, SMALL])
def test_gradients_are_those_of_differences(size):
    precision = outer(roots(size)).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: inverse_root((p + p.mT) / 2), precision)
    root, columns = roots(size).requires_grad_(), torch.randn(5, 1, size, 1, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda r: solve_lower(r.tril(), columns), root)


@pytest.mark.parametrize("count", [triangular.MANY - 1, triangular.MANY])
def test_few_matrices_are_solved_by_lapack(count, monkeypatch):
    monkeypatch.undo()
    called = []
    solve = torch.linalg.solve_triangular
    monkeypatch.setattr(
        torch.linalg, "solve_triangular", lambda *a, **k: called.append(1) or solve(*a, **k)
    )
    solve_lower(torch.eye(3).expand(count, 3, 3), torch.ones(count, 3, 1))
    assert len(called) == (count < triangular.MANY)


def test_what_is_not_positive_definite_is_seen():
    indefinite = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    assert not inverse_root(indefinite).isfinite().all()
