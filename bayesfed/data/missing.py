"""Missing values: rows of an observed sample site that hold NaN do not count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints, transform_to

MISSING = "missing"
"""Key in the ``infer`` dictionary of an observed sample site: the bool mask of its rows without a value."""


class MaskMissing(Messenger):
    """Mask the missing values of observed sites, and replace each by some value of the distribution's support."""

    def _pyro_sample(self, msg: Any) -> None:
        fn, value = msg["fn"], msg["value"]
        if not msg["is_observed"] or not isinstance(value, Tensor) or not value.is_floating_point():
            return
        present = ~value.isnan()
        zeros = torch.zeros_like(value)
        filler = transform_to(fn.support)(zeros) if _is_scalar_and_continuous(fn) else 0.0
        msg["value"] = torch.where(present, value, filler)
        if fn.event_dim:
            present = present.flatten(value.ndim - fn.event_dim).all(-1)
        msg["mask"] = present if msg["mask"] is None else msg["mask"] & present
        msg["infer"] = {**msg["infer"], MISSING: ~present}


def _is_scalar_and_continuous(fn: Any) -> bool:
    """Return whether torch can map 0 on the reals into the support: that of real or positive numbers, for example."""
    support = fn.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return not support.is_discrete and support.event_dim == 0


def missing_fields(
    fields: Mapping[str, Any], others: Mapping[str, Any], rows: int, device: torch.device
) -> dict[str, Tensor]:
    """Return the floating fields of others that are not among the fields, with NaN in every row."""
    return {
        name: torch.full((rows, *value.shape[1:]), torch.nan, dtype=value.dtype, device=device)
        for name, value in others.items()
        if name not in fields and value.is_floating_point()
    }
