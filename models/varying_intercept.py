"""Linear regression with one intercept per client."""

import pyro
import pyro.distributions as dist

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation


def varying_intercept(federation: Federation | Batch) -> None:
    """Model an outcome whose level differs between clients; the slopes β and the noise σ are common to all.

    ::

        global   μ   ~ Normal(0, 2)
                 τ   ~ HalfNormal(1)
                 β_p ~ Normal(0, 2)              p = 1 … P
                 σ   ~ HalfNormal(1)
        client i α_i ~ Normal(μ, τ)
        row j    y_ij ~ Normal(α_i + x_ij·β, σ)

    The priors are weakly informative for standardised ``x`` and ``y``
    (:func:`bayesfed.data.standardise.standardise`).

    Args:
        federation: clients with a vector field ``x``, shape ``(rows, P)``, and a scalar field
            ``y``, shape ``(rows,)``. One predictor is a vector too:
            ``fields={"x": ["floor"], "y": ...}``.
            Without ``y`` the sample site ``y`` is drawn.

    Source: A. Gelman and J. Hill (2007), "Data Analysis Using Regression and Multilevel/
    Hierarchical Models", Cambridge University Press, section 12.4.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import models
        >>> from pyro import poutine
        >>> federation = bf.Federation.from_arrays({
        ...     "north": {"x": [[1.0, 0.0], [0.0, 1.0]], "y": [0.5, 1.5]},
        ...     "south": {"x": [[1.0, 1.0]], "y": [2.0]},
        ... })
        >>> trace = poutine.trace(models.varying_intercept).get_trace(federation)
        >>> trace.stochastic_nodes
        ['mu', 'tau', 'beta', 'sigma', 'clients', 'alpha', 'observations']
        >>> trace.observation_nodes
        ['y']
        >>> trace.nodes["alpha"]["value"].shape
        torch.Size([2, 1])
    """
    predictors = federation.event_shape("x")
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand(predictors).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
        with federation.observations() as obs:
            mean = alpha + (beta * obs["x"]).sum(-1)
            pyro.sample("y", dist.Normal(mean, sigma), obs=obs.get("y"))
