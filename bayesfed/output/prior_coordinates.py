"""Coordinates of θ that are measured from its prior, site by site.

    v = (u − loc(θ)) / scale(θ)           of a site with a location and a scale that other globals determine
    v = Φ⁻¹(F((u − loc) / scale))         of a Cauchy, half-Cauchy, half-Normal or exponential prior

u are unconstrained values, the logarithms of positive ones, F is their distribution function under the prior for
location 0 and scale 1, and z = (u − origin) / unit are the guide's coordinates, with constants. Where the data say
little of an effect and of its scale, their posterior is a funnel in z, and close to a Normal in v (Papaspiliopoulos,
Roberts & Sköld 2007, *A general framework for the parametrization of hierarchical models*). A posterior with the tails
of a Cauchy distribution has those of a Normal in v, and so has the logarithm of a standard deviation that may be 0,
whose posterior has the long left tail e^u of its prior.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints

from bayesfed.elbo import handlers
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.hierarchical import Hierarchical
from bayesfed.guides.unconstrained import delta_at, split

FARTHEST = 35.0
"""The largest distance from the centre of a prior, in v: larger ones count as this one."""


@dataclass(frozen=True, eq=False)
class PriorCoordinates:
    """The change from the guide's coordinates z to v, and back.

    Attributes:
        program: a program whose guide is a :class:`~bayesfed.guides.hierarchical.Hierarchical`.
        params: its global parameters.
        names: the global sites whose coordinates differ.

    Example:
        >>> import torch, bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.output.prior_coordinates import find_prior_coordinates
        >>> fit = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=2)
        >>> find_prior_coordinates(fit.program, fit.params, torch.randn(5, 2)).names  # mu has a Normal prior
        frozenset({'tau'})
    """

    program: Program
    params: Params
    names: frozenset[str]

    def from_guide(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return v ``(S, D)`` and log |det ∂v / ∂z| ``(S,)`` at draws z ``(S, D)``."""
        with torch.no_grad():
            walk = self._walk(z, _Site.from_guide)
        return torch.cat(walk.found, -1)[:, 0, 0].double(), walk.log_det[:, 0, 0].double()

    def to_guide(self, v: Tensor) -> Tensor:
        """Return z ``(S, D)`` at v ``(S, D)``."""
        return self.to_guide_and_volume(v)[0]

    def to_guide_and_volume(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return z ``(S, D)`` and log |det ∂z / ∂v| ``(S,)`` at v ``(S, D)``, differentiable where gradients are on."""
        v = v.to(self.program.schema.scale.dtype)
        walk = self._walk(v, _Site.to_guide)
        return torch.cat(walk.found, -1)[:, 0, 0].to(v.dtype), walk.log_det[:, 0, 0]

    def _walk(self, points: Tensor, change: _Change) -> _Walk:
        """Run the model's part of all clients at these points, in the coordinates that ``change`` starts from."""
        program, count = self.program, len(points)
        walk = _Walk(program.guide, points[:, None, None], self.names, change)
        given = handlers.given(
            program.schema.device, self.params, {}, draws=count, starting=program.local_params
        )
        with given, handlers.Until(program.guide.globals), walk:
            program.model(program.schema)
        return walk


def find_prior_coordinates(program: Program, params: Params, z: Tensor) -> PriorCoordinates | None:
    """Return the coordinates of a program's prior; None if they are those of the guide, up to constants.

    Args:
        program: a program with a global block.
        params: its global parameters.
        z: some draws in the guide's coordinates, ``(S, D)``.
    """
    if not isinstance(program.guide, Hierarchical):
        return None
    every = PriorCoordinates(program, params, frozenset(program.guide.globals))
    with torch.no_grad():
        sites = every._walk(z, _Site.from_guide).sites
    names = frozenset(name for name, site in sites.items() if site.differs)
    return PriorCoordinates(program, params, names) if names else None


class _Site(NamedTuple):
    """The two coordinates of a site at unconstrained values u.

    Attributes:
        origin: that of the guide's coordinates z.
        unit: theirs.
        loc: the location of the prior; of a positive variable, that of its logarithm.
        scale: its scale.
        shape: the standard distribution whose values become those of a standard Normal; None of a location and a scale.
    """

    origin: Tensor
    unit: Tensor
    loc: Tensor
    scale: Tensor
    shape: _Shape | None

    @property
    def differs(self) -> bool:
        """Return whether the change of coordinates is not the same linear function for all draws."""
        return self.shape is not None or any(
            bool((x != x[:1]).any()) for x in (self.loc, self.scale) if x.ndim > 1
        )

    def from_guide(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return u, v and log |∂v / ∂z| of each number at z."""
        u = self.origin + self.unit * z
        v, log_det = (u - self.loc) / self.scale, self.unit.log() - self.scale.log()
        if self.shape is None:
            return u, v, log_det
        v, more = _to_normal(v, self.shape)
        return u, v, log_det + more

    def to_guide(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return u, z and log |∂z / ∂v| of each number at v."""
        x, log_det = v, self.scale.log() - self.unit.log()
        if self.shape is not None:
            x = _from_normal(v, self.shape)
            log_det = log_det - v.square() / 2 - math.log(math.tau) / 2 - self.shape.log_density(x)
        u = self.loc + self.scale * x
        return u, (u - self.origin) / self.unit, log_det


_Change = Callable[[_Site, Tensor], tuple[Tensor, Tensor, Tensor]]


class _Walk(Messenger):
    """Give global sites values by their coordinates, and find the other coordinates.

    Attributes:
        found: by site, the other coordinates ``(S, 1, 1, P)``.
        log_det: the logarithm of the change of volume, ``(S, 1, 1)``.
        sites: those that ``names`` has and whose priors have a location and a scale, by name.
    """

    def __init__(
        self, guide: Hierarchical, points: Tensor, names: frozenset[str], change: _Change
    ) -> None:
        super().__init__()
        self.scalings, self.names, self.change = guide.globals, names, change
        sizes = {name: len(scaling.loc) for name, scaling in guide.globals.items()}
        self.points = split(points, sizes)
        self.found: list[Tensor] = []
        self.log_det = points.new_zeros(points.shape[:-1])
        self.sites: dict[str, _Site] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if name not in self.points:
            return
        prior, point, scaling = msg["fn"], self.points[name], self.scalings[name]
        located = _location_and_scale(prior) if name in self.names else None
        if located is None:
            u, other = scaling.loc + scaling.scale * point, point
        else:
            site = _Site(scaling.loc, scaling.scale, *located, _SHAPES.get(type(_base(prior))))
            u, other, log_det = self.change(site, point)
            self.log_det = self.log_det + log_det.expand_as(point).sum(-1)
            self.sites[name] = site
        self.found.append(other)
        msg["value"] = delta_at(prior, u).v
        msg["done"] = True


def _base(prior: Any) -> Any:
    """Return a distribution without the wrappers that make its dimensions one event."""
    while isinstance(prior, dist.Independent):
        prior = prior.base_dist
    return prior


class _Shape(NamedTuple):
    """A standard distribution on the real line, of a variable or of the logarithm of a positive one.

    Attributes:
        cdf: F.
        sf: 1 − F.
        icdf: the inverse of F.
        isf: that of 1 − F.
        log_density: the logarithm of its density.
    """

    cdf: Callable[[Tensor], Tensor]
    sf: Callable[[Tensor], Tensor]
    icdf: Callable[[Tensor], Tensor]
    isf: Callable[[Tensor], Tensor]
    log_density: Callable[[Tensor], Tensor]


_ROOT = math.sqrt(2.0)
_SHAPES: dict[type[Any], _Shape] = {
    dist.Cauchy: _Shape(
        cdf=lambda x: torch.atan2(torch.ones_like(x), -x) / torch.pi,
        sf=lambda x: torch.atan2(torch.ones_like(x), x) / torch.pi,
        icdf=lambda p: -1 / torch.tan(torch.pi * p),
        isf=lambda p: 1 / torch.tan(torch.pi * p),
        log_density=lambda x: -x.square().log1p() - math.log(math.pi),
    ),
    dist.HalfCauchy: _Shape(
        cdf=lambda x: 2 / torch.pi * torch.atan(x.exp()),
        sf=lambda x: 2 / torch.pi * torch.atan((-x).exp()),
        icdf=lambda p: torch.tan(torch.pi / 2 * p).log(),
        isf=lambda p: -torch.tan(torch.pi / 2 * p).log(),
        log_density=lambda x: x - (2 * x).exp().log1p() + math.log(2 / math.pi),
    ),
    dist.HalfNormal: _Shape(
        cdf=lambda x: torch.erf(x.exp() / _ROOT),
        sf=lambda x: torch.erfc(x.exp() / _ROOT),
        icdf=lambda p: (_ROOT * torch.erfinv(p)).log(),
        isf=lambda p: (-torch.special.ndtri(p / 2)).log(),
        log_density=lambda x: x - (2 * x).exp() / 2 + math.log(2 / math.pi) / 2,
    ),
    dist.Exponential: _Shape(
        cdf=lambda x: -torch.expm1(-x.exp()),
        sf=lambda x: (-x.exp()).exp(),
        icdf=lambda p: (-torch.log1p(-p)).log(),
        isf=lambda p: (-p.log()).log(),
        log_density=lambda x: x - x.exp(),
    ),
}


def _location_and_scale(prior: Any) -> tuple[Tensor, Tensor] | None:
    """Return location and scale of a prior of independent real numbers ``(..., P)``; None if it has none.

    Of a positive number whose prior has a shape, and of a log-Normal one, those of its logarithm.
    """
    base, size = _base(prior), len(prior.event_shape)
    if type(base) in _SHAPES and type(base) is not dist.Cauchy:
        unit = torch.as_tensor(base.scale if hasattr(base, "scale") else 1 / base.rate)
        loc, scale = unit.log(), torch.ones_like(unit)
    elif base.event_shape or not (_is_real(base) or isinstance(base, dist.LogNormal)):
        return None
    else:
        loc, scale = (torch.as_tensor(getattr(base, x)) for x in ("loc", "scale"))
    return tuple(x.reshape(*x.shape[: x.ndim - size], -1) for x in (loc, scale))  # type: ignore[return-value]


def _is_real(prior: Any) -> bool:
    """Return whether a prior of real numbers has a location and a scale."""
    return prior.support == constraints.real and hasattr(prior, "scale")


def _to_normal(x: Tensor, shape: _Shape) -> tuple[Tensor, Tensor]:
    """Return Φ⁻¹(F(x)) and the logarithm of its derivative."""
    x = x.double()
    below, above = shape.cdf(x), shape.sf(x)
    v = torch.where(below < above, torch.special.ndtri(below), -torch.special.ndtri(above))
    v = v.clamp(-FARTHEST, FARTHEST)
    return v, shape.log_density(x) + v.square() / 2 + math.log(math.tau) / 2


def _from_normal(v: Tensor, shape: _Shape) -> Tensor:
    """Return F⁻¹(Φ(v)), the inverse of :func:`_to_normal`."""
    tail = torch.special.ndtr(-v.double().abs().clamp(max=FARTHEST))
    return torch.where(v < 0, shape.icdf(tail), shape.isf(tail)).to(v.dtype)
