"""Structured messages, uploads and states as flat ones, for sums, noise, files and the wire."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

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


def flatten_state(state: Any) -> dict[str, Tensor]:
    """Return the tensors of nested dicts and named tuples by their path."""
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(state)[0]}


def unflatten_state(tensors: Mapping[str, Tensor], like: Any) -> Any:
    """Return tensors by path in the nested form of a state, on the devices of its tensors."""
    leaves, tree = tree_flatten_with_path(like)
    return tree_unflatten([tensors[keystr(path)].to(leaf.device) for path, leaf in leaves], tree)
