"""Numbers as pairs of integers modulo 2⁶⁴, whose sums are exact: x = high · 2⁻⁸ + low · 2⁻⁵⁷.

Both words are at most 2⁴⁸ in size, so that sums of 2¹⁴ of them stay below 2⁶³.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]
"""Integers modulo 2⁶⁴: for one part of an upload ``(2, ...)``, its high words and its low words."""
LARGEST = 2.0**40
"""The largest size of a number, about 10¹²."""
WORD = 2**48
"""The largest size of a word."""
LEAST = -(2.0**36)
"""The log density that replaces −∞ in a sum."""
_HIGH, _LOW = 8, 49


def encode(name: str, value: Tensor) -> Words:
    """Return a part of an upload in fixed point, ``(2, ...)``: each number to the nearest multiple of 2⁻⁵⁷.

    Exact for numbers of single precision from 2⁻³⁴ in size, of double precision from 2⁻⁵, and for whole numbers.

    Raises:
        ValueError: a number is complex, is not finite, or is above 2⁴⁰ in size.

    Example:
        >>> import torch
        >>> from bayesfed.deploy.fixed_point import decode, encode
        >>> a, b = torch.tensor([1e8, 0.1]), torch.tensor([-1e-9, -0.3])
        >>> bool((decode(encode("a", a) + encode("b", b)) == a.double() + b.double()).all())
        True
    """
    if value.is_complex():
        raise ValueError(f"{name} is complex: send its real and imaginary parts")
    x = value.detach().cpu().double().numpy()
    bad = "not finite" if not np.isfinite(x).all() else ""
    if not bad and np.abs(x).max(initial=0) > LARGEST:
        bad = f"up to {np.abs(x).max():.3g} in size, above {LARGEST:.3g}"
    if bad:
        raise ValueError(f"{name} has numbers that are {bad}: nothing of this upload is sent")
    x = np.ldexp(x, _HIGH)
    high = np.rint(x)
    low = np.rint(np.ldexp(x - high, _LOW))
    return np.stack([high, low]).astype(np.int64).view(np.uint64)


def decode(total: Words) -> Tensor:
    """Return a sum of encoded parts, float64 ``(...)``: rounded once, correctly below 2⁴⁵ in size."""
    high, low = (np.asarray(words) for words in total.view(np.int64))
    carry = (low + WORD) >> _LOW
    value = np.ldexp((high + carry).astype(float), -_HIGH)
    return torch.as_tensor(value + np.ldexp((low - (carry << _LOW)).astype(float), -_HIGH - _LOW))


def finite_log_densities(value: Tensor) -> Tensor:
    """Return log densities with :data:`LEAST` in place of all that are not finite, and of lower ones.

    At draws of θ far in the tails a density may be zero. Their weight is zero then, whatever other clients say.

    Example:
        >>> import torch
        >>> from bayesfed.deploy.fixed_point import finite_log_densities
        >>> finite_log_densities(torch.tensor([-1.5, -torch.inf, torch.nan])).tolist()
        [-1.5, -68719476736.0, -68719476736.0]
    """
    return value.nan_to_num(LEAST, LEAST, LEAST).clamp(min=LEAST)
