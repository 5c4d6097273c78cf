"""A model whose global ``pyro.param`` are sample sites, for guides that have a distribution over them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.transforms import ComposeTransform

from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.sites import InspectedModel
from bayesfed.vmap.one_client import OneClient


class _Onto(ComposeTransform):
    """The transform from the reals onto a constrained set, with that set as its codomain."""

    def __init__(self, constraint: Any) -> None:
        super().__init__([biject_to(constraint)])
        self._constraint = constraint

    @property
    def codomain(self) -> Any:  # type: ignore[override]
        return self._constraint


@dataclass(frozen=True)
class LiftedModel:
    """A model in which some parameters are sample sites.

    Attributes:
        model: the Pyro model.
        starts: the start of these parameters, in unconstrained coordinates.
        priors: their priors, N(start, 1 / precision) there.
    """

    model: Model
    starts: Mapping[str, Tensor]
    priors: Mapping[str, Any]

    @property
    def __name__(self) -> str:
        return getattr(self.model, "__name__", type(self.model).__name__)

    @property
    def points(self) -> int:
        """The model's own ``points``."""
        return getattr(self.model, "points", 1)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The model's own ``kinds``."""
        return getattr(self.model, "kinds", ())

    def __call__(self, federation: Any) -> None:
        """Run the Pyro program."""
        if isinstance(self.model, OneClient):  # lift inside it, so that these sites run as others
            replace(self.model, model=replace(self, model=self.model.model))(federation)
            return
        with poutine.lift(prior=dict(self.priors)):
            self.model(federation)


def lift_params(model: Model, federation: Federation, precision: float) -> LiftedModel:
    """The model with every global ``pyro.param`` lifted into a sample site of the same name (``poutine.lift``).

    Args:
        model: the Pyro model.
        federation: the clients' data.
        precision: the precision of their priors, in unconstrained coordinates.

    Example:
        >>> import pyro, pyro.distributions as dist, torch, bayesfed as bf
        >>> from bayesfed.guides.params_as_sites import lift_params
        >>> from bayesfed.elbo.sites import sites
        >>> def model(federation):
        ...     mu = pyro.param("mu", torch.tensor(0.5))
        ...     with federation.clients(), federation.observations() as obs:
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=obs.get("y"))
        >>> data = bf.Federation.from_arrays({"a": {"y": [1.0, 3.0]}})
        >>> random = lift_params(model, data, 1.0)
        >>> list(sites(random, data)), random.starts
        (['mu', 'y'], {'mu': tensor(0.5000)})
    """
    model = model.model if isinstance(model, InspectedModel) else model
    batch = federation.batch(torch.arange(1)).head()
    found = handlers.Parameters()
    with noise.seeded(0), torch.no_grad(), handlers.on(batch.device), poutine.block(), found:
        model(batch)
    starts, priors = {}, {}
    for name, seen in found.seen.items():
        if seen["local"]:
            continue
        constraint = seen["constraint"]
        start = biject_to(constraint).inv(seen["value"]).detach().clone()
        prior = dist.Normal(start, precision**-0.5).to_event(start.ndim)
        if constraint is not constraints.real:
            prior = dist.TransformedDistribution(prior, [_Onto(constraint)])
        starts[name], priors[name] = start, prior
    return LiftedModel(model, starts, priors)
