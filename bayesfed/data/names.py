"""Names as integers, the same on every machine: they give each client and each sample site its own noise stream."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def word(text: str) -> int:
    """Return a signed 64-bit hash of a name, the same on every machine."""
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True
    )


def words(names: Sequence[str]) -> Tensor:
    """Return the :func:`word` of each name: int64, shape ``(len(names),)``."""
    return torch.tensor([word(name) for name in names], dtype=torch.int64)
