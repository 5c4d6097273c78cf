"""Models that mix clients, draws or rows are refused, and no others. Each would otherwise fit without an error."""

import itertools

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayesfed as bf
from bayesfed import datasets, models, simulations
from bayesfed.checks.independence import check_independence
from tests.invariants.cases import CASES, federation


def ragged():
    generator = np.random.default_rng(3)
    sizes = [3, 9, 5, 12, 1, 7]
    return bf.Federation.from_arrays(
        {
            f"c{n}": {"x": generator.normal(1.0, 1.0, n), "y": generator.normal(3.0, 1.0, n)}
            for n in sizes
        }
    )


def equal():
    """Clients with equally many rows, so that no batch has padding."""
    generator = np.random.default_rng(3)
    return bf.Federation.from_arrays(
        {
            f"c{i}": {"x": generator.normal(1.0, 1.0, 6), "y": generator.normal(3.0, 1.0, 6)}
            for i in range(4)
        }
    )


def model(
    prior=lambda f: dist.Normal(0.0, 5.0),
    local=lambda f, mu: dist.Normal(mu, 1.0),
    value=lambda a: a,
    mean=lambda a, x: a + 0.5 * x,
):
    """A hierarchy of intercepts, one part of which may be wrong."""

    def hierarchy(federation):
        mu = pyro.sample("mu", prior(federation))
        with federation.clients():
            a = pyro.sample("a", local(federation, mu))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(mean(value(a), obs["x"]), 1.0), obs=obs.get("y"))

    return hierarchy


def outside(federation):
    """A model whose observed site is one indent too shallow, so that padding counts as data."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(mu, 1.0))
        with federation.observations() as obs:
            pass
        pyro.sample("y", dist.Normal(a, 1.0), obs=obs["y"])


def slopes(reduce):
    """A model with a vector of slopes that is summed to a mean."""

    def regression(federation):
        b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(0.0, 1.0))
            with federation.observations() as obs:
                pyro.sample("y", dist.Normal(a + reduce(b) * obs["x"], 1.0), obs=obs.get("y"))

    return regression


RUNS = itertools.count()


def own_noise(a, x):
    """A function whose result differs clearly at each call."""
    return a + 0.5 * x + 0.3 * next(RUNS)


WRONG = {
    "centred over clients": (
        model(value=lambda a: a - a.mean(-2, keepdim=True)),
        "site 'y' depends",
    ),
    "observed outside observations": (outside, "site 'y' depends"),
    "mean over padding": (
        model(mean=lambda a, x: a + x.mean(-1, keepdim=True)),
        "site 'y' depends",
    ),
    "centred over the cohort": (
        model(mean=lambda a, x: a + x - x.mean()),
        "site 'y' depends",
    ),
    "data in a local prior": (
        model(local=lambda f, mu: dist.Normal(mu + f.fields["y"].mean(), 1.0)),
        "site 'a' depends",
    ),
    "number of clients in a local prior": (
        model(local=lambda f, mu: dist.Normal(mu, 1.0 / len(f))),
        "site 'a' depends",
    ),
    "number of clients in a global prior": (
        model(prior=lambda f: dist.Normal(0.0, 1.0 * len(f))),
        "site 'mu' ",
    ),
    "data in a global prior": (
        model(prior=lambda f: dist.Normal(f.fields["y"].mean(), 1.0)),
        "site 'mu' ",
    ),
    "numbers of its own": (model(mean=own_noise), "site 'y' differs from one run to the next"),
}


@pytest.mark.parametrize("algorithm", [bf.SFVI(), bf.FedAvg()], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_models_that_mix_are_refused(name, algorithm):
    wrong, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        bf.start(wrong, ragged(), algorithm, rounds=1)


PADDED = ("mean over padding", "observed outside observations")
"""Models that are right if no client is ever padded."""


@pytest.mark.parametrize("name", WRONG)
def test_padding_is_no_matter_where_there_is_none(name):
    wrong, message = WRONG[name]
    if name in PADDED:
        bf.start(wrong, equal(), bf.SFVI(), rounds=1)
    else:
        with pytest.raises(ValueError, match=message):
            bf.start(wrong, equal(), bf.SFVI(), rounds=1)


def lagged(federation):
    """A model in which a row depends on the one before it."""
    rho = pyro.sample("rho", dist.Normal(0.0, 1.0))
    with federation.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with federation.observations() as obs:
            y = obs["y"]
            before = torch.cat([y[..., :1], y[..., :-1]], -1)
            pyro.sample("y", dist.Normal(a + rho * before, 1.0), obs=y)


def test_rows_that_look_at_others_are_refused_in_minibatches_only():
    with pytest.raises(
        ValueError, match="site 'y' depends on the order of a client's rows.*leave out batch_size"
    ):
        bf.start(lagged, ragged(), bf.SFVI(), rounds=1, batch_size=2)
    bf.start(lagged, ragged(), bf.SFVI(), rounds=1)


RIGHT = {
    "intercepts": (model(), ragged),
    "equal rows": (model(), equal),
    "slopes": (slopes(lambda b: b.sum(-1)), ragged),
    "one client": (model(), lambda: ragged().select(["c5"])),
    "one client of one row": (model(), lambda: ragged().select(["c1"])),
    "eight schools": (models.eight_schools, datasets.eight_schools),
    "varying_slope": (models.varying_slope, datasets.grunfeld),
    "logistic": (models.hierarchical_logistic, datasets.china_smoking),
    "count": (models.hierarchical_count, datasets.randhie),
}


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("name", RIGHT)
def test_right_models_pass(name, batch_size):
    right, data = RIGHT[name]
    bf.start(right, data(), bf.SFVI(), rounds=1, batch_size=batch_size)


@pytest.mark.parametrize("name", CASES)
def test_every_algorithm_and_model_of_the_invariants_passes(name):
    (algorithm, problem), data = CASES[name](), federation()
    check_independence(algorithm.program(problem, data), data, shuffled=True)


@pytest.mark.parametrize("seed", range(10))
def test_gaussian_processes_pass(seed):
    """Nearly singular covariances round differently with padding, and are accepted."""
    train, _ = simulations.polynomials(clients=12, seed=seed)
    torch.manual_seed(seed)
    process = models.GaussianProcess(models.mlp(1, 16, 1), features=models.mlp(1, 16, 2))
    bf.start(process, train, bf.PACPFL(), rounds=1)


def by_beds(federation):
    """A model with a predictor of clients, not of rows."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with federation.clients():
        level = pyro.sample("level", dist.Normal(slope * federation.of_clients("beds"), 0.01))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(level, 1.0), obs=obs.get("y"))


def test_a_predictor_of_clients():
    rows = {"a": {"beds": [2.0, 2.0], "y": [4.0, 4.1]}, "b": {"beds": [5.0], "y": [10.0]}}
    posterior = bf.fit(by_beds, bf.Federation.from_arrays(rows))
    draws = posterior.sample(2000)
    torch.testing.assert_close(
        draws["level"].mean(0), draws["slope"].mean() * torch.tensor([2.0, 5.0]), rtol=0, atol=0.02
    )
    rows["a"]["beds"][1] = 3.0
    with pytest.raises(
        ValueError, match="client 'a', row 1: field 'beds' differs between the client's rows"
    ):
        bf.fit(by_beds, bf.Federation.from_arrays(rows), rounds=1)


@pytest.mark.parametrize("kinds", [[[0, 1, 2], [2, 1], [0, 0]], [[2, 0, 1], [1, 2], [2], [0]]])
def test_a_number_that_is_read_off_the_data_of_any_client_is_found(kinds):
    """Here the two clients that are compared first have the same largest category, and another has not."""

    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients(), federation.observations() as obs:
            largest = int(obs["kind"].max())
            pyro.sample("y", dist.Normal(mu * (1 + largest), 1.0), obs=obs["y"])

    clients = {f"c{i}": {"kind": k, "y": torch.zeros(len(k))} for i, k in enumerate(kinds)}
    last = f"c{len(kinds) - 1}"
    with pytest.raises(ValueError, match=f"'y' depends, for client '{last}', on which other"):
        bf.fit(model, bf.Federation.from_arrays(clients), rounds=1, progress=False)


def by_rows(change):
    def model(federation):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with federation.clients(), federation.observations() as obs:
            location, outcome = change(obs["y"])
            pyro.sample("y", dist.Normal(mu + location, 1.0), obs=outcome)

    return model


# the first row of the client with two, to which padding is compared first, is the larger
ORDERS = bf.Federation.from_arrays(
    {"a": {"y": [1.0, 2.0, 3.0, 4.0]}, "b": {"y": [5.0, 1.0]}, "c": {"y": [1.0, 2.0, 5.0]}}
)


@pytest.mark.parametrize(
    "change",
    [lambda y: (0.0, y.sort(-1).values), lambda y: (y.flip(-1).cumsum(-1).flip(-1), y)],
    ids=["sorted rows", "sums of later rows"],
)
def test_rows_that_trade_places_with_padding_are_found(change):
    with pytest.raises(ValueError, match="'y' depends.*padding"):
        bf.fit(by_rows(change), ORDERS, rounds=1, progress=False)


def test_a_largest_row_is_the_same_with_padding():
    model = by_rows(lambda y: (y.amax(-1, keepdim=True), y))
    posterior = bf.fit(model, ORDERS, rounds=2, progress=False)
    found = posterior.log_likelihood(ORDERS, 1)["y"]
    largest = torch.tensor([4.0] * 4 + [5.0] * 5)
    mu = posterior.sample(1)["mu"]
    torch.testing.assert_close(found, dist.Normal(mu + largest, 1.0).log_prob(ORDERS["y"])[None])
