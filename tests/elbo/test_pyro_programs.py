"""Programs with Pyro's handlers, modules and plates: Pyro's own log density on pooled data, or a refusal by name."""
# ruff: noqa: E501

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer.autoguide import AutoMultivariateNormal, AutoStructured
from pyro.infer.enum import config_enumerate
from pyro.infer.mcmc.util import TraceEinsumEvaluator
from pyro.infer.reparam import (
    ConjugateReparam,
    DiscreteCosineReparam,
    GumbelSoftmaxReparam,
    HaarReparam,
    LatentStableReparam,
    LinearHMMReparam,
    MinimalReparam,
    NeuTraReparam,
    ProjectedNormalReparam,
    SplitReparam,
    StableReparam,
    StructuredReparam,
    StudentTReparam,
    SymmetricStableReparam,
    UnitJacobianReparam,
)
from pyro.nn import PyroModule, PyroParam, PyroSample

import bayesfed as bf
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.log_density import log_density
from tests.scenarios import exact, ragged

ROWS = (5, 3, 1)


def federation(gap=False):
    """Three clients with covariates, a category, a count, a grade and a vector, and on request a missing covariate."""
    rng, clients = np.random.default_rng(0), {}
    for i, n in enumerate(ROWS):
        rows = {"x": rng.normal(size=(n, 2)), "y": rng.normal(size=n), "v": rng.normal(size=(n, 3))}
        rows |= {"kind": rng.integers(0, 3, n), "grade": rng.integers(2, 4, n)}
        clients[f"c{i}"] = rows
    if gap:
        clients["c0"]["x"][0, 0] = np.nan
    return bf.Federation.from_arrays(clients, missing="keep")


@pytest.fixture(autouse=True)
def _empty_store():
    pyro.clear_param_store()


def hierarchy(
    local=lambda mu: dist.Normal(mu, 0.7), prior=lambda: dist.Normal(0.0, 1.0), **reparam
):
    def model(federation):
        mu = pyro.sample("mu", prior())
        mu = mu.sum(-1) if prior().event_dim else mu
        with federation.clients():
            own = pyro.sample("own", local(mu))
            own = own.sum(-1) if local(mu).event_dim else own
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(own, 1.0), obs=obs.get("y"))

    return poutine.reparam(model, config=reparam) if reparam else model


def stable(mu):
    return dist.Stable(1.5, 0.0, 1.0, mu)


def four(mu):
    return dist.Normal(torch.stack([mu, mu + 1, mu - 1, 0 * mu], -1), 1.0).to_event(1)


def direction(mu=1.0):
    mu = torch.as_tensor(mu)
    return dist.ProjectedNormal(torch.stack([mu, mu + 2], -1))


def of_y(distribution):
    """A program whose outcome has a distribution, given an observation-level mean."""

    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients(), federation.observations() as obs:
            pyro.sample("y", distribution(mu + obs["x"][..., 0]), obs=obs.get("y"))

    return model


class Layers(PyroModule):
    """A Bayesian network of one hidden layer."""

    def __init__(self):
        super().__init__()
        self.hidden = PyroModule[torch.nn.Linear](2, 3)
        self.out = PyroModule[torch.nn.Linear](3, 1)
        for layer in (self.hidden, self.out):
            for name, value in list(layer.named_parameters()):
                prior = dist.Normal(0.0, 1.0).expand(value.shape).to_event(value.ndim)
                setattr(layer, name, PyroSample(prior))

    def weights(self):
        return [layer.weight + 0 * layer.bias[..., None] for layer in (self.hidden, self.out)]

    def outcome(self, obs):
        mean = self.out(self.hidden(obs["x"]).tanh()).squeeze(-1)
        pyro.sample("y", dist.Normal(mean, 1.0), obs=obs.get("y"))


class GlobalNetwork(Layers):
    def forward(self, federation):
        self.weights()
        with federation.clients(), federation.observations() as obs:
            self.outcome(obs)


class NetworkOfClients(Layers):
    def forward(self, federation):
        with federation.clients():
            self.weights()
            with federation.observations() as obs:
                self.outcome(obs)


class NetworkOfRows(Layers):
    def forward(self, federation):
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


def neutra():
    guide = AutoMultivariateNormal(hierarchy())
    guide(federation())
    return NeuTraReparam(guide).reparam(hierarchy())


def module(federation):
    net = pyro.module("net", torch.nn.Linear(2, 1))
    with federation.clients(), federation.observations() as obs:
        pyro.sample("y", dist.Normal(net(obs["x"]).squeeze(-1), 1.0), obs=obs.get("y"))


class Parameters(PyroModule):
    def __init__(self):
        super().__init__()
        self.net = PyroModule[torch.nn.Linear](2, 1)

    def forward(self, federation):
        with federation.clients(), federation.observations() as obs:
            pyro.sample("y", dist.Normal(self.net(obs["x"]).squeeze(-1), 1.0), obs=obs.get("y"))


def own_clients(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("clients", len(ROWS), dim=-2):
        own = pyro.sample("own", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(own, 1.0), obs=obs.get("y"))


def subsampled(federation):
    with pyro.plate("items", 6, subsample_size=3):
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
    with federation.clients(), federation.observations() as obs:
        pyro.sample("y", dist.Normal(effect[..., 0], 1.0), obs=obs.get("y"))


def structured():
    guide = AutoStructured(
        hierarchy(),
        conditionals={"mu": "normal", "own": "normal"},
        dependencies={"own": {"mu": "linear"}},
    )
    guide(federation())
    return StructuredReparam(guide).reparam(hierarchy())


def of_some_items(federation):
    with pyro.plate("items", 6, subsample=torch.arange(3)):
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
    with federation.clients(), federation.observations() as obs:
        pyro.sample("y", dist.Normal(effect[..., 0], 1.0), obs=obs.get("y"))


def written(outcome):
    """A program whose part inside the two plates is given, as a function of the client's variable and its rows."""

    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients() as i:
            own = pyro.sample("own", dist.Normal(mu, 1.0))
            with federation.observations() as obs:
                outcome(own, obs, i)

    return model


def plate_of_some_rows(own, obs, _):
    with pyro.plate("data", 5, subsample_size=2) as some:
        pyro.sample("y", dist.Normal(own, 1.0), obs=obs["y"][..., some])


def plate_of_rows(own, obs, _):
    with pyro.plate("data", len(obs["y"])):
        pyro.sample("y", dist.Normal(own, 1.0), obs=obs["y"])


def plate_of_entries(own, obs, _):
    with pyro.plate("entries", 3):
        pyro.sample("v", dist.Normal(own, 1.0), obs=obs["v"])


def loop_over_rows(own, obs, _):
    for row in range(len(obs["y"])):
        pyro.sample(f"y{row}", dist.Normal(own, 1.0), obs=obs["y"][row])


def rows_by_a_mask(own, obs, _):
    pyro.sample("y", dist.Normal(own, 1.0), obs=obs["y"][obs["kind"] > 0])


def rows_at_random(own, obs, _):
    some = torch.randperm(obs["y"].shape[-1])[:2]
    pyro.sample("y", dist.Normal(own, 1.0), obs=obs["y"][..., some])


def number_of_clients(federation):
    with pyro.plate("units", len(federation)):
        effects = pyro.sample("effects", dist.Normal(0.0, 1.0))
    with federation.clients(), federation.observations() as obs:
        pyro.sample("y", dist.Normal(effects.sum(), 1.0), obs=obs["y"])


def after_the_clients(federation):
    with federation.clients():
        own = pyro.sample("own", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(own, 1.0), obs=obs["y"])
    pyro.sample("mu", dist.Normal(own.mean(), 1.0))


def raters(federation):
    style = pyro.sample("style", dist.Categorical(torch.ones(3, 2)).to_event(1))
    cuts = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0]])[style]
    with federation.clients():
        own = pyro.sample("own", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            grades = dist.OrderedLogistic(own, cuts[obs["kind"].long()])
            pyro.sample("grade", grades, obs=obs.get("grade"))


def raters_of_clients(federation):
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    with federation.clients():
        with pyro.plate("raters", 3):
            style = pyro.sample("style", dist.Categorical(torch.ones(2)))
            cuts = pyro.sample("cuts", dist.Normal(loc[style], 1.0).to_event(1))
        with federation.observations() as obs:
            own = cuts[..., obs["kind"].long(), :].reshape(*obs["kind"].shape, 3)
            grades = dist.OrderedLogistic(0 * obs["y"], own.sort(-1).values)
            pyro.sample("grade", grades, obs=obs.get("grade"))


def graded(federation):
    weights = pyro.sample("weights", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
    with federation.clients(), federation.observations() as obs:
        pyro.sample("grade", dist.Categorical(logits=obs["x"] @ weights), obs=obs.get("grade"))


def hidden(own):
    steps = dist.StudentT(4.0, torch.zeros(3, 2), 1.0).to_event(1)
    seen = dist.StudentT(4.0, torch.zeros(3, 1), 1.0).to_event(1)
    first = dist.Normal(torch.stack([own, own], -1), 1.0).to_event(1)
    return dist.LinearHMM(first, torch.eye(2), steps, torch.ones(2, 1), seen, duration=3)


def of_steps(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with federation.clients(), federation.observations() as obs:
        pyro.sample("v", hidden(mu + obs["y"]), obs=obs["v"][..., None])


def numbers_of_its_own(federation):
    mu = pyro.deterministic("level", pyro.sample("mu", dist.Normal(0.0, 1.0)) + torch.randn(()))
    with federation.clients(), federation.observations() as obs:
        pyro.sample("y", dist.Normal(mu, 1.0), obs=obs.get("y"))


def graded_by_kind(federation):
    """As it is written, the program runs for one client only."""
    effect = pyro.sample("effect", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    more = pyro.sample("more", dist.Normal(0.0, scale).expand([3]))
    with federation.clients(), federation.observations() as obs:
        kind = obs["kind"].long()
        logits = effect[kind] + more[kind][..., None]
        pyro.sample("grade", dist.Categorical(logits=logits), obs=obs.get("grade"))


def factor_and_kind(federation):
    kind = pyro.sample("kind", dist.Bernoulli(0.5))
    with federation.clients(), federation.observations() as obs:
        pyro.factor("y", dist.Normal(kind, 1.0).log_prob(obs["y"]))


REFUSED = [
    ("a factor beside a discrete global variable", factor_and_kind, "'kind' is discrete, and lies outside the clients plate"),
    ("numbers of its own beside a deterministic", numbers_of_its_own, "line .* it draws numbers of its own"),
    ("a class beyond the categories, by kind", graded_by_kind, r"client 'c0', row 0: observed site 'grade' is \d.0. Of Categorical"),
    ("SplitReparam", hierarchy(four, own=SplitReparam([1, 3], -1)), "'own': SplitReparam cannot be used here. Leave"),
    ("ConjugateReparam", hierarchy(prior=lambda: dist.Gamma(2.0, 2.0), mu=ConjugateReparam(dist.Gamma(3.0, 2.0))), "'mu_updated' .* ConjugateReparam gives it: leave that out"),
    ("ConjugateReparam of a Normal", hierarchy(own=ConjugateReparam(dist.Normal(0.0, 1.0))), "'own': ConjugateReparam cannot be used here"),
    ("NeuTraReparam", neutra(), "site 'mu' is a Delta with a log density. If NeuTraReparam"),
    ("SymmetricStableReparam of an outcome", poutine.reparam(of_y(stable), config={"y": SymmetricStableReparam()}), "'y_uniform' and 'y_exponential' are continuous, and of a row: one"),
    ("LinearHMMReparam", poutine.reparam(of_steps, config={"v": LinearHMMReparam(trans=StudentTReparam())}), "latent site 'v_trans_gamma' is of a row"),
    ("pyro.module", module, r"'net\$\$\$weight' belongs to a torch module.*PyroSample"),
    ("a PyroModule's own parameters", Parameters(), r"'net.weight' belongs to a torch module.*PyroSample"),
    ("layers of each client", NetworkOfClients(), "a layer of torch takes weights of one network.*models.Network"),
    ("layers first read inside the rows", NetworkOfRows(), "'hidden.weight' is of a row.*A PyroSample attribute is sampled where it is first read"),
    ("a plate of clients of the program's own", own_clients, "'own' lies in a plate 'clients' that the model has made: open `with federation.clients"),
    ("a subsampled plate", subsampled, "plate 'items' takes a subsample of its own, 3 of 6: leave out subsample_size"),
    ("a plate of given items", of_some_items, "plate 'items' takes a subsample of its own, 3 of 6"),
    ("a subsample of rows", written(plate_of_some_rows), "plate 'data' takes a subsample .*, 2 of 5: leave .* inside .* the plate itself"),
    ("a plate of rows", written(plate_of_rows), "'y' depends .* other clients .* in no loop or plate of your own over rows"),
    ("a plate of entries", written(plate_of_entries), r"'v': values of shape .* In place of plate 'entries' write .to_event\(1\)"),
    ("a loop over rows", written(loop_over_rows), r"'y\d' depends .* in no loop or plate of your own over rows"),
    ("rows by a mask", written(rows_by_a_mask), r"'y': values of shape .* rows are left out by poutine.mask\(mask=...\), not by an index"),
    ("rows at random", written(rows_at_random), r"'y': values of shape .* rows are left out by poutine.mask\(mask=...\), not by an index"),
    ("clients by index", written(lambda own, obs, i: pyro.sample("y", dist.Normal(own[i], 1.0), obs=obs["y"])), r"no entry for other clients, own and not own\[i\]"),
    ("a field as an attribute", written(lambda own, obs, i: pyro.sample("y", dist.Normal(own, 1.0), obs=obs.y)), r'read a field as obs\["y"\]'),
    ("a plate of all clients outside theirs", number_of_clients, r"'effects' depends .* len\(federation\) and len\(obs\[...\]\) count the clients of a batch"),
    ("a global variable after the clients", after_the_clients, "'mu' depends .* no site outside the clients plate a value from inside"),
    ("StructuredReparam", structured(), "site 'mu' is a Delta with a log density. If NeuTraReparam, StructuredReparam"),
    ("pyro.condition of a global variable", pyro.condition(hierarchy(), data={"mu": torch.tensor(0.5)}), "'mu' lies outside the clients plate.* pyro.condition .* write it into the program"),
    ("pyro.condition of the clients' variables", pyro.condition(hierarchy(), data={"own": torch.zeros(3, 1)}), r"'own': values of shape \(3, 1\) .* needs no pyro.condition"),
    ("a value that is no tensor", pyro.condition(hierarchy(), data={"own": 0.5}), "'own' has a value of type float: give it a tensor"),
    ("poutine.replay", poutine.replay(hierarchy(), trace=poutine.trace(lambda: pyro.sample("mu", dist.Normal(0.0, 1.0))).get_trace()), "'mu' is given a value by a handler around the model, such as poutine.replay"),
    ("poutine.block", poutine.block(hierarchy(), hide=["own"]), "which no poutine.block may hide"),
    ("poutine.uncondition", poutine.uncondition(hierarchy()), "no outcome depends on latent site 'y'.*obs= is"),
    ("two arguments", lambda x, y: None, "is called with the federation alone, def model"),
    ("a bound of infinity", hierarchy(prior=lambda: dist.Uniform(-torch.tensor(np.inf), torch.tensor(np.inf))), "line .* a parameter that it cannot have"),
    ("thresholds by a discrete global variable", raters, "'style' is discrete, and lies outside the clients plate"),
    ("thresholds by discrete variables in a plate of clients", raters_of_clients, "'style' is discrete, and Categorical .* it is a vector"),
    ("a class beyond the network's outputs", graded, r"client 'c0', row 0: observed site 'grade' is \d.0. Of Categorical this is outside its support"),
    ("fields of the federation", lambda f: f["y"], "'Batch' object is not subscriptable|read a field as obs"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_refused_by_name_with_what_to_write(model, message):
    with pytest.raises(ValueError, match=message):
        bf.fit(model, federation(), rounds=2, progress=False)


@pytest.mark.parametrize(
    "outcome",
    [
        lambda mean: dist.Bernoulli(logits=mean),
        lambda mean: dist.Poisson(mean.exp()),
        lambda mean: dist.MultivariateNormal(mean[..., None].expand(*mean.shape, 3), torch.eye(3)),
    ],
    ids=["Bernoulli", "Poisson", "MultivariateNormal"],
)  # fmt: skip
def test_a_covariate_missing_in_the_first_row_is_named(outcome):
    def model(federation):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with federation.clients(), federation.observations() as obs:
            fn = outcome(obs["x"] @ slope)
            pyro.sample(
                "out", fn, obs=obs["v"].round().abs() if fn.event_dim else (obs["y"] > 0) * 1.0
            )

    with pytest.raises(
        ValueError, match="client 'c0', row 0: x is missing, and site 'out' depends"
    ):
        bf.fit(model, federation(gap=True), rounds=2, progress=False)


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
