"""Run a model at given unconstrained values of its latent variables, or as a guide."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.handlers import is_plate, origin
from bayesfed.elbo.log_density import sum_log_density
from bayesfed.elbo.moments import unconstrained_shape
from bayesfed.elbo.sites import Site, prior_draws


def delta_at(prior: Any, u: Tensor, log_scale: Tensor | float = 0.0) -> dist.Delta:
    """A Delta at the value of a variable whose unconstrained coordinates are u ``(..., P)``.

    Its log density is −log |det| of the change of variables from ``log_scale``-scaled coordinates to the value, so that
    a guide that draws these coordinates and then this Delta has the density of the value.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> from bayesfed.guides.unconstrained import delta_at
        >>> delta = delta_at(dist.LogNormal(0.0, 1.0), torch.tensor([0.5]))
        >>> delta.v, delta.log_density
        (tensor(1.6487), tensor(-0.5000))
    """
    transform = biject_to(prior.support)
    shape = unconstrained_shape(prior.support, prior.shape())[len(prior.batch_shape) :]
    u = u.reshape((*u.shape[:-1], *shape))
    value, size = transform(u), len(prior.event_shape)
    log_det = log_abs_det(transform, u, value, size) + log_scale
    return dist.Delta(value, log_density=-log_det, event_dim=size)


def log_abs_det(transform: Any, u: Tensor, value: Tensor, event_dim: int) -> Tensor:
    """Return log |det ∂value / ∂u|, summed over the dimensions of one value."""
    batch = value.shape[: value.ndim - event_dim]
    event = event_dim - transform.codomain.event_dim + transform.domain.event_dim
    u = u.expand((*batch, *u.shape[u.ndim - event :]))  # bounds may differ where u does not
    return transform.log_abs_det_jacobian(u, value).reshape((*batch, -1)).sum(-1)


def split(vectors: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the sites' parts ``(..., size)`` of stacked values ``(..., D)``."""
    return dict(zip(sizes, vectors.split([*sizes.values()], -1) if sizes else [], strict=True))


class ModelAt(Messenger):
    """Run a model at unconstrained values of its latent variables, unseen by the handlers outside.

    Args:
        values: the values, ``(..., P)`` by sample site.
        otherwise: the value of a latent site that is given none, from its prior; by default the origin of its
            unconstrained coordinates.
        without: sites in ``values`` whose densities are not computed.

    Attributes:
        priors: the distributions of the latent sites.
        observed: the names of the sites that have data.
        log_probs: log densities ``(S, K)`` of the sites that have data or values, the latter in unconstrained
            coordinates.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        otherwise: Callable[[Any], Tensor] = origin,
        without: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.values, self.otherwise, self.without = values, otherwise, without
        self.priors: dict[str, Any] = {}
        self.observed: list[str] = []
        self.log_probs: dict[str, Tensor] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        msg["stop"] = True
        if is_plate(msg):
            return
        msg["done"] = True
        if msg["is_observed"]:
            self.observed.append(name)
            self.log_probs[name] = sum_log_density(msg)
            return
        self.priors[name] = fn
        if name in self.values:
            delta = delta_at(fn, self.values[name])
            msg["value"] = delta.v
            if name not in self.without:
                self.log_probs[name] = (fn.log_prob(delta.v) - delta.log_density).sum(-1)
        elif msg["value"] is None:
            msg["value"] = self.otherwise(fn)

    def log_prob(self, names: Collection[str] | None = None) -> Any:
        """The sum of the log densities of these sites, by default of all that have one, ``(S, K)``."""
        return sum(v for name, v in self.log_probs.items() if names is None or name in names)


class AsGuide(Messenger):
    """Run a model as a guide: draw latent sites from other distributions, and hide the rest of the program.

    Args:
        distributions: for each latent site that the guide draws, its distribution as a function of its prior.
    """

    def __init__(self, distributions: Mapping[str, Callable[[Any], Any]]) -> None:
        super().__init__()
        self.distributions = distributions

    def _pyro_sample(self, msg: Any) -> None:
        if is_plate(msg):
            msg["stop"] = True  # the guide's plates have other sizes
        elif msg["name"] in self.distributions:
            msg["fn"] = self.distributions[msg["name"]](msg["fn"])
        else:
            if msg["value"] is None:
                msg["value"] = origin(msg["fn"])
            msg["done"] = msg["stop"] = True


FARTHEST, VAGUE = 30.0, 10.0
"""The logarithm or logit beyond which a value is of no use, and the spread in place of that of a prior much of which is
there: such as Gamma(0.001, 0.001), whose draws are mostly below the least number that there is."""


def unconstrained_draws(
    model: Model, sites: Mapping[str, Site], federation: Federation, count: int
) -> dict[str, Tensor]:
    """Return draws from the prior of all latent sites, ``(count, size)`` each.

    Those of positive numbers and others with bounds are from Normal(0, :data:`VAGUE`²) where a third of the prior's is
    farther than :data:`FARTHEST`.
    """
    nodes = prior_draws(model, sites, federation, count)
    found = {}
    for site in sites.values():
        if not site.observed:
            value = nodes[site.name]["value"]
            u = biject_to(nodes[site.name]["fn"].support).inv(value)
            real = u is value or torch.equal(u, value)
            u = u.reshape(count, -1)
            found[site.name] = u if real else _within_range(u)
    return found


def _within_range(u: Tensor) -> Tensor:
    """Return draws of logarithms or logits ``(S, P)``, with quantiles of a Normal where many are out of range."""
    far = (~(u.abs() < FARTHEST)).to(u).mean(0) > 1 / 3
    levels = torch.linspace(0, 1, len(u) + 2, dtype=u.dtype, device=u.device)[1:-1]
    return u.where(~far, VAGUE * torch.special.ndtri(levels)[:, None])


def median_and_spread(draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return the medians of draws ``(S, P)`` and half the widths of their central 68 %."""
    low, middle, high = draws.quantile(draws.new_tensor([0.16, 0.5, 0.84]), dim=0)
    return middle, (high - low) / 2
