"""What an algorithm may ask of a family of q(z), z being all global variables, unconstrained and stacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from bayesfed.guides.natural_gradient import Direction, Site

GLOBAL = "global"
"""The auxiliary site that holds z; the names of the family's parameters begin with it."""
Params = Mapping[str, Tensor]


class Family:
    """A family of distributions over the globals: a part of a Pyro guide, and its steps.

    Subclasses are frozen dataclasses; only Gaussian ones have the last two methods.
    """

    gaussian: ClassVar[bool] = False
    """Whether q(z) is Normal."""
    whole: ClassVar[bool] = True
    """Whether its steps need the curvature whole, else its diagonal."""

    def __call__(self, init: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sample z; returns ``(z, loc, scale)``, each with last dimension D, of which ``init`` is a start for loc."""
        raise NotImplementedError

    def natural(self, rate: float) -> bool:
        """Whether it takes natural-gradient steps when this is left of the learning rate, else Adam's."""
        return True

    @property
    def levels(self) -> tuple[float, ...]:
        """The rates at which q(θ) has to converge, one after the other: one for each kind of steps."""
        return (1.0, 0.5) if self.natural(1.0) != self.natural(0.5) else (1.0,)

    def blank(self, params: Params) -> Site:
        """The site of a term that is not there."""
        loc = params[f"{GLOBAL}.loc"]
        return Site(torch.zeros_like(loc), loc.new_zeros(len(loc), len(loc)))

    def site(self, params: Params, z: Tensor, grads: Tensor, before: Site) -> Site:
        """Sites of K terms; arguments as for :func:`bayesfed.guides.natural_gradient.site`."""
        raise NotImplementedError

    def direction(
        self, params: Params, of: Site, z: Tensor, noise: float | Tensor | None = None
    ) -> Direction:
        """Where a natural-gradient step goes; see :func:`bayesfed.guides.natural_gradient.direction`."""
        raise NotImplementedError

    def ascend(self, params: Params, to: Direction, rate: float | Tensor) -> dict[str, Tensor]:
        """All its parameters after a step; see :func:`bayesfed.guides.natural_gradient.step`."""
        raise NotImplementedError

    def moved(self, start: Params, copies: Params) -> dict[str, Tensor]:
        """Copies of q as the optimal transport maps that carry q onto them; what else is in ``copies`` stays.

        A map is affine, x ↦ m_i + A_i (x − m), and so is a mean of maps (Álvarez-Esteban et al. 2016, eq. 6).
        """
        raise NotImplementedError

    def carried(self, start: Params, moved: Params) -> dict[str, Tensor]:
        """All of ``start``, q carried by a map; inverts :meth:`moved`."""
        raise NotImplementedError
