"""Ordered logistic regression with one intercept a client."""

from __future__ import annotations

from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.transforms import SimplexToOrderedTransform

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation


@dataclass(frozen=True)
class OrderedLogistic:
    """Ordered categories (grades, stages, answers) towards whose end clients tend more or less.

    ::

        global   c   = logit(cumulative sums of p),    p ~ Dirichlet(1, …, 1)    C − 1 cutpoints, ascending
                 τ   ~ HalfNormal(1)
                 β_q ~ Normal(0, 2.5)            q = 1 … Q
        client i α_i ~ Normal(0, τ)
        row j    P(y_ij ≤ k) = 1 / (1 + exp(α_i + x_ij·β − c_k))        k = 0 … C − 2

    The prior of the cutpoints c is that all probabilities p of the categories are alike for a row with
    α_i + x_ij·β = 0, whatever their number C. e^β is the factor in the odds of any higher category against the lower
    ones (proportional odds). The priors are weakly informative for ``x`` that is standardised
    (:func:`bayesfed.data.datasets.standardise`) or 0/1.

    The program reads a vector field ``x``, shape ``(rows, Q)``, and a scalar field ``y``, shape ``(rows,)``, of whole
    numbers from 0 to C − 1. Without ``y`` the site ``y`` is sampled.

    Attributes:
        categories: C, 2 or more. It is not counted, since no client needs to have rows of all.

    Raises:
        ValueError: fewer than two categories.

    Sources: P. McCullagh (1980), "Regression models for ordinal data", Journal of the Royal Statistical Society B
    42(2), 109–142; the prior: M. Betancourt (2019), "Ordinal Regression", section 2.2.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import models
        >>> from pyro import poutine
        >>> federation = bf.Federation.from_arrays({
        ...     "north": {"x": [[1.0, 0.0], [0.0, 1.0]], "y": [0, 3]},
        ...     "south": {"x": [[1.0, 1.0]], "y": [1]},
        ... })
        >>> trace = poutine.trace(models.OrderedLogistic(categories=4)).get_trace(federation)
        >>> trace.stochastic_nodes
        ['cutpoints', 'tau', 'beta', 'clients', 'alpha', 'observations']
        >>> trace.nodes["cutpoints"]["value"].shape, trace.nodes["alpha"]["value"].shape
        (torch.Size([3]), torch.Size([2, 1]))
    """

    categories: int

    def __post_init__(self) -> None:
        if self.categories < 2:
            raise ValueError(f"categories is {self.categories}; there must be 2 or more")

    def __call__(self, federation: Federation | Batch) -> None:
        """The program."""
        predictors = federation.event_shape("x")
        alike = dist.Dirichlet(torch.ones(self.categories))
        prior = dist.TransformedDistribution(alike, [SimplexToOrderedTransform()])
        cutpoints = pyro.sample("cutpoints", prior)
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        beta = pyro.sample("beta", dist.Normal(0.0, 2.5).expand(predictors).to_event(1))
        with federation.clients():
            alpha = pyro.sample("alpha", dist.Normal(0.0, tau))
            with federation.observations() as obs:
                location = alpha + (beta * obs["x"]).sum(-1)
                logits = _log_probabilities(cutpoints - location.unsqueeze(-1))
                pyro.sample("y", dist.Categorical(logits=logits), obs=obs.get("y"))


def _log_probabilities(a: torch.Tensor) -> torch.Tensor:
    """log(σ(a_k) − σ(a_{k−1})) of ascending a, ``(..., C − 1)``, with a_{−1} = −∞ and a_{C−1} = ∞: ``(..., C)``.

    σ(a) − σ(b) = σ(a) σ(−b) (1 − e^(b−a)), of which no factor is a difference of nearly equal numbers.
    """
    below, above = torch.nn.functional.logsigmoid(a), torch.nn.functional.logsigmoid(-a)
    gaps = torch.log(-torch.expm1(-a.diff(dim=-1)))
    between = below[..., 1:] + above[..., :-1] + gaps
    return torch.cat([below[..., :1], between, above[..., -1:]], -1)
