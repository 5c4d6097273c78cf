"""A Gaussian over the globals that is found by Laplace's method, and what that method evaluates of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pyro
import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.moments import Moments
from bayesfed.elbo.sites import InspectedModel, sites
from bayesfed.guides import laplace_marginal
from bayesfed.guides.client_factor import NEWTON_STEPS, SIZES, newton
from bayesfed.guides.factorised import Factorised, factorised
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.hierarchical import Hierarchical, automatic
from bayesfed.guides.local import FULL_UP_TO, Start
from bayesfed.guides.mean_field import MeanField
from bayesfed.guides.params_as_sites import lifted
from bayesfed.guides.precisions import FLOOR, definite, solve, times

_WEAKEST, _STEPS = 1e-2, 4


@dataclass(frozen=True)
class Laplace(Hierarchical):
    """q(θ) = N(μ, Λ⁻¹) over all globals, ``pyro.param`` included, in their own unconstrained coordinates.

    Clients with few variables (20 numbers at most) have them integrated out of log p(D_i | θ) by Laplace's method, and
    q(w_i | θ) conditioned on θ where all their priors are Normal, else mean-field; others stand at the centre of their
    prior, and q(w_i) is a point.

    Attributes:
        apart: all sites independent of each other, for locals that are not conditioned on θ.
        start: where θ starts, ``(D,)``.
        layered: every number of θ that the likelihood reads is a weight of one linear layer.
    """

    apart: Factorised = field(default_factory=lambda: Factorised({}, {}))
    start: Tensor = field(default_factory=lambda: torch.zeros(0))
    layered: bool = False

    def __call__(self, federation: Any) -> None:
        """Sample every latent site of the model."""
        if self.conditioned:
            return super().__call__(federation)
        for name, u in laplace_marginal.split(self.sample_globals()[0], self.sizes[0]).items():
            site = self.apart.globals[name]
            pyro.sample(name, site.point(u.reshape((*u.shape[:-1], *site.start.shape))))
        replace(self.apart, globals={})(federation)

    def __str__(self) -> str:
        return (
            super().__str__()
            if self.conditioned
            else f"{type(self.family).__name__} globals, {self.apart}"
        )

    @property
    def sizes(self) -> tuple[dict[str, int], dict[str, int]]:
        """How many numbers each global, and each local site has."""
        return _sizes(self.globals), _sizes(self.locals)

    @property
    def variables(self) -> int:
        """How many numbers a client has."""
        return sum(self.sizes[1].values())

    @property
    def integrated(self) -> bool:
        """Whether clients' variables are integrated out."""
        return 0 < self.variables <= FULL_UP_TO

    def log_prior(self, z: Tensor, batch: Batch) -> Tensor:
        """log p(θ) at ``(S, D)``: ``(S,)``."""
        return laplace_marginal.log_prior(self.model, self.sizes[0], z, batch)

    def log_likelihood(
        self, z: Tensor, batch: Batch, w: Tensor | None = None, near: Tensor | None = None
    ) -> Tensor:
        """log p(D_i | θ) at ``(S, K, 1, D)``: ``(S, K)``; or log p(D_i | w_i, θ) at w ``(S, K, 1, P)``.

        ``near``: modes of w_i for a θ not far away, ``(1, K, 1, P)``.
        """
        if w is None and self.integrated:
            return self.mode(z, batch, near)[0]
        values = laplace_marginal.split(z, self.sizes[0])
        if w is not None:
            values |= laplace_marginal.split(w, self.sizes[1])
        return laplace_marginal.evaluated(self.model, values, batch).likelihood

    def centre(self, z: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Location and scale of the clients' priors at ``(1, K or 1, 1, D)``: ``(K, P)``."""
        found = laplace_marginal.evaluated(
            self.model, laplace_marginal.split(z, self.sizes[0]), batch
        ).centres
        parts = []
        for name, site in self.apart.locals.items():
            shape = (1, len(batch), 1, *site.start.shape)
            parts.append(
                [v.detach().expand(shape).reshape(len(batch), -1) for v in found[name][:2]]
            )
        loc, scale = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        return loc, scale

    def kept(self, loc: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """The local parameters of K clients at stacked locations and scales ``(K, P)``."""
        parts = zip(
            *(laplace_marginal.split(value, self.sizes[1]).values() for value in (loc, scale)),
            strict=True,
        )
        found = {}
        for (name, site), (at, spread) in zip(self.apart.locals.items(), parts, strict=True):
            shape = (len(loc), 1, *site.start.shape)
            found[name] = Moments(at.reshape(shape), spread.reshape(shape), exact=True)
        return self.apart.at(found)

    def mode(
        self, z: Tensor, batch: Batch, near: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """log p(D_i | θ), the mode of w_i and its precision; see :func:`bayesfed.guides.laplace_marginal.marginal`."""
        starts = self.locals.values()
        loc, scale = (torch.cat([getattr(s, field) for s in starts]) for field in ("loc", "scale"))
        start, steps = (loc, NEWTON_STEPS) if near is None else (near, 1)
        start = start.expand(*z.shape[:-1], len(loc))
        least = _WEAKEST / scale.square()
        return laplace_marginal.marginal(self.model, self.sizes, z, batch, start, least, steps)

    # -- minima ---------------------------------------------------------------------------------------

    def least(self, z: Tensor, centre: Tensor, strength: Tensor, batch: Batch) -> Tensor:
        """Where −log p(D_i | θ) / n_i + ½ (θ − centre)ᵀ strength (θ − centre) is least, by Newton's method.

        Args:
            z: where to start, ``(K, D)``.
            centre: ``(K, D)``.
            strength: precisions ``(K or 1, D)`` or matrices ``(K or 1, D, D)``.
            batch: the clients' rows.
        """
        near = self.mode(z[None, :, None], batch)[1].detach() if self.integrated else None
        matrix = strength.ndim == 3

        def objective(u: Tensor) -> Tensor:
            gap = u.squeeze(-2) - centre
            force = (strength @ gap[..., None]).squeeze(-1) if matrix else strength * gap
            likelihood = self.log_likelihood(u, batch, near=near)
            return likelihood / batch.rows - (gap * force).sum(-1) / 2

        least = strength.diagonal(0, -2, -1) if matrix else strength
        least = (_WEAKEST * least).clamp(min=FLOOR).expand_as(z)
        tolerance = 8 * torch.finfo(z.dtype).eps
        return newton(objective, least[:, None], z[:, None], _STEPS, tolerance).squeeze(1)

    def prior_slopes(self, z: Tensor, batch: Batch, full: bool) -> tuple[Tensor, Tensor]:
        """∇ log p(θ) and −∇² log p(θ) at z ``(D,)``, whole or its diagonal."""
        leaf = z.detach().requires_grad_()
        (grad,) = torch.autograd.grad(
            self.log_prior(leaf[None], batch).sum(), leaf, create_graph=True
        )

        def backward(vector: Tensor) -> Tensor:
            if not grad.requires_grad:
                return torch.zeros_like(z)
            (found,) = torch.autograd.grad(
                -grad, leaf, vector, retain_graph=True, materialize_grads=True
            )
            return found

        if (
            not full
        ):  # the diagonal from one product, if another gives the same: then there is nothing else
            generator = torch.Generator().manual_seed(0)
            trials = (2 * torch.rand(2, len(z), generator=generator).to(z) - 1).sign()
            first, second = (v * backward(v) for v in trials)
            if torch.allclose(first, second, rtol=1e-4, atol=1e-6):
                return grad.detach(), first
        rows = torch.stack([backward(v) for v in torch.eye(len(z), dtype=z.dtype, device=z.device)])
        return grad.detach(), rows if full else rows.diagonal()

    def product(
        self, z: Tensor, likelihood: Tensor, pull: Tensor, rows: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """The mode of p(θ)^(1/n) exp(pullᵀ(θ − z) − ½ (θ − z)ᵀ likelihood (θ − z)) and the curvature there.

        Args:
            z: where to start, ``(D,)``.
            likelihood: a matrix or a diagonal.
            pull: ``(D,)``.
            rows: n.
            batch: any client.
        """
        u, full = z, likelihood.ndim == 2
        for _ in range(NEWTON_STEPS):
            grad, prior = self.prior_slopes(u, batch, full)
            precision = definite(likelihood + prior / rows, matrix=full)
            step = solve(precision, grad / rows + pull - times(likelihood, u - z))
            if float((step * times(precision, step)).sum() * rows) < 1e-6:  # in nats
                return u + step, precision
            with torch.no_grad():
                tried = u + torch.tensor(SIZES, dtype=u.dtype, device=u.device)[:, None] * step
                gap = tried - z
                force = gap @ likelihood if full else gap * likelihood
                value = self.log_prior(tried, batch) / rows + gap @ pull - (gap * force).sum(-1) / 2
                u = tried[value.nan_to_num(-torch.inf).argmax()]
        _, prior = self.prior_slopes(u, batch, full)
        return u, definite(likelihood + prior / rows, matrix=full)


def laplace(
    model: Model, federation: Federation, precision: float, full: bool | None, full_up_to: int
) -> Laplace:
    """The :class:`Laplace` guide of a model, whose ``pyro.param`` get the prior N(start, 1 / precision).

    Args:
        model: the Pyro model.
        federation: the clients' data.
        precision: of those priors.
        full: a full covariance of θ; by default where θ has ``full_up_to`` numbers at most.
        full_up_to: see above.

    Raises:
        ValueError: the model has no global variables, or the bounds of one depend on others.
    """
    with_priors = lifted(model, federation, precision)
    random = InspectedModel(with_priors, federation)
    found = sites(random, federation)
    names = [site.name for site in found.values() if not site.local and not site.observed]
    if not names:
        raise ValueError(
            "the model has no global variable or parameter to have a posterior over: use FedAvg, or sample "
            "outside the clients plate what clients have in common"
        )
    apart = factorised(random, federation)
    starts = {n: with_priors.starts.get(n, apart.globals[n].start).reshape(-1) for n in names}
    start = torch.cat(list(starts.values())).to(federation.dtype)
    family = FullRank() if (len(start) <= full_up_to if full is None else full) else MeanField()
    guide = automatic(random, found, federation, family, conditioned=True)
    few = sum(len(start.loc) for start in guide.locals.values()) <= FULL_UP_TO
    if not few or set(guide.normal) != set(guide.locals):
        guide = replace(guide, conditioned=False, block=(), normal=())
    apart = replace(apart, local_point=not few)
    own = {n: Start(torch.zeros_like(v), torch.ones_like(v)) for n, v in starts.items()}
    parts = {part.name: getattr(guide, part.name) for part in fields(guide)}
    return Laplace(**parts | {"globals": own, "start": start, "apart": apart})


def gaussian(loc: Tensor, precision: Tensor) -> dict[str, Tensor]:
    """The global parameters of q(θ) = N(loc, precision⁻¹), the precision a diagonal ``(D,)`` or a matrix."""
    if precision.ndim == 1:
        return MeanField().at(loc, precision.rsqrt())
    root = torch.linalg.cholesky(torch.linalg.inv(precision))
    return FullRank().at(loc, root)


def _sizes(starts: Mapping[str, Start]) -> dict[str, int]:
    return {name: len(start.loc) for name, start in starts.items()}
