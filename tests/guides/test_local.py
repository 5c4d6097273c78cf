"""The local factor against exact conditioning."""

import pyro.distributions as dist
import pytest
import torch

from bayesfed.guides import local
from bayesfed.guides.local import NormalPrior, Scaling

pytestmark = pytest.mark.usefixtures("float64")

PRIORS = [(0.0, 1.0), (-3.0, 0.2), (5.0, 40.0)]


def start(size):
    return Scaling(torch.linspace(-1.0, 2.0, size), torch.linspace(0.5, 3.0, size))


def nothing():
    return torch.zeros(0)


def none(size):
    """Weights of an empty context."""
    return {
        "loc_weight": torch.zeros(1, 1, size, 0),
        "precision_weight": torch.zeros(1, 1, size, 0),
    }


def moments(q):
    cov = getattr(q, "covariance_matrix", None)
    return q.mean, torch.diag_embed(q.variance) if cov is None else cov


@pytest.mark.parametrize("prior", PRIORS)
def test_normal_prior_and_likelihood_in_one_dimension(prior):
    """w ~ N(m, s), y_j ~ N(w, σ): the same parameters give the exact posterior for any prior."""
    units, y, sigma = start(1), torch.tensor([0.4, 1.1, 0.9]), 0.7
    q = local.conditional(
        units,
        NormalPrior(*(torch.full((1, 1, 1), v) for v in prior)),
        nothing(),
        loc=((y.mean() - units.loc) / units.scale)[None, None],
        log_precision=(3 / sigma**2 * units.scale.square()).log()[None, None],
        **none(1),
    )
    m, s = prior
    precision = 1 / s**2 + 3 / sigma**2
    mean = (m / s**2 + y.sum() / sigma**2) / precision
    torch.testing.assert_close(q.mean.squeeze(), mean)
    torch.testing.assert_close(q.stddev.squeeze(), torch.tensor(precision**-0.5))


@pytest.mark.parametrize("prior", PRIORS)
def test_a_regression_with_full_covariance(prior):
    """w ~ N(m, diag s²) in three dimensions, y ~ N(Xw, σ): conditioning the joint Gaussian of (w, y).

    The expected values are differences of numbers as large as s² (the mean's: s or m), each off by round-off times the
    condition number of the matrix inverted. This bounds the error: the covariance to 6e-14 under the first prior, to
    1.4e-7 under the last. Actual errors are a tenth of it.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 3, generator=generator), torch.randn(6, generator=generator)
    sigma, units = 0.6, start(3)
    loc = prior[0] + torch.arange(3.0)
    scale = prior[1] * torch.tensor([1.0, 0.5, 2.0])
    cross = torch.diag(scale**2) @ x.T
    marginal = x @ cross + sigma**2 * torch.eye(6)
    gain = cross @ torch.linalg.inv(marginal)
    mean, cov = loc + gain @ (y - x @ loc), torch.diag(scale**2) - gain @ cross.T
    # the likelihood of w, in the units of start: N(w; best, (XᵀX)⁻¹ σ²)
    best = torch.linalg.solve(x.T @ x, x.T @ y)
    root = torch.linalg.cholesky(units.scale[:, None] * (x.T @ x / sigma**2) * units.scale)
    q = local.conditional(
        units,
        NormalPrior(loc.expand(1, 1, 3), scale.expand(1, 1, 3)),
        nothing(),
        loc=((best - units.loc) / units.scale)[None, None],
        log_precision=2 * root.diagonal().log()[None, None],
        tril=(root / root.diagonal()[:, None])[None, None],
        **none(3),
    )
    bound = torch.finfo(torch.float64).eps * float(torch.linalg.cond(marginal))
    largest = float(torch.cat([loc.abs(), scale]).max())
    torch.testing.assert_close(q.mean[0, 0], mean, rtol=0, atol=bound * largest)
    torch.testing.assert_close(q.covariance_matrix[0, 0], cov, rtol=0, atol=bound * largest**2)


@pytest.mark.parametrize("correlation", [0.0, -0.6, 0.999999])
@pytest.mark.parametrize("draws", [1, 6000])
def test_a_regression_with_a_correlated_prior(correlation, draws):
    """The same, w ~ N(m, M Mᵀ), few draws and many; the posterior is as narrow as the prior where that is singular."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 3, generator=generator), torch.randn(6, generator=generator)
    units, loc, root = start(3), torch.tensor([0.5, -1.0, 2.0]), torch.eye(3)
    root[1, :2] = torch.tensor([correlation, (1 - correlation**2) ** 0.5])
    root = torch.tensor([0.5, 2.0, 1.0])[:, None] * root
    cross = root @ root.T @ x.T
    gain = cross @ torch.linalg.inv(x @ cross + torch.eye(6))
    mean, cov = loc + gain @ (y - x @ loc), root @ root.T - gain @ cross.T
    best = torch.linalg.solve(x.T @ x, x.T @ y)
    factor = torch.linalg.cholesky(units.scale[:, None] * (x.T @ x) * units.scale)
    scales = root.square().sum(-1).sqrt()
    parts = (value.expand(draws, 1, *value.shape) for value in (loc, scales, root))
    q = local.conditional(
        units,
        NormalPrior(*parts),
        nothing(),
        loc=((best - units.loc) / units.scale)[None, None],
        log_precision=2 * factor.diagonal().log()[None, None],
        tril=(factor / factor.diagonal()[:, None])[None, None],
        **none(3),
    )
    torch.testing.assert_close(q.mean[-1, 0], mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(q.covariance_matrix[-1, 0], cov, rtol=0, atol=1e-12)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("flat", [True, False])
def test_the_context_shifts_the_factor(full, flat):
    """Location a + C^{−⊤} A c, where C is that of c = 0, and log-precisions r + R c; with and without a prior."""
    generator = torch.Generator().manual_seed(1)
    units, clients, draws = start(3), 2, 4

    def randn(*shape):
        return 0.5 * torch.randn(shape, generator=generator)

    a, r, w = randn(clients, 1, 3), randn(clients, 1, 3), randn(clients, 1, 3, 3)
    big_a, big_r = randn(clients, 1, 3, 5), randn(clients, 1, 3, 5)
    c = randn(draws, 1, 1, 5)
    prior = None if flat else NormalPrior(randn(draws, 1, 1, 3), randn(draws, 1, 1, 3).exp())
    if not full:
        w = torch.zeros_like(w)
    q = local.conditional(units, prior, c, a, r, big_a, big_r, **({"tril": w} if full else {}))
    mean, cov = moments(q)
    assert mean.shape == (draws, clients, 1, 3)
    for s in range(draws):
        for k in range(clients):
            unit = torch.eye(3) + w[k, 0].tril(-1)
            fixed = torch.diag((r[k, 0] / 2).exp()) @ unit
            at = a[k, 0] + torch.linalg.inv(fixed).T @ big_a[k, 0] @ c[s, 0, 0]
            root = torch.diag(((r[k, 0] + big_r[k, 0] @ c[s, 0, 0]) / 2).exp()) @ unit
            scale = torch.diag(1 / units.scale)
            precision = natural = scale @ root @ root.T @ scale
            natural = precision @ (units.loc + units.scale * at)
            if prior is not None:
                weight = prior[1][s, 0, 0] ** -2
                natural = natural + weight * prior[0][s, 0, 0]
                precision = precision + torch.diag(weight)
            torch.testing.assert_close(mean[s, k, 0], torch.linalg.solve(precision, natural))
            torch.testing.assert_close(cov[s, k, 0], torch.linalg.inv(precision))


def test_without_tril_the_factor_is_diagonal_and_agrees():
    units = start(2)
    parts = {"loc": torch.ones(1, 1, 2), "log_precision": torch.ones(1, 1, 2), **none(2)}
    prior = NormalPrior(torch.zeros(1, 1, 2), torch.full((1, 1, 2), 2.0))
    first = local.conditional(units, prior, nothing(), **parts)
    second = local.conditional(units, prior, nothing(), **parts, tril=torch.zeros(1, 1, 2, 2))
    for left, right in zip(moments(first), moments(second), strict=True):
        torch.testing.assert_close(left, right)


def test_start_is_a_narrow_factor_at_the_centre_of_the_prior():
    units = start(3)
    params = local.init_conditional(units, 4)
    shapes = {name: tuple(value.shape) for name, value in params.items()}
    assert shapes == {
        "loc": (3,),
        "log_precision": (3,),
        "tril": (3, 3),
        "loc_weight": (3, 4),
        "precision_weight": (3, 4),
    }
    q = local.conditional(
        units, None, torch.zeros(1, 1, 4), **{n: v[None, None] for n, v in params.items()}
    )
    torch.testing.assert_close(q.mean[0, 0], units.loc)
    torch.testing.assert_close(
        q.stddev[0, 0], units.scale * torch.tensor(-local.START_LOG_PRECISION / 2).exp()
    )
    assert "tril" not in local.init_conditional(start(1), 4)
    assert "tril" not in local.init_conditional(start(local.FULL_UP_TO + 1), 4)


@pytest.mark.parametrize("full", [True, False])
def test_whitened_draws_are_the_noise(full):
    tril = torch.tensor([[2.0, 0.0], [-1.0, 0.5]])
    loc, noise = torch.tensor([1.0, -1.0]), torch.randn(5, 2)
    q = dist.MultivariateNormal(loc, scale_tril=tril) if full else dist.Normal(loc, tril.diagonal())
    u = loc + (noise @ tril.T if full else noise * tril.diagonal())
    torch.testing.assert_close(local.whiten(q, u), noise)


def test_normal_priors_in_unconstrained_coordinates():
    shape = (2, 1)
    loc, scale, _ = local.normal_prior(dist.Normal(torch.zeros(2, 1), 3.0))
    assert (loc.shape, scale.shape) == ((*shape, 1), (*shape, 1))
    loc, scale, _ = local.normal_prior(dist.LogNormal(torch.ones(2, 1), 2.0))
    assert (loc == 1).all()
    assert (scale == 2).all()
    loc, scale, _ = local.normal_prior(dist.Normal(torch.zeros(2, 1, 4), 3.0).to_event(1))
    assert (loc.shape, scale.shape) == ((*shape, 4), (*shape, 4))
    for other in (dist.StudentT(3.0, torch.zeros(2, 1)), dist.HalfNormal(torch.ones(2, 1))):
        assert local.normal_prior(other) is None
        assert local.correlated_prior(other) is None


def test_multivariate_normal_priors_side_by_side():
    """Three pairs of a client's variables, and one that is independent of them."""
    root = torch.tensor([[2.0, 0.0], [-1.0, 0.5]])
    pairs = dist.MultivariateNormal(torch.ones(5, 1, 3, 2), scale_tril=root).to_event(1)
    single = dist.Normal(torch.zeros(5, 1, 1), 3.0).to_event(1)
    prior = local.join_priors([local.correlated_prior(pairs), local.normal_prior(single)])
    whole = torch.block_diag(root, root, root, torch.tensor([[3.0]]))
    torch.testing.assert_close(prior.root, whole.expand(5, 1, 7, 7))
    torch.testing.assert_close(prior.scale, (whole @ whole.T).diagonal().sqrt().expand(5, 1, 7))
    assert prior.loc[0, 0].tolist() == [1.0] * 6 + [0.0]
    assert local.normal_prior(pairs) is None


@pytest.mark.parametrize(
    "prior",
    [
        dist.Normal(torch.zeros(2, 1), 1.0),
        dist.Normal(torch.zeros(2, 1, 3), 1.0).to_event(1),
        dist.LogNormal(torch.zeros(2, 1), 1.0),
        dist.Uniform(0.0, 3.0).expand([2, 1]),
        dist.Uniform(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]])),
        dist.Dirichlet(torch.ones(2, 1, 3)),
        dist.LKJCholesky(3, 1.0).expand([2, 1]),
    ],
    ids=["real", "vector", "positive", "interval", "bounds of its own", "simplex", "cholesky"],
)
def test_on_support(prior):
    """Draws lie in the support and their density is that of u with the Jacobian of the change."""
    transform = torch.distributions.biject_to(prior.support)
    size = transform.inverse_shape(prior.shape())[2:].numel()
    q = dist.Normal(torch.full((2, 1, size), 0.2), 0.6)
    over = local.on_support(prior, q)
    assert (over.batch_shape, over.event_shape) == ((2, 1), prior.event_shape)
    torch.manual_seed(0)
    value = over.rsample()
    assert prior.support.check(value).all()
    u = transform.inv(value)
    log_det = transform.log_abs_det_jacobian(u, value).reshape(2, 1, -1).sum(-1)
    expected = q.log_prob(u.reshape(2, 1, size)).sum(-1) - log_det
    torch.testing.assert_close(over.log_prob(value), expected)


def test_a_matrix_with_full_covariance_over_its_support():
    """q is over the flattened matrix, a draw has the shape of the prior."""
    torch.manual_seed(0)
    root = torch.linalg.cholesky(torch.eye(6) + 0.3)
    q = dist.MultivariateNormal(torch.arange(6.0).expand(2, 1, 6), scale_tril=root)
    over = local.on_support(dist.Normal(torch.zeros(2, 1, 2, 3), 1.0).to_event(2), q)
    value = over.rsample()
    assert value.shape == (2, 1, 2, 3)
    torch.testing.assert_close(over.log_prob(value), q.log_prob(value.reshape(2, 1, 6)))
