"""Invariant 1: server term + Σ client terms = Pyro's own Trace_ELBO on the pooled data, given the same noise."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyro.infer import Trace_ELBO

import bayesfed as bf
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.build import build
from bayesfed.elbo.elbo import client_terms, elbo_terms, server_pass
from bayesfed.engine.batches import batches
from bayesfed.guides import factorised
from bayesfed.guides.locals import Conditioned
from bayesfed.guides.natural_gradient import paired
from bayesfed.rules import Turn
from bayesfed.steps.job import Job
from bayesfed.steps.local_variational import follow_origin

GLOBALS = {
    "real": lambda: dist.Normal(0.3, 2.0),
    "positive": lambda: dist.Gamma(2.0, 1.5),
    "interval": lambda: dist.Uniform(-1.0, 3.0),
    "vector": lambda: dist.Normal(0.0, 1.0).expand([2]).to_event(1),
    "simplex": lambda: dist.Dirichlet(torch.ones(3)),
    "cholesky": lambda: dist.LKJCholesky(3, 1.5),
}
PARAMETERS = {
    "real": lambda: (torch.tensor(0.2), dist.constraints.real),
    "positive": lambda: (torch.tensor(0.7), dist.constraints.positive),
    "vector": lambda: (torch.tensor([0.3, -0.1]), dist.constraints.real_vector),
    "simplex": lambda: (torch.ones(3) / 3, dist.constraints.simplex),
    "definite": lambda: (torch.eye(2), dist.constraints.positive_definite),
    "cholesky": lambda: (torch.eye(2), dist.constraints.corr_cholesky),
}
EVENT_DIMS = {"real": 0, "positive": 0, "vector": 1, "simplex": 1, "definite": 2, "cholesky": 2}
LOCALS = {
    "real": lambda m, s: dist.Normal(m, s),
    "positive": lambda m, s: dist.LogNormal(m, s),
    "unit": lambda m, s: dist.Beta(1.0 + s, 2.0),
    "heavy": lambda m, s: dist.StudentT(5.0, m, s),
    "vector": lambda m, s: dist.Normal(m[..., None] + torch.zeros(2), s[..., None]).to_event(1),
    "simplex": lambda m, s: dist.Dirichlet(torch.ones(3) * s[..., None]),
}
LIKELIHOODS = {
    "Normal": (lambda m: dist.Normal(m, 0.7), lambda u: u),
    "Poisson": (lambda m: dist.Poisson(m.clamp(-3, 3).exp()), lambda u: u.abs().round()),
    "Bernoulli": (lambda m: dist.Bernoulli(logits=m), lambda u: (u > 0).double()),
    "Categorical": (
        lambda m: dist.Categorical(logits=torch.stack([m, -m, 0.5 * m], -1)),
        lambda u: u.abs().round().clamp(max=2),
    ),
}


def total(value, event_dim):
    """A bounded number a site, whatever its event shape, so that later sites can depend on it."""
    return (value.sum(tuple(range(-event_dim, 0))) if event_dim else value).tanh()


def make_model(global_kinds, local_kinds, likelihood, parameter_kinds=()):
    def model(federation):
        level, spread = 0.0, 0.5
        for j, kind in enumerate(parameter_kinds):
            start, constraint = PARAMETERS[kind]()
            value = pyro.param(f"p{j}", start, constraint=constraint)
            value = total(
                value[..., 0] if kind == "simplex" else value,
                0 if kind == "simplex" else EVENT_DIMS[kind],
            )
            level, spread = level + 0.3 * value, spread + value.abs()
        for j, kind in enumerate(global_kinds):
            fn = GLOBALS[kind]()
            value = total(pyro.sample(f"g{j}", fn), fn.event_dim)
            level, spread = level + 0.3 * value, spread + value.abs()
        with federation.clients():
            for j, kind in enumerate(local_kinds):
                fn = LOCALS[kind](torch.as_tensor(level), torch.as_tensor(spread))
                value = total(pyro.sample(f"l{j}", fn), fn.event_dim)
                level, spread = level + value, 0.5 + value.abs()
            with federation.observations() as obs:
                mean = level * obs["x"].cos()
                pyro.sample("y", LIKELIHOODS[likelihood][0](mean), obs=obs["y"])

    return model


def make_federation(lengths, likelihood, seed):
    generator = torch.Generator().manual_seed(seed)
    clients = {}
    for i, n in enumerate(lengths):
        x, u = torch.randn(2, n, generator=generator, dtype=torch.float64)
        clients[f"c{i}"] = {"x": x, "y": LIKELIHOODS[likelihood][1](u)}
    return bf.Federation.from_arrays(clients)


def pooled_elbo(program, federation, params, supplied, draws):
    """Pyro's own estimate on all data at once, with the parameters and noise that ours has."""
    elbo = Trace_ELBO(
        num_particles=draws,
        vectorize_particles=draws > 1,
        max_plate_nesting=2 + (draws == 1),
    )

    def once(fn):  # Pyro opens no plate for one particle
        def run(*args):
            with handlers.draws_plate(1):
                return fn(*args)

        return run if draws == 1 else fn

    # the handlers must lie outside Pyro's plate of particles, so they wrap the whole estimate
    with handlers.Parameters(params), handlers.Noise(supplied):
        return -elbo.differentiable_loss(once(program.model), once(program.guide), federation)


@pytest.mark.usefixtures("float64")
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    parameter_kinds=st.lists(st.sampled_from(sorted(PARAMETERS)), max_size=2),
    global_kinds=st.lists(st.sampled_from(sorted(GLOBALS)), max_size=3),
    local_kinds=st.lists(st.sampled_from(sorted(LOCALS)), min_size=1, max_size=3),
    likelihood=st.sampled_from(sorted(LIKELIHOODS)),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    draws=st.integers(1, 3),
    guide=st.sampled_from(
        [
            *(
                (family, on)
                for family in (bf.MeanField(), bf.FullRank(), bf.Flow())
                for on in (True, False)
            ),
            *(("factorised", point) for point in (True, False)),
        ]
    ),
    seed=st.integers(0, 1000),
)
def test_terms_add_up_to_pyros_elbo(
    parameter_kinds, global_kinds, local_kinds, likelihood, lengths, draws, guide, seed
):
    federation = make_federation(lengths, likelihood, seed)
    model = make_model(global_kinds, local_kinds, likelihood, parameter_kinds)
    family, choice = guide
    if family == "factorised":
        program = build(model, factorised(model, federation, local_point=choice), federation)
    else:
        program = Conditioned(choice).build(family, model, federation)
    check_partition(program, federation, draws, seed)


def check_partition(program, federation, draws, seed):
    """Invariant 1 at parameters away from the start; and one client alone gives what it gives among all."""
    generator = torch.Generator().manual_seed(seed)
    start = program.init | program.init_locals(federation.batch())
    params = {
        n: v + 0.3 * torch.randn(v.shape, generator=generator, dtype=v.dtype)
        for n, v in start.items()
    }
    key = noise.key(seed)
    theirs = program.noise(key, draws, local=False)
    ours = program.noise(noise.fold(key, federation.stream_ids), draws, local=True)
    expected = pooled_elbo(program, federation, params, theirs | ours, draws)

    shared = {n: params[n] for n in program.init}
    server, _, values = server_pass(program, shared, theirs, draws)
    clients = client_terms(program, params, values, federation.batch(), ours, draws)
    assert clients.shape == (draws, len(federation))
    found = (server + clients.sum(1)).mean()
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-9)

    for i in range(len(federation)):
        row = torch.tensor([i])
        local = {n: params[n][row] for n in program.local_params}
        alone = client_terms(
            program,
            shared | local,
            values,
            federation.batch(row),
            program.noise(noise.fold(key, federation.stream_ids[row]), draws, local=True),
            draws,
        )
        torch.testing.assert_close(alone[:, 0], clients[:, i], rtol=1e-11, atol=1e-9)

    both = elbo_terms(program, params, {}, federation.batch(), theirs | ours, draws)
    torch.testing.assert_close(both.server.mean() + both.clients.sum(1).mean(), expected)


@pytest.mark.usefixtures("float64")
def test_a_users_own_guide_adds_up_too():
    federation = make_federation([3, 1, 2], "Normal", 0)
    model = make_model(["real", "positive"], ["real"], "Normal")

    def guide(federation):
        loc = pyro.param("loc", torch.tensor(0.1))
        pyro.sample(
            "g0",
            dist.Normal(
                loc, pyro.param("scale", torch.tensor(0.5), constraint=dist.constraints.positive)
            ),
        )
        g1 = pyro.sample("g1", dist.LogNormal(loc, 0.3))
        with federation.clients() as index:
            a = pyro.param("a", lambda: torch.zeros(len(index), 1), event_dim=0)
            pyro.sample("l0", dist.Normal(a + 0.1 * g1, 0.2))

    program = build(model, guide, federation)
    assert set(program.random) == {"g0", "g1"}
    assert program.local_params == ("a",)
    assert set(program.init) == {"loc", "scale"}
    key = noise.key(3)
    params = program.init | {"a": torch.tensor([[0.3], [-0.2], [0.7]])}
    theirs = program.noise(key, 2, local=False)
    ours = program.noise(noise.fold(key, federation.stream_ids), 2, local=True)
    expected = pooled_elbo(program, federation, params, theirs | ours, 2)
    server, _, values = server_pass(program, program.init, theirs, 2)
    clients = client_terms(program, params, values, federation.batch(), ours, 2)
    torch.testing.assert_close((server + clients.sum(1)).mean(), expected, rtol=1e-12, atol=1e-10)


@pytest.mark.usefixtures("float64")
def test_a_global_parameter_that_clients_read_is_shared():
    """The gradient in it, through the terms of the clients, equals autograd's on Pyro's ELBO."""
    federation = make_federation([3, 1, 2], "Normal", 0)

    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        sigma = pyro.param("sigma", torch.tensor(0.8), constraint=dist.constraints.positive)
        with federation.clients():
            alpha = pyro.sample("alpha", dist.Normal(mu, 0.5))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(alpha, sigma), obs=obs["y"])

    algorithm = bf.SFVI(local_steps=1, draws=2)
    program = algorithm.program(model, federation)
    assert program.direct == ("sigma",)
    server = algorithm.start(program)
    clients = algorithm.start_clients(program, server, federation.batch())
    key = noise.key(0)
    message = algorithm.broadcast(Turn(program, key, 3), server)
    keys = noise.fold(key, federation.stream_ids)
    job = Job(program, message, clients, batches(federation, torch.arange(3), None, keys), keys)
    upload = algorithm.work(job).upload
    params = {n: v.clone().requires_grad_() for n, v in program.init.items()}
    of_theta = program.noise(key, 2, local=False)
    supplied = {name: [paired(part) for part in parts] for name, parts in of_theta.items()}
    supplied |= program.noise(noise.fold(keys, 0), 2, local=True)
    clients = follow_origin(program, program.init, clients, federation.batch())
    phi = clients["params"]  # where the gradient is taken
    loss = pooled_elbo(program, federation, params | phi, supplied, 2)
    expected = torch.autograd.grad(loss, params["sigma"])[0]
    torch.testing.assert_close(
        upload["mean gradient"]["sigma"].sum(), expected, rtol=1e-10, atol=1e-12
    )
