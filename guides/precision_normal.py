"""A multivariate Normal that is given by a factor of its precision, dense or with few entries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from bayesfed.guides.elimination import SparseRoot
from bayesfed.guides.triangular import inverse_root, solve_lower

LOG_ROOT_TAU = math.log(math.tau) / 2


class DenseRoot(NamedTuple):
    """L of H = L Lᵀ, ``(..., P, P)``; with the methods of :class:`~bayesfed.guides.elimination.SparseRoot`."""

    tril: Tensor

    def solve(self, b: Tensor) -> Tensor:
        """H⁻¹ b of ``(..., P)``."""
        return torch.cholesky_solve(b[..., None], self.tril).squeeze(-1)

    def spread(self, noise: Tensor) -> Tensor:
        """L^{−⊤} of standard Normal noise ``(..., P)``, whose covariance is H⁻¹."""
        return solve_lower(self.tril, noise[..., None], transposed=True).squeeze(-1)

    def white(self, x: Tensor) -> Tensor:
        """Lᵀ x of ``(..., P)``: the noise of :meth:`spread`."""
        return (self.tril.mT @ x[..., None]).squeeze(-1)

    def log_det(self) -> Tensor:
        """½ log |H|, ``(...)``."""
        return self.tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)


Root = SparseRoot | DenseRoot


class PrecisionNormal(dist.TorchDistribution):
    """N(loc, H⁻¹) of a vector.

    Args:
        loc: ``(..., P)``.
        root: the factor of H.

    Example:
        >>> import torch
        >>> from bayesfed.guides.precision_normal import DenseRoot, PrecisionNormal
        >>> H = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
        >>> q = PrecisionNormal(torch.zeros(2), DenseRoot(torch.linalg.cholesky(H)))
        >>> other = torch.distributions.MultivariateNormal(torch.zeros(2), precision_matrix=H)
        >>> x = torch.tensor([0.3, -1.0])
        >>> bool(torch.isclose(q.log_prob(x), other.log_prob(x)))
        True
    """

    has_rsample = True
    arg_constraints = {}  # noqa: RUF012  (torch's interface)
    support = constraints.real_vector

    def __init__(self, loc: Tensor, root: Root) -> None:
        self.loc, self.root = loc, root
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=False)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> PrecisionNormal:
        """The same distribution with other batch dimensions."""
        return PrecisionNormal(self.loc.expand(*batch_shape, -1), self.root)

    @property
    def mean(self) -> Tensor:
        """The location, ``(..., P)``."""
        return self.loc

    @property
    def scale_tril(self) -> Tensor:
        """The lower triangular root of H⁻¹, ``(..., P, P)``."""
        if isinstance(self.root, DenseRoot):
            return inverse_root(self.root.tril @ self.root.tril.mT)
        size = self.loc.shape[-1]
        each = torch.eye(size, dtype=self.loc.dtype, device=self.loc.device)
        each = each.reshape(size, *[1] * (self.loc.ndim - 1), size).expand(size, *self.loc.shape)
        inverse = self.root.solve(each).movedim(0, -2)
        return torch.linalg.cholesky_ex((inverse + inverse.mT) / 2).L

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Reparameterised draws."""
        shape = self._extended_shape(torch.Size(sample_shape))
        return self.at(torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device))

    def at(self, noise: Tensor) -> Tensor:
        """The draw from standard Normal noise ``(..., P)``."""
        return self.loc + self.root.spread(noise)

    def log_prob(self, value: Tensor) -> Tensor:
        """The log density."""
        white = self.root.white(value - self.loc)
        return -(white.square() / 2 + LOG_ROOT_TAU).sum(-1) + self.root.log_det()
