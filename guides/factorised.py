"""Point estimates of the globals, and for every client independent Normals or point estimates."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import biject_to, transforms

from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.moments import Moments, base_support, moments
from bayesfed.elbo.sites import prior_draws, sites
from bayesfed.guides.unconstrained import log_abs_det


@dataclass(frozen=True)
class Coordinates:
    """The unconstrained coordinates of a latent site.

    Attributes:
        support: Pyro's constraint.
        event_dim: the number of dimensions of one value.
        start: the value at the start, unconstrained.
        unit: the scale of the prior, at the median of its draws; 1 where the support is not the whole line.
    """

    support: Any
    event_dim: int
    start: Tensor
    unit: Tensor

    def point(self, u: Tensor) -> dist.Delta:
        """A Delta at the value of u ``(..., *shape)``; its log density is −log |det| of the change of variables."""
        transform = biject_to(self.support)
        value = transform(u)
        if _real(transform):
            return dist.Delta(value, event_dim=self.event_dim)
        log_det = log_abs_det(transform, u, value, self.event_dim)
        return dist.Delta(value, log_density=-log_det, event_dim=self.event_dim)

    def normal(self, loc: Tensor, log_scale: Tensor) -> Any:
        """The distribution of the value where u ~ N(loc, exp(log_scale)²)."""
        q = dist.Normal(loc, log_scale.exp()).to_event(self.start.ndim)
        transform = biject_to(self.support)
        return q if _real(transform) else dist.TransformedDistribution(q, [transform])


@dataclass(frozen=True)
class Factorised:
    """A point estimate of θ, and q(w_i) = N(loc_i, diag(exp(log_scale_i))²), or a point estimate, for every local site.

    All parameters are in the unconstrained coordinates of the sites. A point estimate maximises the density there,
    which includes the Jacobian.

    Attributes:
        globals: the global latent sites.
        locals: the local latent sites.
        local_point: point estimates of the local sites instead of Normals.
        scale: standard deviation of the locals at the start.

    Example:
        >>> import torch
        >>> from pyro import poutine
        >>> from bayesfed import datasets, models
        >>> from bayesfed.guides import factorised
        >>> schools = datasets.eight_schools()
        >>> guide = factorised(models.eight_schools, schools)
        >>> trace = poutine.trace(guide).get_trace(schools)
        >>> {name: tuple(trace.nodes[name]["value"].shape) for name in ("mu.loc", "mu", "theta.loc", "theta")}
        {'mu.loc': (), 'mu': (), 'theta.loc': (8, 1), 'theta': (8, 1)}
    """

    globals: Mapping[str, Coordinates]
    locals: Mapping[str, Coordinates]
    local_point: bool = False
    scale: float = 1.0
    needs_rows = False

    def __call__(self, federation: Any) -> None:
        """Sample every latent site."""
        for name, site in self.globals.items():
            u = pyro.param(loc_of(name), site.start.clone, event_dim=site.start.ndim)
            pyro.sample(name, site.point(u))
        with federation.clients() as index:
            for name, site in self.locals.items():
                start, ndim = site.start.expand(len(index), 1, *site.start.shape), site.start.ndim
                loc = pyro.param(loc_of(name), start.clone, event_dim=ndim)
                if self.local_point:
                    pyro.sample(name, site.point(loc))
                    continue
                wide = torch.full_like(start, math.log(self.scale))
                log_scale = pyro.param(log_scale_of(name), wide, event_dim=ndim)
                pyro.sample(name, site.normal(loc, log_scale))

    def __str__(self) -> str:
        return f"{'point' if self.local_point else 'mean-field'} locals"

    @property
    def log_scales(self) -> list[str]:
        """The parameters that are logarithms of standard deviations."""
        return [] if self.local_point else [log_scale_of(name) for name in self.locals]

    def at(self, prior: Mapping[str, Moments]) -> dict[str, Tensor]:
        """The local parameters of K clients at which q is the prior of these sites; a point is its centre."""
        params = {}
        for name, (loc, scale, _) in prior.items():
            params[loc_of(name)] = loc
            if not self.local_point:
                params[log_scale_of(name)] = scale.log()
        return params

    def moments(self, params: Mapping[str, Tensor]) -> dict[str, Moments]:
        """Location and scale of q(w_i) for local parameters of K clients; the inverse of :meth:`at`."""
        found = {}
        for name in self.locals:
            loc = params[loc_of(name)]
            scale = torch.zeros_like(loc) if self.local_point else params[log_scale_of(name)].exp()
            found[name] = Moments(loc, scale, exact=True)
        return found


def factorised(
    model: Model, federation: Federation, *, local_point: bool = False, scale: float = 1.0
) -> Factorised:
    """The :class:`Factorised` guide of a model, in which the globals start at the median of their prior.

    Raises:
        ValueError: the bounds of a site's support are not constants.
    """
    found = sites(model, federation)
    nodes = prior_draws(model, found, federation, 100)
    parts: dict[bool, dict[str, Coordinates]] = {False: {}, True: {}}
    for site in found.values():
        if site.observed:
            continue
        fn, value = nodes[site.name]["fn"], nodes[site.name]["value"]
        support = constant_support(site.name, fn.support)
        u = biject_to(support).inv(value)
        u = u.reshape(-1, *u.shape[value.ndim - fn.event_dim :])
        at, start = moments(fn), torch.zeros_like(u[0])
        if not site.local:
            loc = at.loc.reshape(-1, *u.shape[1:])
            start = loc[0] if at.exact and (loc == loc[:1]).all() else u.median(0).values
        unit = torch.ones_like(start)
        if _real(biject_to(support)):
            unit = at.scale.reshape(-1, *start.shape).clone().median(0).values.to(start)
        parts[site.local][site.name] = Coordinates(support, fn.event_dim, start.clone(), unit)
    return Factorised(parts[False], parts[True], local_point, scale)


def constant_support(name: str, support: Any) -> Any:
    """The support of a site, which must be the same for all values of the other variables.

    Raises:
        ValueError: the support depends on other variables; the message names the site.
    """
    base = base_support(support)
    bounds = [value for value in vars(base).values() if isinstance(value, Tensor)]
    if any((bound != bound.reshape(-1)[0]).any() for bound in bounds):
        raise ValueError(
            f"the bounds of site {name!r} depend on other variables or differ between clients: this guide "
            "needs constant bounds. Use SFVI, or sample it between 0 and 1 and scale it"
        )
    return support


def loc_of(site: str) -> str:
    """The name of the parameter that is a site's location."""
    return f"{site}.loc"


def log_scale_of(site: str) -> str:
    """The name of the parameter that is the logarithm of a site's standard deviation."""
    return f"{site}.log_scale"


def _real(transform: Any) -> bool:
    """Return True if the unconstrained coordinates are the values themselves."""
    while isinstance(transform, transforms.IndependentTransform):
        transform = transform.base_transform
    return isinstance(transform, transforms.ComposeTransform) and not transform.parts
