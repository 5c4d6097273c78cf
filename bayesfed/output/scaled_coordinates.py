"""Coordinates of θ in which some real variables are multiplied by positive ones.

    v = σ(θ) u

of a site u that the model multiplies by another one, σ, such as the effects of a program that is written as
``effect = sigma * pyro.sample("z", dist.Normal(0, 1))``. Where the data say much of the effects, the products are what
they determine: the posterior of u and log σ is bent, and that of v and log σ close to a Normal (Papaspiliopoulos,
Roberts & Sköld 2007, *A general framework for the parametrization of hierarchical models*). This is the inverse of
:mod:`bayesfed.output.prior_coordinates`. A program does not say what it multiplies, so that weighted draws decide:
those products are taken whose Normal approximation has the smaller cross-entropy, in the guide's coordinates,

    ½ log |cov(v)| − E[log |det ∂v / ∂z|].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from bayesfed.elbo.moments import base_support
from bayesfed.elbo.program import Program
from bayesfed.guides.hierarchical import Hierarchical
from bayesfed.guides.unconstrained import split

GAIN = 0.1
"""The least decrease of the cross-entropy, in nats, for which a product is taken."""


@dataclass(frozen=True, eq=False)
class ScaledCoordinates:
    """The change from the guide's coordinates z to v, and back.

    Attributes:
        guide: the guide of a program.
        scales: the names of sites that are multiplied, with those of the positive sites that multiply them.

    Example:
        >>> import torch, bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.output.scaled_coordinates import ScaledCoordinates
        >>> fit = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=2)
        >>> products = ScaledCoordinates(fit.program.guide, {"mu": "tau"})
        >>> z = torch.randn(5, 2, dtype=torch.float64)
        >>> torch.allclose(products.to_guide(products.from_guide(z)[0]), z)
        True
    """

    guide: Hierarchical
    scales: Mapping[str, str]

    def from_guide(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return v ``(S, D)`` and log |det ∂v / ∂z| ``(S,)`` at draws z ``(S, D)``."""
        parts, log_scales = self._parts_and_log_scales(z.double())
        log_det = torch.zeros_like(z[:, 0], dtype=torch.float64)
        for name, log_scale in log_scales.items():
            scaling = self.guide.globals[name]
            parts[name] = (scaling.loc + scaling.scale * parts[name]) * log_scale.exp()
            log_det += (log_scale + scaling.scale.log()).sum(1)
        return torch.cat([*parts.values()], 1), log_det

    def to_guide(self, v: Tensor) -> Tensor:
        """Return z ``(S, D)`` at v ``(S, D)``."""
        parts, log_scales = self._parts_and_log_scales(v)
        for name, log_scale in log_scales.items():
            scaling = self.guide.globals[name]
            parts[name] = (parts[name] * (-log_scale).exp() - scaling.loc) / scaling.scale
        return torch.cat([*parts.values()], 1)

    def _parts_and_log_scales(self, z: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the coordinates of each site, and log σ of those that are multiplied, ``(S, P)`` each.

        The coordinates of the positive sites are the same in v and z.
        """
        sizes = {name: len(scaling.loc) for name, scaling in self.guide.globals.items()}
        parts = dict(split(z, sizes))
        log_scales = {}
        for name, scale in self.scales.items():
            scaling = self.guide.globals[scale]
            log_scale = scaling.loc + scaling.scale * parts[scale]
            log_scales[name] = log_scale.expand_as(parts[name])
        return parts, log_scales


def find_scaled_coordinates(
    program: Program, z: Tensor, weights: Tensor
) -> ScaledCoordinates | None:
    """Return coordinates in which weighted draws are closer to a Normal; None if there are none.

    Args:
        program: a program with a global block.
        z: draws in the guide's coordinates, ``(S, D)``.
        weights: theirs, which sum to 1, ``(S,)``.
    """
    if not isinstance(guide := program.guide, Hierarchical):
        return None
    supports = {site.name: site.support for site in program.globals if site.name in guide.globals}
    sizes = {name: len(guide.globals[name].loc) for name in supports}
    positive = [name for name, support in supports.items() if _is_positive(support)]
    before = _cross_entropy(ScaledCoordinates(guide, {}), z, weights)
    scales: dict[str, str] = {}
    for name, support in supports.items():
        found = {
            scale: before - _cross_entropy(ScaledCoordinates(guide, {name: scale}), z, weights)
            for scale in positive
            if _is_real(support) and sizes[scale] in (1, sizes[name])
        }
        if found and max(found.values()) > GAIN:
            scales[name] = max(found, key=lambda scale: found[scale])
    return ScaledCoordinates(guide, scales) if scales else None


def _cross_entropy(coordinates: ScaledCoordinates, z: Tensor, weights: Tensor) -> float:
    """Return that of the Normal with the moments of weighted draws, up to a constant; infinite if it is singular."""
    v, log_det = coordinates.from_guide(z)
    away = v - weights @ v
    root, failed = torch.linalg.cholesky_ex((weights[:, None] * away).mT @ away)
    if bool(failed):
        return torch.inf
    return float(root.diagonal().log().sum() - weights @ log_det)


def _is_real(support: Any) -> bool:
    """Return whether a variable is real."""
    return base_support(support) in (constraints.real, constraints.real_vector)


def _is_positive(support: Any) -> bool:
    """Return whether a variable is positive, without an upper bound."""
    base = base_support(support)
    return getattr(base, "lower_bound", None) == 0.0 and not hasattr(base, "upper_bound")
