"""Entry by entry, many small triangular matrices give what LAPACK gives."""

import pytest
import torch

from bayesfed.guides import triangular
from bayesfed.guides.triangular import (
    SMALL,
    TriangularNormal,
    inverse_root,
    product_of_normals,
    solve_lower,
    times,
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
    found = inverse_root(root @ root.mT)
    assert found.equal(found.tril())
    torch.testing.assert_close(found @ found.mT, torch.linalg.inv(root @ root.mT))
    value, loc = columns[..., 0], torch.zeros(size, dtype=torch.float64)
    torch.testing.assert_close(
        TriangularNormal(loc, scale_tril=root).log_prob(value),
        torch.distributions.MultivariateNormal(loc, scale_tril=root).log_prob(value),
    )


def factors(size):
    """Arguments of product_of_normals, with clients' factors and a prior that they share at three draws."""
    generator = torch.Generator().manual_seed(size)

    def draw(*shape):
        return torch.randn(*shape, size, generator=generator, dtype=torch.float64)

    prior = draw(3, 1, 1), draw(3, 1, 1).exp()
    return prior, draw(3, 5, 1), draw(3, 5, 1).exp(), draw(5, 1, size)


@pytest.mark.parametrize("many", [1, 10_000])
@pytest.mark.parametrize("size", [1, 2, 3, SMALL, SMALL + 2])
def test_the_product_of_two_normals(size, many, monkeypatch):
    monkeypatch.setattr(triangular, "MANY", many)
    (centre, weight), loc, diagonal, below = factors(size)
    root = diagonal[..., None] * (below.tril(-1) + torch.eye(size, dtype=torch.float64))
    factor, prior = root @ root.mT, torch.diag_embed(weight)
    covariance = torch.linalg.inv(prior + factor)
    natural = prior @ centre[..., None] + factor @ loc[..., None]
    mean, tril = product_of_normals((centre, weight), loc, diagonal, below)
    torch.testing.assert_close(mean, (covariance @ natural).squeeze(-1))
    torch.testing.assert_close(tril @ tril.mT, covariance)
    assert tril.equal(tril.tril())


@pytest.mark.parametrize("size", [2, SMALL])
def test_gradients_of_the_product_are_those_of_differences(size):
    prior, *factor = factors(size)
    given = [x.requires_grad_() for x in (*prior, *factor)]

    def product(centre, weight, *factor):
        return product_of_normals((centre, weight), *factor)

    assert torch.autograd.gradcheck(product, given)


@pytest.mark.parametrize("size", [2, SMALL])
def test_a_root_with_a_diagonal_of_ones_and_products_with_vectors(size, monkeypatch):
    root, vector = roots(size), torch.randn(3, 5, 1, size, dtype=torch.float64)
    unit = root.tril(-1) + torch.eye(size, dtype=torch.float64)
    for many in (1, 10_000):
        monkeypatch.setattr(triangular, "MANY", many)
        for transposed in (False, True):
            found = solve_lower(root, vector[..., None], transposed=transposed, unit=True)
            back = (unit.mT if transposed else unit) @ found
            torch.testing.assert_close(back.squeeze(-1), vector)
        torch.testing.assert_close(times(root, vector), (root @ vector[..., None]).squeeze(-1))


@pytest.mark.parametrize("size", [2, SMALL])
def test_gradients_are_those_of_differences(size):
    root = roots(size)
    precision = (root @ root.mT).requires_grad_()
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
