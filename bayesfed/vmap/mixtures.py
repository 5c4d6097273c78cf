"""The distribution of an outcome after the variables of its row or client are summed or integrated out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.util import broadcast_shape
from torch import Tensor
from torch.nn.functional import pad


class Mixture(TorchDistribution):
    """Σ_z p(z | rest) p(y | z, rest), with a component for each value of z, or for each node of an integral over z.

    Args:
        log_weights: of the k components, ``(*batch, k)``, with the evidence of earlier observed sites.
        components: p(y | z) for each value of z; with ``copies`` each holds that many, one after the other for each
            draw: ``(S · copies, K, B)``.
        variables: the number of values of each variable, k in all.
        log_evidence: of the earlier observed sites, ``(*batch)``; by default the sum of the weights.
        mask: the rows that count as observed; None for all.
        copies: the number of nodes that each component holds.
        first: the distribution at the values that the variables have in the program's own run.
        sampler: returns the mixture that is sampled; by default this one.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> from bayesfed.vmap.mixtures import Mixture
        >>> parts = dist.Normal(torch.zeros(3), 1.0), dist.Normal(torch.full((3,), 2.0), 1.0)
        >>> Mixture(torch.zeros(3, 2), parts, {"z": 2}).mean
        tensor([1., 1., 1.])
    """

    arg_constraints = {}  # noqa: RUF012  (torch's interface)

    def __init__(
        self,
        log_weights: Tensor,
        components: Sequence[Any],
        variables: Mapping[str, int],
        *,
        log_evidence: Tensor | None = None,
        mask: Any = None,
        copies: int = 1,
        first: Any = None,
        sampler: Callable[[], Mixture] | None = None,
    ) -> None:
        self.log_weights, self.components, self.variables = log_weights, components, variables
        self.log_evidence = log_weights.logsumexp(-1) if log_evidence is None else log_evidence
        self.row_mask, self.copies, self.sampler = mask, copies, sampler
        self.first = components[0] if first is None else first
        shapes = [part.batch_shape for part in components] if copies == 1 else []
        batch = broadcast_shape(log_weights.shape[:-1], *shapes)
        super().__init__(batch, components[0].event_shape, validate_args=False)

    @property
    def terms(self) -> int:
        """The number of components, nodes of an integral included."""
        return self.log_weights.shape[-1]

    @property
    def support(self) -> Any:
        """The support of the distribution at the variables' values in the program's own run."""
        return self.first.support

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> Mixture:
        """The same mixture over more draws; without ``copies`` only."""
        if torch.Size(batch_shape) == self.batch_shape:
            return self
        assert self.copies == 1
        weights = self.log_weights.expand(*batch_shape, self.log_weights.shape[-1])
        evidence = self.log_evidence.expand(batch_shape)
        components = [part.expand(batch_shape) for part in self.components]
        return Mixture(weights, components, self.variables, log_evidence=evidence)

    def each(self, value: Tensor) -> Tensor:
        """log p(y | z) of each component: ``(*batch, k)``."""
        return self._stack(lambda part: part.log_prob(self._repeat(value)))

    def rows(self, value: Tensor, kinds: int) -> Tensor:
        """log p(y) by row, 0 for rows that do not count, repeated for each kind of the client: ``(*batch, kinds)``."""
        return (
            masked(self.log_prob(value), self.row_mask)
            .unsqueeze(-1)
            .expand(*self.batch_shape, kinds)
        )

    def log_prob(self, value: Tensor) -> Tensor:
        """log Σ_z p(z) p(y | z)."""
        return (self.log_weights + self.each(value)).logsumexp(-1) - self.log_evidence

    def weighted_components(self) -> Iterator[tuple[Tensor, Any]]:
        """Yield the logarithm of the weight and the distribution of each component, nested mixtures included."""
        if self.copies > 1:
            yield torch.zeros(self.batch_shape), self
            return
        log_weights = self._weights().log_softmax(-1).unbind(-1)
        for log_weight, part in zip(log_weights, self.components, strict=True):
            inner = part.weighted_components() if isinstance(part, Mixture) else ((0.0, part),)
            for weight, one in inner:
                yield (log_weight + weight).expand(self.batch_shape), one

    @property
    def mean(self) -> Tensor:
        """Σ_z p(z) E[y | z]."""
        return self.expectation(lambda part: part.mean)

    def expectation(self, use: Callable[[Any], Tensor]) -> Tensor:
        """Σ_z p(z) use(p(y | z)), for a function of a distribution, ``(*batch)`` to ``(*batch, *rest)``."""
        return self._weighted(self._stack(use))

    @property
    def variance(self) -> Tensor:
        """The variance within the components plus the variance between them."""
        squares = self._stack(lambda part: part.variance + part.mean.square())
        return self._weighted(squares) - self.mean.square()

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw z, then y given z."""
        if self.sampler is not None:
            return self.sampler().sample(sample_shape)
        weights = self.log_weights.expand(*self.batch_shape, len(self.components))
        return self._sample(weights, sample_shape)

    def _sample(self, log_weights: Tensor, sample_shape: Sequence[int]) -> Tensor:
        """Draw a component by weights that expand to ``(*batch, k)``, then a value of it."""
        nth = torch.distributions.Categorical(logits=log_weights).sample(torch.Size(sample_shape))
        each = torch.stack(
            [
                part.expand(self.batch_shape).sample(torch.Size(sample_shape))
                for part in self.components
            ]
        )
        nth = nth.reshape(1, *nth.shape, *[1] * len(self.event_shape)).expand(1, *each.shape[1:])
        return each.gather(0, nth).squeeze(0)

    def _weights(self) -> Tensor:
        """The logarithms of the components' weights, by row."""
        return self.log_weights

    def _repeat(self, value: Tensor) -> Tensor:
        return repeat_draws(value, self.copies, len(self.event_shape))

    def _stack(self, use: Callable[[Any], Tensor]) -> Tensor:
        """Stack a function of each component, ``(*batch, *rest)``, to ``(*batch, *rest, k)``."""
        found = [use(part) for part in self.components]
        if self.copies == 1:
            return torch.stack(torch.broadcast_tensors(*found), -1)
        rest = max(value.ndim for value in found) - 3
        found = [split_copies(value, self.batch_shape, self.copies, rest) for value in found]
        return torch.cat(found, -1)

    def _weighted(self, values: Tensor) -> Tensor:
        weights = self._weights().softmax(-1)
        rest = values.ndim - weights.ndim
        weights = weights.reshape(*weights.shape[:-1], *[1] * rest, weights.shape[-1])
        return (weights * values).sum(-1)


class ClientMixture(Mixture):
    """Σ_z p(z) Π_b p(y_b | z), where z is a discrete variable of a client, shared by all of its rows.

    The density of a row is p(y_b | y_<b), rows in order, so that by the chain rule the product is the density of all
    rows. If the weights are given the client's own rows, new rows are independent instead: p(y_b | own rows).

    Args:
        log_weights: of the values of z, with the evidence of the client's own observed sites, ``(*draws, K, 1, k)``.
        components: the distributions of the site given each value of z, ``(*draws, K, B or 1)``.
        variables: the number of values of each variable, k in all.
        before: log p(y_<k | z) of the earlier sites, by row, or 0: ``(*draws, K, B or 1, k)``.
        mask, first: see :class:`Mixture`.
        known: whether ``log_weights`` are given the client's own rows.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> from bayesfed.vmap.mixtures import ClientMixture
        >>> parts = dist.Normal(torch.zeros(1, 2), 1.0), dist.Normal(torch.full((1, 2), 9.0), 1.0)
        >>> mixture = ClientMixture(torch.zeros(1, 1, 2), parts, {"z": 2}, before=torch.zeros(1, 1, 2), mask=None)
        >>> (mixture.sample() > 4.5).tolist() in ([[True, True]], [[False, False]])
        True
    """

    def __init__(
        self,
        log_weights: Tensor,
        components: Sequence[Any],
        variables: Mapping[str, int],
        *,
        before: Tensor,
        mask: Any,
        known: bool = False,
        first: Any = None,
    ) -> None:
        super().__init__(log_weights, components, variables, mask=mask, first=first)
        self.before, self.known = before, known

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> ClientMixture:
        """The same mixture over more draws or clients."""
        if torch.Size(batch_shape) == self.batch_shape:
            return self
        lead, k = batch_shape[:-1], self.log_weights.shape[-1]
        return ClientMixture(
            self.log_weights.expand(*lead, 1, k),
            [part.expand(batch_shape) for part in self.components],
            self.variables,
            before=self.before.expand(*lead, *self.before.shape[-2:]),
            mask=self.row_mask,
            known=self.known,
            first=self.first,
        )

    def rows(self, value: Tensor, kinds: int) -> Tensor:
        """log p(y_b | z, y_<k of the row), 0 for rows that do not count, repeated if z is only a part of the kinds."""
        mask = self.row_mask.unsqueeze(-1) if isinstance(self.row_mask, Tensor) else self.row_mask
        rows, times = masked(self.each(value), mask), kinds // len(self.components)
        return rows if times == 1 else rows.repeat_interleave(times, -1)

    def evidence(self, value: Tensor) -> Tensor:
        """log p(z) p(all observed sites up to this one | z): ``(*draws, K, 1, k)``."""
        return self._start + self.rows(value, len(self.components)).sum(-2, keepdim=True)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y_b | y_<b), rows in order; of independent rows if z is known from others."""
        if self.known:
            return ((self.log_weights + self.before).log_softmax(-1) + self.each(value)).logsumexp(
                -1
            )
        rows = self.rows(value, len(self.components))
        gaps = rows - rows.detach().amax(-1, keepdim=True)  # so that the cumulative sums stay small
        above = pad(gaps.cumsum(-2)[..., :-1, :], (0, 0, 1, 0))
        return ((self._start + above).log_softmax(-1) + rows).logsumexp(-1)

    def log_prob_of_rows(self, value: Tensor) -> Tensor:
        """Σ_b log p(y_b | y_<b) over the rows that count, ``(*draws, K)``: one sum over z for all rows together."""
        if self.known:
            return masked(self.log_prob(value), self.row_mask).sum(-1)
        return (self.evidence(value).logsumexp(-1) - self._start.logsumexp(-1)).squeeze(-1)

    def left_out(self, value: Tensor) -> Tensor:
        """log p(y_b | all other rows of the client), if the weights of z are given all rows, this one included."""
        return -(self.log_weights.log_softmax(-1) - self.each(value)).logsumexp(-1)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw z of each client, then its rows."""
        return self._sample(self._start, sample_shape)

    @property
    def _start(self) -> Tensor:
        """log p(z) p(y_<k | z)."""
        return self.log_weights + self.before.sum(-2, keepdim=True)

    def _weights(self) -> Tensor:
        return self.log_weights + self.before if self.known else self._start


def masked(log_prob: Tensor, mask: Any) -> Tensor:
    """Return the log density, and 0 where it is masked."""
    return torch.where(torch.as_tensor(mask), log_prob, 0.0) if mask is not None else log_prob


def repeat_draws(value: Tensor, copies: int, event: int) -> Tensor:
    """Repeat each draw of a site's value, ``(S or 1, K, B, *event)`` or without S, ``copies`` times."""
    if copies == 1 or value.ndim < event + 3 or len(value) == 1:
        return value
    return value.repeat_interleave(copies, 0)


def split_copies(value: Tensor, batch: torch.Size, copies: int, rest: int = 0) -> Tensor:
    """Reshape ``(S · copies, K, B, *rest)``, in which each size may be 1, to ``(*batch, *rest, copies)``.

    ``batch`` is ``(S, K, B)``, or ``(K, B)`` without draws.
    """
    draws = batch[0] if len(batch) == 3 else 1
    value = value.expand(draws * copies, *batch[-2:], *value.shape[value.ndim - rest :])
    value = value.unflatten(0, (draws, copies)).movedim(1, -1)
    return value if len(batch) == 3 else value.squeeze(0)
