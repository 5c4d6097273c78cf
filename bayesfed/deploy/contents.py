"""The contents of a message: checks of its tensors, and a digest of what all nodes are asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from bayesfed.deploy.coding_messages import Add
from bayesfed.deploy.messages import (
    Ask,
    Average,
    Evaluate,
    LeaveOut,
    MessageError,
    MoveChains,
)
from bayesfed.engine.parts import flatten_state, unflatten_state


def check_like(part: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Fail on tensors that do not have the names, shapes and types of the expected ones.

    Raises:
        MessageError: names the tensor.
    """
    for name in [*expected, *found]:
        if name not in found or name not in expected:
            lacks = "lacks" if name in expected else "has an unknown"
            raise MessageError(f"{part} {lacks} {name!r}")
        one, other = (
            f"{value.dtype} {tuple(value.shape)}" for value in (found[name], expected[name])
        )
        if one != other:
            raise MessageError(f"{part} {name!r} is {one} in place of {other}")


def read_state(found: Mapping[str, Tensor], like: Any) -> Any:
    """Return tensors by path as a server's state of the same structure as another.

    Raises:
        MessageError: the tensors do not have the paths, shapes or types of the other state.
    """
    check_like("the server's state", found, flatten_state(like))
    return unflatten_state(found, like)


def broadcast_digest(
    message: Ask | Add | Evaluate | MoveChains | Average | LeaveOut, sent: Mapping[str, Tensor]
) -> bytes:
    """Return a digest of what all nodes are asked, 32 bytes: a secure sum needs nodes that were asked the same."""
    named = {"kind", "run", "rate", "clip", "noisy", "closely", "effect", "agreement"}
    named |= {"iteration", "step", "size"}
    common = message.model_dump(include=named)
    digest = sha256(json.dumps(common, sort_keys=True).encode())
    for name, value in sorted(sent.items()):
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
