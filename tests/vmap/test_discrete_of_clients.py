"""Densities with discrete variables of a client summed out equal sums by hand, and the posterior reports them."""

import itertools

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

import bayesfed as bf
from bayesfed.elbo import handlers
from bayesfed.elbo.log_density import sum_log_density
from bayesfed.vmap.choose import for_batches


def data(gaps=False, clients=4, seed=0):
    generator = np.random.default_rng(seed)
    rows = {}
    for i in range(clients):
        y, v = generator.normal(size=4 + i) + 2 * (i % 2), generator.normal(size=4 + i)
        if gaps:
            y[1], v[2] = np.nan, np.nan
        rows[f"c{i}"] = {"y": y, "v": v}
    return bf.Federation.from_arrays(rows, missing="keep" if gaps else "fail")


# Each program beside log p(values of the client's discrete variables, and its data, by row) by hand: the distributions
# of its discrete variables, of its own variable `a`, and of a row summed over the row's own variables.


def one_kind(federation):
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
    level = pyro.sample("level", dist.Normal(torch.arange(3.0), 1.0).to_event(1))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        kind = pyro.sample("kind", dist.Categorical(p))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a + level[kind], 0.5), obs=obs.get("y"))


def of_one_kind(p, level, a, y, v):
    for k in range(3):
        yield p[k].log() + normal(a, 0.0, 1.0), normal(y, a + level[k], 0.5)


def behind(federation):
    """A model whose client's own variable depends on its kind, and so do two outcomes."""
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    with federation.clients():
        kind = pyro.sample("kind", dist.Bernoulli(p))
        a = pyro.sample("a", dist.Normal(2 * kind, 0.7))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a, 0.5), obs=obs.get("y"))
            pyro.sample("v", dist.Normal(a - kind, 1.0), obs=obs.get("v"))


def of_behind(p, a, y, v):
    for k, q in enumerate((1 - p, p)):
        yield q.log() + normal(a, 2 * k, 0.7), normal(y, a, 0.5) + normal(v, a - k, 1.0)


def two_kinds(federation):
    """A model whose second kind depends on the first, and appears after the first outcome."""
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    with federation.clients():
        first = pyro.sample("first", dist.Bernoulli(p))
        a = pyro.sample("a", dist.Normal(first, 1.0))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(a + first, 0.5), obs=obs.get("y"))
        probs = torch.stack([0.2 + 0.5 * first, 0.8 - 0.5 * first], -1)
        second = pyro.sample("second", dist.Categorical(probs))
        with federation.observations() as obs:
            pyro.sample("v", dist.Normal(a - second * first, 1.0), obs=obs.get("v"))


def of_two_kinds(p, a, y, v):
    for one, two in itertools.product((0, 1), (0, 1)):
        q = torch.log(p if one else 1 - p) + np.log((0.2 + 0.5 * one, 0.8 - 0.5 * one)[two])
        yield q + normal(a, one, 1.0), normal(y, a + one, 0.5) + normal(v, a - two * one, 1.0)


def with_rows(federation):
    """A discrete variable of a row whose distribution depends on that of its client."""
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        kind = pyro.sample("kind", dist.Bernoulli(p))
        with federation.observations() as obs:
            late = pyro.sample("late", dist.Bernoulli(0.2 + 0.5 * kind))
            pyro.sample("y", dist.Normal(a + 2 * late, 0.5), obs=obs.get("y"))
            pyro.sample("v", dist.Normal(a - late + kind, 1.0), obs=obs.get("v"))


def of_with_rows(p, a, y, v):
    for k, q in enumerate((1 - p, p)):
        each = [
            np.log(share) + normal(y, a + 2 * late, 0.5) + normal(v, a - late + k, 1.0)
            for late, share in enumerate((0.8 - 0.5 * k, 0.2 + 0.5 * k))
        ]
        yield (
            q.log() + normal(a, 0.0, 1.0),
            torch.stack(torch.broadcast_tensors(*each)).logsumexp(0),
        )


def with_noise(federation):
    """A model with a continuous variable of a row, in both outcomes."""
    p = pyro.sample("p", dist.Beta(2.0, 2.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        kind = pyro.sample("kind", dist.Bernoulli(p))
        with federation.observations() as obs:
            e = pyro.sample("e", dist.Normal(kind, 0.5 + kind))
            pyro.sample("y", dist.Normal(a + e, 0.5), obs=obs.get("y"))
            pyro.sample("v", dist.Normal(a - e, 1.0), obs=obs.get("v"))


def of_with_noise(p, a, y, v):
    for k, q in enumerate((1 - p, p)):
        width = 0.5 + k
        mean = torch.stack([a + k, a - k]).expand(2)
        cov = torch.tensor([[0.25, 0.0], [0.0, 1.0]]) + width**2 * torch.tensor(
            [[1.0, -1], [-1, 1]]
        )
        pair = torch.stack([y, v], -1)
        each = dist.MultivariateNormal(mean, cov).log_prob(pair.nan_to_num())
        alone = normal(v, a - k, (1 + width**2) ** 0.5), normal(y, a + k, (0.25 + width**2) ** 0.5)
        each = torch.where(y.isnan(), alone[0], torch.where(v.isnan(), alone[1], each))
        yield q.log() + normal(a, 0.0, 1.0), each


def normal(value, loc, scale):
    """The log density of a value, 0 if it is missing."""
    value = torch.as_tensor(value)
    return dist.Normal(loc, scale).log_prob(value.nan_to_num()).where(~value.isnan(), 0.0)


PROGRAMS = [
    (one_kind, of_one_kind),
    (behind, of_behind),
    (two_kinds, of_two_kinds),
    (with_rows, of_with_rows),
    (with_noise, of_with_noise),
]


def traced(program, federation, draws=3):
    batch, model = federation.batch(), for_batches(program, federation)
    torch.manual_seed(1)
    with handlers.given(batch.device, draws=draws), poutine.trace() as tracer:
        model(batch)
    return handlers.sample_sites(tracer.trace)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize(("program", "by_hand"), PROGRAMS, ids=lambda value: value.__name__)
def test_a_clients_density_is_the_sum(program, by_hand, gaps):
    """Densities at three draws of the prior equal sums by hand, with 4 to 7 rows and up to one missing outcome."""
    federation = data(gaps)
    nodes = traced(program, federation)
    assert not {"kind", "first", "second", "late", "e"} & nodes.keys()
    local = {"a", "y", "v"} & nodes.keys()
    by_row, together = (torch.zeros(3, 4) for _ in range(2))
    for name in local:
        density = nodes[name]["fn"].log_prob(nodes[name]["value"])
        mask = nodes[name]["mask"]
        by_row += (density if mask is None else torch.where(mask, density, 0.0)).sum(-1)
        together += sum_log_density(nodes[name])
    for draw in range(3):
        for client, name in enumerate(federation.names):
            rows = {n: federation.select([name])[n] for n in ("y", "v")}
            at = {
                n: node["value"][draw, client if n == "a" else 0, 0]
                for n, node in nodes.items()
                if n not in ("y", "v")
            }
            each = [own + row.sum() for own, row in by_hand(**at, **rows)]
            expected = torch.stack(each).logsumexp(0)
            for found in (by_row, together):
                torch.testing.assert_close(found[draw, client], expected, rtol=1e-5, atol=1e-4)


def test_rows_left_out_are_given_all_others():
    """The pointwise densities of leave-one-out are log p(D) − log p(D without the row), at each draw of q."""
    federation = data()
    posterior = bf.fit(two_kinds, federation, rounds=2)
    found = posterior.log_likelihood(num_samples=2)
    draws = posterior.sample(2)
    for draw, (client, name) in itertools.product(range(2), enumerate(federation.names)):
        rows = {n: federation.select([name])[n] for n in ("y", "v")}
        at = {"p": draws["p"][draw], "a": draws["a"][draw, client]}

        def of(y, v, at=at):
            each = [own + row.sum() for own, row in of_two_kinds(**at, y=y, v=v)]
            return torch.stack(each).logsumexp(0)

        start = int(federation.offsets[client])
        for row in range(len(rows["y"])):
            for site in ("y", "v"):
                without = {n: value.clone() for n, value in rows.items()}
                without[site][row] = torch.nan
                expected = of(**rows) - of(**without)
                torch.testing.assert_close(
                    found[site][draw, start + row], expected, rtol=1e-4, atol=1e-4
                )


def two_levels(federation):
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    low = pyro.sample("low", dist.Normal(0.0, 1.0))
    with federation.clients():
        high = pyro.sample("high", dist.Bernoulli(share))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(low + 10 * high, 1.0), obs=obs.get("y"))


@pytest.fixture(scope="module")
def levels():
    generator = np.random.default_rng(0)
    rows = {f"c{i}": {"y": generator.normal(size=3) + 10 * (i % 3 == 0)} for i in range(9)}
    return bf.fit(two_levels, bf.Federation.from_arrays(rows))


def test_clients_kinds_are_told(levels):
    high = levels.kinds()["high"]
    assert high.argmax(1).tolist() == [1, 0, 0] * 3
    torch.testing.assert_close(high.sum(1), torch.ones(9))
    assert abs(levels.sample()["share"].mean() - 5 / 13) < 0.01  # Beta(2 + 3, 2 + 6)


def test_a_known_clients_rows_are_of_its_kind_a_new_ones_all_of_one(levels):
    y = levels.predict(num_samples=200)["y"].reshape(200, 9, 3)
    assert ((y > 5).all((0, 2)) == torch.tensor([True, False, False] * 3)).all()
    assert (y[:, ::3] > 5).all()
    rows = bf.Federation.from_arrays({"new": {"y": np.full(40, np.nan)}}, missing="keep")
    new = levels.personalize(rows)
    high = new.predict(num_samples=500)["y"] > 5
    assert (high.all(1) | ~high.any(1)).all()
    share = float(high[:, 0].double().mean())
    assert abs(share - 5 / 13) < 4 * (0.24 / 500) ** 0.5
    known = levels.personalize(bf.Federation.from_arrays({"new": {"y": [11.0]}}))
    assert known.kinds()["high"][0, 1] > 0.99
    assert (known.predict(num_samples=100)["y"] > 5).all()


def test_new_rows_are_each_given_the_clients_own(levels):
    """Predictions of held-out rows use the client's kind: densities, moments, the mixture and class probabilities."""
    test = bf.Federation.from_arrays({"c0": {"y": [10.0, 0.0]}, "c1": {"y": [10.0, 0.0]}})
    log_p = levels.log_likelihood(test).values()
    (found,) = (value.mean(0) for value in log_p)
    assert found[0] > -2 and found[3] > -2 and found[1] < -30 and found[2] < -30
    mixture = levels.predictive(test)
    assert (mixture.mean - torch.tensor([10.0, 10.0, 0.0, 0.0])).abs().max() < 1.0
    assert (mixture.variance < 2).all()
    torch.testing.assert_close(mixture.log_prob(test["y"])[[0, 3]], found[[0, 3]], atol=0.3, rtol=0)


@pytest.mark.filterwarnings("ignore:Pareto k is above")
def test_arviz_has_them(levels):
    idata = levels.to_arviz(200)
    assert bf.loo(idata).n_data_points == 27
    spread = idata.prior_predictive["y"].values.reshape(200, 9, 3)
    assert (
        (spread > 5).all(2) | (spread < 5).all(2)
    ).mean() > 0.95  # a client's rows are of one kind
    assert 0.3 < (spread > 5).mean() < 0.7


def test_a_covariate_with_gaps_beside_a_discrete_variable():
    """Missing values of a covariate are integrated out: the density equals the sum by hand."""

    def program(federation):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with federation.clients(), federation.observations() as obs:
            late = pyro.sample("late", dist.Bernoulli(0.3))
            v = pyro.sample("v", dist.Normal(0.5, 1.0), obs=obs["v"])
            pyro.sample("y", dist.Normal(slope * v + 2 * late, 0.5), obs=obs["y"])

    federation = data(gaps=True)
    nodes = traced(program, federation)
    total = sum(
        torch.where(nodes[n]["mask"], nodes[n]["fn"].log_prob(nodes[n]["value"]), 0.0).sum((1, 2))
        for n in ("v", "y")
    )
    y, v = federation["y"], federation["v"]
    for draw, slope in enumerate(nodes["slope"]["value"].flatten()):
        each = []
        for late, share in enumerate((0.7, 0.3)):
            known = normal(v, 0.5, 1.0) + normal(y, slope * v.nan_to_num() + 2 * late, 0.5)
            unknown = normal(y, slope * 0.5 + 2 * late, (0.25 + slope**2) ** 0.5)
            each.append(np.log(share) + torch.where(v.isnan(), unknown, known))
        expected = torch.stack(each).logsumexp(0).sum()
        torch.testing.assert_close(total[draw], expected, rtol=1e-4, atol=1e-3)


def test_what_cannot_be_summed_out_is_refused():
    def named(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.deterministic("level", mu + z)
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(mu + z, 1.0), obs=obs["y"])

    def counted(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            z = pyro.sample("z", dist.Poisson(2.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(mu + z, 1.0), obs=obs["y"])

    def of_all(federation):
        z = pyro.sample("z", dist.Bernoulli(0.5))
        with federation.clients(), federation.observations() as obs:
            pyro.sample("y", dist.Normal(z, 1.0), obs=obs["y"])

    def idle(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            pyro.sample("z", dist.Bernoulli(0.5))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(mu, 1.0), obs=obs["y"])

    def questioned(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients():
            z = pyro.sample("z", dist.Bernoulli(0.5))
            mu = mu + 1 if z else mu
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(mu, 1.0), obs=obs["y"])

    def of_a_mixture(federation):
        with federation.clients():
            kinds = dist.Categorical(torch.ones(2))
            a = pyro.sample("a", dist.MixtureSameFamily(kinds, dist.Normal(torch.arange(2.0), 1.0)))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(a, 1.0), obs=obs["y"])

    for model, said in [
        (of_a_mixture, "latent site 'a': torch has no transform from the reals.*discrete variable"),
        (named, "'level' depends on site 'z', which is discrete, of a client, and summed out"),
        (
            counted,
            "site 'z' is discrete, and Poisson has no list of its values.*one number a client",
        ),
        (of_all, "site 'z' is discrete, and lies outside the clients plate"),
        (idle, "no outcome depends on latent site 'z'"),
        (questioned, "`mu = mu \\+ 1 if z else mu`: it asks for the value of a tensor"),
    ]:
        with pytest.raises(ValueError, match=said):
            bf.fit(model, data())
    with pytest.raises(ValueError, match="site 'kind' is discrete.*Leave out batch_size"):
        bf.fit(one_kind, data(), batch_size=2)
