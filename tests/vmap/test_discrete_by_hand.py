"""Densities with discrete variables of a row summed out equal sums by hand."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

import bayesfed as bf
from bayesfed.elbo import handlers
from bayesfed.vmap.choose import for_batches
from bayesfed.vmap.mixtures import Mixture


def data(kind, clients=4, seed=0):
    generator = np.random.default_rng(seed)
    rows = {}
    for i in range(clients):
        y = generator.normal(size=5 + i) + i
        rows[f"c{i}"] = {"y": np.abs(np.round(y)) if kind == "counts" else y, "v": y + 1}
    return bf.Federation.from_arrays(rows)


def zero_inflated(federation):
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            here = pyro.sample("here", dist.Bernoulli(p))
            pyro.sample("y", dist.Poisson((here * a.exp()).clamp(min=1e-20)), obs=obs.get("y"))


def of_zero_inflated(p, a, rows):
    there = torch.log(p) + dist.Poisson(a.exp()).log_prob(rows["y"])
    return torch.logaddexp(there, torch.where(rows["y"] == 0, torch.log(1 - p), -torch.inf))


def of_kinds(federation):
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    middle = pyro.sample("middle", dist.Normal(0.0, 2.0).expand([3]))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            z = pyro.sample("z", dist.Categorical(p))
            pyro.sample("y", dist.Normal(a + middle[z], 0.5), obs=obs.get("y"))


def by_kinds(p, middle, a, rows):
    each = [torch.log(p[k]) + dist.Normal(a + middle[k], 0.5).log_prob(rows["y"]) for k in range(3)]
    return torch.stack(each).logsumexp(0)


def two_outcomes(federation):
    """A model whose second variable depends on the first, and whose outcomes depend on both."""
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            first = pyro.sample("first", dist.Bernoulli(p))
            second = pyro.sample("second", dist.Bernoulli(0.2 + 0.5 * first))
            pyro.sample("y", dist.Normal(a + first, 0.5), obs=obs.get("y"))
            pyro.sample("v", dist.Normal(a - second + first, 1.0), obs=obs.get("v"))


def of_two_outcomes(p, a, rows):
    each = []
    for first in (0.0, 1.0):
        for second in (0.0, 1.0):
            q = torch.as_tensor(0.2 + 0.5 * first)
            each.append(
                torch.log(p if first else 1 - p)
                + torch.log(q if second else 1 - q)
                + dist.Normal(a + first, 0.5).log_prob(rows["y"])
                + dist.Normal(a - second + first, 1.0).log_prob(rows["v"])
            )
    return torch.stack(each).logsumexp(0)


@pytest.mark.parametrize(
    ("program", "by_hand", "kind"),
    [
        (zero_inflated, of_zero_inflated, "counts"),
        (of_kinds, by_kinds, "reals"),
        (two_outcomes, of_two_outcomes, "reals"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_each_rows_density_is_the_sum(program, by_hand, kind):
    """Densities at three draws of the prior equal sums by hand; padded rows count as 0."""
    federation = data(kind)
    batch, model = federation.batch(), for_batches(program, federation)
    torch.manual_seed(1)
    with handlers.given(batch.device, draws=3), poutine.trace() as tracer:
        model(batch)
    nodes = handlers.sample_sites(tracer.trace)
    assert not {"z", "here", "first", "second"} & nodes.keys()
    found = sum(
        node["fn"].log_prob(node["value"]) for node in nodes.values() if node["is_observed"]
    )
    latent = {name: node["value"] for name, node in nodes.items() if not node["is_observed"]}
    local = {"a"}
    for draw in range(3):
        for client, name in enumerate(federation.names):
            rows = {n: federation.select([name])[n] for n in ("y", "v")}
            at = {n: v[draw, client if n in local else 0, 0] for n, v in latent.items()}
            expected = by_hand(**at, rows=rows)
            torch.testing.assert_close(found[draw, client, : len(expected)], expected)


def test_a_fit_is_that_of_the_program_summed_by_hand():
    """With one seed the fit is equal to that of the model summed by hand, up to round-off, compiled or not."""

    def by_factor(federation):
        p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
        middle = pyro.sample("middle", dist.Normal(0.0, 2.0).expand([3]))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                pyro.factor("y", by_kinds(p, middle, a, obs))

    federation = data("reals")
    found, expected = (
        bf.fit(m, federation, bf.SFVI(corrected=False), rounds=3).sample(5)
        for m in (of_kinds, by_factor)
    )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-3)


def test_rows_are_predicted_by_the_mixture():
    """Sampled rows have two kinds, ten apart; shares are right to four standard errors of 4000 draws of 26 rows."""

    def model(federation):
        with federation.clients():
            a = pyro.sample("a", dist.Normal(0.0, 0.01))
            with federation.observations() as obs:
                z = pyro.sample("z", dist.Bernoulli(0.3))
                pyro.sample("y", dist.Normal(a + 10 * z, 0.1), obs=obs.get("y"))

    posterior = bf.fit(model, data("reals"), rounds=2)
    y = posterior.predict(num_samples=4000)["y"]
    assert (((y - 0).abs() < 1) | ((y - 10).abs() < 1)).all()
    assert abs(float((y > 5).double().mean()) - 0.3) < 4 * (0.21 / y.numel()) ** 0.5


def test_mixtures_know_their_moments():
    """The mean and variance of a mixture agree with a million draws."""
    components = (
        dist.Normal(torch.tensor([0.0, 1.0]), 1.0),
        dist.Normal(torch.tensor([4.0, -1.0]), 2.0),
    )
    mixture = Mixture(torch.tensor([[0.7, 0.3], [0.5, 0.5]]).log(), components, {"z": 2})
    torch.manual_seed(0)
    draws = mixture.sample((500_000,))
    torch.testing.assert_close(draws.mean(0), mixture.mean, atol=0.02, rtol=0)
    torch.testing.assert_close(draws.var(0), mixture.variance, atol=0.05, rtol=0.01)


def test_what_cannot_be_summed_out_is_refused():
    def number_of_clients(federation):
        a = pyro.sample("a", dist.Normal(0.0, 1.0 * len(federation)))
        with federation.clients(), federation.observations() as obs:
            z = pyro.sample("z", dist.Bernoulli(0.3))
            pyro.sample("y", dist.Normal(a + z, 1.0), obs=obs["y"])

    with pytest.raises(ValueError, match="site 'a' depends on which other clients"):
        bf.fit(number_of_clients, data("reals"))

    def unbounded(federation):
        with federation.clients(), federation.observations() as obs:
            z = pyro.sample("z", dist.Poisson(2.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=obs["y"])

    def without_its_field(federation):
        with federation.clients(), federation.observations() as obs:
            pyro.sample("w", dist.Bernoulli(0.5), obs=obs.get("w"))
            pyro.sample("y", dist.Normal(0.0, 1.0), obs=obs["y"])

    with pytest.raises(ValueError, match="no outcome depends on latent site 'w'"):
        bf.fit(without_its_field, data("reals"))
    with pytest.raises(ValueError, match="site 'z' is discrete, and Poisson has no list of its"):
        bf.fit(unbounded, data("reals"))
