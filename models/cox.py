"""Cox regression with a piecewise constant baseline hazard and one frailty per client."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation


@dataclass(frozen=True)
class Cox:
    """Cox regression of right-censored times: hazards are proportional, the baseline constant between ``cuts``.

    ::

        global   log λ_k ~ Normal(−log c, 2)     k = 1 … K + 1, between K cuts, whose median is c
                 τ       ~ HalfNormal(1)
                 β_p     ~ Normal(0, 1)          p = 1 … P
        client i α_i     ~ Normal(0, τ)
        row j    h_ij(t) = λ_k(t) exp(α_i + x_ij·β)
                 p(t) = h(t) S(t) of an event, S(t) = exp(−∫_0^t h) of a censored row

    e^β are hazard ratios, e^(α_i) is the client's frailty. As intervals become narrower, the estimate of β converges to
    that of Cox's partial likelihood. The partial likelihood compares each row with the rows of all clients that are at
    risk at that time, so clients cannot compute it separately; this likelihood is a sum over rows. It equals the
    likelihood of Poisson regression on rows that are split at the cuts, with the logarithm of the time at risk as
    offset, and needs no splitting.

    The prior of λ is centred at one event in a time of c: choose cuts among typical times, in the unit of the times,
    and results do not depend on that unit. The hazard of an interval without events is determined by its prior alone.
    The other priors are weakly informative for standardised ``x`` (:func:`bayesfed.data.standardise.standardise`).

    The program reads a vector field ``x``, shape ``(rows, P)``, and two scalar fields, shape ``(rows,)``: ``time`` > 0,
    and ``event``, 1 if that is the time of the event and 0 if it is censored. Without ``event`` no row is censored.
    Without ``time`` the sample site ``time`` is sampled, as times of events.

    Attributes:
        cuts: the times at which the baseline hazard changes, ascending.

    Raises:
        ValueError: the cuts are not positive, finite and ascending.

    Sources: D. R. Cox (1972), "Regression models and life-tables", Journal of the Royal Statistical Society B 34(2),
    187–220; the piecewise exponential form: N. Breslow (1974), "Covariance analysis of censored survival data",
    Biometrics 30(1), 89–99, and M. Friedman (1982), "Piecewise exponential models for survival data with covariates",
    Annals of Statistics 10(1), 101–113.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import models
        >>> from pyro import poutine
        >>> federation = bf.Federation.from_arrays({
        ...     "north": {"x": [[1.0, 0.0], [0.0, 1.0]], "time": [0.5, 1.5], "event": [1, 0]},
        ...     "south": {"x": [[1.0, 1.0]], "time": [2.0], "event": [1]},
        ... })
        >>> trace = poutine.trace(models.Cox(cuts=[1.0])).get_trace(federation)
        >>> trace.stochastic_nodes
        ['log_hazard', 'tau', 'beta', 'clients', 'alpha', 'observations']
        >>> trace.nodes["log_hazard"]["value"].shape, trace.nodes["alpha"]["value"].shape
        (torch.Size([2]), torch.Size([2, 1]))
    """

    cuts: Sequence[float]

    def __post_init__(self) -> None:
        edges = [0.0, *self.cuts, math.inf]
        if not all(before < after for before, after in itertools.pairwise(edges)):
            raise ValueError(f"cuts are {list(self.cuts)}: they must be positive and ascend")

    def __call__(self, federation: Federation | Batch) -> None:
        """Run the Pyro program."""
        predictors, intervals = federation.event_shape("x"), [len(self.cuts) + 1]
        centre = -math.log(statistics.median(self.cuts)) if self.cuts else 0.0
        prior = dist.Normal(centre, 2.0).expand(intervals).to_event(1)
        log_hazard = pyro.sample("log_hazard", prior)
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand(predictors).to_event(1))
        with federation.clients():
            alpha = pyro.sample("alpha", dist.Normal(0.0, tau))
            with federation.observations() as obs:
                log_ratio = alpha + (beta * obs["x"]).sum(-1)
                times = PiecewiseExponential(self.cuts, log_hazard, log_ratio, obs.get("event"))
                pyro.sample("time", times, obs=obs.get("time"))


class PiecewiseExponential(dist.TorchDistribution):
    """The distribution of times, some of them censored, with a hazard that is constant between cuts.

    ::

        log p(t) = event · log h(t) − H(t),    H(t) = Σ_k λ_k e^η · (time in interval k until t),    h = H′

    Args:
        cuts: the K times at which the hazard changes.
        log_hazard: log λ, ``(..., K + 1)``.
        log_ratio: η, added to all log hazards.
        event: 1 for the time of an event, 0 for a censored time; by default all are times of events.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012  (torch's interface)
    support = constraints.positive

    def __init__(
        self,
        cuts: Sequence[float],
        log_hazard: Tensor,
        log_ratio: Tensor,
        event: Tensor | None = None,
    ) -> None:
        self.cuts = cuts
        known = torch.ones_like(log_ratio) if event is None else event
        self.log_ratio, self.event, _ = torch.broadcast_tensors(
            log_ratio, known, log_hazard[..., 0]
        )
        self.log_hazard = log_hazard
        super().__init__(self.log_ratio.shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> PiecewiseExponential:
        """Return the same distribution with a larger batch shape."""
        log_ratio, event = self.log_ratio.expand(batch_shape), self.event.expand(batch_shape)
        return PiecewiseExponential(self.cuts, self.log_hazard, log_ratio, event)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw times of events: H⁻¹ of exponential times."""
        _, widths = self._intervals()
        shape = torch.Size(sample_shape) + self.batch_shape
        uniform = torch.rand(shape, dtype=self.log_ratio.dtype, device=self.log_ratio.device)
        exponential = -torch.log1p(-uniform) / self.log_ratio.exp()
        hazard = self.log_hazard.exp()
        passed = torch.cumsum(hazard[..., :-1] * widths[:-1], -1)
        passed = torch.cat([torch.zeros_like(hazard[..., :1]), passed], -1)
        within = ((exponential.unsqueeze(-1) - passed) / hazard).clamp(min=0.0)
        return torch.minimum(within, widths).sum(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of an event at that time, or if censored the log probability of a later event."""
        starts, widths = self._intervals()
        since = value.unsqueeze(-1) - starts
        spent = torch.minimum(since.clamp(min=0.0), widths)
        cumulative = (spent * self.log_hazard.exp()).sum(-1) * self.log_ratio.exp()
        here = (since > 0) & (since <= widths)
        return self.event * ((here * self.log_hazard).sum(-1) + self.log_ratio) - cumulative

    def _intervals(self) -> tuple[Tensor, Tensor]:
        """Return starts and widths of the intervals, ``(K + 1,)`` each; the last is unbounded."""
        edges = self.log_ratio.new_tensor([0.0, *self.cuts, math.inf])
        return edges[:-1], edges.diff()
