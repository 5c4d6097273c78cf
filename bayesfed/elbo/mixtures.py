"""The law of an outcome, the variables of its row, or of its client, summed or integrated out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.nn.functional import pad


class Mixture(TorchDistribution):
    """Σ_z p(z | rest) p(y | z, rest): a component for each value of z, or for each node of z.

    Args:
        log_weights: of the components, ``(*batch, k)``, the evidence of all that was observed before included.
        laws: of the components, over as many rows; with ``copies`` each is that many, one after the other for each
            draw: ``(S · copies, K, B)``.
        variables: how many values each of the variables has, k in all.
        log_evidence: of all that was observed before, ``(*batch)``; by default the sum of the weights.
        mask: which rows count, as what is observed; None for all.
        copies: components of each law.
        first: the law at the values that the variables have in the program's own run.
        drawn: makes the mixture that is sampled; by default this one.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> from bayesfed.elbo.mixtures import Mixture
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
        mask: Any = None,
        copies: int = 1,
        first: Any = None,
        drawn: Callable[[], Mixture] | None = None,
    ) -> None:
        self.log_weights, self.laws, self.variables = log_weights, laws, variables
        self.log_evidence = log_weights.logsumexp(-1) if log_evidence is None else log_evidence
        self.there, self.copies, self.drawn = mask, copies, drawn
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

    def rows(self, value: Tensor, kinds: int) -> Tensor:
        """log p(y) of rows, 0 of those that do not count, whichever of the kinds the client is: ``(*batch, kinds)``."""
        return (
            counted(self.log_prob(value), self.there).unsqueeze(-1).expand(*self.batch_shape, kinds)
        )

    def log_prob(self, value: Tensor) -> Tensor:
        """log Σ_z p(z) p(y | z)."""
        return (self.log_weights + self.each(value)).logsumexp(-1) - self.log_evidence

    def apart(self) -> Iterator[tuple[Tensor, Any]]:
        """The components and the logarithms of their weights, mixtures of discrete variables among them apart too."""
        if self.copies > 1:
            yield torch.zeros(self.batch_shape), self
            return
        log_weights = self._weights().log_softmax(-1).unbind(-1)
        for log_weight, law in zip(log_weights, self.laws, strict=True):
            for weight, part in law.apart() if isinstance(law, Mixture) else ((0.0, law),):
                yield (log_weight + weight).expand(self.batch_shape), part

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
        weights = self.log_weights.expand(*self.batch_shape, len(self.laws))
        return self._sample(weights, sample_shape)

    def _sample(self, log_weights: Tensor, sample_shape: Sequence[int]) -> Tensor:
        """A component by these weights, ``(*batch, k)`` or what expands to it, then a value of it."""
        nth = torch.distributions.Categorical(logits=log_weights).sample(torch.Size(sample_shape))
        each = torch.stack(
            [law.expand(self.batch_shape).sample(torch.Size(sample_shape)) for law in self.laws]
        )
        nth = nth.reshape(1, *nth.shape, *[1] * len(self.event_shape)).expand(1, *each.shape[1:])
        return each.gather(0, nth).squeeze(0)

    def _weights(self) -> Tensor:
        """The logarithms of the components' weights, of each row."""
        return self.log_weights

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
        weights = self._weights().softmax(-1)
        weights = weights.reshape(
            *weights.shape[:-1], *[1] * len(self.event_shape), weights.shape[-1]
        )
        return (weights * values).sum(-1)


class ClientMixture(Mixture):
    """Σ_z p(z) Π_b p(y_b | z): a discrete variable of a client, which all of its rows have in common.

    The rows' densities multiply to that of all of them together, by the chain rule: p(y_b | y_<b), rows in order. Given
    what the client's own rows say of z, new rows are each by themselves instead, p(y_b | own rows).

    Args:
        log_weights: of the values of z, what is observed of the client itself included, ``(*draws, K, 1, k)``.
        laws: of the site given each of them, ``(*draws, K, B or 1)``.
        variables: how many values each of the variables has, k in all.
        before: log p(y_<k | z) of the sites before, by row, 0 where there is none: ``(*draws, K, B or 1, k)``.
        mask, first: as of :class:`Mixture`.
        known: ``log_weights`` are given the client's own rows.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> from bayesfed.elbo.mixtures import ClientMixture
        >>> parts = dist.Normal(torch.zeros(1, 2), 1.0), dist.Normal(torch.full((1, 2), 9.0), 1.0)
        >>> law = ClientMixture(torch.zeros(1, 1, 2), parts, {"z": 2}, before=torch.zeros(1, 1, 2), mask=None)
        >>> (law.sample() > 4.5).tolist() in ([[True, True]], [[False, False]])
        True
    """

    def __init__(
        self,
        log_weights: Tensor,
        laws: Sequence[Any],
        variables: Mapping[str, int],
        *,
        before: Tensor,
        mask: Any,
        known: bool = False,
        first: Any = None,
    ) -> None:
        super().__init__(log_weights, laws, variables, mask=mask, first=first)
        self.before, self.known = before, known

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> ClientMixture:
        """The same over more draws or clients."""
        if torch.Size(batch_shape) == self.batch_shape:
            return self
        lead, k = batch_shape[:-1], self.log_weights.shape[-1]
        return ClientMixture(
            self.log_weights.expand(*lead, 1, k),
            [law.expand(batch_shape) for law in self.laws],
            self.variables,
            before=self.before.expand(*lead, *self.before.shape[-2:]),
            mask=self.there,
            known=self.known,
            first=self.first,
        )

    def rows(self, value: Tensor, kinds: int) -> Tensor:
        """log p(y_b | z, y_<k of the row), 0 of rows that do not count, also where z has become part of more kinds."""
        mask = self.there.unsqueeze(-1) if isinstance(self.there, Tensor) else self.there
        return counted(self.each(value), mask).repeat_interleave(kinds // len(self.laws), -1)

    def evidence(self, value: Tensor) -> Tensor:
        """log p(z) p(all that is observed of the client | z), this site included: ``(*draws, K, 1, k)``."""
        return self._start + self.rows(value, len(self.laws)).sum(-2, keepdim=True)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y_b | y_<b), rows in order; of each row by itself where z is known from others."""
        if self.known:
            return ((self.log_weights + self.before).log_softmax(-1) + self.each(value)).logsumexp(
                -1
            )
        rows = self.rows(value, len(self.laws))
        gaps = rows - rows.detach().amax(-1, keepdim=True)  # whose sums stay small
        above = pad(gaps.cumsum(-2)[..., :-1, :], (0, 0, 1, 0))
        return ((self._start + above).log_softmax(-1) + rows).logsumexp(-1)

    def left_out(self, value: Tensor) -> Tensor:
        """log p(y_b | all else that is observed of the client), where z is known from these rows among them."""
        return -(self.log_weights.log_softmax(-1) - self.each(value)).logsumexp(-1)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """A z of each client, then its rows."""
        return self._sample(self._start, sample_shape)

    @property
    def _start(self) -> Tensor:
        """log p(z) p(y_<k | z)."""
        return self.log_weights + self.before.sum(-2, keepdim=True)

    def _weights(self) -> Tensor:
        return self.log_weights + self.before if self.known else self._start


def counted(log_prob: Tensor, mask: Any) -> Tensor:
    """Where the mask does not leave it out."""
    return torch.where(torch.as_tensor(mask), log_prob, 0.0) if mask is not None else log_prob


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
