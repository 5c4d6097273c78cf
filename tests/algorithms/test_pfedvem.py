"""pFedVEM: its closed forms by hand, and EM's fixed points."""

from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import optimize, stats
from torch.distributions import constraints

import bayesfed as bf
from bayesfed import PFedVEM
from bayesfed.guides.closed_forms import closed_forms, own_spreads
from bayesfed.models import Network
from tests.algorithms.pfedvem_by_hand import m_step, means, regression, wide

pytestmark = pytest.mark.usefixtures("float64")


# -- the M-step ----------------------------------------------------------------------------------------


def test_rho_by_hand():
    """(tr Σ + ‖μ − m‖²) / D with Σ = diag(.25, 1), μ − m = (3, 1): (1.25 + 10) / 2."""
    federation = bf.Federation.from_arrays({"a": {"x": torch.ones(2, 1), "y": torch.ones(2)}})
    model = Network(torch.nn.Linear(1, 1), likelihood="normal", spread="client")
    program = PFedVEM().program(model, federation)
    phi = {
        "weights.loc": torch.tensor([[[4.0, 1.0]]]),
        "weights.log_scale": torch.tensor([[[math.log(0.5), 0.0]]]),
        "prior.rho": torch.zeros(1, 1, 1),
    }
    known = closed_forms(program)
    assert known == ({"prior.loc": ["weights"]}, {}, {"prior.rho": ["weights"]})
    theta = {"prior.loc": torch.tensor([[[1.0, 0.0]]])}
    found = own_spreads(program, known.own, theta, phi, federation.batch(torch.arange(1)))
    torch.testing.assert_close((2 * found["prior.rho"]).exp().squeeze(), torch.tensor(5.625))


def test_the_server_takes_means_weighted_by_precision():
    """μ = (1, 3), ρ² = (1, ¼): m = (1 · 1 + 4 · 3) / 5 (eq. 7); the body by rows: (2 · 10 + 6 · 30) / 8."""

    def model(federation):
        v = pyro.param("v", torch.tensor(0.0))
        m = pyro.param("m", torch.tensor(0.7))
        with federation.clients() as index:
            r = pyro.param("r", torch.ones(len(index), 1), constraint=constraints.positive)
            w = pyro.sample("w", dist.Normal(m, r))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(w + v, 1.0), obs=obs.get("y"))

    federation = bf.Federation.from_arrays({"2": {"y": torch.ones(2)}, "6": {"y": torch.ones(6)}})
    algorithm = PFedVEM()
    program = algorithm.program(model, federation)
    assert closed_forms(program) == ({"m": ["w"]}, {}, {"r": ["w"]})
    phi = {
        "w.loc": torch.tensor([[1.0], [3.0]]),
        "w.log_scale": torch.zeros(2, 1),
        "r": torch.tensor([[0.0], [math.log(0.5)]]),
    }
    body = torch.tensor([[10.0], [30.0]])
    found = {"theta": {"v": body}, "squares": {"v": torch.ones(2, 1)}}
    new = m_step(algorithm, program, federation, program.init, phi, found)
    torch.testing.assert_close(new["m"], torch.tensor(13 / 5))
    torch.testing.assert_close(new["v"], torch.tensor(25.0))


@pytest.mark.parametrize(
    ("loc", "scale"), [((3,), (3,)), ((3,), (1,)), ((1,), (3,)), ((1,), (1,)), ((3,), ())]
)
def test_em_ends_at_the_maximum_of_the_marginal_likelihood(loc, scale):
    """ȳ_i ~ N(m, ρ² + σ² / n): with exact E-steps, EM's fixed point is the maximum of their likelihood."""
    lengths = (4,) * 8 if loc == scale else (2, 3, 4, 8, 5, 4, 2, 6)
    federation, algorithm = means(lengths), PFedVEM()
    program = algorithm.program(wide(loc, scale), federation)
    assert closed_forms(program) == ({"a": ["w"]}, {"b": ["w"]}, {})
    y_bar = torch.stack([federation.select([n])["y"].mean(0) for n in federation.names])
    variance = 0.25 / federation.lengths[:, None]
    theta = dict(program.init)
    for _ in range(200):
        rho = theta["b"].exp().expand(3)
        precision = 1 / rho**2 + 1 / variance
        mu = (theta["a"] / rho**2 + y_bar / variance) / precision
        phi = {"w.loc": mu[:, None], "w.log_scale": -precision.log()[:, None] / 2}
        theta = m_step(algorithm, program, federation, theta, phi)

    def loss(flat):
        m, log_rho = flat[: math.prod(loc)], flat[math.prod(loc) :]
        sd = np.sqrt(np.exp(2 * log_rho) + variance.numpy())
        return -stats.norm.logpdf(y_bar.numpy(), m, sd).sum()

    size = math.prod(loc) + math.prod(scale)
    best = optimize.minimize(loss, np.zeros(size), tol=1e-12).x
    found = torch.cat([theta["a"].reshape(-1), theta["b"].reshape(-1)])
    torch.testing.assert_close(found, torch.tensor(best), rtol=0, atol=1e-4)
    if loc == scale == (3,):  # equal n: m = mean ȳ_i, ρ² = var ȳ_i − σ² / n
        torch.testing.assert_close(theta["a"], y_bar.mean(0))
        rho = y_bar.var(0, correction=0) - 0.25 / 4
        torch.testing.assert_close((2 * theta["b"]).exp(), rho, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("loc", "scale"), [((3,), (3,)), ((3,), (1,)), ((1,), (1,))])
@pytest.mark.parametrize("kl_weight", [1.0, 0.3])
def test_the_m_step_under_a_hyper_prior(loc, scale, kl_weight):
    """Against SciPy: log p(m) + log p(log ρ) + λ Σ_i E_q[log N(w_i; m, ρ²)], the Jacobian of ρ included."""
    federation, algorithm = means(), PFedVEM(kl_weight=kl_weight)
    program = algorithm.program(wide(loc, scale, hyper=True), federation)
    generator = torch.Generator().manual_seed(1)
    mu = torch.randn(5, 3, generator=generator)
    s = 0.3 + torch.rand(5, 3, generator=generator)
    phi = {"w.loc": mu[:, None], "w.log_scale": s.log()[:, None]}
    theta = m_step(algorithm, program, federation, program.init, phi)
    (a,), (b,) = closed_forms(program).centres, closed_forms(program).spreads
    first = math.prod(loc)

    def loss(flat):
        m, log_rho = flat[:first], flat[first:]
        rho = np.exp(log_rho)
        expected = stats.norm.logpdf(mu.numpy(), m, rho) - s.numpy() ** 2 / (2 * rho**2)
        prior = stats.norm.logpdf(m, 1.0, 0.5).sum()
        prior += (stats.halfnorm.logpdf(rho, scale=0.7) + log_rho).sum()
        return -prior - kl_weight * expected.sum()

    best = optimize.minimize(loss, np.zeros(first + math.prod(scale)), tol=1e-12).x
    found = torch.cat([theta[a].reshape(-1), theta[b].reshape(-1)])
    torch.testing.assert_close(found, torch.tensor(best), rtol=0, atol=1e-5)


def test_a_part_of_the_cohort_stands_for_all():
    """Under a hyper-prior the sums of K uploads count N / K times: clients doubled weigh as two of them."""
    few, many = means((4, 4, 4)), means((4, 4, 4))
    arrays = {f"{name} {i}": {"y": many.select([name])["y"]} for name in many.names for i in (0, 1)}
    many = bf.Federation.from_arrays(arrays)
    model, algorithm = wide((3,), (1,), hyper=True), PFedVEM()
    one, all_ = algorithm.program(model, few), algorithm.program(model, many)
    mu, log_scale = (
        torch.randn(3, 1, 3, generator=torch.Generator().manual_seed(0)),
        torch.zeros(3, 1, 3),
    )
    phi = {"w.loc": mu, "w.log_scale": log_scale}
    twice = {name: value.repeat_interleave(2, 0) for name, value in phi.items()}
    whole = m_step(algorithm, all_, many, all_.init, twice)
    part = m_step(algorithm, all_, few, all_.init, phi)  # three of the six
    alone = m_step(algorithm, one, few, one.init, phi)
    for name, value in whole.items():
        torch.testing.assert_close(part[name], value, rtol=0, atol=1e-6)
        assert not torch.allclose(alone[name], value, atol=1e-3)


def test_rho_adapts_to_how_far_clients_are():
    """Clients of one slope are drawn together, clients of three slopes are not."""
    spread = {}
    for gap in (0.0, 2.0):
        generator = torch.Generator().manual_seed(0)
        data = {}
        for i in range(3):
            x = torch.randn(40, 2, generator=generator)
            y = x @ torch.tensor([1.0 + gap * i, -0.5 - gap * i])
            y = y + 0.3 * torch.randn(40, generator=generator)
            data[f"client {i}"] = {"x": x, "y": y}
        federation = bf.Federation.from_arrays(data)
        torch.manual_seed(0)
        model = Network(
            torch.nn.Linear(2, 1), likelihood="normal", noise=0.3, spread="client", scale=1.0
        )
        algorithm = PFedVEM(head_steps=10, lr=0.02)
        fallen = pytest.warns(UserWarning, match="has fallen to 1/")
        with nullcontext() if gap else fallen:  # the clients do not differ, and that is said
            posterior = bf.fit(model, federation, algorithm, rounds=60)
        (own,) = closed_forms(posterior.program).own
        spread[gap] = float(posterior.local_params[own].exp().mean())
    assert spread[0.0] < 0.3 < spread[2.0]


# -- what has a closed form ------------------------------------------------------------------------------


def structure(model):
    return closed_forms(PFedVEM().program(model, means((2, 3))))


def program_of(body):
    """A model of one number for each client; ``body(federation, a, b)`` makes its mean from globals a and b > 0."""

    def model(federation):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.LogNormal(0.0, 1.0))
        with federation.clients():
            mean = body(a, b)
            with federation.observations() as obs:
                y = obs.get("y")
                pyro.sample("y", dist.Normal(mean, 1.0), obs=None if y is None else y[..., 0])

    return model


def _nested(a, b):
    u = pyro.sample("u", dist.Normal(a, 1.0))
    return pyro.sample("w", dist.Normal(u, b))


@pytest.mark.parametrize(
    ("body", "centres", "spreads"),
    [
        (lambda a, b: pyro.sample("w", dist.Normal(a, b)), ["w"], ["w"]),
        (lambda a, b: pyro.sample("w", dist.LogNormal(a, b)).log(), ["w"], ["w"]),
        (
            lambda a, b: a + pyro.sample("w", dist.Normal(a, b)),
            None,
            ["w"],
        ),  # the likelihood reads a
        (lambda a, b: pyro.sample("w", dist.Normal(2 * a, b)), None, ["w"]),
        (lambda a, b: pyro.sample("w", dist.Normal(a, 0.5)) * b, ["w"], None),
        (lambda a, b: pyro.sample("w", dist.StudentT(4.0, a, b)), None, None),
        (
            lambda a, b: (
                pyro.sample("w", dist.Normal(a, b)) + pyro.sample("u", dist.Normal(a, 1.0))
            ),
            ["w", "u"],
            ["w"],
        ),
        (
            lambda a, b: (
                pyro.sample("w", dist.Normal(a, 1.0)) + pyro.sample("u", dist.Normal(0.0, a.exp()))
            ),
            None,
            None,
        ),
        (_nested, ["u"], None),  # w stands on another local variable
    ],
    ids=[
        "normal",
        "log-normal",
        "read-by-likelihood",
        "twice",
        "fixed",
        "student",
        "shared",
        "two-roles",
        "nested",
    ],
)
def test_structure_is_found_by_tracing(body, centres, spreads):
    found = structure(program_of(body))
    assert list(map(sorted, found.centres.values())) == ([sorted(centres)] if centres else [])
    if centres is None and spreads is None and found.spreads:
        pytest.fail(f"{found.spreads}")
    assert list(found.spreads.values()) == ([spreads] if spreads else [])


def test_clients_pull_a_shared_parameter_by_their_rows():
    """What all clients share is at the maximum over all rows, however they differ: the shares of three kinds."""

    def model(federation):
        shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
        with federation.clients():
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                pyro.sample("kind", dist.Categorical(shares), obs=obs.get("kind"))
                pyro.sample("y", dist.Normal(w, 1.0), obs=obs.get("y"))

    kinds = {"a": [0] * 9 + [1], "b": [1, 1, 2, 0], "c": [2], "d": [2, 1, 0, 0, 0, 0]}
    federation = bf.Federation.from_arrays(
        {name: {"kind": torch.tensor(k), "y": torch.zeros(len(k))} for name, k in kinds.items()}
    )
    posterior = bf.fit(model, federation, PFedVEM(), rounds=100)
    counts = federation["kind"].bincount()
    found = posterior.sample(1)["shares"][0]
    # the maximum in unconstrained coordinates: the Jacobian of stick breaking counts (1, 1, 1) more, nearly
    assert (found - (counts + 1) / (counts + 1).sum()).abs().max() < 0.01


@pytest.mark.parametrize("point", [False, True])
def test_hierarchies_without_structure_learn_by_steps(point):
    """Student's t around a regression on the clients' own field, random globals, two local sites: the ELBO rises."""

    def model(federation):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        share = pyro.sample("share", dist.Beta(2.0, 2.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with federation.clients():
            u = pyro.sample("u", dist.StudentT(5.0, slope, 0.5))
            v = pyro.sample("v", dist.Gamma(2.0, 1.0 + share))
            with federation.observations() as obs:
                mean = u + v * obs["x"][..., 0] + slope * obs["x"][..., 1]
                pyro.sample("y", dist.Normal(mean, sigma), obs=obs.get("y"))

    posterior = bf.fit(model, regression(), PFedVEM(point=point), rounds=30)
    elbo = posterior.history["elbo"]
    assert elbo[-10:].mean() > elbo[:3].mean() + 2
    draws = posterior.sample(50)
    assert all(value.isfinite().all() for value in draws.values())
    assert (draws["u"].std(0) > 0).all() != point


def test_points_leave_a_spread_where_it_is():
    model = wide((3,), (3,))
    posterior = bf.fit(model, means(), PFedVEM(point=True), rounds=3)
    assert posterior.params["b"].eq(0).all()
    assert posterior.params["a"].ne(0).all()
