"""A Normal with full covariance over all global variables, in unconstrained space."""

import math
from dataclasses import dataclass

import pyro
import torch
from torch import Tensor

from bayesfed.guides.family import GLOBAL, Family, Params
from bayesfed.guides.mean_field import LOC, LOG_SCALE, SLOPE
from bayesfed.guides.sticking_the_landing import StickingTheLanding
from bayesfed.guides.triangular import CholeskyNormal

TRIL = f"{GLOBAL}.tril"


@dataclass(frozen=True)
class FullRank(Family):
    """q(z) = N(loc, LLᵀ), L = diag(exp(log_scale)) (I + strictly lower triangle of ``tril``).

    Attributes:
        init_scale: standard deviation at the start, in units of the prior's.
    """

    init_scale: float = 0.3

    def __call__(self, init: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sample z; returns ``(z, loc, scale)``, where scale are the marginal standard deviations."""
        loc = pyro.param(LOC, init, event_dim=1)
        tril = affine(init, self.init_scale)
        q = StickingTheLanding(CholeskyNormal, loc, tril)
        z = pyro.sample(GLOBAL, q, infer={"is_auxiliary": True})
        return z, loc, tril.square().sum(-1).sqrt()

    def normal(self, params: Params) -> tuple[Tensor, Tensor]:
        """The location and L."""
        return params[LOC], scale_tril(params[LOG_SCALE], params[TRIL])

    def at(self, loc: Tensor, scale_tril: Tensor) -> dict[str, Tensor]:
        """The parameters of N(loc, LLᵀ)."""
        return {LOC: loc} | from_scale_tril(scale_tril)

    def transport_maps(self, start: Params, copies: Params) -> dict[str, Tensor]:
        """The maps that carry q onto its copies, with slopes A_i = Σ^{-½} (Σ^{½} Σ_i Σ^{½})^{½} Σ^{-½}."""
        rest = {name: value for name, value in copies.items() if name not in (LOG_SCALE, TRIL)}
        before, now = self.normal(start)[1], self.normal(copies)[1]
        root, inverse = _roots(_covariance(before))
        slope = inverse @ _roots(root @ _covariance(now) @ root)[0] @ inverse
        return rest | {SLOPE: slope.to(before)}

    def apply_map(self, start: Params, maps: Params) -> dict[str, Tensor]:
        """All parameters after q is carried by a map: Σ ← A Σ A."""
        rest = {name: maps[name] for name in start if name in maps}
        before, slope = self.normal(start)[1], maps[SLOPE].double()
        covariance = slope @ _covariance(before) @ slope
        return rest | from_scale_tril(torch.linalg.cholesky(covariance).to(before))


def affine(init: Tensor, init_scale: float) -> Tensor:
    """L ``(..., D, D)``, lower triangular, from its two ``pyro.param``."""
    size = init.shape[-1]
    log_scale = pyro.param(LOG_SCALE, torch.full_like(init, math.log(init_scale)), event_dim=1)
    return scale_tril(log_scale, pyro.param(TRIL, init.new_zeros(size, size), event_dim=2))


def scale_tril(log_scale: Tensor, tril: Tensor) -> Tensor:
    """L = diag(exp(log_scale)) (I + strictly lower triangle of ``tril``): ``(..., D, D)``."""
    unit = torch.eye(tril.shape[-1], dtype=tril.dtype, device=tril.device)
    return log_scale.exp()[..., None] * (tril.tril(-1) + unit)


def from_scale_tril(scale_tril: Tensor) -> dict[str, Tensor]:
    """The parameters that give a lower triangular L with positive diagonal; the inverse of :func:`scale_tril`."""
    diagonal = scale_tril.diagonal(dim1=-2, dim2=-1)
    return {LOG_SCALE: diagonal.log(), TRIL: (scale_tril / diagonal[..., None]).tril(-1)}


def _covariance(tril: Tensor) -> Tensor:
    """Return L Lᵀ in double precision, since roots of a product lose half of the digits twice."""
    return tril.double() @ tril.mT.double()


def _roots(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ^{½} and Σ^{-½}."""
    values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
    root = values.clamp(min=1e-30).sqrt()[..., None, :]
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT
