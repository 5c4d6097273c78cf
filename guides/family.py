"""The interface of a family of q(z), where z are all global variables, unconstrained and stacked."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from bayesfed.guides import natural_gradient
from bayesfed.guides.natural_gradient import Direction, QuadraticTerm

GLOBAL = "global"
"""The auxiliary site that holds z; the names of the family's parameters begin with it."""
Params = Mapping[str, Tensor]


class Family:
    """A family of distributions over the globals: a part of a Pyro guide, and its natural-gradient steps.

    Subclasses are frozen dataclasses. Only Gaussian ones have ``at`` and the last two methods.
    """

    full_curvature: ClassVar[bool] = True
    """True if its steps need the full curvature, False if they need the diagonal."""

    def __call__(self, init: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sample z; returns ``(z, loc, scale)``, each with last dimension D, where ``init`` is the start of loc."""
        raise NotImplementedError

    def takes_natural_steps(self, rate: float) -> bool:
        """True if a step is a natural-gradient step, False if it is Adam's, at this fraction of the first rate."""
        return True

    def normal(self, params: Params) -> tuple[Tensor, Tensor]:
        """Location ``(D,)`` and L ``(D, D)`` of q or its affine part; if L is diagonal, its diagonal ``(D,)``."""
        raise NotImplementedError

    def at(self, loc: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """The parameters of N(loc, L Lᵀ), L as in :meth:`normal`."""
        raise NotImplementedError

    @property
    def levels(self) -> tuple[float, ...]:
        """The rates at which q(θ) has to converge, one after the other: one for each kind of steps."""
        both = self.takes_natural_steps(1.0) != self.takes_natural_steps(0.5)
        return (1.0, 0.5) if both else (1.0,)

    def zero_term(self, params: Params) -> QuadraticTerm:
        """The quadratic of a term that is zero."""
        loc, scale = self.normal(params)
        return QuadraticTerm(torch.zeros_like(loc), torch.zeros_like(scale))

    def fit_quadratic(
        self, params: Params, z: Tensor, grads: Tensor, before: QuadraticTerm
    ) -> QuadraticTerm:
        """The quadratics of K terms; arguments as for :func:`bayesfed.guides.natural_gradient.fit_quadratic`."""
        return natural_gradient.fit_quadratic(*self.normal(params), z, grads, before)

    def direction(
        self,
        params: Params,
        term: QuadraticTerm,
        z: Tensor | None = None,
        noise: float | Tensor | None = None,
    ) -> Direction:
        """The direction of a natural-gradient step; see :func:`bayesfed.guides.natural_gradient.direction`."""
        return natural_gradient.direction(*self.normal(params), term, z, noise=noise)

    def ascend(
        self, params: Params, direction: Direction, rate: float | Tensor
    ) -> dict[str, Tensor]:
        """All parameters of the family after a step; see :func:`bayesfed.guides.natural_gradient.step`."""
        return self.at(*natural_gradient.step(*self.normal(params), direction, rate))

    def transport_maps(self, start: Params, copies: Params) -> dict[str, Tensor]:
        """The optimal transport maps that carry q onto copies of it; other parameters in ``copies`` are unchanged.

        A map is affine, x ↦ m_i + A_i (x − m), and so is a mean of maps (Álvarez-Esteban et al. 2016, eq. 6).
        """
        raise NotImplementedError

    def apply_map(self, start: Params, maps: Params) -> dict[str, Tensor]:
        """All parameters of ``start`` after q is carried by a map; the inverse of :meth:`transport_maps`."""
        raise NotImplementedError
