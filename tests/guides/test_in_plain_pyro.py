"""Model and guide are Pyro programs: Pyro's own inference runs them on the federation."""

import math

import pyro
import pyro.distributions as dist
import pytest
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO

import bayesfed as bf
from bayesfed.guides.locals import Conditioned
from tests.scenarios import conjugate_hierarchy, exact, ragged

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def fresh_store():
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    yield
    pyro.clear_param_store()


def constrained(federation):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
        rate = pyro.sample("rate", dist.LogNormal(mu, 0.5))
        odd = pyro.sample("odd", dist.StudentT(5.0, alpha, 0.5))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(alpha + odd, rate), obs=obs["y"])


@pytest.mark.parametrize("conditioned", [True, False])
@pytest.mark.parametrize("family", [bf.MeanField(), bf.FullRank(), bf.Flow()], ids=str)
@pytest.mark.parametrize("model", [conjugate_hierarchy, constrained])
def test_svi(model, family, conditioned):
    data = ragged(4)
    guide = Conditioned(conditioned).build(family, model, data).guide
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
    losses = [svi.step(data) for _ in range(4)]
    assert all(math.isfinite(loss) for loss in losses)
    names = set(pyro.get_param_store())
    assert "global.loc" in names
    rows = [v for n, v in pyro.get_param_store().items() if not n.startswith("global.")]
    assert rows
    assert all(value.shape[:2] == (4, 1) for value in rows)


def test_svi_reaches_the_evidence():
    """The family contains the posterior, so the ELBO of 200 draws is the evidence, within 0.3 nats."""
    data = ragged(4)
    guide = Conditioned(True).build(bf.FullRank(), conjugate_hierarchy, data).guide
    optimiser = pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.985})
    svi = SVI(
        conjugate_hierarchy,
        guide,
        optimiser,
        Trace_ELBO(num_particles=8, vectorize_particles=True, max_plate_nesting=2),
    )
    for _ in range(250):
        svi.step(data)
    draws = Trace_ELBO(num_particles=200, vectorize_particles=True, max_plate_nesting=2)
    elbo = -draws.loss(conjugate_hierarchy, guide, data)
    assert abs(elbo - exact(data).log_evidence) < 0.3


@pytest.mark.parametrize("model", [conjugate_hierarchy, constrained])
def test_nuts(model):
    data = ragged(3)
    mcmc = MCMC(NUTS(model, max_tree_depth=4), num_samples=5, warmup_steps=5, disable_progbar=True)
    mcmc.run(data)
    samples = mcmc.get_samples()
    assert samples["mu"].shape == (5,)
    assert samples["alpha"].shape == (5, 3, 1)
    assert len(samples["mu"].unique()) > 1
