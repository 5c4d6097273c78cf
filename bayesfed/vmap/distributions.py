"""Conversion of a distribution inside vmap, of one client and draw, to one of all clients and draws outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.util import broadcast_shape
from pyro.ops.gamma_gaussian import Gamma, GammaGaussian
from pyro.ops.gaussian import AffineNormal, Gaussian
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributions import Distribution, Transform
from torch.distributions.transforms import _InverseTransform

from bayesfed.vmap.levels import Layout, Levels, opened
from bayesfed.vmap.writes import Writes

_FACTORS = (Gaussian, AffineNormal, Gamma, GammaGaussian)
"""Parts of Pyro's hidden Markov models."""
_WITHIN = (Tensor, list, tuple, Distribution, Transform, *_FACTORS)


def batched(fn: Any, levels: Levels, layout: Layout) -> Any:
    """The distribution with batch dimensions S, K and B or 1; further batch dimensions become part of the event.

    If each parameter has all dimensions of the batch, as in most distributions, the parameters are converted; else the
    distribution is evaluated inside vmap. The caller has left vmap's interpreters.
    """
    moved: dict[int, Tensor] = {}
    for value in _tensors(fn):
        if value.shape[: len(layout.batch)] == layout.batch:
            moved[id(value)] = levels.leave(value, layout)
        elif value.ndim or _functorch.is_batchedtensor(value):
            return InsideVmap.of(fn, levels, layout)
    own = len(layout.own)
    size = own + (3 if levels.draws else 2)
    widths = layout.width, *(layout.batch[axis] for axis in layout.own)
    alone = (*[1] * (size - len(widths)), *widths)  # of a distribution without tensors
    lead = broadcast_shape(alone, *(value.shape[:size] for value in moved.values()))

    def placed(value: Tensor) -> Tensor:
        new = moved.get(id(value))
        return value if new is None else new.expand(*lead, *new.shape[size:])

    distribution = _rebuilt(fn, placed, lambda shape: (*lead, *shape[len(layout.batch) :]))
    return distribution.to_event(own) if own else distribution


def expand_matrices(fn: Any) -> Any:
    """The distribution with matrices that torch stores once for the whole batch expanded over the batch."""
    kept = {
        name: value.expand(*fn.batch_shape, *value.shape[-1 if name.endswith("diag") else -2 :])
        for name, value in vars(fn).items()
        if name.startswith("_unbroadcasted_")
        and fn.event_dim  # the bounds of a Uniform are no matrices
    }
    if not kept:
        return fn
    new = object.__new__(type(fn))
    new.__dict__.update(vars(fn) | kept)
    return new


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a distribution, a transform or a list of these."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _WITHIN) and not isinstance(value, torch.Size):
        for part in value if isinstance(value, list | tuple) else _parts(value).values():
            yield from _tensors(part)


def _parts(value: Any) -> dict[str, Any]:
    """The attributes of a distribution or transform, but for what a transform keeps for later."""
    if isinstance(value, _InverseTransform):
        return {"_inv": value.inv}
    kept = ("_inv", "_cached_x_y") if isinstance(value, Transform) else ()
    return {name: part for name, part in vars(value).items() if name not in kept}


def _rebuilt(value: Any, use: Callable[[Tensor], Tensor], batch: Callable[[Any], Any]) -> Any:
    """A copy with converted tensors and batch shapes, without another check of the arguments."""
    if isinstance(value, Tensor):
        return use(value)
    if not isinstance(value, _WITHIN) or isinstance(value, torch.Size):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_rebuilt(part, use, batch) for part in value)
    new: Any = object.__new__(type(value))
    if isinstance(value, Transform):
        new._cached_x_y, new._inv, new._cache_size = (None, None), None, 0
    new.__dict__.update({n: _rebuilt(part, use, batch) for n, part in _parts(value).items()})
    if isinstance(value, Distribution):
        new._batch_shape = torch.Size(batch(value.batch_shape))
    return new


class InsideVmap(TorchDistribution):
    """A distribution that is used outside vmap and evaluated inside.

    Args:
        fn: the distribution, with tensors ``(S or 1, K or 1, *shape)``.
        support: the support of ``fn``.
        sizes: S, or None without a plate of draws, and K.
        layout: the layout of the site.
    """

    arg_constraints = {}  # noqa: RUF012  (torch's interface)

    def __init__(
        self, fn: Any, support: Any, sizes: tuple[int | None, int], layout: Layout
    ) -> None:
        self.fn, self._support, self.sizes, self.layout = fn, support, sizes, layout
        self.own = torch.Size(layout.batch[axis] for axis in layout.own)
        draws = () if sizes[0] is None else (sizes[0],)
        lead = torch.Size((*draws, sizes[1], layout.width))
        super().__init__(lead, self.own + fn.event_shape, validate_args=False)

    @classmethod
    def of(cls, fn: Any, levels: Levels, layout: Layout) -> InsideVmap:
        """Convert the distribution that a program has inside vmap."""
        sizes = (levels.draws[1] if levels.draws else None), levels.clients[1]
        return cls(_rebuilt(fn, levels.outside, lambda shape: shape), fn.support, sizes, layout)

    @property
    def support(self) -> Any:
        """The support of ``fn``, with the program's own dimensions in front."""
        return torch.distributions.constraints.independent(self._support, len(self.own))

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> InsideVmap:
        """The same distribution: it has all draws and clients already."""
        new = InsideVmap(self.fn, self._support, self.sizes, self.layout)
        new._batch_shape = torch.Size(batch_shape)
        return new

    def _run(self, use: Callable[..., Tensor], *values: Tensor) -> Tensor:
        """Evaluate a function of the distribution and of values of the site inside vmap."""
        with opened(*self.sizes) as levels, Writes():
            fn = _rebuilt(self.fn, levels.inside, lambda shape: shape)
            found = use(fn, *(levels.enter(v, self.layout, len(self.event_shape)) for v in values))
            with temporarily_clear_interpreter_stack():
                return levels.leave(found, self.layout)

    def log_prob(self, value: Tensor) -> Tensor:
        """The log density, summed over the program's own dimensions."""
        found = self._run(lambda fn, inside: fn.log_prob(inside).expand(fn.batch_shape), value)
        return found.flatten(-len(self.own)).sum(-1) if self.own else found

    @property
    def mean(self) -> Tensor:
        """The mean of each entry."""
        return self._run(lambda fn: fn.mean.expand(fn.batch_shape + fn.event_shape))

    @property
    def variance(self) -> Tensor:
        """The variance of each entry."""
        return self._run(lambda fn: fn.variance.expand(fn.batch_shape + fn.event_shape))

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw a value for each client and draw in turn: vmap draws no random numbers."""
        assert not sample_shape
        draws, clients = self.sizes[0] or 1, self.sizes[1]

        def one(draw: int, client: int) -> Tensor:
            fn = _rebuilt(
                self.fn,
                lambda value: value[min(draw, len(value) - 1), min(client, value.shape[1] - 1)],
                lambda shape: shape,
            )
            return fn.sample().expand(fn.batch_shape + fn.event_shape)

        values = [one(*at) for at in product(range(draws), range(clients))]
        found = self.layout.outside(torch.stack(values).unflatten(0, (draws, clients)))
        found = found if self.sizes[0] else found.squeeze(0)
        return found.expand(self.batch_shape + self.event_shape)
