"""Sticking the landing: a gradient of the ELBO whose noise vanishes as the guide nears the posterior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor


class StickingTheLanding(dist.TorchDistribution):
    """Sampled with its parameters, weighed with copies of them that carry no gradient.

    The score of q has mean zero, so leaving it out of ∇ELBO leaves the gradient unbiased; what is left is zero
    for every draw where q is the posterior (Roeder, Wu & Duvenaud 2017, *Sticking the landing*, eq. 8). Draws
    and densities are those of ``family(*params)``.

    Args:
        family: makes a distribution of the parameters.
        params: its parameters.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> from bayesfed.guides.sticking_the_landing import StickingTheLanding
        >>> loc = torch.tensor(0.3, requires_grad=True)
        >>> q = StickingTheLanding(lambda loc: dist.Normal(loc, 1.0), loc)
        >>> posterior = dist.Normal(0.3, 1.0)
        >>> w = q.rsample()
        >>> (posterior.log_prob(w) - q.log_prob(w)).backward()
        >>> loc.grad
        tensor(0.)
    """

    has_rsample = True
    arg_constraints = {}  # noqa: RUF012  (torch's interface)

    def __init__(self, family: Callable[..., Any], *params: Tensor) -> None:
        drawn = weighed = family(*params)
        if torch.is_grad_enabled() and any(p.requires_grad for p in params):
            weighed = family(*(p.detach() for p in params))
        self._set(drawn, weighed)

    def _set(self, drawn: Any, weighed: Any) -> None:
        self.drawn, self.weighed = drawn, weighed
        super().__init__(drawn.batch_shape, drawn.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """That of the family."""
        return self.drawn.support

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> StickingTheLanding:
        """The same, over more draws."""
        new = StickingTheLanding.__new__(StickingTheLanding)
        new._set(self.drawn.expand(batch_shape), self.weighed.expand(batch_shape))
        return new

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Reparameterised draws."""
        return self.drawn.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """log q, constant in the parameters."""
        return self.weighed.log_prob(value)
