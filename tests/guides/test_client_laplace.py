"""q(w_i | θ) as Laplace's approximation at θ: its structure, and fits beside the exact marginal posterior."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed.elbo.sites import sites
from bayesfed.guides.automatic import automatic_guide
from bayesfed.guides.client_laplace import find_structure, newton_step
from bayesfed.guides.elimination import find_elimination, sparse_root
from bayesfed.guides.family import GLOBAL
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.precision_normal import DenseRoot, PrecisionNormal
from bayesfed.output.draws import draw_theta
from bayesfed.output.locals_given_theta import proposal_centre


def chain(size, width=1):
    steps = torch.arange(size)
    return (steps[:, None] - steps).abs() <= width


def tree(above, below):
    size = 1 + above + above * below
    pattern = torch.eye(size, dtype=torch.bool)
    for i in range(above):
        pattern[0, 1 + i] = True
        pattern[1 + i, 1 + above + i * below : 1 + above + (i + 1) * below] = True
    return pattern | pattern.T


def arrow(size):
    pattern = chain(size)
    pattern[0] = pattern[:, 0] = True
    return pattern


PATTERNS = [chain(33), chain(20, 3), tree(4, 6), arrow(25), torch.ones(5, 5).bool()]


@pytest.mark.parametrize("pattern", PATTERNS, ids=["chain", "band", "tree", "arrow", "dense"])
def test_factors_of_sparse_matrices(pattern):
    torch.manual_seed(0)
    A = torch.randn(3, *pattern.shape, dtype=torch.float64) * pattern
    A = A + A.mT
    A = (A + torch.diag_embed(A.abs().sum(-1) + 1)).requires_grad_()
    order = find_elimination(pattern)
    root = sparse_root(order, A[..., order.rows, order.columns])
    b = torch.randn(3, len(pattern), dtype=torch.float64)
    torch.testing.assert_close(root.solve(b), torch.linalg.solve(A, b))
    torch.testing.assert_close(root.log_det(), torch.logdet(A) / 2)
    torch.testing.assert_close(root.white(root.spread(b)), b)
    each = root.spread(torch.eye(len(pattern), dtype=torch.float64)[:, None])
    torch.testing.assert_close(torch.einsum("jki,jkl->kil", each, each), torch.linalg.inv(A))
    (grad,) = torch.autograd.grad(root.log_det().sum(), A)
    expected = torch.linalg.inv(A).detach() / 2 * pattern
    torch.testing.assert_close((grad + grad.mT) / 2 * pattern, expected)  # fill has one too
    assert root.definite.all()
    assert not sparse_root(order, -A[..., order.rows, order.columns]).definite.any()


@pytest.mark.parametrize("dense", [True, False])
def test_the_triangular_root_of_a_covariance(dense):
    torch.manual_seed(0)
    A = torch.randn(2, 3, 1, 20, 20, dtype=torch.float64) * chain(20)
    A = A + A.mT
    A = A + torch.diag_embed(A.abs().sum(-1) + 1)
    order = find_elimination(chain(20))
    sparse = sparse_root(order, A[..., order.rows, order.columns])
    root = DenseRoot(torch.linalg.cholesky(A)) if dense else sparse
    found = PrecisionNormal(torch.zeros(2, 3, 1, 20, dtype=torch.float64), root).scale_tril
    torch.testing.assert_close(found, torch.linalg.cholesky(torch.linalg.inv(A)))


def test_a_chain_is_eliminated_in_logarithmically_many_stages():
    assert len(find_elimination(chain(512)).stages) <= 10
    assert len(find_elimination(tree(10, 20)).stages) == 3


# -- an autoregression with a site for each number ---------------------------------------------------

STEPS = 24
PRIORS = {
    "rho": dist.Uniform(0.0, 1.0),
    "step": dist.HalfNormal(0.5),
    "sigma": dist.HalfNormal(1.0),
}


def autoregression(federation):
    rho, step, sigma = (pyro.sample(name, prior) for name, prior in PRIORS.items())
    with federation.clients():
        path = [pyro.sample("x0", dist.Normal(0.0, step * (1 - rho**2).rsqrt()))]
        for t in range(1, STEPS):
            path.append(pyro.sample(f"x{t}", dist.Normal(rho * path[-1], step)))
        with federation.observations() as obs:
            x = torch.cat(torch.broadcast_tensors(*path), -1)
            x = x.gather(-1, obs["t"].long().expand(*x.shape[:-1], obs["t"].shape[-1]))
            pyro.sample("y", dist.Normal(x, sigma), obs=obs.get("y"))


def paths(clients=6, seed=0):
    rng = np.random.default_rng(seed)
    found = {}
    for i in range(clients):
        x = [rng.normal() * 0.7]
        for _ in range(STEPS - 1):
            x.append(0.9 * x[-1] + 0.3 * rng.normal())
        t = np.flatnonzero(rng.random(STEPS) < 0.8)
        found[f"client {i}"] = {
            "t": t.astype(float),
            "y": np.array(x)[t] + 0.3 * rng.normal(size=len(t)),
        }
    return found


def log_evidence(rows, rho, step, sigma):
    """log p(D_i | θ) of S values, ``(S,)``."""
    t = torch.as_tensor(rows["t"])
    rho, step, sigma = (x.double().reshape(-1, 1, 1) for x in (rho, step, sigma))
    C = step**2 / (1 - rho**2) * rho ** (t[:, None] - t).abs()
    V = C + sigma**2 * torch.eye(len(t))
    return dist.MultivariateNormal(torch.zeros(len(t)).double(), V).log_prob(
        torch.as_tensor(rows["y"])
    )


def guide_of(model, federation):
    return automatic_guide(model, sites(model, federation), federation, FullRank(), True)


def test_the_structure_of_an_autoregression():
    structure = guide_of(autoregression, bf.Federation.from_arrays(paths())).structure
    assert structure.quadratic
    assert structure.concave
    assert len(structure.seeds) == 3
    assert str(structure) == "24 numbers, 3 products"


def test_the_weights_of_an_autoregression_are_its_marginal_likelihood():
    from bayesfed.output.draws import draw_theta
    from bayesfed.output.log_densities import sum_log_weights

    clients = paths()
    federation = bf.Federation.from_arrays(clients).to(dtype=torch.float64)
    posterior = bf.fit(
        autoregression, federation, bf.SFVI(corrected=False), rounds=1, progress=False
    )
    z = draw_theta(posterior, 20, posterior.key(0))
    found = sum_log_weights(posterior, z, 20, posterior.key(1))
    theta = posterior.sample(20, seed=0)
    exact = sum(log_evidence(rows, **{n: theta[n] for n in PRIORS}) for rows in clients.values())
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)


def test_products_one_after_another_are_those_at_once(monkeypatch):
    federation = bf.Federation.from_arrays(paths()).to(dtype=torch.float64)
    posterior = bf.fit(
        autoregression, federation, bf.SFVI(corrected=False), rounds=1, progress=False
    )
    at_once = posterior.sample(20)
    monkeypatch.setattr("bayesfed.guides.client_laplace.AT_ONCE", 0)
    for name, draws in posterior.sample(20).items():
        torch.testing.assert_close(draws, at_once[name])


def test_the_server_computes_nothing_of_the_clients(monkeypatch):
    """log p(θ) needs no Laplace approximation at θ: between machines nobody could compute one."""
    from bayesfed.elbo.elbo import log_prior
    from bayesfed.guides import hierarchical

    federation = bf.Federation.from_arrays(paths())
    posterior = bf.fit(
        autoregression, federation, bf.SFVI(corrected=False), rounds=1, progress=False
    )
    monkeypatch.setattr(hierarchical.client_laplace, "laplace_at", None)
    z = torch.tensor([[0.0, 0.0, 0.0], [0.5, -0.5, 1.0]])
    found = log_prior(posterior.program, posterior.params, {GLOBAL: z[:, None, None]}, 2)
    at = {
        n: s.loc + s.scale * z[:, i]
        for i, (n, s) in enumerate(posterior.program.guide.globals.items())
    }
    expected = torch.zeros(2)
    for name, prior in PRIORS.items():
        transform = torch.distributions.biject_to(prior.support)
        value = transform(at[name])
        expected += prior.log_prob(value) + transform.log_abs_det_jacobian(at[name], value)
        expected += posterior.program.guide.globals[name].scale.log().sum()
    torch.testing.assert_close(found, expected)


def test_no_gradient_noise_where_the_approximation_is_exact():
    """∇ of a client's term at draws of θ is ∇ log p(D_i | θ), whatever the noise of its own variables."""
    from bayesfed.elbo.elbo import client_terms

    clients = paths()
    federation = bf.Federation.from_arrays(clients).to(dtype=torch.float64)
    program = bf.SFVI().program(autoregression, federation)
    batch = federation.batch(torch.arange(len(federation)))
    params = program.init | program.init_locals(batch)
    z = 0.3 * torch.randn(4, 1, 1, 3, dtype=torch.float64)
    z.requires_grad_()
    found = []
    for seed in range(2):
        keys = torch.arange(len(federation)) + 100 * seed
        noise = program.noise(keys, 4, local=True)
        terms = client_terms(program, params, {"global": z}, batch, noise, 4)
        found.append(torch.autograd.grad(terms.sum(), z)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)


# -- counts on a random walk: the approximation is not exact -----------------------------------------


def counts(federation):
    step = pyro.sample("step", dist.HalfNormal(0.5))
    with federation.clients():
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([70]).to_event(1))
        path = 1.0 + step[..., None] * z.cumsum(-1)
        with federation.observations() as obs:
            here = torch.nn.functional.one_hot(obs["t"].long(), 70).to(path.dtype)
            pyro.sample("y", dist.Poisson((path * here).sum(-1).exp()), obs=obs.get("y"))


def counted(clients=3):
    rng = np.random.default_rng(1)
    return bf.Federation.from_arrays(
        {
            f"c{i}": {
                "t": np.arange(0.0, 70.0, 2.0),
                "y": rng.poisson(np.exp(1 + 0.2 * rng.normal(size=70).cumsum()[::2])).astype(float),
            }
            for i in range(clients)
        }
    )


def test_newton_steps_reach_the_mode_of_counts():
    federation = counted()
    guide = guide_of(counts, federation)
    assert not guide.structure.quadratic
    batch = federation.batch(torch.arange(len(federation)))
    program = bf.SFVI().program(counts, federation)
    start = torch.zeros(len(federation), 1, 70)
    mode = program.laplace(program.init, {"local.loc": start}, batch)["local.loc"]
    z = torch.zeros(1)
    u = mode[None].clone().requires_grad_()
    log_joint = program.guide.block_log_joint(program.init, batch, u, z)
    (grad,) = torch.autograd.grad(log_joint.sum(), u)
    assert float(grad.abs().max()) < 1e-2


TIMES = torch.arange(24.0)
KERNEL = torch.exp(-(TIMES[:, None] - TIMES).square() / 50) + 1e-3 * torch.eye(24)


def curves_of_counts(federation):
    """A Gaussian process of each client, whose covariance is that of the kernel times the square of a global."""
    height = pyro.sample("height", dist.HalfNormal(1.0))
    with federation.clients():
        covariance = height[..., None, None] ** 2 * KERNEL
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros(24), covariance))
        with federation.observations() as obs:
            here = torch.nn.functional.one_hot(obs["t"].long(), 24).to(f.dtype)
            pyro.sample("y", dist.Poisson((1.0 + (f * here).sum(-1)).exp()), obs=obs.get("y"))


def curved(clients=5):
    rng = np.random.default_rng(2)
    root = np.linalg.cholesky(KERNEL.double().numpy())
    counts = [rng.poisson(np.exp(1 + 0.6 * root @ rng.normal(size=24))) for _ in range(clients)]
    rows = [{"t": TIMES.numpy(), "y": y.astype(float)} for y in counts]
    return np.array(counts), bf.Federation.from_arrays({f"c{i}": r for i, r in enumerate(rows)})


def weighted_paths(y, at, covariance, normal):
    """log p(y), and E[f | y], of counts with log mean 1 + f at some places of a path.

    By importance sampling around the mode, which Newton's method finds, in double precision.
    """
    precision = np.linalg.inv(covariance)
    f = np.zeros(len(covariance))
    for _ in range(50):
        rate, curved = np.exp(1 + f[at]), precision.copy()
        curved[at, at] += rate
        slope = -precision @ f
        slope[at] += y - rate
        step = np.linalg.solve(curved, slope)
        f = f + step * min(1.0, 1.0 / np.abs(step).max())
    root = np.linalg.inv(np.linalg.cholesky(curved)).T
    draws = f + normal @ root.T
    log_p = (y * draws[:, at] - np.exp(1 + draws[:, at])).sum(1)
    log_w = log_p - ((draws @ precision) * draws).sum(1) / 2 + (normal**2).sum(1) / 2
    w = np.exp(log_w - log_w.max())
    level = np.linalg.slogdet(precision)[1] / 2 + np.log(np.diag(root)).sum()
    return level + np.log(w.mean()) + log_w.max(), (w @ draws) / w.sum()


def test_paths_of_counts_have_their_means_and_not_their_modes():
    federation = counted()
    posterior = bf.fit(counts, federation, progress=False)
    assert posterior.program.guide.structure is not None and posterior.correction.laplace
    at, y = (federation.batch(torch.arange(3)).fields[name] for name in ("t", "y"))
    at, y = at[0].long().numpy(), y.double().numpy()
    weeks = np.arange(1, 71)
    walk = np.minimum(weeks[:, None], weeks) + 1e-6 * np.eye(70)
    normal = np.random.default_rng(0).normal(size=(1000, 70))
    normal = np.concatenate([normal, -normal])
    steps = np.exp(np.linspace(np.log(0.05), np.log(0.4), 16))
    found = [[weighted_paths(own, at, h**2 * walk, normal) for own in y] for h in steps]
    log_p = np.array([sum(level for level, _ in own) for own in found])
    log_p = log_p - steps**2 / (2 * 0.5**2) + np.log(steps)
    p = np.exp(log_p - log_p.max())
    means = np.tensordot(p / p.sum(), np.array([[mean for _, mean in own] for own in found]), 1)
    draws = posterior.sample(1000)
    path = draws["step"][..., None, None] * draws["z"].reshape(1000, 3, 70).cumsum(-1)
    shifts = (path.double().numpy().mean(0) - means) / path.double().numpy().std(0)
    assert abs(shifts.mean()) < 0.06  # of the modes it is 0.13
    theta = draw_theta(posterior, 8, posterior.key(0, "test"))
    some = torch.arange(3)
    centre = proposal_centre(posterior, theta, 8, some, posterior.key(0, "test"), 4)
    assert centre.mean.shape == (8, 3, 1, 70) and centre.root.isfinite().all()


def test_a_gaussian_process_of_counts_has_its_posterior_by_a_grid():
    """A factor with a covariance of its own follows such a prior poorly: the fit diverged."""
    counts, federation = curved()
    posterior = bf.fit(curves_of_counts, federation, progress=False)
    structure = posterior.program.guide.structure
    assert structure is not None and not structure.quadratic
    heights = np.exp(np.linspace(np.log(0.2), np.log(2.0), 60))
    normal = np.random.default_rng(0).normal(size=(2000, 24))
    at, kernel = np.arange(24), KERNEL.double().numpy()
    log_p = [sum(weighted_paths(y, at, h**2 * kernel, normal)[0] for y in counts) for h in heights]
    log_p = np.array(log_p) - heights**2 / 2 + np.log(heights)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = (p * heights).sum()
    sd = np.sqrt((p * (heights - mean) ** 2).sum())
    found = posterior.sample(4000)["height"].double()
    assert abs(float(found.mean()) - mean) < 0.1 * sd
    assert abs(float(found.std()) / sd - 1) < 0.1


def test_variables_that_are_independent_in_their_prior_have_a_factor():
    def program(federation):
        spread = pyro.sample("spread", dist.HalfNormal(1.0))
        with federation.clients():
            f = pyro.sample("f", dist.Normal(torch.zeros(24), spread[..., None]).to_event(1))
            with federation.observations() as obs:
                here = torch.nn.functional.one_hot(obs["t"].long(), 24).to(f.dtype)
                pyro.sample("y", dist.Poisson((f * here).sum(-1).exp()), obs=obs.get("y"))

    assert guide_of(program, curved()[1]).structure is None


def test_a_density_that_is_not_concave_gives_a_diagonal_precision():
    """At 0 the density of a mixture of Normals at ±3 is convex."""

    def log_joint(u):
        parts = torch.stack([-(u - 3).square() / 2, -(u + 3).square() / 2])
        return parts.logsumexp(0).sum((-2, -1))

    points = torch.zeros(2, 1, 1, 4)
    structure = find_structure([(1, log_joint)], points)
    assert not structure.concave
    u, _ = newton_step(structure, log_joint, torch.full((1, 1, 1, 4), 0.1), torch.ones(4))
    assert float(log_joint(u)) > float(log_joint(torch.full((1, 1, 1, 4), 0.1)))


def sums_of_neighbours(federation):
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([40]).to_event(1))
        with federation.observations() as obs:
            here = torch.nn.functional.one_hot(obs["t"].long(), 40).to(x.dtype)
            there = torch.nn.functional.one_hot(obs["s"].long(), 40).to(x.dtype)
            pyro.sample("y", dist.Normal((x * (here + there)).sum(-1), sigma), obs=obs.get("y"))


def test_rows_that_connect_other_variables_than_those_of_the_fit_are_refused():
    t = np.arange(0.0, 39.0)
    rows = {"t": t, "s": t + 1, "y": np.sin(t)}
    federation = bf.Federation.from_arrays({"a": rows, "b": rows})
    posterior = bf.fit(sums_of_neighbours, federation, rounds=1, progress=False)
    assert len(posterior.program.guide.structure.seeds) == 3
    far = bf.Federation.from_arrays({"c": rows | {"s": (t + 20) % 40}})
    with pytest.raises(ValueError, match="fit the model again"):
        posterior.personalize(far)
