"""The distribution of an outcome with zeros of its own."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions.zero_inflated import ZeroInflatedDistribution
from torch import Tensor
from torch.distributions import constraints


class Hurdle(ZeroInflatedDistribution):
    """Zero with probability ``gate``, otherwise a value of ``base`` that is not 0.

    ::

        p(0) = gate,    p(y) = (1 − gate) base(y) / (1 − base(0))       without the denominator if base is continuous

    Args:
        base: a distribution of counts or of positive numbers, ``(*batch)``.
        gate: ``(*batch)``.

    Source: J. Mullahy (1986), "Specification and testing of some modified count data models", Journal of Econometrics
    33(3), 341–365.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> from bayesfed.formulas.hurdle import Hurdle
        >>> Hurdle(dist.Poisson(torch.tensor(2.0)), torch.tensor(0.3)).log_prob(torch.arange(30.0)).exp().sum()
        tensor(1.0000)
    """

    def __init__(self, base: Any, gate: Tensor) -> None:
        super().__init__(base, gate=gate, validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        """That of counts, or numbers from 0."""
        return self.base_dist.support if self._discrete else constraints.nonnegative

    @property
    def _discrete(self) -> bool:
        return bool(self.base_dist.support.is_discrete)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Hurdle:
        """Return the same distribution with a larger batch shape."""
        return Hurdle(self.base_dist.expand(batch_shape), self.gate.expand(batch_shape))

    def _log_positive(self) -> Tensor:
        """log(1 − base(0)), 0 if base is continuous."""
        if not self._discrete:
            return torch.zeros_like(self.gate)
        return (-self.base_dist.log_prob(torch.zeros_like(self.gate)).expm1()).log()

    @property
    def mean(self) -> Tensor:
        """(1 − gate) E[y | y > 0]."""
        return (1 - self.gate) * self.base_dist.mean / self._log_positive().exp()

    @property
    def variance(self) -> Tensor:
        """E[y²] − E[y]²."""
        square = self.base_dist.variance + self.base_dist.mean.square()
        return (1 - self.gate) * square / self._log_positive().exp() - self.mean.square()

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density."""
        zero = value == 0
        some = value.where(~zero, 1.0 if self._discrete else 0.5)  # base may have no density at 0
        other = (-self.gate).log1p() - self._log_positive() + self.base_dist.log_prob(some)
        return torch.where(zero, self.gate.log(), other)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw whether the value is 0; other values are drawn from ``base`` until they are not 0."""
        shape = self._extended_shape(sample_shape)
        base = self.base_dist.expand(shape)
        with torch.no_grad():
            found = base.sample()
            for _ in range(_ATTEMPTS):
                if not (found == 0).any():
                    break
                found = torch.where(found == 0, base.sample(), found)
            found = torch.where(found == 0, torch.ones_like(found), found)
            return torch.where(torch.rand(shape, device=found.device) < self.gate, 0.0, found)


_ATTEMPTS = 200
"""After so many zeros the value is 1: base has 0 with a probability near 1, and 1 with nearly all of the rest."""
