"""Programs with Pyro's handlers, modules and plates: Pyro's own log density on pooled data."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer.enum import config_enumerate
from pyro.infer.mcmc.util import TraceEinsumEvaluator
from pyro.infer.reparam import (
    DiscreteCosineReparam,
    GumbelSoftmaxReparam,
    HaarReparam,
    LatentStableReparam,
    MinimalReparam,
    ProjectedNormalReparam,
    StableReparam,
    StudentTReparam,
    SymmetricStableReparam,
    UnitJacobianReparam,
)
from pyro.nn import PyroModule, PyroParam, PyroSample

import bayesfed as bf
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.log_density import log_density
from tests.elbo.programs import ROWS, Layers, federation, four, hierarchy, stable
from tests.scenarios import exact, ragged


@pytest.fixture(autouse=True)
def _empty_store():
    pyro.clear_param_store()


def direction(mu=1.0):
    mu = torch.as_tensor(mu)
    return dist.ProjectedNormal(torch.stack([mu, mu + 2], -1))


class GlobalNetwork(Layers):
    def forward(self, federation):
        self.weights()
        with federation.clients(), federation.observations() as obs:
            self.outcome(obs)


class Late(PyroModule):
    """An intercept, a slope and a discrete variable of each row; a parameter that all clients share."""

    def __init__(self):
        super().__init__()
        self.mu = PyroSample(dist.Normal(0.0, 1.0))
        self.own = PyroSample(lambda self: dist.Normal(self.mu, 1.0))
        self.slope = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        self.late = PyroSample(dist.Bernoulli(0.3))
        self.scale = PyroParam(torch.tensor(1.5), constraint=constraints.positive)

    def forward(self, federation):
        mu, scale = self.mu, self.scale
        with federation.clients():
            own, slope = self.own + 0 * mu, self.slope
            with federation.observations() as obs:
                mean = own + (obs["x"] * slope).sum(-1) + self.late
                pyro.sample("y", dist.Normal(mean, scale), obs=obs.get("y"))


class KindOfClient(PyroModule):
    """A discrete variable of each client that indexes a global one."""

    def __init__(self):
        super().__init__()
        self.kind = PyroSample(dist.Categorical(torch.ones(3)))

    def forward(self, federation):
        loc = pyro.sample("loc", dist.Normal(0.0, 3.0).expand([3]).to_event(1))
        with federation.clients():
            mean = loc[self.kind]
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(mean, 1.0), obs=obs.get("y"))


def levels_of_clients(federation):
    with federation.clients():
        with pyro.plate("kinds", 3, dim=-3):
            effect = pyro.sample("effect", dist.Normal(0.0, 0.5))
        with federation.observations() as obs:
            kind = obs["kind"].long()
            mean = effect.expand(3, *kind.shape).gather(0, kind[None])[0]
            pyro.sample("y", dist.Normal(mean, 1.0), obs=obs.get("y"))


def chain_of_rows(federation):
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    move = pyro.sample("move", dist.Dirichlet(torch.ones(2, 2)).to_event(1))
    with federation.clients(), federation.observations() as obs:
        z = 0
        for t in pyro.markov(range(3)):
            z = pyro.sample(f"z{t}", dist.Categorical(move[z]), infer={"enumerate": "parallel"})
            pyro.sample(f"v{t}", dist.Normal(loc[z], 1.0), obs=obs["v"][..., t])


def walk_of_clients(federation):
    z, path = pyro.sample("start", dist.Normal(0.0, 1.0)), []
    with federation.clients():
        for t in pyro.markov(range(3)):
            z = pyro.sample(f"z{t}", dist.Normal(z, 1.0))
            path.append(z)
        with federation.observations() as obs:
            picked = torch.nn.functional.one_hot(obs["kind"].long(), 3)
            mean = (torch.stack(path, -1) * picked).sum(-1)
            pyro.sample("y", dist.Normal(mean, 1.0), obs=obs.get("y"))


def with_parameter(federation):
    scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
    with federation.clients():
        own = pyro.sample("own", dist.Normal(0.0, scale))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(own, 1.0), obs=obs.get("y"))


def named(federation):
    mu = pyro.deterministic("double", 2 * pyro.sample("mu", dist.Normal(0.0, 1.0)))
    with federation.clients():
        own = pyro.sample("own", dist.Normal(mu, 1.0))
        pyro.factor("penalty", -(own**2))
        with federation.observations() as obs, poutine.scale(scale=0.5):
            pyro.sample("y", dist.Normal(own, 1.0), obs=obs.get("y"))


def flat(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0).mask(False))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(alpha, 0.5), obs=obs.get("y"))


RIGHT = {
    "StudentTReparam, local": hierarchy(lambda mu: dist.StudentT(4.0, mu, 1.0), own=StudentTReparam()),
    "StudentTReparam, global": hierarchy(
        prior=lambda: dist.StudentT(4.0, 0.0, 1.0), mu=StudentTReparam()
    ),
    "StableReparam": hierarchy(stable, own=StableReparam()),
    "SymmetricStableReparam": hierarchy(stable, own=SymmetricStableReparam()),
    "LatentStableReparam, local": hierarchy(stable, own=LatentStableReparam()),
    "LatentStableReparam, global": hierarchy(
        prior=lambda: stable(torch.tensor(0.0)), mu=LatentStableReparam()
    ),
    "ProjectedNormalReparam": hierarchy(prior=direction, mu=ProjectedNormalReparam()),
    "GumbelSoftmaxReparam": hierarchy(
        lambda mu: dist.RelaxedOneHotCategorical(torch.tensor(0.7), torch.stack([mu.exp(), mu * 0 + 1], -1)),
        own=GumbelSoftmaxReparam(),
    ),
    "DiscreteCosineReparam": hierarchy(four, own=DiscreteCosineReparam(smooth=1.0)),
    "HaarReparam, local": hierarchy(four, own=HaarReparam()),
    "HaarReparam, global": hierarchy(
        prior=lambda: dist.Normal(torch.zeros(4), 1.0).to_event(1), mu=HaarReparam()
    ),
    "UnitJacobianReparam": hierarchy(
        four, own=UnitJacobianReparam(dist.transforms.Permute(torch.tensor([2, 1, 0, 3])))
    ),
    "a PyroModule, global": GlobalNetwork(),
    "a PyroModule with a discrete variable of rows": Late(),
    "a PyroModule with a discrete variable of clients": KindOfClient(),
    "levels inside a client": levels_of_clients,
    "a hidden Markov chain in each row": chain_of_rows,
    "a random walk in each client": walk_of_clients,
    "a parameter": with_parameter,
    "poutine.substitute": poutine.substitute(with_parameter, data={"scale": torch.tensor(2.0)}),
    "poutine.lift": poutine.lift(with_parameter, prior={"scale": dist.HalfNormal(1.0)}),
    "pyro.do": pyro.do(hierarchy(), data={"mu": torch.tensor(0.5)}),
    "pyro.condition of a local variable": pyro.condition(
        hierarchy(), data={"own": torch.tensor(0.5)}
    ),
    "poutine.equalize": poutine.equalize(hierarchy(), ["mu", "own"]),
    "deterministic, factor and scale": named,
    "a masked prior": flat,
}  # fmt: skip


@torch.no_grad()
def pooled(model, federation, values):
    """Pyro's log density of the pooled data, discrete variables summed out by its own enumeration."""
    given = poutine.enum(
        config_enumerate(poutine.condition(model, data=values)), first_available_dim=-4
    )
    trace = poutine.trace(given).get_trace(federation)
    nodes = [node for node in trace.nodes.values() if node["type"] == "sample"]
    summed = [node for node in nodes if node["infer"].get("_enumerate_dim") is not None]
    if not summed:
        return float(trace.log_prob_sum())
    # Pyro sums over the values of rows that are masked, too
    padding = len(federation) * max(ROWS) - federation.rows
    of_rows = [n for n in summed if len(n["cond_indep_stack"]) == 2]
    counted = padding * sum(np.log(len(n["fn"].enumerate_support())) for n in of_rows)
    return float(TraceEinsumEvaluator(trace, True, 3).log_prob(trace)) - counted


@pytest.mark.parametrize("name", RIGHT)
def test_the_log_density_is_pyros_own(name):
    model, data = RIGHT[name], federation()
    run = bf.start(model, data, rounds=2)
    bf.step(run)
    program, batch = run.program, data.batch()
    at = handlers.given(batch.device, program.init | program.init_locals(batch), draws=2)
    with noise.seeded(1), torch.no_grad(), at, poutine.trace() as tracer:
        program.model(batch)
    nodes = handlers.sample_sites(tracer.trace)
    found = sum(d.expand(2, *d.shape[1:]).sum((1, 2)) for d in map(log_density, nodes.values()))
    found = found.detach()
    for draw in range(2):
        values = {}
        for site in program.latent:
            value = nodes[site.name]["value"][draw]
            own = 0 if not site.local or name != "levels inside a client" else 1
            value = value if site.local else value[0, 0]
            values[site.name] = value.movedim(-1, 0) if own else value
        assert float(found[draw]) == pytest.approx(pooled(model, data, values), rel=1e-4, abs=1e-3)


def test_a_masked_prior_is_flat():
    data = ragged(8)
    mu = bf.fit(flat, data, seed=1, progress=False).sample(8000)["mu"]
    variance = 1.0 + 0.25 / data.lengths
    means = torch.stack([y.mean() for y in data["y"].split(data.lengths.tolist())])
    sd = float((1 / variance).sum().rsqrt())
    assert float(mu.mean()) == pytest.approx(float((means / variance).sum()) * sd**2, abs=0.05 * sd)
    assert float(mu.std()) == pytest.approx(sd, rel=0.05)
    assert exact(data).mu[1] < 0.999 * sd  # under a prior with a density q is narrower


def test_minimal_reparam_leaves_a_normal_hierarchy_alone():
    run = bf.start(poutine.reparam(hierarchy(), config=MinimalReparam()), federation(), rounds=2)
    assert [site.name for site in run.program.latent] == ["mu", "own"]


@pytest.mark.parametrize("event", [None, 1], ids=["Pyro's default", "event_dim=1"])
def test_derived_vectors_of_all_clients_of_clients_and_of_rows(event):
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        with federation.clients():
            own = pyro.sample("own", dist.Normal(mu, 1.0).to_event(1))
            pyro.deterministic("all", 2 * mu, event_dim=event)
            pyro.deterministic("client", own - mu, event_dim=event)
            with federation.observations() as obs:
                pyro.deterministic("row", own * obs["y"][..., None], event_dim=event)
                pyro.sample("y", dist.Normal(own[..., 0], 1.0), obs=obs.get("y"))

    data = federation()
    posterior = bf.fit(model, data, rounds=2, progress=False)
    found, draws = posterior.derived(num_samples=7), posterior.sample(7)
    torch.testing.assert_close(found["all"], 2 * draws["mu"][:, None].expand(7, 3, 4))
    torch.testing.assert_close(found["client"], draws["own"] - draws["mu"][:, None])
    rows = draws["own"][:, data.owner] * data["y"][:, None]
    torch.testing.assert_close(found["row"], rows)


def test_a_density_that_only_a_batch_of_clients_has_is_refused_where_a_field_has_gaps():
    """Pyro's spline takes numbers by a mask, which torch.vmap cannot."""
    spline = dist.transforms.Spline(1, count_bins=4)

    def model(federation):
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0).expand([3]))
        with federation.clients(), federation.observations() as obs:
            base = dist.Normal(effect[obs["kind"].long()][..., None], 1.0).to_event(1)
            fn = dist.TransformedDistribution(base, [spline])
            pyro.sample("y", fn, obs=obs["y"][..., None])

    with pytest.raises(ValueError, match="site 'y': the log density of .* cannot be computed"):
        bf.fit(model, federation(gap=True), rounds=2, progress=False)
