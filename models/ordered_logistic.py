"""Ordered logistic regression with one intercept per client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.transforms import SimplexToOrderedTransform
from pyro.distributions.util import broadcast_shape
from torch import Tensor
from torch.nn.functional import logsigmoid

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation


@dataclass(frozen=True)
class OrderedLogistic:
    """Ordered categories (grades, stages, answers), higher or lower on average from client to client.

    ::

        global   c   = logit(cumulative sums of p),    p ~ Dirichlet(1, …, 1)    C − 1 cutpoints, ascending
                 τ   ~ HalfNormal(1)
                 β_q ~ Normal(0, 2.5)            q = 1 … Q
        client i α_i ~ Normal(0, τ)
        row j    P(y_ij ≤ k) = 1 / (1 + exp(α_i + x_ij·β − c_k))        k = 0 … C − 2

    The prior of the cutpoints c is a uniform prior of the probabilities p of the C categories for a row with
    α_i + x_ij·β = 0. e^β is the factor in the odds of any higher category against the lower ones (proportional odds).
    The priors are weakly informative for ``x`` that is standardised (:func:`bayesfed.data.standardise.standardise`) or
    0/1.

    The program reads a vector field ``x``, shape ``(rows, Q)``, and a scalar field ``y``, shape ``(rows,)``, of whole
    numbers from 0 to C − 1. Without ``y`` the sample site ``y`` is drawn.

    Attributes:
        categories: C, 2 or more; it must be given because no client needs to have rows in all categories.

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
            raise ValueError(f"categories is {self.categories}; it must be 2 or more")

    def __call__(self, federation: Federation | Batch) -> None:
        """Run the Pyro program."""
        predictors = federation.event_shape("x")
        uniform = dist.Dirichlet(torch.ones(self.categories))
        prior = dist.TransformedDistribution(uniform, [SimplexToOrderedTransform()])
        cutpoints = pyro.sample("cutpoints", prior)
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        beta = pyro.sample("beta", dist.Normal(0.0, 2.5).expand(predictors).to_event(1))
        with federation.clients():
            alpha = pyro.sample("alpha", dist.Normal(0.0, tau))
            with federation.observations() as obs:
                location = alpha + (beta * obs["x"]).sum(-1)
                pyro.sample("y", Ordered(location, cutpoints), obs=obs.get("y"))


class Ordered(dist.TorchDistribution):
    """The distribution P(y ≤ k) = σ(c_k − location), evaluated from the two cutpoints around a value.

    Example:
        >>> import torch
        >>> from bayesfed.models.ordered_logistic import Ordered
        >>> ordered = Ordered(torch.tensor(0.0), torch.tensor([0.0, 1.0]))
        >>> ordered.log_prob(ordered.enumerate_support()).exp()
        tensor([0.5000, 0.2311, 0.2689])
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "location": constraints.real,
        "cutpoints": constraints.ordered_vector,
    }
    has_enumerate_support = True

    def __init__(
        self, location: Tensor, cutpoints: Tensor, validate_args: bool | None = None
    ) -> None:
        shape = broadcast_shape(location.shape, cutpoints.shape[:-1])
        self.location = location.expand(shape)
        self.cutpoints = cutpoints.expand(*shape, -1)
        super().__init__(shape, validate_args=validate_args)

    @property
    def support(self) -> constraints.Constraint:
        """The whole numbers 0 … C − 1."""
        return constraints.integer_interval(0, self.cutpoints.shape[-1])

    def expand(self, batch_shape: Any, _instance: Any = None) -> Ordered:
        """Return the same distribution with a larger batch shape."""
        return Ordered(
            self.location.expand(batch_shape),
            self.cutpoints.expand(*batch_shape, -1),
            validate_args=False,
        )

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw a logistic variable around the location, and count the cutpoints below it."""
        u = torch.rand(self._extended_shape(sample_shape)).to(self.location)
        passed = self.cutpoints < (self.location + u.logit(eps=1e-7)).unsqueeze(-1)
        return passed.sum(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log(σ(a) − σ(b)), a = c_y − location, b = c_{y−1} − location, with c_{−1} = −∞ and c_{C−1} = ∞.

        It is computed as σ(a) − σ(b) = σ(a) σ(−b) (1 − e^(b−a)), where no factor cancels.
        """
        last = self.cutpoints.shape[-1]
        shape = broadcast_shape(value.shape, self.batch_shape)
        y = value.long().expand(shape).unsqueeze(-1)
        above, below = (
            self.cutpoints.expand(*shape, -1).gather(-1, at.clamp(0, last - 1)).squeeze(-1)
            for at in (y, y - 1)
        )
        y = y.squeeze(-1)
        inner = (y > 0) & (y < last)
        of_gap = torch.where(inner, above - below, 1.0).neg().expm1().neg().log()
        return (
            torch.where(y < last, logsigmoid(above - self.location), 0.0)
            + torch.where(y > 0, logsigmoid(self.location - below), 0.0)
            + torch.where(inner, of_gap, 0.0)
        )

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all categories."""
        values = torch.arange(self.cutpoints.shape[-1] + 1, device=self.location.device)
        values = values.reshape(-1, *[1] * len(self.batch_shape))
        return values.expand(-1, *self.batch_shape) if expand else values
