"""The law of an outcome, the variables of its row summed or integrated out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor


class Mixture(TorchDistribution):
    """Σ_z p(z | rest) p(y | z, rest): a component for each value of z, or for each node of z.

    Args:
        log_weights: of the components, ``(*batch, k)``, the evidence of all that was observed before included.
        laws: of the components, over as many rows; with ``copies`` each is that many, one after the other for each
            draw: ``(S · copies, K, B)``.
        variables: how many values each of the variables has, k in all.
        log_evidence: of all that was observed before, ``(*batch)``; by default the sum of the weights.
        copies: components of each law.
        first: the law at the values that the variables have in the program's own run.
        drawn: makes the mixture that is sampled; by default this one.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> from bayesfed.elbo.marginal import Mixture
        >>> parts = dist.Normal(torch.zeros(3), 1.0), dist.Normal(torch.full((3,), 2.0), 1.0)
        >>> Mixture(torch.zeros(3, 2), parts, {"z": 2}).mean
        tensor([1., 1., 1.])
    """

    arg_constraints = {}  # noqa: RUF012  (torch's interface)

    def __init__(
        self,
        log_weights: Tensor,
        laws: Sequence[Any],
        variables: Mapping[str, int],
        *,
        log_evidence: Tensor | None = None,
        copies: int = 1,
        first: Any = None,
        drawn: Callable[[], Mixture] | None = None,
    ) -> None:
        self.log_weights, self.laws, self.variables = log_weights, laws, variables
        self.log_evidence = log_weights.logsumexp(-1) if log_evidence is None else log_evidence
        self.copies, self.drawn = copies, drawn
        self.first = laws[0] if first is None else first
        shapes = [law.batch_shape for law in laws] if copies == 1 else []
        batch = torch.broadcast_shapes(log_weights.shape[:-1], *shapes)
        super().__init__(batch, laws[0].event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """That of the first."""
        return self.laws[0].support

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Mixture:
        """The same; those of no copies also over more draws."""
        if torch.Size(batch_shape) == self.batch_shape:
            return self
        assert self.copies == 1
        weights = self.log_weights.expand(*batch_shape, self.log_weights.shape[-1])
        evidence = self.log_evidence.expand(batch_shape)
        laws = [law.expand(batch_shape) for law in self.laws]
        return Mixture(weights, laws, self.variables, log_evidence=evidence)

    def each(self, value: Tensor) -> Tensor:
        """log p(y | z) of all components: ``(*batch, k)``."""
        return self._apart(lambda law: law.log_prob(self._repeated(value)))

    def log_prob(self, value: Tensor) -> Tensor:
        """log Σ_z p(z) p(y | z)."""
        return (self.log_weights + self.each(value)).logsumexp(-1) - self.log_evidence

    @property
    def mean(self) -> Tensor:
        """Σ_z p(z) E[y | z]."""
        return self._weighted(self._apart(lambda law: law.mean))

    @property
    def variance(self) -> Tensor:
        """Within and between the components."""
        squares = self._apart(lambda law: law.variance + law.mean.square())
        return self._weighted(squares) - self.mean.square()

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """z, then y given z."""
        if self.drawn is not None:
            return self.drawn().sample(sample_shape)
        shape = (*sample_shape, *self.batch_shape)
        weights = self.log_weights.expand(*self.batch_shape, len(self.laws))
        nth = torch.distributions.Categorical(logits=weights).sample(torch.Size(sample_shape))
        each = torch.stack(
            [law.expand(self.batch_shape).sample(torch.Size(sample_shape)) for law in self.laws]
        )
        nth = nth.reshape(1, *shape, *[1] * len(self.event_shape)).expand(1, *each.shape[1:])
        return each.gather(0, nth).squeeze(0)

    def _repeated(self, value: Tensor) -> Tensor:
        return repeated(value, self.copies, len(self.event_shape))

    def _apart(self, use: Callable[[Any], Tensor]) -> Tensor:
        """What a law gives, ``(*batch, *rest)`` of each component, as ``(*batch, *rest, k)``."""
        found = [use(law) for law in self.laws]
        if self.copies == 1:
            return torch.stack(torch.broadcast_tensors(*found), -1)
        rest = max(value.ndim for value in found) - 3
        found = [apart(value, self.batch_shape, self.copies, rest) for value in found]
        return torch.cat(found, -1)

    def _weighted(self, values: Tensor) -> Tensor:
        weights = self.log_weights.softmax(-1)
        weights = weights.reshape(
            *weights.shape[:-1], *[1] * len(self.event_shape), weights.shape[-1]
        )
        return (weights * values).sum(-1)


def repeated(value: Tensor, copies: int, event: int) -> Tensor:
    """A site's value ``(S or 1, K, B, *event)`` or without S, each of the draws that many times."""
    if copies == 1 or value.ndim < event + 3 or len(value) == 1:
        return value
    return value.repeat_interleave(copies, 0)


def apart(value: Tensor, batch: torch.Size, copies: int, rest: int = 0) -> Tensor:
    """Of ``(S · copies, K, B, *rest)``, where each may be 1: ``(*batch, *rest, copies)``.

    ``batch`` is ``(S, K, B)``, or ``(K, B)`` without draws.
    """
    draws = batch[0] if len(batch) == 3 else 1
    value = value.expand(draws * copies, *batch[-2:], *value.shape[value.ndim - rest :])
    value = value.unflatten(0, (draws, copies)).movedim(1, -1)
    return value if len(batch) == 3 else value.squeeze(0)
