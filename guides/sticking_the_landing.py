"""Sticking the landing: a gradient of the ELBO whose variance vanishes as the guide approaches the posterior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor


class StickingTheLanding(dist.TorchDistribution):
    """A distribution that is sampled with its parameters, and whose density has detached copies of them.

    The score of q has mean zero, so leaving it out of ∇ELBO keeps the gradient unbiased; the rest is zero for every
    draw where q is the posterior (Roeder, Wu & Duvenaud 2017, *Sticking the landing*, eq. 8). Draws and densities are
    those of ``family(*params)``.

    Args:
        family: the distribution as a function of its parameters.
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
        drawn = detached = family(*params)
        if torch.is_grad_enabled() and any(p.requires_grad for p in params):
            detached = family(*(p.detach() for p in params))
        self._set(drawn, detached)

    def _set(self, drawn: Any, detached: Any) -> None:
        self.drawn, self.detached = drawn, detached
        super().__init__(drawn.batch_shape, drawn.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """The support of the family."""
        return self.drawn.support

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> StickingTheLanding:
        """The same distribution with other batch dimensions."""
        new = StickingTheLanding.__new__(StickingTheLanding)
        new._set(self.drawn.expand(batch_shape), self.detached.expand(batch_shape))
        return new

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Reparameterised draws."""
        return self.drawn.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """log q, without a gradient in the parameters."""
        return self.detached.log_prob(value)
