"""Poisson regression with exposure and one intercept per client."""

import pyro
import pyro.distributions as dist

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation


def hierarchical_count(federation: Federation | Batch) -> None:
    """Model counts whose base rate differs between clients; the rate ratios e^β are common to all.

    ::

        global   μ   ~ Normal(0, 5)
                 τ   ~ HalfNormal(1)
                 β_p ~ Normal(0, 1)              p = 1 … P
        client i α_i ~ Normal(μ, τ)
        row j    y_ij ~ Poisson(e_ij · exp(α_i + x_ij·β))

    The exposure e (time, population or area at risk) is 1 if the field is not given. The unit of
    α and β is the log-rate per unit of exposure; μ has a wide prior because the rate depends on
    that unit: choose one in which rates are between 10⁻⁴ and 10⁴. The priors are weakly informative for
    standardised ``x`` (:func:`bayesfed.data.standardise.standardise`).

    Args:
        federation: clients with a vector field ``x``, shape ``(rows, P)``, a scalar field ``y`` of
            counts 0, 1, 2, …, shape ``(rows,)``, and optionally a scalar field ``exposure`` > 0,
            shape ``(rows,)``. One predictor is a vector too: ``fields={"x": ["age"], "y": ...}``.
            Without ``y`` the sample site ``y`` is drawn.

    Source: A. Gelman and J. Hill (2007), "Data Analysis Using Regression and Multilevel/
    Hierarchical Models", Cambridge University Press, section 15.1.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import models
        >>> from pyro import poutine
        >>> federation = bf.Federation.from_arrays({
        ...     "north": {"x": [[1.0, 0.0], [0.0, 1.0]], "y": [0, 4], "exposure": [1.0, 2.5]},
        ...     "south": {"x": [[1.0, 1.0]], "y": [2], "exposure": [0.5]},
        ... })
        >>> trace = poutine.trace(models.hierarchical_count).get_trace(federation)
        >>> trace.stochastic_nodes
        ['mu', 'tau', 'beta', 'clients', 'alpha', 'observations']
        >>> trace.observation_nodes
        ['y']
        >>> trace.nodes["alpha"]["value"].shape
        torch.Size([2, 1])
    """
    predictors = federation.event_shape("x")
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand(predictors).to_event(1))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
        with federation.observations() as obs:
            log_rate = alpha + (beta * obs["x"]).sum(-1)
            exposure = obs.get("exposure")
            if exposure is not None:
                log_rate = log_rate + exposure.log()
            pyro.sample("y", dist.Poisson(log_rate.exp()), obs=obs.get("y"))
