"""Structured messages and uploads as flat ones with names ``part/name``, for sums, noise, files and the wire."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bayesfed.steps.job import Parts

ROWS = "weight/rows"
"""The weights by rows in a flat upload, see :func:`bayesfed.rules.weighted_sum`."""


def flat(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of all parts by ``part/name``.

    Example:
        >>> import torch
        >>> from bayesfed.engine.parts import flat, nested
        >>> one = torch.ones(())
        >>> list(flat({"theta": {"mu/x": one}, "weight": {"rows": one}}))
        ['theta/mu/x', 'weight/rows']
        >>> nested({"theta/mu/x": one})
        {'theta': {'mu/x': tensor(1.)}}
    """
    return {f"{part}/{name}": v for part, values in parts.items() for name, v in values.items()}


def nested(tensors: Mapping[str, Tensor]) -> Parts:
    """Invert :func:`flat`; parts without tensors are not there."""
    found: Parts = {}
    for full, value in tensors.items():
        part, _, name = full.partition("/")
        found.setdefault(part, {})[name] = value
    return found
