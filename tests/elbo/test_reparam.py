"""``poutine.reparam``: a reparametrised site keeps its name and its posterior, or is refused by name."""

import pyro
import pyro.distributions as dist
import pytest
from pyro import poutine
from pyro.infer.reparam import AutoReparam, HaarReparam, LocScaleReparam, TransformReparam

import bayesfed as bf
from tests.scenarios import conjugate_hierarchy, ragged


def positive(federation):
    mu = pyro.sample("mu", dist.LogNormal(0.0, 1.0))
    with federation.clients():
        scale = pyro.sample("scale", dist.LogNormal(mu.log(), 0.5))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(0.0, scale), obs=obs.get("y"))


def two(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with federation.clients():
        own = pyro.sample("own", dist.Normal(mu, 1.0).to_event(1))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(own[..., 0] - own[..., 1], 0.5), obs=obs.get("y"))


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (conjugate_hierarchy, {"alpha": LocScaleReparam(0.0)}),
        (conjugate_hierarchy, {"alpha": LocScaleReparam(0.3)}),
        (conjugate_hierarchy, {"mu": LocScaleReparam(0.0), "alpha": LocScaleReparam(1.0)}),
        (positive, {"scale": TransformReparam()}),
        (positive, {"mu": TransformReparam(), "scale": TransformReparam()}),
        (two, {"mu": HaarReparam(), "own": HaarReparam()}),
    ],
    ids=["off centre", "partly", "both", "transform", "transforms", "Haar"],
)
def test_a_reparametrised_program_has_the_same_posterior(model, config):
    federation = ragged(8)
    plain = bf.fit(model, federation, seed=1, progress=False).sample(4000)
    found = bf.fit(poutine.reparam(model, config=config), federation, seed=1, progress=False)
    draws = found.sample(4000) | found.derived(num_samples=4000)
    for name, expected in plain.items():
        error = (draws[name].mean(0) - expected.mean(0)).abs() / expected.std(0)
        assert (error < 0.15).all(), name
        assert ((draws[name].std(0) / expected.std(0) - 1).abs() < 0.15).all(), name


def test_a_learnt_centring_is_refused_by_name():
    learnt = poutine.reparam(conjugate_hierarchy, config=AutoReparam())
    with pytest.raises(ValueError, match=r"'alpha_centered' .* LocScaleReparam\(0.0\)"):
        bf.fit(learnt, ragged(3), rounds=2, progress=False)
