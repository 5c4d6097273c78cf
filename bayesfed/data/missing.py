"""Missing values: rows of an observed sample site that hold NaN do not count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.util import broadcast_shape
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import (
    Independent,
    LowRankMultivariateNormal,
    MultivariateNormal,
    transform_to,
)

MISSING = "missing"
"""Key in the ``infer`` dictionary of an observed sample site: the bool mask of its rows without a value."""


class MaskMissing(Messenger):
    """Mask the missing values of observed sites, and replace each by some value of the distribution's support.

    A vector of which some entries are missing counts with the others, if :func:`of_observed_entries` has their
    distribution. If not it stays NaN, which :func:`~bayesfed.checks.data.check_data` refuses.
    """

    def _pyro_sample(self, msg: Any) -> None:
        fn, value = msg["fn"], msg["value"]
        if not msg["is_observed"] or not isinstance(value, Tensor) or not value.is_floating_point():
            return
        if not value.numel():  # a pyro.factor, whose value holds no number
            return
        present = ~value.isnan()
        zeros = torch.zeros_like(value)
        support = _support_of_numbers(fn)
        filler = 0.0 if support is None else transform_to(support)(zeros)
        value = torch.where(present, value, filler)
        if fn.event_dim:
            entries = present.flatten(value.ndim - fn.event_dim)
            marginal, present = of_observed_entries(fn, present), entries.any(-1)
            if marginal is None:
                partly = (present & ~entries.all(-1)).reshape(*present.shape, *[1] * fn.event_dim)
                value = torch.where(partly, torch.nan, value)
            else:
                msg["fn"] = marginal
        msg["value"] = value
        msg["mask"] = present if msg["mask"] is None else msg["mask"] & present
        msg["infer"] = {**msg["infer"], MISSING: ~present}


def of_observed_entries(fn: Any, observed: Tensor) -> Any:
    """Return the distribution of the observed entries of an event, in the shape of the whole event.

    Known are independent entries and the multivariate Normal distribution, of which the missing entries become
    independent of all others with a density of 1 at 0.

    Args:
        fn: a distribution of events.
        observed: True where an entry is observed, of the shape of the events, with any batch dimensions.

    Returns:
        the distribution, or None if it is not known.

    Example:
        >>> import torch
        >>> import pyro.distributions as dist
        >>> from bayesfed.data.missing import of_observed_entries
        >>> pair = dist.MultivariateNormal(torch.ones(2), torch.tensor([[1.0, 0.5], [0.5, 4.0]]))
        >>> first = of_observed_entries(pair, torch.tensor([True, False]))
        >>> round(float(first.log_prob(torch.zeros(2)) - dist.Normal(1.0, 1.0).log_prob(torch.tensor(0.0))), 5)
        0.0
    """
    if _is_normal(fn):
        pairs = observed[..., :, None] & observed[..., None, :]
        alone = torch.eye(fn.event_shape[0], dtype=fn.loc.dtype, device=fn.loc.device) / (
            2 * math.pi
        )
        covariance = torch.where(pairs, fn.covariance_matrix, alone)
        loc = torch.where(observed, fn.loc, 0.0)
        marginal = dist.MultivariateNormal(loc, covariance_matrix=covariance, validate_args=False)
        batch = marginal.batch_shape
        whole = dist.MultivariateNormal(
            fn.loc.expand(loc.shape),
            scale_tril=fn.scale_tril.expand(*batch, *fn.scale_tril.shape[-2:]),
            validate_args=False,
        )
        return _PartlyObserved(whole, marginal)
    if isinstance(fn, Independent) and not fn.base_dist.event_dim:
        base = fn.base_dist.expand(broadcast_shape(fn.base_dist.batch_shape, observed.shape))
        return base.mask(observed).to_event(fn.reinterpreted_batch_ndims)
    return None


class _PartlyObserved(dist.TorchDistribution):
    """A distribution of whole events whose density is that of the observed entries.

    Args:
        whole: the distribution of the events.
        marginal: that of their observed entries, of the same shapes.
    """

    arg_constraints = {}  # noqa: RUF012  (torch's interface)

    def __init__(self, whole: Any, marginal: Any) -> None:
        self.whole, self.marginal = whole, marginal
        super().__init__(whole.batch_shape, whole.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        return self.whole.support

    @property
    def mean(self) -> Tensor:
        return self.whole.mean

    @property
    def variance(self) -> Tensor:
        return self.whole.variance

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self.whole.sample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.marginal.log_prob(value)

    def expand(self, batch_shape: Any, _instance: Any = None) -> _PartlyObserved:
        return _PartlyObserved(self.whole.expand(batch_shape), self.marginal.expand(batch_shape))


def _is_normal(fn: Any) -> bool:
    """Return whether a distribution is a multivariate Normal one, whatever its parameters."""
    return isinstance(fn, MultivariateNormal | LowRankMultivariateNormal)


def _support_of_numbers(fn: Any) -> Any:
    """Return the support of each number of a distribution, if torch can map 0 on the reals into it, else None."""
    support = fn.support
    while hasattr(support, "base_constraint"):  # of independent numbers, or of a mixture
        support = support.base_constraint
    return None if support.is_discrete or support.event_dim else support


def missing_fields(
    fields: Mapping[str, Any], others: Mapping[str, Any], rows: int, device: torch.device
) -> dict[str, Tensor]:
    """Return the fields of others that are not among the fields, with NaN in every row."""
    found = {}
    for name in others.keys() - fields.keys():
        value = others[name]
        dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        found[name] = torch.full((rows, *value.shape[1:]), torch.nan, dtype=dtype, device=device)
    return found
