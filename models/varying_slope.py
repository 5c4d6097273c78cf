"""Linear regression with one intercept and one vector of slopes per client."""

import pyro
import pyro.distributions as dist

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation


def varying_slope(federation: Federation | Batch) -> None:
    """Model an outcome whose level and slopes differ between clients; the noise σ is common to all.

    ::

        global   μ_α    ~ Normal(0, 2)
                 τ_α    ~ HalfNormal(1)
                 μ_β[p] ~ Normal(0, 2)           p = 1 … P
                 τ_β[p] ~ HalfNormal(1)
                 σ      ~ HalfNormal(1)
        client i α_i    ~ Normal(μ_α, τ_α)
                 β_i[p] ~ Normal(μ_β[p], τ_β[p])
        row j    y_ij   ~ Normal(α_i + x_ij·β_i, σ)

    Given the global variables, a client's intercept and slopes are independent. The priors are
    weakly informative for standardised ``x`` and ``y`` (:func:`bayesfed.data.standardise.standardise`).

    Args:
        federation: clients with a vector field ``x``, shape ``(rows, P)``, and a scalar field
            ``y``, shape ``(rows,)``. One predictor is a vector too:
            ``fields={"x": ["floor"], "y": ...}``.
            Without ``y`` the sample site ``y`` is drawn.

    Source: A. Gelman and J. Hill (2007), "Data Analysis Using Regression and Multilevel/
    Hierarchical Models", Cambridge University Press, section 13.1, where the coefficients are
    correlated.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import models
        >>> from pyro import poutine
        >>> federation = bf.Federation.from_arrays({
        ...     "north": {"x": [[1.0, 0.0], [0.0, 1.0]], "y": [0.5, 1.5]},
        ...     "south": {"x": [[1.0, 1.0]], "y": [2.0]},
        ... })
        >>> trace = poutine.trace(models.varying_slope).get_trace(federation)
        >>> trace.stochastic_nodes
        ['mu_alpha', 'tau_alpha', 'mu_beta', 'tau_beta', 'sigma',
         'clients', 'alpha', 'beta', 'observations']
        >>> trace.observation_nodes
        ['y']
        >>> trace.nodes["beta"]["value"].shape
        torch.Size([2, 1, 2])
    """
    predictors = federation.event_shape("x")
    mu_alpha = pyro.sample("mu_alpha", dist.Normal(0.0, 2.0))
    tau_alpha = pyro.sample("tau_alpha", dist.HalfNormal(1.0))
    mu_beta = pyro.sample("mu_beta", dist.Normal(0.0, 2.0).expand(predictors).to_event(1))
    tau_beta = pyro.sample("tau_beta", dist.HalfNormal(1.0).expand(predictors).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu_alpha, tau_alpha))
        beta = pyro.sample("beta", dist.Normal(mu_beta, tau_beta).to_event(1))
        with federation.observations() as obs:
            mean = alpha + (beta * obs["x"]).sum(-1)
            pyro.sample("y", dist.Normal(mean, sigma), obs=obs.get("y"))
