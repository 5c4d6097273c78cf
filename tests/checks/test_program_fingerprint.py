"""Fingerprints of programs: a change of any distribution is found and named, a change of round-off is not."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

import bayesfed as bf
from bayesfed import models
from bayesfed.checks.program_fingerprint import (
    describe_program_change,
    program_fingerprint,
    select_clients,
    witnesses,
)
from tests.invariants.cases import CASES, federation


def hierarchy(mu=5.0, tau=2.0, own=1.0, noise=0.5):
    def model(federation):
        loc = pyro.sample("mu", dist.Normal(0.0, mu))
        scale = pyro.sample("tau", dist.HalfNormal(tau))
        with federation.clients():
            a = pyro.sample("a", dist.Normal(loc, own * scale))
            with federation.observations() as obs:
                mean = a + obs["x"].sum(-1)
                pyro.sample("y", dist.Normal(mean, noise), obs=obs.get("y"))

    return model


def of(model, algorithm=None, data=None):
    data = federation() if data is None else data
    algorithm = bf.SFVI() if algorithm is None else algorithm
    with torch.random.fork_rng():
        torch.manual_seed(0)
        program = algorithm.program(model, data)
    return program, program_fingerprint(program, data, witnesses(len(data)))


def test_the_numbers_are_log_densities():
    """The densities of mu and of the clients' prior at the fixed values that their names give."""
    _, found = of(hierarchy())
    wide, _ = of(hierarchy(mu=7.0))[1]["model mu"][:, :, 0]
    narrow, _ = found["model mu"][:, :, 0]
    # log N(u; 0, s) = −log s − u² / 2s² − ½ log 2π: the first gives u², and so the second
    square = -2 * 25 * (narrow.numpy() + stats.norm.logpdf(0, scale=5.0) * -1)
    expected = stats.norm.logpdf(square**0.5, scale=7.0)
    assert wide.numpy() == pytest.approx(
        expected, rel=1e-4
    )  # u² by cancellation, in single precision
    assert found["model y"].shape == (2, 2, 1 + 4)
    assert found["model mu"].shape == (2, 2, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mu": 5.1}, "the prior of 'mu' has changed"),
        ({"tau": 2.02}, "the prior of 'tau' has changed"),
        ({"own": 1.01}, "the prior of 'a' has changed"),
        ({"noise": 0.51}, "the likelihood of 'y' has changed"),
        (
            {"mu": 9.0, "noise": 1.0},
            "the prior of 'mu' and the likelihood of 'y' have changed",
        ),
    ],
)
def test_what_has_changed_is_named(change, words):
    _, before = of(hierarchy())
    program, now = of(hierarchy(**change))
    assert describe_program_change(program, before, now) == words


def test_other_rounding_is_no_change():
    program, single = of(hierarchy())
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: torch.stack([v[0] + 1e-6 * torch.randn(v[0].shape, generator=generator) * v[1], v[1]])
        for name, v in single.items()
    }
    assert describe_program_change(program, single, noisy) is None


def test_double_precision_sees_more(float64):
    _, before = of(hierarchy())
    program, now = of(hierarchy(mu=5.0 + 1e-6))
    assert describe_program_change(program, before, now) == "the prior of 'mu' has changed"


@pytest.mark.parametrize("name", CASES)
def test_every_program_has_numbers(name):
    """A second program of a model has the same fingerprint, with fewer clients in another order."""
    algorithm, model = CASES[name]()
    program, whole = of(model, algorithm)
    assert all(value.isfinite().all() for value in whole.values())
    again, _ = of(CASES[name]()[1], algorithm)
    data, kept = federation(), [3, 1]
    seen = [data.names[i] for i in witnesses(len(data)).tolist()]
    few = data.select([seen[i] for i in kept][::-1])
    found = program_fingerprint(again, few, torch.tensor([1, 0]))
    assert describe_program_change(program, select_clients(whole, kept), found) is None


def test_a_network_that_starts_elsewhere_is_the_same_model():
    torch.manual_seed(1)
    one = models.Network(models.mlp(3, 4, 2), scale=0.5)
    two = models.Network(models.mlp(3, 4, 2), scale=0.5)
    wider = models.Network(models.mlp(3, 4, 2), scale=0.51)
    _, before = of(one, bf.FedAvg())
    assert (
        describe_program_change(*of(two, bf.FedAvg())[:1], before, of(two, bf.FedAvg())[1]) is None
    )
    program, now = of(wider, bf.PFedVEM())
    _, before = of(one, bf.PFedVEM())
    assert "prior" in describe_program_change(program, before, now)


def test_a_guide_of_ones_own():
    def guide(spread):
        def q(federation):
            loc = pyro.param("loc", torch.tensor(0.0))
            pyro.sample("mu", dist.Normal(loc, 1.0))
            pyro.sample("tau", dist.LogNormal(loc, 1.0))
            with federation.clients():
                rows = pyro.param("rows", torch.zeros(len(federation), 1))
                pyro.sample("a", dist.Normal(rows, spread))

        return bf.SFVI(guide=q)

    _, before = of(hierarchy(), guide(1.0))
    program, now = of(hierarchy(), guide(1.1))
    assert describe_program_change(program, before, before) is None
    assert (
        describe_program_change(program, before, now)
        == "the guide of 'a', or a prior that it uses, has changed"
    )
