"""Programs with Pyro's handlers that are refused, by name and with what to write."""

# ruff: noqa: E501

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoMultivariateNormal, AutoStructured
from pyro.infer.reparam import (
    ConjugateReparam,
    LinearHMMReparam,
    NeuTraReparam,
    SplitReparam,
    StructuredReparam,
    StudentTReparam,
    SymmetricStableReparam,
)
from pyro.nn import PyroModule

import bayesfed as bf
from tests.elbo.programs import ROWS, Layers, federation, four, hierarchy, stable


@pytest.fixture(autouse=True)
def _empty_store():
    pyro.clear_param_store()


def of_y(distribution):
    """A program whose outcome has a distribution, given an observation-level mean."""

    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients(), federation.observations() as obs:
            pyro.sample("y", distribution(mu + obs["x"][..., 0]), obs=obs.get("y"))

    return model


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
    ("clients by index", written(lambda own, obs, i: pyro.sample("y", dist.Normal(own[i], 1.0), obs=obs["y"])), r"no entry for other clients, own and not own\[i\], and the entries of a vector are its last dimension, own\[\.\.\., i\]"),
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
