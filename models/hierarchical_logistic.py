"""Logistic regression with one intercept and one vector of slopes per client."""

import pyro
import pyro.distributions as dist

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation


def hierarchical_logistic(federation: Federation | Batch) -> None:
    """Model a binary outcome whose base rate and odds ratios differ between clients.

    ::

        global   μ_α    ~ Normal(0, 2.5)
                 τ_α    ~ HalfNormal(1)
                 μ_β[p] ~ Normal(0, 2.5)         p = 1 … P
                 τ_β[p] ~ HalfNormal(1)
        client i α_i    ~ Normal(μ_α, τ_α)
                 β_i[p] ~ Normal(μ_β[p], τ_β[p])
        row j    y_ij   ~ Bernoulli(p_ij),       log(p_ij / (1 − p_ij)) = α_i + x_ij·β_i

    The unit of α and β is the log-odds: 2.5 is a factor of 12 in the odds. The priors are weakly
    informative for ``x`` that is standardised (:func:`bayesfed.data.standardise.standardise`) or 0/1.

    Args:
        federation: clients with a vector field ``x``, shape ``(rows, P)``, and a scalar field ``y``
            that is 0 or 1, shape ``(rows,)``. One predictor is a vector too:
            ``fields={"x": ["smoker"], "y": ...}``. Without ``y`` the sample site ``y`` is drawn.

    Source: A. Gelman and J. Hill (2007), "Data Analysis Using Regression and Multilevel/
    Hierarchical Models", Cambridge University Press, chapter 14. The scale 2.5: A. Gelman et al.
    (2008), "A weakly informative default prior distribution for logistic and other regression
    models", Annals of Applied Statistics 2(4), 1360–1383, who use a Cauchy distribution.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import models
        >>> from pyro import poutine
        >>> federation = bf.Federation.from_arrays({
        ...     "north": {"x": [[1.0, 0.0], [0.0, 1.0]], "y": [0.0, 1.0]},
        ...     "south": {"x": [[1.0, 1.0]], "y": [1.0]},
        ... })
        >>> trace = poutine.trace(models.hierarchical_logistic).get_trace(federation)
        >>> trace.stochastic_nodes
        ['mu_alpha', 'tau_alpha', 'mu_beta', 'tau_beta', 'clients', 'alpha', 'beta', 'observations']
        >>> trace.observation_nodes
        ['y']
        >>> trace.nodes["beta"]["value"].shape
        torch.Size([2, 1, 2])
    """
    predictors = federation.event_shape("x")
    mu_alpha = pyro.sample("mu_alpha", dist.Normal(0.0, 2.5))
    tau_alpha = pyro.sample("tau_alpha", dist.HalfNormal(1.0))
    mu_beta = pyro.sample("mu_beta", dist.Normal(0.0, 2.5).expand(predictors).to_event(1))
    tau_beta = pyro.sample("tau_beta", dist.HalfNormal(1.0).expand(predictors).to_event(1))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu_alpha, tau_alpha))
        beta = pyro.sample("beta", dist.Normal(mu_beta, tau_beta).to_event(1))
        with federation.observations() as obs:
            logits = alpha + (beta * obs["x"]).sum(-1)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=obs.get("y"))
