"""A spline flow over all global variables, for skewed and heavy-tailed posteriors such as those of scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.distributions.transforms as T
import torch
from torch import Tensor, nn

from bayesfed.functional.networks import call_with
from bayesfed.guides import natural_gradient
from bayesfed.guides.family import GLOBAL, Family, Params
from bayesfed.guides.full_rank import FullRank, affine
from bayesfed.guides.mean_field import LOC
from bayesfed.guides.natural_gradient import Direction, QuadraticTerm

SPLINE = f"{GLOBAL}.flow."
"""The prefix of the names of the spline's parameters."""


@dataclass(frozen=True)
class Flow(Family):
    """z = loc + L f(ε), ε ~ N(0, I), where f is an autoregressive rational spline (Dolatabadi et al. 2020).

    The affine part starts as in :class:`~bayesfed.guides.FullRank` and f starts close to the identity.

    Attributes:
        init_scale: standard deviation at the start, in units of the prior's.
        bins: number of spline segments in each dimension.
        bound: the spline acts on (-bound, bound); outside it is the identity.
    """

    init_scale: float = 0.3
    bins: int = 8
    bound: float = 2.5

    def __call__(self, init: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sample z; returns ``(z, loc, scale)`` with the affine part's location and scale."""
        spline = _spline(init.shape[-1], self.bins, self.bound, init.device, init.dtype)
        weights = {
            name: pyro.param(f"{SPLINE}{name}", start.to(init), event_dim=start.ndim)
            for name, start in spline.named_parameters()
        }
        loc = pyro.param(LOC, init, event_dim=1)
        tril = affine(init, self.init_scale)
        q = _Pushforward(spline, weights, loc, tril)
        z = pyro.sample(GLOBAL, q, infer={"is_auxiliary": True})
        return z, loc, tril.square().sum(-1).sqrt()

    def takes_natural_steps(self, rate: float) -> bool:
        """True while more than half of the rate is left: only the affine part moves. Then Adam moves all parameters."""
        return rate > 0.5

    def normal(self, params: Params) -> tuple[Tensor, Tensor]:
        """The location and L of the affine part."""
        return FullRank().normal(params)

    def direction(
        self,
        params: Params,
        term: QuadraticTerm,
        z: Tensor | None = None,
        noise: float | Tensor | None = None,
    ) -> Direction:
        """The direction of a natural-gradient step on the affine part.

        The entropy is reduced, so that the affine part stays narrower than the posterior: a spline can widen the bulk,
        but too few draws fall beyond its bound to shorten tails that are too long.
        """
        return natural_gradient.direction(*self.normal(params), term, z, entropy=0.5, noise=noise)

    def ascend(
        self, params: Params, direction: Direction, rate: float | Tensor
    ) -> dict[str, Tensor]:
        """The parameters after a step on the affine part, with the spline unchanged."""
        spline = {name: value for name, value in params.items() if name.startswith(SPLINE)}
        return spline | FullRank().ascend(params, direction, rate)


class _Spline(nn.Module):
    """ε ↦ (f(ε), log |det f'(ε)|), by Pyro's transforms."""

    def __init__(self, size: int, bins: int, bound: float) -> None:
        super().__init__()
        self.transform = (
            T.Spline(1, count_bins=bins, bound=bound)
            if size == 1
            else T.spline_autoregressive(size, [4 * size], count_bins=bins, bound=bound)
        )

        if size == 1:  # Pyro's start of this one is far from the identity
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.1)

    def forward(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        pushed = self.transform(noise)
        log_det = self.transform.log_abs_det_jacobian(noise, pushed)
        return pushed, log_det.reshape(*noise.shape[:-1], -1).sum(-1)


@cache
def _spline(
    size: int, bins: int, bound: float, device: torch.device, dtype: torch.dtype
) -> _Spline:
    """Return the spline of D dimensions at its start, the same one at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _Spline(size, bins, bound).to(device=device, dtype=dtype)


class _Pushforward(dist.TorchDistribution):
    """The distribution of loc + L f(ε), which gives the density of its last draw only."""

    has_rsample = True
    arg_constraints = {}  # noqa: RUF012  (torch's interface)
    support = dist.constraints.real_vector

    def __init__(
        self,
        spline: _Spline,
        weights: dict[str, Tensor],
        loc: Tensor,
        scale_tril: Tensor,
        batch_shape: Sequence[int] = (),
    ) -> None:
        self.parts = (spline, weights, loc, scale_tril)
        self.drawn: tuple[Tensor, Tensor] | None = None
        super().__init__(torch.Size(batch_shape), loc.shape[-1:], validate_args=False)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> _Pushforward:
        return _Pushforward(*self.parts, batch_shape)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        spline, weights, loc, scale_tril = self.parts
        shape = (*sample_shape, *self.batch_shape, *self.event_shape)
        noise = torch.randn(shape, dtype=loc.dtype, device=loc.device)
        pushed, log_det = call_with(spline, weights, noise)
        z = loc + (scale_tril @ pushed[..., None]).squeeze(-1)
        log_prob = dist.Normal(torch.zeros_like(loc), 1.0).log_prob(noise).sum(-1) - log_det
        self.drawn = z, log_prob - scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return z

    def log_prob(self, value: Tensor) -> Tensor:
        if self.drawn is None or self.drawn[0] is not value:
            raise NotImplementedError("a Flow gives the density of its own last draw only")
        return self.drawn[1]
