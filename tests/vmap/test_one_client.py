"""Models for one client and one draw have the densities of a loop over both, and fit under every algorithm."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.distributions import biject_to

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.elbo import handlers
from bayesfed.vmap.choose import for_batches
from bayesfed.vmap.one_client import OneClient

DRAWS = 3


def federation():
    generator = torch.Generator().manual_seed(0)
    sizes = [5, 9, 1, 7]
    return bf.Federation.from_arrays(
        {
            f"c{i}": {
                "kind": torch.randint(0, 3, (n,), generator=generator).double(),
                "x": torch.randn(n, 2, generator=generator, dtype=torch.float64),
                "y": torch.randn(n, generator=generator, dtype=torch.float64),
            }
            for i, n in enumerate(sizes)
        }
    )


def observe(federation, mean, scale=1.0):
    with federation.observations() as obs:
        pyro.sample("y", dist.Normal(mean(obs), scale), obs=obs.get("y"))


def category(federation):
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    effect = pyro.sample("effect", dist.Normal(0.0, tau).expand([3]).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(effect[0], 1.0))
        observe(federation, lambda obs: a + effect[obs["kind"].long()])


def no_event(federation):
    effect = pyro.sample("effect", dist.Normal(torch.zeros(3), 1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        observe(federation, lambda obs: a + effect[obs["kind"].long()])


def global_plate(federation):
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("kinds", 3):
        effect = pyro.sample("effect", dist.Normal(0.0, tau))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        observe(federation, lambda obs: a + effect[obs["kind"].long()], tau)


def local_plate(federation):
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        with pyro.plate("kinds", 3, dim=-3):
            effect = pyro.sample("effect", dist.Normal(0.0, tau))
        observe(federation, lambda obs: sum(effect[k] * (obs["kind"] == k) for k in range(3)))


def plate_of_vectors(federation):
    with federation.clients():
        with pyro.plate("kinds", 3):
            w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        observe(
            federation,
            lambda obs: (w[..., 1, :].unsqueeze(-2) * obs["x"]).sum(-1) + w[..., 0, :].sum(),
        )


def product(federation):
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.LogNormal(beta[0], 1.0))
        observe(federation, lambda obs: a + obs["x"] @ beta, a.squeeze())


def correlated(federation):
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(2)).to_event(1))
    root = pyro.sample("root", dist.LKJCholesky(2, 2.0))
    with federation.clients():
        w = pyro.sample(
            "w", dist.MultivariateNormal(torch.zeros(2), scale_tril=scale.diag() @ root)
        )
        observe(federation, lambda obs: (w * obs["x"]).sum(-1))


def over_time(federation):
    with federation.clients():
        level = [pyro.sample("level_0", dist.Normal(0.0, 1.0))]
        for t in (1, 2):
            level.append(pyro.sample(f"level_{t}", dist.Normal(level[-1], 0.5)))
        levels = torch.stack(level).squeeze()
        observe(federation, lambda obs: levels[obs["kind"].long()])


def simplex(federation):
    share = pyro.sample("share", dist.Dirichlet(torch.ones(3)))
    with federation.clients():
        a = pyro.sample("a", dist.StudentT(4.0, share[0], 1.0))
        with federation.observations() as obs:
            mixture = dist.MixtureSameFamily(
                dist.Categorical(share), dist.Normal(torch.stack([a - 1, a, a + 1], -1), 1.0)
            )
            pyro.sample("y", mixture, obs=obs.get("y"))


def scaled(federation):
    """A model with a transform whose parameter has no dimension of rows."""
    with federation.clients():
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with federation.observations() as obs:
            distribution = dist.TransformedDistribution(
                dist.Normal(torch.zeros_like(obs["y"]), 1.0),
                [dist.transforms.AffineTransform(0.5, scale.squeeze())],
            )
            pyro.sample("y", distribution, obs=obs["y"])


def bounded(federation):
    """A model with Uniform priors whose bounds are plain numbers, or one for each entry."""
    rho = pyro.sample("rho", dist.Uniform(-1.0, 1.0))
    w = pyro.sample("w", dist.Uniform(torch.tensor([-1.0, 0.0]), torch.ones(2)).to_event(1))
    with federation.clients():
        observe(federation, lambda obs: rho + obs["x"] @ w)


def parameters(federation):
    beta = pyro.param("beta", torch.tensor([0.3, 1.0], dtype=torch.float64))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(beta[0], 1.0))
        observe(federation, lambda obs: a + beta[1] * obs["x"][..., 0])


def factor(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        pyro.factor("soft", -((a - mu).squeeze() ** 2))
        with federation.observations() as obs:
            pyro.factor("y", dist.Normal(a, 1.0).log_prob(obs["y"]))


PLAIN = [
    category,
    no_event,
    global_plate,
    local_plate,
    plate_of_vectors,
    product,
    correlated,
    over_time,
    simplex,
    scaled,
    bounded,
    parameters,
    factor,
]


def sites(trace):
    return {
        name: node
        for name, node in trace.nodes.items()
        if node["type"] == "sample" and not handlers.is_plate(node)
    }


def unconstrained(model, data):
    """A value of each latent site for S draws and K clients, and the trace of one client."""
    one = data.batch(torch.arange(1))
    with handlers.given(one.device, noise={}):
        nodes = sites(poutine.trace(model).get_trace(one))
    generator, values = torch.Generator().manual_seed(1), {}
    for name, node in nodes.items():
        if not node["is_observed"]:
            transform = biject_to(node["fn"].support)
            shape = transform.inv(node["value"]).shape
            width = len(data) if handlers.is_local(node) else 1
            drawn = torch.randn(DRAWS, width, *shape, generator=generator, dtype=torch.float64)
            values[name] = transform(0.5 * drawn)
    return values


def looped(model, data, values):
    """Log densities ``(S, K)`` by site, from a run of the unchanged model for each client and each draw."""
    found = {}
    for k in range(len(data)):
        batch = data.batch(torch.tensor([k]))
        for s in range(DRAWS):
            own = {name: value[s, min(k, value.shape[1] - 1)] for name, value in values.items()}
            with handlers.given(batch.device, values=own):
                trace = poutine.trace(model).get_trace(batch)
            trace.compute_log_prob()
            for name, node in sites(trace).items():
                total = found.setdefault(name, torch.zeros(DRAWS, len(data), dtype=torch.float64))
                total[s, k] = node["log_prob"].sum()
    return found


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("model", PLAIN, ids=lambda m: m.__name__)
def test_densities_are_those_of_a_loop(model):
    data = federation()
    values = unconstrained(model, data)
    expected = looped(model, data, values)
    one, batch = OneClient(model), data.batch()
    with handlers.given(batch.device, noise={}, draws=DRAWS):
        layouts = one.run(batch).layouts
    given = {}
    for name, value in values.items():  # from the program's dimensions to those outside
        given[name] = layouts[name].outside(value)
    with handlers.given(batch.device, values=given, draws=DRAWS):
        trace = poutine.trace(one).get_trace(batch)
    trace.compute_log_prob()
    assert sites(trace).keys() == expected.keys()
    for name, node in sites(trace).items():
        found = node["log_prob"].sum(-1).expand(DRAWS, len(data))
        torch.testing.assert_close(found, expected[name], rtol=1e-10, atol=1e-10)


ALGORITHMS = [bf.SFVI(), bf.FedABML(), bf.PFedVEM(), bf.FOLA(), bf.FedAvg()]
RANDOM = [bf.SFVIAvg(), bf.PVI(), bf.PACPFL()]
"""Algorithms that need random global variables."""


@pytest.mark.parametrize(
    ("model", "algorithm"),
    [(category, a) for a in ALGORITHMS + RANDOM]
    + [(local_plate, bf.SFVI()), (local_plate, bf.FedABML())]
    + [(parameters, a) for a in ALGORITHMS[1:]],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_every_algorithm_takes_them(model, algorithm):
    posterior = bf.fit(model, federation(), algorithm, rounds=1)
    assert all(value.isfinite().all() for value in posterior.sample(5).values())
    assert posterior.predict(num_samples=3)["y"].shape == (3, 22)
    assert posterior.to_arviz(8).posterior.sizes["draw"] == 8


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (models.eight_schools, datasets.eight_schools),
        (models.varying_slope, datasets.grunfeld),
        (models.hierarchical_logistic, datasets.china_smoking),
    ],
    ids=lambda x: x.__name__,
)
@pytest.mark.parametrize("algorithm", [bf.SFVI(), bf.FedABML()], ids=str)
def test_a_program_that_can_be_run_both_ways_is_the_same(model, data, algorithm):
    """Draws of a fit are equal up to round-off, with and without vmap."""
    data = data()
    assert for_batches(model, data).model is model
    draws = [
        bf.fit(run, data, algorithm, rounds=2).sample(50)
        for run in (model, lambda f: OneClient(model)(f))
    ]
    for name, value in draws[0].items():
        torch.testing.assert_close(draws[1][name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", ["mask", "scale"])
def test_a_weight_along_a_plate_of_the_programs_own_is_refused(what):
    weight = {
        "mask": torch.tensor([[[True]], [[False]]]),
        "scale": torch.tensor([[[1.0]], [[2.0]]]),
    }
    handler = {"mask": poutine.mask, "scale": poutine.scale}[what]

    def model(federation):
        with federation.clients():
            with pyro.plate("kinds", 2, dim=-3), handler(**{what: weight[what]}):
                w = pyro.sample("w", dist.Normal(0.0, 1.0))
            observe(federation, lambda obs: w[0] + w[1])

    with pytest.raises(ValueError, match=f"site 'w': a {what} differs along a plate"):
        bf.start(model, federation(), rounds=1)


def graded(federation):
    with pyro.plate("kinds", 3):
        cut = pyro.sample("cut", dist.Normal(torch.tensor([-1.0, 0.5]), 0.2).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            fn = dist.OrderedLogistic(a, cut[obs["kind"].long()])
            pyro.sample("y", fn, obs=(obs["x"][..., 0] > 0).double())


def written(federation):
    b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        both = torch.zeros(3, dtype=a.dtype)
        both[:2] = b
        both[2] = a.squeeze()
        observe(federation, lambda obs: both[obs["kind"].long()])


@pytest.mark.parametrize("model", [graded, written])
def test_writes_into_tensors_by_torch_and_by_the_program(model):
    """The density is that of each client and draw alone, run without vmap."""
    data = federation()
    runs = for_batches(model, data).model
    assert isinstance(runs, OneClient) and runs.writes
    batch = data.batch()
    with handlers.given(batch.device, draws=DRAWS), poutine.trace() as tracer:
        runs(batch)
    found = handlers.sample_sites(tracer.trace)
    for k, name in enumerate(data.names):
        for s in range(DRAWS):
            values = {}
            for site in ("cut", "a", "b"):
                if site in found:
                    value = found[site]["value"]
                    values[site] = value[s, k if value.shape[1] > 1 else 0, 0]
            values["a"] = values["a"].reshape(1, 1)
            alone = poutine.trace(poutine.condition(model, data=values)).get_trace(
                data.select([name])
            )
            alone.compute_log_prob()
            expected = alone.nodes["y"]["log_prob"].sum()
            row = found["y"]["fn"].log_prob(found["y"]["value"])[s, k][batch.mask[k]].sum()
            torch.testing.assert_close(row, expected.to(row), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("event", [True, False])
@pytest.mark.parametrize("copied", [True, False])
def test_a_write_into_the_value_of_a_site_is_refused(event, copied):
    def model(federation):
        prior = dist.Normal(0.0, 1.0).expand([3])
        effect = pyro.sample("effect", prior.to_event(1) if event else prior)
        if copied:
            effect = effect.clone()
        effect[0] = 0.0
        with federation.clients():
            observe(federation, lambda obs: effect[obs["kind"].long()])

    if copied:
        bf.step(bf.start(model, federation(), rounds=1))
        return
    with pytest.raises(ValueError, match=r"site 'effect': the model writes .*\.clone\(\)"):
        bf.start(model, federation(), rounds=1)
