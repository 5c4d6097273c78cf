"""Bundles: several messages that travel in one exchange, in one safetensors file. One message travels as it is.

A node answers a bundle by a bundle: one reply to each message, in their order, up to the first that it refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from bayesfed.engine.files import metadata_text, to_bytes

_METADATA = "bayesfed messages"


def join(messages: Sequence[bytes]) -> bytes:
    """Return messages as the bytes of one exchange.

    Example:
        >>> from bayesfed.deploy.bundles import join, split
        >>> from bayesfed.deploy.messages import Hello, pack
        >>> hello = pack(Hello())
        >>> split(join([hello, hello])) == [hello, hello], join([hello]) == hello
        (True, True)
    """
    if len(messages) == 1:
        return messages[0]
    return to_bytes({str(i): as_array(one) for i, one in enumerate(messages)}, _METADATA, "{}")


def split(payload: bytes) -> list[bytes]:
    """Return the messages in these bytes; bytes that are no bundle are one message, which may be invalid."""
    try:
        named, arrays = metadata_text(payload, _METADATA), load(payload)
    except (SafetensorError, ValueError, TypeError, AttributeError, KeyError, RuntimeError):
        return [payload]
    numbers = [str(i) for i in range(len(arrays))]
    flat = all(value.dtype == torch.uint8 and value.ndim == 1 for value in arrays.values())
    if named is None or not numbers or arrays.keys() != set(numbers) or not flat:
        return [payload]
    return [arrays[number].numpy().tobytes() for number in numbers]


def split_replies(payload: bytes, count: int) -> list[bytes]:
    """Return the replies to the first messages of a bundle; the last one may be a refusal, which is of all that follow.

    Args:
        payload: the reply to the bundle.
        count: the number of its messages.
    """
    replies = split(payload)
    return replies if len(replies) <= count else [payload]


def as_array(data: bytes) -> Tensor:
    """Return bytes as a tensor."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )
