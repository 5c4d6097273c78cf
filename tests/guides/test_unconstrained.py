"""A model at given unconstrained values, and as a guide."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from bayesfed.guides.unconstrained import AsGuide, ModelAt, delta_at, split

pytestmark = pytest.mark.usefixtures("float64")


def model():
    upper = pyro.sample("upper", dist.LogNormal(0.0, 1.0).expand([1]))
    x = pyro.sample("x", dist.Uniform(0.0, upper))
    w = pyro.sample("w", dist.Dirichlet(torch.ones(1, 3)))
    with poutine.scale(scale=2.0):
        pyro.sample("y", dist.Normal(x + w[..., 0], 1.0), obs=torch.tensor([0.3]))


VALUES = {"upper": [0.4], "x": [-0.2], "w": [0.1, 0.5]}


def test_densities_are_those_of_a_trace_with_the_change_of_variables():
    values = {name: torch.tensor([u]) for name, u in VALUES.items()}
    run = ModelAt(values)
    with poutine.trace() as outside, run:
        model()
    assert not [name for name in outside.trace.nodes if name in (*VALUES, "y")]
    deltas = {name: delta_at(run.priors[name], u) for name, u in values.items()}
    with poutine.substitute(data={}), poutine.trace() as tracer:
        poutine.condition(model, {name: delta.v for name, delta in deltas.items()})()
    tracer.trace.compute_log_prob()
    for name, delta in deltas.items():
        log_prob = tracer.trace.nodes[name]["log_prob"] - delta.log_density
        torch.testing.assert_close(run.log_prob([name]), log_prob.sum(-1))
    torch.testing.assert_close(run.log_prob(run.observed), tracer.trace.nodes["y"]["log_prob_sum"])
    total = sum(run.log_prob([name]) for name in (*VALUES, "y"))
    torch.testing.assert_close(run.log_prob(), total)


def test_sites_without_values_have_no_densities():
    run = ModelAt({"upper": torch.tensor([[0.4]])}, without=["upper"])
    with run:
        model()
    assert list(run.priors) == ["upper", "x", "w"]
    assert list(run.log_probs) == run.observed == ["y"]


def test_a_guide_draws_the_sites_that_it_is_given_and_no_others():
    sites = {"upper": lambda prior: prior, "w": lambda prior: delta_at(prior, torch.zeros(1, 2))}
    with poutine.trace() as tracer, AsGuide(sites):
        model()
    assert [n for n, node in tracer.trace.nodes.items() if node["type"] == "sample"] == [
        "upper",
        "w",
    ]
    torch.testing.assert_close(tracer.trace.nodes["w"]["value"].sum(), torch.tensor(1.0))


def test_split():
    parts = split(torch.arange(3.0), {"a": 1, "b": 2})
    assert {name: part.tolist() for name, part in parts.items()} == {"a": [0.0], "b": [1.0, 2.0]}
    assert split(torch.zeros(4, 0), {}) == {}
