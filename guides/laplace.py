"""A Gaussian over the globals that is found by Laplace's method, and what that method needs of the model."""

from dataclasses import dataclass, field, replace
from typing import Any

import pyro
import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.moments import Moments, moments
from bayesfed.elbo.sites import sites
from bayesfed.guides import laplace_marginal
from bayesfed.guides.automatic import automatic_guide
from bayesfed.guides.factorised import Factorised, factorised
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.hierarchical import Hierarchical, sizes
from bayesfed.guides.local import Scaling
from bayesfed.guides.mean_field import MeanField
from bayesfed.guides.newton import NEWTON_STEPS, line_search, newton
from bayesfed.guides.params_as_sites import lift_params
from bayesfed.guides.precisions import FLOOR, definite, solve, times
from bayesfed.guides.unconstrained import split

_WEAKEST, _STEPS = 1e-2, 4
"""The smallest negative curvature that Newton's method assumes, as a fraction of the prior's; steps to a minimum."""

INTEGRATED_UP_TO = 20
"""The largest number of a client's dimensions that are integrated out."""
SMALL = 50
"""The largest number of dimensions of θ for which whole matrices are the default."""


@dataclass(frozen=True)
class Laplace(Hierarchical):
    """q(θ) = N(μ, Λ⁻¹) over all globals, ``pyro.param`` included, in their own unconstrained coordinates.

    Clients with few variables (20 dimensions at most) have them integrated out of log p(D_i | θ) by Laplace's method;
    q(w_i | θ) is conditioned on θ where all their priors are Normal, else mean-field. The variables of other clients
    stand at the centre of their prior, and q(w_i) is a point estimate.

    Attributes:
        independent: the guide of independent sites that draws the locals where they are not conditioned on θ.
        start: the start of θ, ``(D,)``.
        covariance: ``"full"``, ``"e-full"`` or ``"diagonal"``.
        layered: all elements of θ that the likelihood reads are weights of one linear layer.
    """

    independent: Factorised = field(default_factory=lambda: Factorised({}, {}))
    start: Tensor = field(default_factory=lambda: torch.zeros(0))
    covariance: str = "full"
    layered: bool = False

    def __call__(self, federation: Any) -> None:
        """Sample every latent site of the model."""
        if self.conditioned:
            return super().__call__(federation)
        for name, u in split(self.sample_globals()[0], self.sizes[0]).items():
            site = self.independent.globals[name]
            pyro.sample(name, site.point(u.reshape((*u.shape[:-1], *site.start.shape))))
        replace(self.independent, globals={})(federation)

    def __str__(self) -> str:
        if self.conditioned:
            return super().__str__()
        return f"{type(self.family).__name__} globals, {self.independent}"

    @property
    def sizes(self) -> tuple[dict[str, int], dict[str, int]]:
        """The number of dimensions of each global, and of each local site."""
        return sizes(self.globals), sizes(self.locals)

    @property
    def small(self) -> bool:
        """True if θ has few enough dimensions for whole Hessians by default."""
        return len(self.start) <= SMALL

    @property
    def integrated(self) -> bool:
        """True if clients' variables are integrated out."""
        return 0 < sum(self.sizes[1].values()) <= INTEGRATED_UP_TO

    def log_prior(self, z: Tensor, batch: Batch) -> Tensor:
        """log p(θ) at ``(S, D)``: ``(S,)``."""
        return laplace_marginal.log_prior(self.model, self.sizes[0], z, batch)

    def log_likelihood(
        self, z: Tensor, batch: Batch, w: Tensor | None = None, modes: Tensor | None = None
    ) -> Tensor:
        """log p(D_i | θ) at ``(S, K, 1, D)``: ``(S, K)``; or log p(D_i | w_i, θ) at w ``(S, K, 1, P)``.

        ``modes``: the modes of w_i at a θ that is not far away, ``(1, K, 1, P)``.
        """
        if w is None and self.integrated:
            return self.integrate_locals(z, batch, modes)[0]
        values = split(z, self.sizes[0])
        if w is not None:
            values |= split(w, self.sizes[1])
        run = laplace_marginal.evaluate(self.model, values, batch)
        return torch.as_tensor(run.log_prob(run.observed)).expand(len(z), len(batch))

    def prior_centre(self, z: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Location and scale ``(K, P)`` of the clients' priors at θ ``(1, K or 1, 1, D)``."""
        run = laplace_marginal.evaluate(self.model, split(z, self.sizes[0]), batch)
        parts = []
        for name, site in self.independent.locals.items():
            shape = (1, len(batch), 1, *site.start.shape)
            centre = moments(run.priors[name])[:2]
            parts.append([v.detach().expand(shape).reshape(len(batch), -1) for v in centre])
        loc, scale = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        return loc, scale

    def local_params(self, loc: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """The local parameters of K clients at stacked locations and scales ``(K, P)``."""
        locs, scales = (split(value, self.sizes[1]) for value in (loc, scale))
        found = {}
        for name, site in self.independent.locals.items():
            shape = (len(loc), 1, *site.start.shape)
            at = locs[name].reshape(shape), scales[name].reshape(shape)
            found[name] = Moments(*at, exact=True)
        return self.independent.at(found)

    def integrate_locals(
        self, z: Tensor, batch: Batch, modes: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """log p(D_i | θ), the mode of w_i and its precision; see :func:`bayesfed.guides.laplace_marginal.marginal`."""
        loc, scale = self.block_scaling.loc, self.block_scaling.scale
        start, steps = (loc, NEWTON_STEPS) if modes is None else (modes, 1)
        start = start.expand(*z.shape[:-1], len(loc))
        least = _WEAKEST / scale.square()
        return laplace_marginal.marginal(self.model, self.sizes, z, batch, start, least, steps)

    # -- minima ---------------------------------------------------------------------------------------

    def minimum(self, z: Tensor, centre: Tensor, strength: Tensor, batch: Batch) -> Tensor:
        """The minimum of −log p(D_i | θ) / n_i + ½ (θ − centre)ᵀ strength (θ − centre), by Newton's method.

        Args:
            z: the start, ``(K, D)``.
            centre: ``(K, D)``.
            strength: precisions ``(K or 1, D)`` or matrices ``(K or 1, D, D)``.
            batch: the clients' rows.
        """
        modes = None
        if self.integrated:
            modes = self.integrate_locals(z[None, :, None], batch)[1].detach()
        matrix = strength.ndim == 3

        def objective(u: Tensor) -> Tensor:
            gap = u.squeeze(-2) - centre
            force = (strength @ gap[..., None]).squeeze(-1) if matrix else strength * gap
            likelihood = self.log_likelihood(u, batch, modes=modes)
            return likelihood / batch.rows - (gap * force).sum(-1) / 2

        least = strength.diagonal(0, -2, -1) if matrix else strength
        least = (_WEAKEST * least).clamp(min=FLOOR).expand_as(z)
        tolerance = 8 * torch.finfo(z.dtype).eps
        return newton(objective, least[:, None], z[:, None], _STEPS, tolerance).squeeze(1)

    def prior_slopes(self, z: Tensor, batch: Batch, full: bool) -> tuple[Tensor, Tensor]:
        """∇ log p(θ) and −∇² log p(θ) at z ``(D,)``; of the latter the matrix if ``full``, else its diagonal."""
        leaf = z.detach().requires_grad_()
        (grad,) = torch.autograd.grad(
            self.log_prior(leaf[None], batch).sum(), leaf, create_graph=True
        )

        def backward(vector: Tensor) -> Tensor:
            if not grad.requires_grad:
                return torch.zeros_like(z)
            (found,) = torch.autograd.grad(
                -(grad * vector).sum(), leaf, retain_graph=True, materialize_grads=True
            )
            return found

        if not full:  # if two random products give the same diagonal, the matrix is diagonal
            generator = torch.Generator().manual_seed(0)
            trials = (2 * torch.rand(2, len(z), generator=generator, device="cpu").to(z) - 1).sign()
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
            z: the start, ``(D,)``.
            likelihood: a matrix or a diagonal.
            pull: ``(D,)``.
            rows: n.
            batch: any client.
        """
        u, full = z, likelihood.ndim == 2

        def objective(u: Tensor) -> Tensor:
            u = u.squeeze(-2)
            gap = u - z
            force = gap @ likelihood if full else gap * likelihood
            return self.log_prior(u, batch) / rows + gap @ pull - (gap * force).sum(-1) / 2

        for _ in range(NEWTON_STEPS):
            grad, prior = self.prior_slopes(u, batch, full)
            precision = definite(likelihood + prior / rows, matrix=full)
            step = solve(precision, grad / rows + pull - times(likelihood, u - z))
            if float((step * times(precision, step)).sum() * rows) < 1e-6:  # in nats
                return u + step, precision
            u = line_search(objective, u[None], step[None])[0]
        _, prior = self.prior_slopes(u, batch, full)
        return u, definite(likelihood + prior / rows, matrix=full)


def laplace(
    model: Model, federation: Federation, gamma: float, covariance: str | None = None
) -> Laplace:
    """The :class:`Laplace` guide of a model, whose ``pyro.param`` get the prior N(start, 1 / γ).

    Args:
        model: the Pyro model.
        federation: the clients' data.
        gamma: γ.
        covariance: ``"full"``, ``"e-full"`` or ``"diagonal"``; by default full where θ has :data:`SMALL` dimensions at
            most, else diagonal.

    Raises:
        ValueError: the model has no global variables, or the bounds of one depend on others.
    """
    random = lift_params(model, federation, gamma)
    found = sites(random, federation)
    names = [site.name for site in found.values() if not site.local and not site.observed]
    if not names:
        raise ValueError(
            "the model has no global variable or parameter, so there is no posterior to find: use FedAvg, or sample "
            "outside the clients plate what clients have in common"
        )
    independent = factorised(random, federation)
    starts = {n: random.starts.get(n, independent.globals[n].start).reshape(-1) for n in names}
    start = torch.cat(list(starts.values())).to(federation.dtype)
    covariance = covariance or ("full" if len(start) <= SMALL else "diagonal")
    family = FullRank() if covariance == "full" else MeanField()
    guide = automatic_guide(random, found, federation, family, conditioned=True, many=False)
    few = sum(sizes(guide.locals).values()) <= INTEGRATED_UP_TO
    if not few or set(guide.normal) != set(guide.locals):
        guide = replace(guide, conditioned=False, block=False, normal=())
    independent = replace(independent, local_point=not few)
    own = {n: Scaling(torch.zeros_like(v), torch.ones_like(v)) for n, v in starts.items()}
    changes = {"globals": own, "start": start, "independent": independent, "covariance": covariance}
    return Laplace(**vars(guide) | changes)


def gaussian_params(loc: Tensor, precision: Tensor) -> dict[str, Tensor]:
    """The global parameters of q(θ) = N(loc, precision⁻¹), the precision a diagonal ``(D,)`` or a matrix."""
    if precision.ndim == 1:
        return MeanField().at(loc, precision.rsqrt())
    return FullRank().at(loc, torch.linalg.cholesky(torch.linalg.inv(precision)))
