"""Laws 2 and 3: the server needs a sum only; order and chunking of clients change nothing but round-off."""

import pytest
import torch

import bayesfed as bf
from tests.scenarios import conjugate_hierarchy, ragged

pytestmark = pytest.mark.usefixtures("float64")
ALGORITHMS = [
    bf.SFVI(local_steps=3, particles=2),
    bf.SFVI(global_guide=bf.Flow(), local_steps=2, particles=2),
    bf.SFVI(global_guide=bf.MeanField(), conditioned=False, local_steps=2, particles=2),
    bf.SFVIAvg(local_steps=3, particles=2),
    bf.SFVIAvg(global_guide=bf.MeanField(), local_steps=3, particles=2),
    bf.PVI(local_steps=3, particles=2),
    bf.PACPFL(particles=3, draws=4),
]


def same(one, other, clients=slice(None)):
    for name, value in one.params.items():
        torch.testing.assert_close(other.params[name], value, rtol=1e-6, atol=1e-9)
    for name, value in one.local_params.items():
        torch.testing.assert_close(other.local_params[name][clients], value, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(other.history["elbo"], one.history["elbo"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_chunks(algorithm):
    data, settings = ragged(), {"rounds": 4, "clients_per_round": 5, "batch_size": 3, "seed": 3}
    whole = bf.fit(conjugate_hierarchy, data, algorithm, **settings)
    for chunk_size in (1, 2):
        parts = bf.fit(conjugate_hierarchy, data, algorithm, chunk_size=chunk_size, **settings)
        same(whole, parts)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_order(algorithm):
    data = ragged()
    order = [3, 1, 7, 0, 2, 6, 5, 4]
    shuffled = data.select([data.names[i] for i in order])
    one = bf.fit(conjugate_hierarchy, data, algorithm, rounds=3, seed=1)
    other = bf.fit(conjugate_hierarchy, shuffled, algorithm, rounds=3, seed=1)
    same(one, other, clients=torch.tensor(order).argsort())


def test_seeds_matter_and_repeat():
    settings = {"rounds": 2, "clients_per_round": 0.5}
    a, b, c = (
        bf.fit(conjugate_hierarchy, ragged(), seed=seed, **settings).params["global.loc"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    bf.fit(conjugate_hierarchy, ragged(), rounds=1).to_arviz(40)
    assert torch.equal(torch.rand(1), expected)
