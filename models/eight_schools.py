"""Normal means with known standard errors: a random-effects meta-analysis."""

import pyro
import pyro.distributions as dist

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation


def eight_schools(federation: Federation | Batch) -> None:
    """Model effects that differ between clients, each measured with a known standard error.

    ::

        global   μ   ~ Normal(0, 5)
                 τ   ~ HalfCauchy(5)
        client i θ_i ~ Normal(μ, τ)
        row j    y_ij ~ Normal(θ_i, σ_ij)        σ_ij is known

    The parametrisation is centred. A school has one row; a client may also have several rows
    (several studies of one effect).

    Args:
        federation: clients with two scalar fields, both in the unit of the effect (for the eight
            schools, points of the SAT): the estimate ``y``, shape ``(rows,)``, and its standard
            error ``sigma`` > 0, shape ``(rows,)``. Without ``y`` the sample site ``y`` is drawn.

    Sources: D. B. Rubin (1981), "Estimation in parallel randomized experiments", Journal of
    Educational Statistics 6(4), 377–401. A half-Cauchy prior on τ: A. Gelman (2006), "Prior
    distributions for variance parameters in hierarchical models", Bayesian Analysis 1(3), 515–534;
    the two scales of 5 are those of the usual Stan and PyMC examples.

    Example:
        >>> from pyro import poutine
        >>> from bayesfed import datasets, models
        >>> trace = poutine.trace(models.eight_schools).get_trace(datasets.eight_schools())
        >>> trace.stochastic_nodes
        ['mu', 'tau', 'clients', 'theta', 'observations']
        >>> trace.observation_nodes
        ['y']
        >>> trace.nodes["theta"]["value"].shape
        torch.Size([8, 1])
    """
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with federation.clients():
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with federation.observations() as obs:
            pyro.sample("y", dist.Normal(theta, obs["sigma"]), obs=obs.get("y"))
