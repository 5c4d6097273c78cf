"""Coordinates of θ that are measured from its prior, site by site.

    v = (u − loc(θ)) / scale(θ)           of a site with a location and a scale that other globals determine
    v = Φ⁻¹(F((u − loc) / scale))         of a Cauchy prior, F its distribution function

u are unconstrained values, and z = (u − origin) / unit the guide's coordinates, with constants. Where the data say
little of an effect and of its scale, their posterior is a funnel in z, and close to a Normal in v (Papaspiliopoulos,
Roberts & Sköld 2007, *A general framework for the parametrization of hierarchical models*). A posterior with the tails
of a Cauchy distribution has those of a Normal in v.
"""

from __future__ import annotations

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

FARTHEST = 8.0
"""The largest distance from the centre of a Cauchy prior, in v: larger ones count as this one."""


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
        >>> z = torch.randn(5, 2)
        >>> find_prior_coordinates(fit.program, fit.params, z) is None  # no prior depends on a global variable
        True
    """

    program: Program
    params: Params
    names: frozenset[str]

    def from_guide(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return v ``(S, D)`` and log |det ∂v / ∂z| ``(S,)`` at draws z ``(S, D)``."""
        walk = self._walk(z, _Site.from_guide)
        return torch.cat(walk.found, -1)[:, 0, 0].double(), walk.log_det[:, 0, 0].double()

    def to_guide(self, v: Tensor) -> Tensor:
        """Return z ``(S, D)`` at v ``(S, D)``."""
        v = v.to(self.program.schema.scale.dtype)
        return torch.cat(self._walk(v, _Site.to_guide).found, -1)[:, 0, 0].to(v.dtype)

    def _walk(self, points: Tensor, change: _Change) -> _Walk:
        """Run the model's part of all clients at these points, in the coordinates that ``change`` starts from."""
        program, count = self.program, len(points)
        walk = _Walk(program.guide, points[:, None, None], self.names, change)
        given = handlers.given(
            program.schema.device, self.params, {}, draws=count, starting=program.local_params
        )
        with torch.no_grad(), given, handlers.Until(program.guide.globals), walk:
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
    names = frozenset(every._walk(z, _Site.from_guide).changed)
    return PriorCoordinates(program, params, names) if names else None


class _Site(NamedTuple):
    """The two coordinates of a site at unconstrained values u.

    Attributes:
        origin: that of the guide's coordinates z.
        unit: theirs.
        loc: the location of the prior.
        scale: its scale.
        is_cauchy: whether it is a Cauchy distribution.
    """

    origin: Tensor
    unit: Tensor
    loc: Tensor
    scale: Tensor
    is_cauchy: bool

    def from_guide(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return u, v and log |∂v / ∂z| of each number at z."""
        u = self.origin + self.unit * z
        v, log_det = (u - self.loc) / self.scale, self.unit.log() - self.scale.log()
        if not self.is_cauchy:
            return u, v, log_det
        v, more = _to_normal(v)
        return u, v, log_det + more

    def to_guide(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return u, z and 0, for the logarithm that only the other direction needs, at v."""
        u = self.loc + self.scale * (_from_normal(v) if self.is_cauchy else v)
        return u, (u - self.origin) / self.unit, torch.zeros_like(v)


_Change = Callable[[_Site, Tensor], tuple[Tensor, Tensor, Tensor]]


class _Walk(Messenger):
    """Give global sites values by their coordinates, and find the other coordinates.

    Attributes:
        found: by site, the other coordinates ``(S, 1, 1, P)``.
        log_det: log |det ∂v / ∂z|, ``(S, 1, 1)``.
        changed: the sites whose change of coordinates is not the same linear function for all draws.
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
        self.changed: list[str] = []

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if name not in self.points:
            return
        prior, point, scaling = msg["fn"], self.points[name], self.scalings[name]
        located = _location_and_scale(prior) if name in self.names else None
        if located is None:
            u, other = scaling.loc + scaling.scale * point, point
        else:
            site = _Site(scaling.loc, scaling.scale, *located, _is_cauchy(prior))
            u, other, log_det = self.change(site, point)
            self.log_det = self.log_det + log_det.expand_as(point).sum(-1)
            if site.is_cauchy or any((x != x[:1]).any() for x in located if x.ndim == point.ndim):
                self.changed.append(name)
        self.found.append(other)
        msg["value"] = delta_at(prior, u).v
        msg["done"] = True


def _base(prior: Any) -> Any:
    """Return a distribution without the wrappers that make its dimensions one event."""
    while isinstance(prior, dist.Independent):
        prior = prior.base_dist
    return prior


def _is_cauchy(prior: Any) -> bool:
    return isinstance(_base(prior), torch.distributions.Cauchy)


def _location_and_scale(prior: Any) -> tuple[Tensor, Tensor] | None:
    """Return location and scale of a prior of independent real numbers ``(..., P)``; None if it has none."""
    base, size = _base(prior), len(prior.event_shape)
    if base.event_shape or base.support != constraints.real or not hasattr(base, "scale"):
        return None
    loc, scale = (torch.as_tensor(getattr(base, x)) for x in ("loc", "scale"))
    return tuple(x.reshape(*x.shape[: x.ndim - size], -1) for x in (loc, scale))  # type: ignore[return-value]


def _to_normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return Φ⁻¹(F(x)), F that of a standard Cauchy distribution, and the logarithm of its derivative."""
    x = x.double()
    v = x.sign() * -torch.special.ndtri(torch.atan2(torch.ones_like(x), x.abs()) / torch.pi)
    v = v.clamp(-FARTHEST, FARTHEST)
    log_cauchy = -x.square().log1p() - torch.tensor(torch.pi).log()
    log_normal = -v.square() / 2 - torch.tensor(2 * torch.pi).log() / 2
    return v, log_cauchy - log_normal


def _from_normal(v: Tensor) -> Tensor:
    """Return F⁻¹(Φ(v)), the inverse of :func:`_to_normal`."""
    tail = torch.special.ndtr(-v.double().abs().clamp(max=FARTHEST))
    return (v.sign() / torch.tan(torch.pi * tail)).to(v.dtype)
