"""Weibull regression of right-censored times with one intercept (frailty) per client."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation


def weibull_survival(federation: Federation | Batch) -> None:
    """Model times to an event, some of them censored, whose typical length differs between clients.

    ::

        global   μ   ~ Normal(0, 2)
                 τ   ~ HalfNormal(1)
                 β_p ~ Normal(0, 1)              p = 1 … P
                 k   ~ LogNormal(0, 0.5)         the shape
        client i α_i ~ Normal(μ, τ)
        row j    t_ij ~ Weibull(λ_ij, k),        log λ_ij = α_i + x_ij·β
                 p(t) = k/λ (t/λ)^(k−1) S(t) of an event, S(t) = exp(−(t/λ)^k) of a censored row

    e^β is the factor by which a unit of x makes times longer (accelerated failure time), e^(−kβ) the hazard ratio;
    k > 1 means an increasing hazard. e^(−kα_i) is the client's frailty. The unit of e^μ is that of time: choose one in
    which typical times are between 0.02 and 50, ideally near 1. The other priors are weakly informative for
    standardised ``x`` (:func:`bayesfed.data.standardise.standardise`).

    Args:
        federation: clients with a vector field ``x``, shape ``(rows, P)``, and two scalar fields, shape ``(rows,)``:
            ``time`` > 0, and ``event``, 1 if that is the time of the event and 0 if it is censored. Without ``event``
            no row is censored. Without ``time`` the sample site ``time`` is drawn, as times of events.

    Source: D. R. Cox and D. Oakes (1984), "Analysis of Survival Data", Chapman and Hall, sections 2.3, 5.2 and 6.4;
    with a frailty for each patient: D. Spiegelhalter et al. (1996), "BUGS 0.5 Examples Volume 1", "Kidney".

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import models
        >>> from pyro import poutine
        >>> federation = bf.Federation.from_arrays({
        ...     "north": {"x": [[1.0, 0.0], [0.0, 1.0]], "time": [0.5, 1.5], "event": [1, 0]},
        ...     "south": {"x": [[1.0, 1.0]], "time": [2.0], "event": [1]},
        ... })
        >>> trace = poutine.trace(models.weibull_survival).get_trace(federation)
        >>> trace.stochastic_nodes
        ['mu', 'tau', 'beta', 'shape', 'clients', 'alpha', 'observations']
        >>> trace.observation_nodes
        ['time']
        >>> trace.nodes["alpha"]["value"].shape
        torch.Size([2, 1])
    """
    predictors = federation.event_shape("x")
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand(predictors).to_event(1))
    shape = pyro.sample("shape", dist.LogNormal(0.0, 0.5))
    with federation.clients():
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
        with federation.observations() as obs:
            log_scale = alpha + (beta * obs["x"]).sum(-1)
            times = CensoredWeibull(log_scale, shape, obs.get("event"))
            pyro.sample("time", times, obs=obs.get("time"))


class CensoredWeibull(dist.TorchDistribution):
    """The distribution of Weibull times, some of them censored.

    ::

        log p(t) = event · log h(t) − H(t),    H(t) = (t / λ)^k,    h = H′

    Args:
        log_scale: log λ.
        shape: k > 0.
        event: 1 for the time of an event, 0 for a censored time; by default all are times of events.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012  (torch's interface)
    support = constraints.positive

    def __init__(self, log_scale: Tensor, shape: Tensor, event: Tensor | None = None) -> None:
        known = torch.ones_like(log_scale) if event is None else event
        self.log_scale, self.shape_, self.event = torch.broadcast_tensors(log_scale, shape, known)
        super().__init__(self.log_scale.shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> CensoredWeibull:
        """Return the same distribution with a larger batch shape."""
        parts = (self.log_scale, self.shape_, self.event)
        return CensoredWeibull(*(part.expand(batch_shape) for part in parts))

    @property
    def mean(self) -> Tensor:
        """λ Γ(1 + 1 / k), of times of events."""
        return (self.log_scale + (1.0 + 1.0 / self.shape_).lgamma()).exp()

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw times of events: H⁻¹ of exponential times."""
        shape = torch.Size(sample_shape) + self.batch_shape
        exponential = -torch.rand(shape, dtype=self.log_scale.dtype, device=self.log_scale.device)
        return (self.log_scale + torch.log(-torch.log1p(exponential)) / self.shape_).exp()

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of an event at that time, or if censored the log probability of a later event."""
        log_time = value.log()
        log_cumulative = self.shape_ * (log_time - self.log_scale)
        log_hazard = self.shape_.log() + log_cumulative - log_time
        return self.event * log_hazard - log_cumulative.exp()
