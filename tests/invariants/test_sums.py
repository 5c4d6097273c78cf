"""Invariants 2 and 3: the server needs a sum only; order and chunking of clients change nothing but round-off."""

import pytest
import torch

import bayesfed as bf
from bayesfed.algorithms import METHODS
from tests.invariants.cases import CASES, SPECIAL, federation
from tests.scenarios import conjugate_hierarchy, ragged

pytestmark = pytest.mark.usefixtures("float64")
LONG = {"SFVI, corrected", "SFVI, flow", "SFVIAvg, mean field", "FOLA"}
"""Cases whose sums are those of others, or are tested by chunks of clients."""


def same(one, other, clients=slice(None)):
    for name, value in one.params.items():
        torch.testing.assert_close(other.params[name], value, rtol=1e-6, atol=1e-9)
    for name, value in one.local_params.items():
        torch.testing.assert_close(other.local_params[name][clients], value, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(other.history["elbo"], one.history["elbo"], rtol=1e-6, atol=1e-9)


def fit(name, data, **settings):
    algorithm, model = (CASES | SPECIAL)[name]()
    execution = bf.Execution(compile=False, chunk_size=settings.pop("chunk_size", None))
    return bf.fit(model, data, algorithm, execution=execution, **settings)


def test_every_algorithm_is_here():
    assert set(METHODS) - {"Pooled"} == {name for name in CASES | SPECIAL if name in METHODS}


@pytest.mark.parametrize("name", CASES | SPECIAL)
def test_chunks(name):
    data, settings = federation(), {"rounds": 2, "clients_per_round": 4, "batch_size": 3, "seed": 5}
    whole = fit(name, data, **settings)
    for chunk_size in (1, 3) if name in CASES else (3,):
        same(whole, fit(name, data, chunk_size=chunk_size, **settings))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in CASES]
)
def test_order(name):
    data, order = federation(), [3, 1, 0, 2, 4]
    shuffled = data.select([data.names[i] for i in order])
    one, other = (fit(name, each, rounds=2, seed=1) for each in (data, shuffled))
    same(one, other, clients=torch.tensor(order).argsort())


def test_seeds_matter_and_repeat():
    settings = {"rounds": 2, "clients_per_round": 0.5}
    a, b, c = (
        bf.fit(conjugate_hierarchy, ragged(), seed=seed, **settings).params for seed in (0, 0, 1)
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    bf.fit(conjugate_hierarchy, ragged(), rounds=1).to_arviz(40)
    assert torch.equal(torch.rand(1), expected)
