"""Noise as an input: one counter-based stream per (seed, round, client).

A stream is a key, an int64 scalar; the j-th number of a stream is a hash of (key, j). So noise does not
depend on the order, chunking or device of the clients, a thousand small clients cost one tensor
operation, and a client that runs alone has the same draws as in a cohort (invariant 3).

The hash is SplitMix64's finaliser (Steele, Lea & Flood 2014, *Fast splittable pseudorandom number
generators*, OOPSLA) on 64-bit integers that wrap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from bayesfed.data.names import word as word
from bayesfed.data.names import words as words
from bayesfed.tracing.compiler import compiling, traceable
from bayesfed.tracing.dispatch_mode import DispatchMode

_GOLDEN = -0x61C8864680B583EB  # 2⁶⁴ / golden ratio, as a signed 64-bit integer
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


CACHED = 2**15
"""Normal numbers that are made at once, so that they stay in a processor's cache."""


def _mix(x: Tensor) -> Tensor:
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        x = (x >> shift).bitwise_and_((1 << (64 - shift)) - 1).bitwise_xor_(x).mul_(factor)
    return (x >> 31).bitwise_and_((1 << 33) - 1).bitwise_xor_(x)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's own generator inside a block, and restore its state afterwards, on every device.

    Draws for a GPU are made on the CPU, so that they are the same numbers on every device.

    Example:
        >>> import torch
        >>> from bayesfed.elbo import noise
        >>> before = torch.get_rng_state()
        >>> with noise.seeded(0):
        ...     draw = torch.rand(3)
        >>> bool(torch.equal(before, torch.get_rng_state()))
        True
    """
    started = torch.cuda.is_initialized()
    drawn_here = _DrawnOnCPU() if started else nullcontext()
    with torch.random.fork_rng(range(torch.cuda.device_count()) if started else ()), drawn_here:
        (torch.manual_seed if started else torch.default_generator.manual_seed)(seed)
        yield


class _DrawnOnCPU(DispatchMode):
    """Run every operation that draws random numbers on the CPU, and move its results."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        first = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
        device = kwargs.get("device") or (torch.device("cpu") if first is None else first.device)
        if "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("cpu")}
        here = tree_map_only(Tensor, lambda x: x.cpu(), (args, kwargs))
        found = func(*here[0], **here[1])
        if func._schema.is_mutable:  # in place: of the first argument
            return args[0].copy_(found)
        return tree_map_only(Tensor, lambda x: x.to(device), found)


def key(seed: int) -> Tensor:
    """The root key of a seed: int64, shape ``()``."""
    return _mix(torch.tensor(seed, dtype=torch.int64) + _GOLDEN)


def fold(keys: Tensor, data: Tensor | int) -> Tensor:
    """Keys that depend on ``keys`` and ``data`` (int64, broadcast against each other)."""
    data = torch.as_tensor(data, dtype=torch.int64, device=keys.device)
    return _mix(_mix(keys + _GOLDEN) ^ (data * _FACTORS[0] + _GOLDEN))


def uniform(keys: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Uniform numbers in (0, 1): float64, shape ``keys.shape + shape``.

    Example:
        >>> import torch
        >>> from bayesfed.elbo import noise
        >>> keys = noise.fold(noise.key(0), noise.words(["north", "south"]))
        >>> bool(torch.equal(noise.uniform(keys, (3,))[1], noise.uniform(keys[1], (3,))))
        True
    """
    count = math.prod(shape)
    counter = torch.arange(1, count + 1, device=keys.device)
    bits = (_mix(keys[..., None] + counter * _GOLDEN) >> 12) & ((1 << 52) - 1)
    return ((bits.double() + 0.5) * 2.0**-52).reshape((*keys.shape, *shape))


Path = Sequence[Tensor | int]
"""The numbers that keys are folded with, one after the other."""


def _normal32(keys: Tensor, path: Path, shape: Sequence[int]) -> Tensor:
    """Normal numbers in single precision, two from each hash, in less than half the time of double precision."""
    count = math.prod(shape)
    strides = torch.arange(1, (count + 1) // 2 + 1, device=keys.device) * _GOLDEN
    if keys.device.type == "cpu" and not compiling():
        for data in path:
            keys = fold(keys, data)
        path, together = (), max(1, CACHED // max(1, count))
        if keys.numel() > together:
            parts = [_normals(some, [], strides, count) for some in keys.flatten().split(together)]
            return torch.cat(parts).reshape((*keys.shape, *shape))
    drawn = _normals(keys, list(path), strides, count)
    return drawn.reshape((*drawn.shape[:-1], *shape))


@traceable
def _normals(keys: Tensor, path: list[Tensor | int], strides: Tensor, count: int) -> Tensor:
    """Normal numbers of the shape of the folded keys ``+ (count,)``.

    ``strides`` is an argument so that compiled code multiplies no index by a large constant: a C++ compiler may assume
    that integers do not overflow, and conclude that the loop is short.
    """
    for data in path:
        keys = fold(keys, data)
    bits = _mix(keys[..., None] + strides)
    halves = torch.cat([bits >> 40, bits >> 8], -1)[..., :count].bitwise_and_((1 << 24) - 1)
    odd = halves.mul_(2).sub_((1 << 24) - 1).float()  # symmetric around 0, and odd, so never 0
    odd = odd.mul_(2.0**-24)  # in (-1, 1), never ±1
    return (_erfinv(odd) if compiling() else odd.erfinv_()).mul_(math.sqrt(2))


# fmt: off
_CENTRE = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
           -0.00125372503, -0.00417768164, 0.246640727, 1.50140941)
_TAIL = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
         -0.0076224613, 0.00943887047, 1.00167406, 2.83297682)
# fmt: on


def _erfinv(x: Tensor) -> Tensor:
    """erf⁻¹ as polynomials that a compiler can vectorise, accurate to 3e-7 of its value.

    Source: M. Giles (2012), "Approximating the erfinv function", GPU Computing Gems, single precision.
    """
    w = -((1 - x) * (1 + x)).log()
    centre, tail = torch.full_like(x, _CENTRE[0]), torch.full_like(x, _TAIL[0])
    near, far = w - 2.5, w.sqrt() - 3
    for a, b in zip(_CENTRE[1:], _TAIL[1:], strict=True):
        centre, tail = a + centre * near, b + tail * far
    return torch.where(w < 5, centre, tail) * x


_FEW, _FEISTEL = 10_000, 10
"""The most numbers that are sorted; the rounds of the Feistel network, of which seven suffice (Patarin 2003)."""


def permuted(key: Tensor, count: int, places: Tensor) -> Tensor:
    """The values of a random permutation of ``range(count)`` at some places: int64, in time independent of ``count``.

    A small range is sorted by random numbers. In a large one the digits of each place go through a Feistel network
    until they are a number below ``count`` again (Black & Rogaway 2002, *Ciphers with arbitrary finite domains*).

    Example:
        >>> import torch
        >>> from bayesfed.elbo import noise
        >>> noise.permuted(noise.key(0), 1_000_000, torch.arange(3)).tolist()
        [444586, 244550, 517705]
    """
    if count <= _FEW:
        return uniform(key, (count,)).argsort()[places]
    digits, places = math.isqrt(count - 1) + 1, places.to(key.device)
    keys = fold(key, torch.arange(_FEISTEL, device=key.device))
    found, outside = places, torch.ones_like(places, dtype=torch.bool)
    while bool(outside.any()):
        high, low = found // digits, found % digits
        for each in keys:
            high, low = low, (high + fold(each, low)).remainder(digits)
        found = torch.where(outside, high * digits + low, found)
        outside = found >= count
    return found


def shuffle(keys: Tensor, lengths: Tensor) -> Tensor:
    """``range(length)`` in random order for each key: int64 ``(K, lengths.max())``, the surplus numbers last."""
    longest = int(lengths.max())
    absent = (torch.arange(longest, device="cpu") >= lengths[:, None]).to(keys.device)
    return uniform(keys, (longest,)).masked_fill(absent, torch.inf).argsort(-1)


# -- lifting the random numbers out of a distribution ------------------------------------------------

_KINDS = {
    torch.ops.aten.normal.Tensor_Tensor: "normal",
    torch.ops.aten.normal_.default: "normal",
    torch.ops.aten.randn.default: "normal",
    torch.ops.aten.randn_like.default: "normal",
    torch.ops.aten.rand.default: "uniform",
    torch.ops.aten.rand_like.default: "uniform",
    torch.ops.aten.uniform_.default: "uniform",
}
_REFUSED = {
    getattr(torch.ops.aten, name).default
    for name in (
        "_standard_gamma",
        "_sample_dirichlet",
        "exponential_",
        "cauchy_",
        "bernoulli",
        "poisson",
        "multinomial",
        "binomial",
    )
}


@dataclass(frozen=True)
class Draw:
    """One random tensor that a sample site needs: its kind, and its shape after the batch dimensions."""

    kind: str
    tail: tuple[int, ...]

    def __call__(self, keys: Tensor, dtype: torch.dtype, path: Path = ()) -> Tensor:
        """The noise of the keys, which are folded along ``path`` first: of their shape ``+ tail``."""
        if self.kind == "normal" and dtype == torch.float32:
            return _normal32(keys, path, self.tail)
        for data in path:
            keys = fold(keys, data)
        u = uniform(keys, self.tail)
        return (torch.special.ndtri(u) if self.kind == "normal" else u).to(dtype)


class SuppliedNoise(DispatchMode):
    """Run a distribution's ``rsample`` with its random tensors supplied, or record them if none are."""

    def __init__(self, supplied: Sequence[Tensor] | None, batch_dims: int) -> None:
        super().__init__()
        self.supplied = supplied
        self.batch_dims = batch_dims
        self.recorded: list[Draw] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _REFUSED:
            raise NotImplementedError(
                f"it draws with {func}, which cannot be written as a function of normal or uniform "
                "noise. Use a guide distribution such as Normal, LogNormal or a transformed Normal"
            )
        if func not in _KINDS:
            return func(*args, **(kwargs or {}))
        kind = _KINDS[func]
        template = args[0] if isinstance(args[0], Tensor) else None
        shape = tuple(args[0]) if template is None else tuple(template.shape)
        wanted = (kwargs or {}).get("dtype") or (
            torch.get_default_dtype() if template is None else template.dtype
        )
        if self.supplied is None:
            device = (kwargs or {}).get("device") if template is None else template.device
            drawn = torch.full(shape, 0.0 if kind == "normal" else 0.5, dtype=wanted, device=device)
            self.recorded.append(Draw(kind, shape[self.batch_dims :]))
        else:
            drawn = self.supplied[len(self.recorded)].expand(shape).to(wanted)
            self.recorded.append(Draw(kind, ()))
        if func is torch.ops.aten.normal.Tensor_Tensor:
            return args[0] + args[1] * drawn
        if func is torch.ops.aten.uniform_.default:
            low, high = (*args[1:], 0.0, 1.0)[:2] if len(args) != 2 else (args[1], 1.0)
            return template.copy_(low + (high - low) * drawn)  # type: ignore[union-attr]
        if func is torch.ops.aten.normal_.default:
            loc, scale = (*args[1:], 0.0, 1.0)[:2] if len(args) != 2 else (args[1], 1.0)
            value = drawn if (loc, scale) == (0.0, 1.0) else loc + scale * drawn
            return template.copy_(value)  # type: ignore[union-attr]
        return drawn
