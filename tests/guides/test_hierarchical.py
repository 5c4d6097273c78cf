"""The factor of a client's local variables, and the exactness of chains of Normal priors."""

import math
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

import bayesfed as bf
from bayesfed.elbo import handlers
from bayesfed.guides import local
from bayesfed.guides.family import GLOBAL
from bayesfed.guides.hierarchical import LOCAL


def data(wards=3):
    generator = torch.Generator().manual_seed(0)
    return bf.Federation.from_arrays(
        {
            f"c{i}": {
                "ward": torch.arange(n) % wards,
                "y": i + torch.randn(n, generator=generator),
            }
            for i, n in enumerate([6, 9, 7])
        }
    )


def observe(federation, mean):
    with federation.observations() as obs:
        pyro.sample("y", dist.Normal(mean(obs), 1.0), obs=obs.get("y"))


def hospital_and_wards(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        ward = pyro.sample(
            "ward", dist.Normal(a.unsqueeze(-1), 0.5).expand([*a.shape, 3]).to_event(1)
        )
        kinds = torch.eye(3)
        observe(federation, lambda obs: (ward * kinds[obs["ward"].long()]).sum(-1))


def block_of(model):
    guide = bf.SFVI().program(model, data()).guide
    assert guide.block
    return guide.normal, guide.chain


def test_a_chain_of_normals_is_exact():
    federation = data()
    draws = bf.fit(hospital_and_wards, federation).sample(20_000)
    assert block_of(hospital_and_wards)[0] == ("a", "ward")

    # the same in closed form: (mu, a_1..a_3, wards) is Normal, and so are the rows given these
    clients = len(federation)
    size = 1 + 4 * clients
    precision = torch.zeros(size, size, dtype=torch.float64)
    shift = torch.zeros(size, dtype=torch.float64)
    precision[0, 0] += 1 / 25
    for i in range(clients):
        a, wards = 1 + i, 1 + clients + 3 * i
        for one, other, weight in [(0, a, 1.0)] + [(a, wards + k, 4.0) for k in range(3)]:
            for x, y, sign in [
                (one, one, 1),
                (other, other, 1),
                (one, other, -1),
                (other, one, -1),
            ]:
                precision[x, y] += sign * weight
        rows = slice(int(federation.offsets[i]), int(federation.offsets[i + 1]))
        for y, ward in zip(federation["y"][rows], federation["ward"][rows], strict=True):
            precision[wards + int(ward), wards + int(ward)] += 1
            shift[wards + int(ward)] += float(y)
    covariance = torch.linalg.inv(precision)
    mean, sd = covariance @ shift, covariance.diagonal().sqrt()
    found = torch.cat([draws["mu"][:, None], draws["a"], draws["ward"].flatten(1)], 1).double()
    # a mean of 20,000 draws is within 4 sd / √20,000 = 0.03 sd; the rest is for where q(θ) stopped
    assert float(((found.mean(0) - mean).abs() / sd).max()) < 0.1
    assert float((found.std(0) / sd - 1).abs().max()) < 0.05
    ours, theirs = torch.corrcoef(found[:, [1, 4, 5]].T), covariance[[1, 4, 5]][:, [1, 4, 5]]
    theirs = theirs / sd[[1, 4, 5]] / sd[[1, 4, 5], None]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)


def of(prior, first=lambda theta: dist.Normal(0.0, 1.0)):
    def model(federation):
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with federation.clients():
            a = pyro.sample("a", first(theta))
            b = pyro.sample("b", prior(theta, a))
            observe(federation, lambda obs: b)

    return model


@pytest.mark.parametrize(
    ("model", "block"),
    [
        (of(lambda theta, a: dist.Normal(theta, 1.0)), ("a", "b")),
        (of(lambda theta, a: dist.Normal(2 * a - theta, theta.exp())), ("a", "b")),
        (of(lambda theta, a: dist.Normal(theta * a, 1.0)), ("a",)),
        (of(lambda theta, a: dist.Normal(a**2, 1.0)), ("a",)),
        (of(lambda theta, a: dist.Normal(0.0, a.exp())), ("a",)),
        (of(lambda theta, a: dist.StudentT(4.0, a, 1.0)), ("a",)),
        (of(lambda theta, a: dist.Normal(theta, 1.0), lambda theta: dist.Gamma(2.0, 1.0)), ("b",)),
        (of(lambda theta, a: dist.Normal(a, 1.0), lambda theta: dist.Gamma(2.0, 1.0)), ()),
        (of(lambda theta, a: dist.LogNormal(a, 1.0)), ("a", "b")),
    ],
)
def test_normal_priors_that_the_factor_leaves_out(model, block):
    assert block_of(model)[0] == block


def test_chain_matrix():
    _, chain = block_of(of(lambda theta, a: dist.Normal(2 * a - theta, 1.0)))
    torch.testing.assert_close(chain, torch.tensor([[1.0, 0.0], [2.0, 1.0]]))
    assert block_of(of(lambda theta, a: dist.Normal(theta, 1.0)))[1] is None


def gamma_poisson(federation):
    """Each client's posterior is Gamma(k, β), k = 3 + Σ count and β = 2 + n, whatever the global variables are."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        rate = pyro.sample("rate", dist.Gamma(3.0, 2.0))
        with federation.observations() as obs:
            pyro.sample("count", dist.Poisson(rate), obs=obs.get("count"))
            pyro.sample("y", dist.Normal(mu, 1.0), obs=obs.get("y"))


def student_levels(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 0.01))
    with federation.clients():
        a = pyro.sample("a", dist.StudentT(4.0, mu, 30.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, 1.0), obs=obs.get("y"))


def test_priors_that_are_not_normal_are_part_of_the_factor():
    generator = torch.Generator().manual_seed(1)
    counts = {
        f"c{i}": torch.poisson(torch.full((4 + 3 * i,), 2.0 + i), generator=generator)
        for i in range(3)
    }
    rows = {name: {"count": value, "y": 0.0 * value} for name, value in counts.items()}
    draws = bf.fit(gamma_poisson, bf.Federation.from_arrays(rows)).sample(20_000)["rate"]
    for i, value in enumerate(counts.values()):  # the rate is Gamma(k, β)
        k, beta, log_rate = 3.0 + value.sum(), 2.0 + len(value), draws[:, i].log()
        sd = torch.polygamma(1, k).sqrt()
        assert abs(float((log_rate.mean() - torch.digamma(k) + math.log(beta)) / sd)) < 0.03
        assert float(log_rate.std() / sd) == pytest.approx(1.0, abs=0.03)


def test_under_a_wide_prior_that_is_not_normal_the_posterior_is_the_likelihood():
    """By Adam's steps alone the clients' spreads were 1.3 to 1.5 times too large after 300 rounds."""
    federation = data()
    draws = bf.fit(student_levels, federation).sample(20_000)["a"]
    right = federation.lengths.float().rsqrt()  # the prior is a thousand times as wide
    torch.testing.assert_close(draws.std(0), right, rtol=0.03, atol=0)


def test_a_normal_prior_in_the_factor_is_not_counted_twice():
    """b is Normal around a², so its prior is in the factor, although a site of the chain follows."""

    def model(federation):
        pyro.sample("theta", dist.Normal(0.0, 1.0))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            b = pyro.sample("b", dist.Normal(a**2, 1.0))
            c = pyro.sample("c", dist.Normal(0.0, 2.0))
            observe(federation, lambda obs: b + c)

    guide = bf.SFVI().program(model, data()).guide
    assert guide.normal == ("a", "c")
    head = data().batch(torch.arange(1)).head()
    _, scale, _ = guide.block_prior(torch.zeros(1), head)
    assert scale.flatten().tolist() == [1.0, torch.inf, 2.0]


def pairs(other):
    """Correlated intercepts and slopes, and another variable of the client with this prior."""

    def model(federation):
        tau = pyro.sample("tau", dist.HalfNormal(torch.ones(2)).to_event(1))
        chol = pyro.sample("chol", dist.LKJCholesky(2, 2.0))
        with federation.clients():
            root = tau[..., None] * chol
            w = pyro.sample("w", dist.MultivariateNormal(torch.zeros(2), scale_tril=root))
            b = pyro.sample("b", other(w)) if other else 0.0
            observe(federation, lambda obs: b + w[..., 0] + w[..., 1] * obs["ward"])

    return model


@pytest.mark.parametrize(
    ("other", "normal"),
    [
        (None, ("w",)),
        (lambda w: dist.Normal(torch.zeros_like(w[..., 0]), 1.0), ("w", "b")),
        (lambda w: dist.StudentT(4.0, torch.zeros_like(w[..., 0]), 1.0), ()),
        (lambda w: dist.Normal(w[..., 0], 1.0), ("b",)),
    ],
)
def test_correlated_priors_that_the_factor_leaves_out(other, normal):
    """Those of a block whose other priors are Normal too, without slopes; else they are in the factor."""
    assert block_of(pairs(other))[0] == normal


def test_correlated_variables_given_gaussian_rows_are_exact_at_any_globals():
    """All log weights log p(w, D | θ) − log q(w | θ) of one θ are the evidence, also where ρ is nearly 1."""
    federation = data()
    posterior = bf.fit(pairs(None), federation, progress=False)
    program, batch = posterior.program, federation.batch()
    z = torch.tensor([[-6.0, -1.0, 3.0], [0.5, -4.0, -4.0], [0.0, 0.0, 0.0]])[:, None, None]
    theta = {GLOBAL: z.repeat_interleave(50, 0)}
    params = posterior.params | posterior.params_of(torch.arange(len(federation)))
    with torch.no_grad(), handlers.given(batch.device, params, {}, theta, len(theta[GLOBAL])):
        q = poutine.trace(program.guide).get_trace(batch.head()).nodes[LOCAL]["fn"].drawn
    e = torch.randn(150, len(federation), 1, 2, generator=torch.Generator().manual_seed(0))
    w, _ = local.unwhiten(q, e)
    with torch.no_grad():
        log_p = program.guide.block_log_joint(params, batch, w, theta[GLOBAL])
    log_q = q.log_prob(w)[..., 0]
    weights = (log_p - log_q).reshape(3, 50, -1)
    assert float(weights.std(1).max()) < 1e-2
    assert float(log_q.reshape(3, 50, -1).std(1).min()) > 0.5


def test_the_mode_under_a_prior_far_from_zero():
    """Newton's steps find the mode with little data and a narrow prior."""

    def counts(federation):
        mu = pyro.sample("mu", dist.Normal(3.0, 0.1))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(mu, 0.5))
            with federation.observations() as obs:
                pyro.sample("y", dist.Poisson(a.exp()), obs=obs.get("y"))

    federation = bf.Federation.from_arrays({"a": {"y": [3.0]}, "b": {"y": [40.0, 60.0]}})
    program = bf.SFVI().program(counts, federation)
    batch = federation.batch()
    found = program.laplace(program.init, program.init_locals(batch), batch)
    start = program.guide.block_scaling
    a, rows, total = torch.full((2,), 3.0), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 100.0])
    mu = program.guide.globals["mu"].loc
    for _ in range(50):  # the mode of a given mu, by itself
        a = a + (total - rows * a.exp() - (a - mu) / 0.25) / (rows * a.exp() + 4)
    factor = a + (total - rows * a.exp()) / (rows * a.exp())  # where the likelihood's parabola ends
    precision = rows * a.exp() * start.scale**2
    torch.testing.assert_close(
        found["local.log_precision"].exp().squeeze(), precision, rtol=1e-3, atol=0
    )
    ours = start.loc + start.scale * found["local.loc"].squeeze()
    torch.testing.assert_close(ours, factor, rtol=1e-3, atol=0)


def test_a_guide_takes_the_coordinates_of_another():
    """A node takes the server's coordinates where they have the shape of its sample site."""
    guide = bf.SFVI().program(hospital_and_wards, data()).guide
    moved = {name: value + 0.5 for name, value in guide.coordinates().items()}
    placed = guide.placed(moved | {"ward": torch.zeros(2, 7)}).coordinates()
    assert torch.equal(placed["mu"], moved["mu"])
    assert torch.equal(placed["a"], moved["a"])
    assert torch.equal(placed["ward"], guide.coordinates()["ward"])


def test_local_sites_at_given_values_need_no_q(monkeypatch):
    """They are those of the guide with this value of its block, and q(w_i | θ) is not computed."""
    federation = data()
    program = bf.SFVI().program(hospital_and_wards, federation)
    assert program.guide.block
    u = torch.randn(5, 3, 1, 4, generator=torch.Generator().manual_seed(0))
    values = {GLOBAL: torch.randn(5, 1, 1, 1), LOCAL: u}
    batch = federation.batch()

    def nodes(guide):
        with handlers.given(batch.device, noise={}, values=values, draws=5):
            return poutine.trace(guide).get_trace(batch).nodes

    expected = nodes(program.guide)
    monkeypatch.setattr(local, "conditional", None)
    found = nodes(partial(program.guide.at_block, u=u))
    for site in ("mu", "a", "ward"):
        assert torch.equal(found[site]["value"], expected[site]["value"])


WEEKS = 24


def walks(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
    with federation.clients():
        start = pyro.sample("start", dist.Normal(mu, 1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([WEEKS - 1]).to_event(1))
        path = torch.cat([start.unsqueeze(-1), start.unsqueeze(-1) + 0.3 * z.cumsum(-1)], -1)
        pyro.deterministic("end", path[..., -1])
        with federation.observations() as obs:
            here = torch.nn.functional.one_hot(obs["week"].long(), WEEKS)
            pyro.sample("y", dist.Normal((path * here).sum(-1), 0.4), obs=obs.get("y"))


def test_a_random_walk_in_each_client_is_exact():
    """Weeks 0, 2, 4, ... are observed: rows, ends and mu are jointly Normal, with covariances by hand."""
    weeks, clients = torch.arange(0, WEEKS, 2), 3
    y = torch.randn(clients, len(weeks), generator=torch.Generator().manual_seed(0)).cumsum(1)
    posterior = bf.fit(
        walks,
        bf.Federation.from_arrays({f"c{i}": {"week": weeks, "y": y[i]} for i in range(clients)}),
    )
    at = torch.cat([weeks, torch.tensor([WEEKS - 1])]).double()
    own = 1 + 0.09 * torch.minimum(at[:, None], at)  # of a client's path given mu
    noise = torch.diag(torch.cat([torch.full((len(weeks),), 0.16), torch.zeros(1)])).double()
    prior = 9 + torch.block_diag(*[own + noise] * clients)
    prior = torch.block_diag(torch.tensor(9.0).double(), prior)
    prior[0, 1:] = prior[1:, 0] = 9
    seen = torch.ones(len(prior), dtype=torch.bool)
    seen[:: len(at)] = False  # mu and the ends
    gain = torch.linalg.solve(prior[seen][:, seen], prior[seen][:, ~seen]).mT
    mean = gain @ y.flatten().double()
    sd = (prior[~seen][:, ~seen] - gain @ prior[seen][:, ~seen]).diagonal().sqrt()
    draws = posterior.sample(4000)["mu"], posterior.derived(num_samples=4000)["end"]
    found = torch.cat([draws[0].reshape(-1, 1), draws[1].reshape(-1, clients)], 1).double()
    # a mean of 4,000 draws is within 4 sd / √4,000 = 0.06 sd
    assert float(((found.mean(0) - mean).abs() / sd).max()) < 0.12
    assert float((found.std(0) / sd - 1).abs().max()) < 0.08


@pytest.mark.parametrize("numbers", [local.FULL_UP_TO, local.FULL_UP_TO + 1])
def test_a_factor_does_not_depend_on_very_many_numbers_of_another(numbers):
    """Adam's steps on a weight of each would move it farther than those on its own parameters."""

    def model(federation):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with federation.clients():
            many = pyro.sample("many", dist.Gamma(torch.full((numbers,), 2.0), 1.0).to_event(1))
            more = pyro.sample("more", dist.Gamma(torch.full((1100,), 2.0), 1.0).to_event(1))
            with federation.observations() as obs:
                level = mean + many.mean(-1) + more.mean(-1)
                pyro.sample("y", dist.Normal(level, 1.0), obs=obs.get("y"))

    federation = bf.Federation.from_arrays({"c": {"y": np.zeros(3)}})
    run = bf.fitting.start(model, federation, bf.SFVI(corrected=False), rounds=1)
    params = run.program.init_locals(federation.batch(torch.arange(1)))
    read = numbers if numbers <= local.FULL_UP_TO else 0
    assert params["more.loc_weight"].shape[-1] == 1 + read
