"""The distributions of clients' local sites where each site has a factor of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pyro
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.elbo.program import Params
from bayesfed.guides import local
from bayesfed.guides.local import Scaling
from bayesfed.guides.sticking_the_landing import StickingTheLanding


class SiteFactors(Messenger):
    """The distributions of K clients' local sites, each with its own factor.

    Factors depend on sites before theirs, but for those of more than :data:`~bayesfed.guides.local.FULL_UP_TO` numbers:
    steps on a weight of each would together move a factor far more than steps on its own parameters.

    Attributes:
        scalings: of each local site, in order.
        conditioned: whether the factors depend on the context.
        context: z, standardised, and the noise of the sites sampled so far that others depend on.
        drawn_from: the distributions that these sites were drawn from, unconstrained.
        params: the parameters of each site.
    """

    def __init__(self, scalings: Mapping[str, Scaling], conditioned: bool, context: Tensor) -> None:
        super().__init__()
        self.scalings, self.conditioned, self.context = scalings, conditioned, [context]
        self.drawn_from: dict[str, Any] = {}
        self.params: dict[str, dict[str, Tensor]] = {}

    def start(self, clients: int) -> None:
        """Create the parameters of K clients, in the clients plate."""
        size = self.context[0].shape[-1]
        for name, scaling in self.scalings.items():
            if self.conditioned:
                start = local.init_conditional(scaling, size)
                size += len(scaling.loc) if _is_read(scaling) else 0
            else:
                start = local.init_independent(scaling)
            self.params[name] = client_params(name, start, clients)

    def distribution(self, name: str, prior: Any) -> StickingTheLanding:
        """q of a site, over the support of its prior."""
        scaling, params = self.scalings[name], self.params[name]
        if self.conditioned:
            normal, context = local.normal_prior(prior), local.concatenate(self.context)
            family = partial(local.conditional, scaling, normal, context)
        else:
            family = partial(local.independent, scaling)

        def on_support(*values: Tensor) -> Any:
            q = family(**dict(zip(params, values, strict=True)))
            self.drawn_from.setdefault(name, q)  # the first is sampled, others give densities
            return local.on_support(prior, q)

        return StickingTheLanding(on_support, *params.values())

    def _pyro_post_sample(self, msg: Any) -> None:
        name = msg["name"]
        if self.conditioned and name in self.drawn_from and _is_read(self.scalings[name]):
            q, u = self.drawn_from[name], biject_to(msg["fn"].support).inv(msg["value"])
            u = u.reshape((*msg["value"].shape[: -msg["fn"].event_dim or None], -1))
            self.context.append(local.whiten(q, u))


def _is_read(scaling: Scaling) -> bool:
    """Return whether the factors of later sites depend on a site."""
    return len(scaling.loc) <= local.FULL_UP_TO


def client_params(name: str, start: Params, clients: int) -> dict[str, Tensor]:
    """Return the parameters of K clients, ``(K, 1, ...)``, which all have the same start."""
    return {
        key: pyro.param(
            f"{name}.{key}", value.expand(clients, 1, *value.shape).clone, event_dim=value.ndim
        )
        for key, value in start.items()
    }
