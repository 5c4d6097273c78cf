"""Particles for the global variables, and the model's own prior for the local ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.handlers import Until
from bayesfed.elbo.program import Program
from bayesfed.elbo.sites import Site, global_dimensions, prior_draws
from bayesfed.guides.laplace import INTEGRATED_UP_TO
from bayesfed.guides.laplace_marginal import marginal
from bayesfed.guides.unconstrained import (
    AsGuide,
    delta_at,
    median_and_spread,
    split,
    unconstrained_draws,
)

DRAWS, FEW, MANY = 100, 50, 16
"""Draws of the prior for its spread; the largest number of θ's dimensions in whose spreads steps are taken, and the
usual number of particles there."""
PARTICLES = "particles"
"""The parameter that holds the k particles, unconstrained and stacked: ``(k, D)``."""
PARTICLE = "particle"
"""The auxiliary site that is one of the particles."""
WEAKEST = 1e-2
"""The smallest negative curvature that Newton's method assumes, as a fraction of the prior's."""


class OneOf(dist.TorchDistribution):
    """One of k vectors ``(k, D)``, all equally probable.

    Example:
        >>> import torch
        >>> from bayesfed.guides.particles import OneOf
        >>> OneOf(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).expand([5]).sample().shape
        torch.Size([5, 2])
    """

    has_rsample = True
    has_enumerate_support = True
    arg_constraints = {}  # noqa: RUF012  (torch's interface)
    support = dist.constraints.real_vector

    def __init__(self, vectors: Tensor, batch_shape: Sequence[int] = ()) -> None:
        self.vectors = vectors
        super().__init__(torch.Size(batch_shape), vectors.shape[-1:], validate_args=False)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> OneOf:
        """The same distribution with other batch dimensions."""
        return OneOf(self.vectors, batch_shape)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draws, differentiable in the vectors."""
        u = torch.rand(
            self._extended_shape(torch.Size(sample_shape))[:-1], device=self.vectors.device
        )
        return self.vectors[(u * len(self.vectors)).long()]

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """All k vectors, ``(k, *batch, D)``, or with ones for the batch dimensions."""
        count, size = self.vectors.shape
        vectors = self.vectors.reshape(count, *[1] * len(self.batch_shape), size)
        return vectors.expand(-1, *self.batch_shape, -1) if expand else vectors

    def log_prob(self, value: Tensor) -> Tensor:
        """−ln k for any value."""
        return value.new_full(value.shape[:-1], -math.log(len(self.vectors)))


@dataclass(frozen=True)
class ParticleGuide:
    """q(θ) = (1/k) Σ_κ δ(θ − θ_κ), and every local variable drawn from its prior given θ.

    With the prior as local guide a client's term is ln p(D_i | w_i), so that logsumexp over L draws − ln L
    estimates its log marginal likelihood (PAC-PFL, eq. 38). Where ``local_scaling`` is given, Laplace's method gives
    that, and the Laplace approximation of p(w_i | D_i, θ_κ) the draws of a posterior.

    Attributes:
        model: the Pyro model.
        sizes: the number of unconstrained dimensions of each global latent site.
        locals: the local latent sites.
        start: the particles at the start, ``(k, D)``.
        local_draws: number of draws of w_i for each draw of θ; a draw from the posterior is one of them, chosen by its
            weight.
        beta: β, the number of rows that a client's likelihood counts for; by default n_i.
        unit: the spread of θ's prior in each dimension, ``(D,)``; 1 where it has more than 50.
        local_sizes: the number of unconstrained dimensions of each local latent site.
        local_scaling: the median and the spread of the local variables' prior, ``(P,)`` each.
    """

    model: Model
    sizes: Mapping[str, int]
    locals: tuple[str, ...]
    start: Tensor
    local_draws: int = 1
    beta: float | None = None
    unit: Tensor = field(default_factory=lambda: torch.ones(()))
    local_sizes: Mapping[str, int] = field(default_factory=dict)
    local_scaling: tuple[Tensor, Tensor] | None = None
    needs_rows = False
    weights_draws = True

    def __call__(self, federation: Any) -> None:
        """Sample every latent site of the model."""
        vectors = pyro.param(PARTICLES, self.start.clone, event_dim=2)
        z = pyro.sample(PARTICLE, OneOf(vectors), infer={"is_auxiliary": True})
        sites: dict[str, Callable[[Any], Any]] = {
            name: partial(delta_at, u=u) for name, u in split(z, self.sizes).items()
        }
        sites |= dict.fromkeys(self.locals, lambda prior: prior)
        with Until([*self.sizes, *self.locals]), AsGuide(sites):
            self.model(federation.head())

    def log_evidence(self, z: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return ln Z_i at θ = z ``(S, K or 1, 1, D)`` by Laplace's method, with the mode and the curvature there.

        Arguments and results are those of :func:`~bayesfed.guides.laplace_marginal.marginal`.
        """
        assert self.local_scaling is not None
        centre, _ = self.local_scaling
        z = z.expand(-1, len(batch), -1, -1)
        start = centre.expand(*z.shape[:-1], -1)
        sizes = self.sizes, self.local_sizes
        return marginal(self.model, sizes, z, self.temper(batch), start, self.weakest)

    @property
    def weakest(self) -> Tensor:
        """The smallest negative curvature of log p(D_i, w_i | θ) that Newton's method assumes, ``(P,)``."""
        assert self.local_scaling is not None
        return WEAKEST / self.local_scaling[1].square()

    @property
    def particles(self) -> int:
        """The number of particles, k."""
        return len(self.start)

    def temper(self, batch: Batch) -> Batch:
        """Scale the log likelihoods of each client's rows by β / n_i."""
        if self.beta is None:
            return batch
        return replace(batch, scale=self.beta / batch.mask.sum(-1, keepdim=True).to(batch.scale))

    def __str__(self) -> str:
        source = "their prior" if self.local_scaling is None else "Laplace approximations"
        return f"{self.particles} particles, locals from {source}"


def has_modes(program: Program) -> bool:
    """Return whether the guide gives Laplace approximations of clients' posteriors at particles."""
    guide = program.guide
    integrated = isinstance(guide, ParticleGuide) and guide.local_scaling is not None
    return integrated and not program.direct


def from_prior(
    model: Model,
    sites: Mapping[str, Site],
    federation: Federation,
    count: int | None,
    local_draws: int = 1,
    beta: float | None = None,
    integrated: bool = True,
) -> ParticleGuide:
    """The :class:`ParticleGuide` of a model, started at draws of its prior with the seed of torch's generator.

    A model without global latent sites has particles without dimensions.
    """
    locals_ = tuple(site.name for site in sites.values() if site.local and not site.observed)
    own = {name: sites[name].dimensions for name in locals_}
    few = 0 < sum(own.values()) <= INTEGRATED_UP_TO
    integrated = integrated and few and not any(sites[name].per_row for name in locals_)
    if count is None:
        count = MANY if global_dimensions(sites) <= FEW and (integrated or not locals_) else 4
    nodes = prior_draws(model, sites, federation, count, seed=torch.initial_seed())
    flat = {"": federation.batch(torch.arange(1)).scale.new_zeros(count, 0)}
    for site in sites.values():
        if not site.local and not site.observed:
            fn, value = nodes[site.name]["fn"], nodes[site.name]["value"]
            value = value.expand(count, 1, 1, *site.event_shape)
            flat[site.name] = biject_to(fn.support).inv(value).reshape(count, -1)
    start = torch.cat(list(flat.values()), 1)
    sizes = {name: value.shape[1] for name, value in flat.items() if name}
    scaled = 0 < start.shape[1] <= FEW
    unit, scaling = torch.ones_like(start[0]), None
    if scaled or integrated:
        draws = unconstrained_draws(model, sites, federation, DRAWS)
    if scaled:
        unit = _scaling(draws, sizes)[1].to(start)
    if integrated:
        scaling = _scaling({n: u.to(start) for n, u in draws.items()}, locals_)
    return ParticleGuide(
        model, sizes, locals_, start, local_draws, beta, unit, own if scaling else {}, scaling
    )


def _scaling(draws: Mapping[str, Tensor], names: Iterable[str]) -> tuple[Tensor, Tensor]:
    middle, spread = median_and_spread(torch.cat([draws[name] for name in names], 1))
    return middle, spread.clamp(min=1e-6)
