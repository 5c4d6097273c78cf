"""Classes of rows by latent Gaussian functions with a logistic link, which Laplace's method integrates out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyro.distributions as dist
import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from numpy.polynomial.hermite_e import hermegauss
from pyro.distributions.util import broadcast_shape
from torch import Tensor
from torch.nn.functional import logsigmoid

NEWTON, DIFFERENTIATED = 15, 2
"""The number of Newton steps to the mode, and of more steps that are differentiated through."""
LENGTHS = (1.0, 0.5, 0.2, 0.05)
"""Parts of a Newton step, of which the best is taken: whole ones diverge where the functions vary by much."""
POINTS = 32
"""The number of points of Gauss-Hermite quadrature of a row's probability."""


class GaussianClasses(dist.TorchDistribution):
    """The classes of B rows, decided one after the other by independent functions f_c ~ N(mean, covariance).

        p(y = c | y ≥ c, f) = 1 − σ(f_c)        c = 0 … C − 2, the last class being what is left

    This is a tree of binary classifiers (of GP-Tree, Achituve et al. 2021, one whose every left child is a leaf); of
    two classes, logistic regression on f. The density of all rows together integrates the f_c out by Laplace's method
    (Rasmussen & Williams 2006, algorithm 3.1), differentiably.

    Args:
        mean: ``(..., B)``.
        covariance: ``(..., B, B)``, of the functions, without noise.
        mask: bool ``(..., B)``: the rows that count.
        classes: C.

    Example:
        >>> import torch
        >>> from bayesfed.functional.gaussian_classes import GaussianClasses
        >>> rows = GaussianClasses(torch.zeros(1), torch.eye(1), torch.tensor([True]), 2)
        >>> rows.log_prob(torch.tensor([1.0])), rows.given(torch.zeros(0), rows.there[:0])["probs"]
        (tensor(-0.7007), tensor([[0.5000, 0.5000]]))
    """

    arg_constraints = {}  # noqa: RUF012  (torch's interface)

    def __init__(self, mean: Tensor, covariance: Tensor, mask: Tensor, classes: int) -> None:
        self.mean_of_f, self.covariance_of_f, self.there = mean, covariance, mask
        self.classes = classes
        batch = broadcast_shape(mean.shape[:-1], covariance.shape[:-2], mask.shape[:-1])
        super().__init__(batch, mean.shape[-1:], validate_args=False)

    @property
    def support(self) -> Any:
        """Integers from 0 to C − 1."""
        return dist.constraints.independent(
            dist.constraints.integer_interval(0, self.classes - 1), 1
        )

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> GaussianClasses:
        """Return the same distribution with a larger batch shape."""
        size = self.event_shape[0]
        return GaussianClasses(
            self.mean_of_f.expand(*batch_shape, size),
            self.covariance_of_f.expand(*batch_shape, size, size),
            self.there.expand(*batch_shape, size),
            self.classes,
        )

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log ∫ p(y | f) N(f) df by Laplace's method, ``(...)``."""
        found = _Laplace(self.mean_of_f, self.covariance_of_f, *self._nodes(value, self.there))
        return found.log_evidence().sum(-1)

    def given(self, value: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the probabilities ``(..., Q, C)`` of each of the last Q rows, given the first n.

        Args:
            value: the classes of the first n rows, ``(..., n)``.
            mask: bool ``(..., n)``: True for each of them that is known.
        """
        n, mean, covariance = value.shape[-1], self.mean_of_f, self.covariance_of_f
        own = _Laplace(mean[..., :n], covariance[..., :n, :n], *self._nodes(value, mask))
        cross = covariance[..., :n, n:].unsqueeze(-3)
        loc = mean[..., n:].unsqueeze(-2) + (own.weights[..., None, :] @ cross).squeeze(-2)
        white = torch.linalg.solve_triangular(own.factor, own.root[..., None] * cross, upper=False)
        variance = covariance.diagonal(dim1=-2, dim2=-1)[..., n:].unsqueeze(-2)
        sd = (variance - white.square().sum(-2)).clamp(min=0.0).sqrt()
        at, weights = (torch.as_tensor(v).to(sd) for v in hermegauss(POINTS))
        more = (torch.sigmoid(loc[..., None] + sd[..., None] * at) * weights / weights.sum()).sum(
            -1
        )
        left = torch.cat([torch.ones_like(more[..., :1, :]), more.cumprod(-2)], -2)
        stop = torch.cat([1 - more, torch.ones_like(more[..., :1, :])], -2)
        return {"probs": (left * stop).transpose(-1, -2)}

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw functions, and classes given them."""
        shape = (*self._extended_shape(torch.Size(sample_shape)), self.classes - 1)
        factor = psd_safe_cholesky(self.covariance_of_f)
        f = self.mean_of_f[..., None] + factor @ torch.randn(shape).to(factor)
        goes_on = torch.rand_like(f) < f.sigmoid()
        return goes_on.cumprod(-1).sum(-1).to(f)

    def _nodes(self, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return, by node, whether a row goes on to later classes, and whether it comes there: ``(..., C - 1, n)``."""
        node = torch.arange(self.classes - 1, device=value.device)[:, None]
        value, mask = value.unsqueeze(-2), mask.unsqueeze(-2)
        return (value > node).to(self.mean_of_f), (mask & (value >= node)).to(self.mean_of_f)


class _Laplace:
    """Laplace's approximation at each node: the mode, in the notation of Rasmussen & Williams (2006), algorithm 3.1.

    Attributes:
        weights: a = K⁻¹ (f̂ − m), ``(..., C - 1, n)``.
        root: W^½.
        factor: the Cholesky factor of I + W^½ K W^½.
    """

    def __init__(self, mean: Tensor, covariance: Tensor, up: Tensor, there: Tensor) -> None:
        self.mean, self.covariance = mean.unsqueeze(-2), covariance.unsqueeze(-3)
        self.up, self.there = up, there
        with torch.no_grad():
            self.weights = torch.zeros_like(self.mean * up)
            for _ in range(NEWTON):
                whole = self._newton()
                tried = torch.stack([self.weights.lerp(whole, part) for part in LENGTHS])
                best = self._log_joint(tried).argmax(0, keepdim=True)[..., None]
                self.weights = tried.take_along_dim(best, 0)[0]
        for _ in range(DIFFERENTIATED):
            self.weights = self._newton()
        self.root, self.factor, _ = self._curvature(self._f(self.weights))

    def log_evidence(self) -> Tensor:
        """Return the log evidence of each node, ``(..., C - 1)``."""
        half_log_det = self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return self._log_joint(self.weights) - half_log_det

    def _f(self, weights: Tensor) -> Tensor:
        return self.mean + (self.covariance @ weights[..., None]).squeeze(-1)

    def _log_joint(self, weights: Tensor) -> Tensor:
        f = self._f(weights)
        fit = (self.there * logsigmoid((2 * self.up - 1) * f)).sum(-1)
        return fit - (weights * (f - self.mean)).sum(-1) / 2

    def _curvature(self, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chance = f.sigmoid()
        root = (chance * (1 - chance)).clamp(min=torch.finfo(f.dtype).tiny).sqrt() * self.there
        eye = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
        inner = eye + root[..., None] * self.covariance * root[..., None, :]
        return root, torch.linalg.cholesky_ex(inner).L, chance

    def _newton(self) -> Tensor:
        f = self._f(self.weights)
        root, factor, chance = self._curvature(f)
        b = root.square() * (f - self.mean) + self.there * (self.up - chance)
        inner = root * (self.covariance @ b[..., None]).squeeze(-1)
        return b - root * torch.cholesky_solve(inner[..., None], factor).squeeze(-1)
