"""A mean-field Normal over all global variables, in unconstrained space."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayesfed.guides.family import GLOBAL, Family, Params
from bayesfed.guides.sticking_the_landing import StickingTheLanding

LOC, LOG_SCALE, SLOPE = f"{GLOBAL}.loc", f"{GLOBAL}.log_scale", f"{GLOBAL}.slope"


@dataclass(frozen=True)
class MeanField(Family):
    """q(z) = N(loc, diag(scale²)): the cheapest family, without correlations of the global variables.

    Attributes:
        init_scale: standard deviation at the start, in units of the prior's.
    """

    init_scale: float = 0.3
    full_curvature: ClassVar[bool] = False

    def __call__(self, init: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sample z; returns ``(z, loc, scale)``, each with last dimension D."""
        loc = pyro.param(LOC, init, event_dim=1)
        log_scale = pyro.param(
            LOG_SCALE, torch.full_like(init, math.log(self.init_scale)), event_dim=1
        )
        scale = log_scale.exp()
        q = StickingTheLanding(lambda loc, scale: dist.Normal(loc, scale).to_event(1), loc, scale)
        return pyro.sample(GLOBAL, q, infer={"is_auxiliary": True}), loc, scale

    def normal(self, params: Params) -> tuple[Tensor, Tensor]:
        """The location and the scales."""
        return params[LOC], params[LOG_SCALE].exp()

    def at(self, loc: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """The parameters of N(loc, diag(scale²))."""
        return {LOC: loc, LOG_SCALE: scale.log()}

    def transport_maps(self, start: Params, copies: Params) -> dict[str, Tensor]:
        """The maps that carry q onto its copies, with ratios of scales as slopes, whose mean is that of the scales."""
        rest = {name: value for name, value in copies.items() if name != LOG_SCALE}
        return rest | {SLOPE: (copies[LOG_SCALE] - start[LOG_SCALE]).exp()}

    def apply_map(self, start: Params, maps: Params) -> dict[str, Tensor]:
        """All parameters after q is carried by a map; the inverse of :meth:`transport_maps`."""
        rest = {name: maps[name] for name in start if name != LOG_SCALE}
        return rest | {LOG_SCALE: start[LOG_SCALE] + maps[SLOPE].log()}
