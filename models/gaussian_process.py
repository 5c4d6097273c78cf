"""A Gaussian process for every client, of numbers or classes; its mean and kernel are global, with a hyper-prior."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gpytorch
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesfed.functional.gaussian_classes import GaussianClasses
from bayesfed.functional.multivariate_normal import Gaussian
from bayesfed.functional.networks import apply, check_stateless, flatten

PRIOR = "prior"
"""The global sample site of the parameters φ of mean, kernel and noise, which define a prior over functions."""


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    r"""Functions f_i ~ GP(m_φ, k_φ), one per client, observed with noise; φ has a Gaussian hyper-prior.

    .. code-block:: text

        server      φ ~ N(centre, hyper_scale²)                    sample site ``prior``
        client i    y_i ~ N(m_φ(X_i), k_φ(X_i, X_i) + σ_φ² I)      f_i is integrated out (PAC-PFL, eq. 33)

    With ``classes`` y_ij are classes, by functions with a logistic link and without noise: pFedGP's classification
    (Achituve et al. 2021), with the evidence by Laplace's method in place of their Gibbs sampler of Pólya-Gamma
    variables, and one class after the other in place of a balanced tree
    (:class:`~bayesfed.functional.gaussian_classes.GaussianClasses`). Predictions are given the client's own rows.

    Any GPyTorch mean, kernel and Gaussian likelihood can be used, and any network as the mean, or before the kernel:
    k_φ(x, x') = kernel(g_φ(x), g_φ(x')). Parameters that do not require a gradient are constants. The centre is 0 for
    a network's weights, as in PAC-PFL, and the present unconstrained value for a parameter of GPyTorch's.

    All S draws and K clients are leading dimensions of one batched Cholesky factorisation; padding rows do not count.
    Predictions condition on a client's own rows (PAC-PFL, eq. 35).

    ln Z is not a sum over rows. For a minibatch of b rows, this model multiplies their ln Z by n/b. This is a composite
    likelihood: the mean of its gradient is 0 at the parameters that generated the data, but it uses only the
    dependence between rows of one minibatch. PAC-PFL's Algorithm 2, read literally, uses ln Z_{m_i} of b rows, in which
    every row counts m_i/b times under one function; far from the optimum of all rows its gradient points towards that
    optimum, but its own optimum has a noise of 0. Use all rows in a step if memory allows.

    Args:
        mean: a :class:`gpytorch.means.Mean` or a module with one output; by default a constant.
        kernel: a :class:`gpytorch.kernels.Kernel`; by default exp(−‖x − x'‖² / 2).
        features: a module g_φ that transforms the inputs of the kernel; by default the identity.
        likelihood: a :class:`gpytorch.likelihoods.GaussianLikelihood`: the noise, by default with an initial standard
            deviation of 0.4.
        classes: the number of classes of the field y, 0, 1, …; None for real numbers.
        hyper_scale: σ_P, the hyper-prior's standard deviation.
        x: the field of inputs ``(rows, *event)``.
        y: the field of targets ``(rows,)``.

    Raises:
        ValueError: a module keeps state or draws its own noise; there is noise beside classes.

    Example:
        >>> import torch
        >>> from bayesfed import models
        >>> tanh = torch.nn.Tanh
        >>> model = models.GaussianProcess(
        ...     models.mlp(1, 16, 16, 1, activation=tanh), features=models.mlp(1, 16, 16, 2, activation=tanh)
        ... )
        >>> model.size
        660
    """

    mean: nn.Module = field(default_factory=gpytorch.means.ConstantMean)
    kernel: gpytorch.kernels.Kernel | None = None
    features: nn.Module | None = None
    likelihood: gpytorch.likelihoods.GaussianLikelihood | None = None
    classes: int | None = None
    hyper_scale: float = 1.0
    x: str = "x"
    y: str = "y"
    parts: Mapping[str, nn.Module] = field(init=False, repr=False)
    centre: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.classes is not None and self.likelihood is not None:
            raise ValueError("classes have no Gaussian noise: leave out likelihood, or classes")
        noise = noise_of(0.4) if self.likelihood is None else self.likelihood
        parts = {
            "mean": self.mean,
            "features": self.features,
            "kernel": unit_kernel() if self.kernel is None else self.kernel,
            "likelihood": noise if self.classes is None else None,
        }
        parts = {name: part for name, part in parts.items() if part is not None}
        for part in parts.values():
            if not isinstance(part, gpytorch.Module):
                check_stateless(part)
        object.__setattr__(self, "parts", parts)
        centres = [
            flatten(part, _free(part)) * isinstance(part, gpytorch.Module)
            for part in parts.values()
        ]
        object.__setattr__(self, "centre", torch.cat(centres))

    @property
    def size(self) -> int:
        """The number P of parameters in φ."""
        return len(self.centre)

    @property
    def __name__(self) -> str:
        return "Gaussian process"

    def __call__(self, federation: Any) -> None:
        """Run the Pyro program."""
        centre = self.centre.to(torch.get_default_device())
        scale = torch.full_like(centre, self.hyper_scale)
        phi = pyro.sample(PRIOR, dist.Normal(centre, scale).to_event(1))
        with federation.clients(), federation.jointly() as (obs, mask):
            y: dist.TorchDistribution
            if self.classes is None:
                mean, covariance = self.marginal(phi, obs[self.x], mask)
                y = Gaussian(mean.unsqueeze(-2), covariance.unsqueeze(-3))
            else:
                mean, covariance = self.function(phi, obs[self.x], mask)
                mean, mask = mean.unsqueeze(-2), mask.unsqueeze(-2)
                y = GaussianClasses(mean, covariance.unsqueeze(-3), mask, self.classes)
            seen = obs.get(self.y)
            if seen is not None:
                seen = torch.where(mask.view_as(seen), seen, 0.0).unsqueeze(-2)
            pyro.sample(self.y, y, obs=seen)

    def function(self, phi: Tensor, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return m_φ(X_i) and k_φ(X_i, X_i), 0 for rows outside the mask; shapes as of :meth:`marginal`."""
        mean, inputs = self._mean_and_inputs(phi, x)
        covariance = self._with("kernel", phi, lambda part: part(inputs, inputs).to_dense())
        return mean * mask, covariance * (mask[:, None] & mask[..., None])

    def marginal(self, phi: Tensor, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return m_φ(X_i) and k_φ(X_i, X_i) + σ_φ² I.

        Rows outside the mask are independent of the others, with mean 0 and variance 1 / 2π: density 1 at 0.

        Args:
            phi: ``(..., K or 1, 1, P)``, or ``(P,)``.
            x: ``(K, B, *event)``.
            mask: bool ``(K, B)``.

        Returns:
            ``(..., K, B)`` and ``(..., K, B, B)``.
        """
        mean, covariance = self.function(phi, x, mask)
        variance = self.noise(phi) * mask + (~mask) / (2 * torch.pi)
        covariance.diagonal(dim1=-2, dim2=-1).add_(variance)
        return mean, covariance

    def noise(self, phi: Tensor) -> Tensor:
        """Return σ_φ², ``(..., K or 1, 1)``."""
        return self._with("likelihood", phi, lambda part: part.noise)

    def _part_of(self, name: str, phi: Tensor) -> Tensor:
        """Return the parameters of one part: ``(..., K or 1, 1, P_part)``."""
        sizes = [len(flatten(part, _free(part))) for part in self.parts.values()]
        split = (phi[None, None] if phi.ndim == 1 else phi).split(sizes, -1)
        return dict(zip(self.parts, split, strict=True))[name]

    def _with(self, name: str, phi: Tensor, what: Callable[[Any], Tensor]) -> Tensor:
        """Call a function on a GPyTorch module whose parameters are those of φ, with φ's dimensions in front."""
        part, own = self.parts[name], self._part_of(name, phi).squeeze(-2)
        free = {n: p for n, p in part.named_parameters() if p.requires_grad}
        named = {**dict(part.named_parameters()), **dict(part.named_buffers())}
        values = {f"part.{n}": v.to(phi.device) for n, v in named.items() if n not in free}
        split = own.split([p.numel() for p in free.values()], -1)
        values |= {
            f"part.{n}": value.reshape(*own.shape[:-1], *p.shape)
            for (n, p), value in zip(free.items(), split, strict=True)
        }
        return functional_call(_Part(part), values, (what,))

    def _mean_and_inputs(self, phi: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return m_φ(x) ``(..., K, B)`` and the inputs of the kernel, ``(..., K, B, F)``."""
        x = x[..., None] if x.ndim == 2 else x
        flat = x.flatten(2).expand(*phi.shape[:-3], *x.shape[:2], -1)
        if isinstance(self.mean, gpytorch.Module):
            mean = self._with("mean", phi, lambda part: part(flat))
        else:
            mean = apply(self.mean, self._part_of("mean", phi), x).squeeze(-1)
        if self.features is None:
            return mean, flat
        return mean, apply(self.features, self._part_of("features", phi), x)


class _Part(nn.Module):
    """A wrapper that lets :func:`torch.func.functional_call` call any function on a GPyTorch module."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, what: Callable[[Any], Tensor]) -> Tensor:
        return what(self.part)


def unit_kernel() -> gpytorch.kernels.RBFKernel:
    """Return the kernel exp(−‖x − x'‖² / 2), without parameters."""
    kernel = gpytorch.kernels.RBFKernel()
    kernel.lengthscale = 1.0
    return kernel.requires_grad_(False)


def noise_of(scale: float) -> gpytorch.likelihoods.GaussianLikelihood:
    """Return Gaussian noise with this initial standard deviation."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = scale**2
    return likelihood


def _free(part: nn.Module) -> list[str]:
    """Return the names of the parameters that belong to φ."""
    return [name for name, value in part.named_parameters() if value.requires_grad]
