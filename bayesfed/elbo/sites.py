"""The sites of a model, classified by tracing it: what is global, what is local, what is observed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch.distributions import biject_to

from bayesfed.data.batch import CLIENTS, OBSERVATIONS
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.mixtures import Mixture

CONTEXT = "context"
"""The mark of a local site that is made from rows, ``infer={"context": encode}``: see :mod:`bayesfed.elbo.context`."""


TAKEN = (
    "chain",
    "draw",
    "client",
    "observation",
    "round",
    "clients",
    "observations",
    "draws",
    "global",
    "local",
)
"""Names that no site may have: of plates, of ArviZ's dimensions, of what a guide draws beside the sites."""


@dataclass(frozen=True)
class Site:
    """A sample site of a model.

    Attributes:
        name: its name.
        local: inside the clients plate.
        observed: it has data.
        per_row: inside the observations plate.
        joint: observed, all rows of a client being one event: given all variables they depend on each other.
        event_shape: shape of one value.
        support: Pyro's constraint.
        context: local, and the model has an encoder that makes it from the client's rows.
        factor: observed without data: ``pyro.factor``.
    """

    name: str
    local: bool
    observed: bool
    per_row: bool
    joint: bool
    event_shape: torch.Size
    support: Any
    context: bool = False
    factor: bool = False


class NeedsOneClient(ValueError):
    """A variable that is summed or integrated out only by :mod:`bayesfed.vmap.one_client`."""


class _Watch(Messenger):
    """Name a site that is sampled twice, before Pyro's own message does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, bool] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if handlers.is_plate(msg):
            return
        name, local = msg["name"], handlers.is_local(msg)
        if name in TAKEN:
            raise ValueError(
                f"site {name!r} has the name of a dimension or of a part of the guide ({', '.join(TAKEN)}): rename it"
            )
        if name in self.seen:
            where = {True: "inside the clients plate", False: "outside it"}
            raise ValueError(
                f"site {name!r} is sampled twice, {where[self.seen[name]]} and {where[local]}: a site is "
                "either global (outside) or local (inside); remove one or rename it"
            )
        self.seen[name] = local


def sites(model: Model, federation: Federation) -> dict[str, Site]:
    """The sample sites of a model, classified by tracing it on one client.

    Raises:
        ValueError: no clients plate, an observed site outside it, a site named twice or as no site may be, a latent
            site inside the observations plate, a discrete latent site, a plate that it does not know, or nothing
            observed.
    """

    def traced(rows: int) -> Any:
        batch = federation.batch(torch.arange(1), torch.zeros(1, rows, dtype=torch.int64))
        with noise.seeded(0), handlers.on(batch.device), handlers.Parameters(), _Watch():
            return poutine.trace(model).get_trace(batch)

    trace, longer = traced(1), None
    found = {}
    for name, node in trace.nodes.items():
        if node["type"] != "sample" or handlers.is_plate(node):
            continue
        inside = handlers.plates(node)
        latent = not node["is_observed"]
        others = inside - {CLIENTS, OBSERVATIONS}
        if others:
            raise ValueError(
                f"site {name!r} lies in plate {others.pop()!r}: only the clients and observations "
                "plates may be open; make the dimension part of the event with .to_event()"
            )
        factor = isinstance(_base(node["fn"]), dist.Unit)
        if factor and CLIENTS not in inside:
            raise ValueError(
                f"pyro.factor {name!r} lies outside the clients plate, where no data are: make it part of the "
                "distribution of a global site"
            )
        if not latent and CLIENTS not in inside:
            raise ValueError(
                f"observed site {name!r} lies outside the clients plate: data belong to clients, move "
                "it inside `with federation.clients():`"
            )
        if latent and OBSERVATIONS not in inside and node["fn"].support.is_discrete:
            if CLIENTS in inside:
                raise NeedsOneClient(
                    f"latent site {name!r} is discrete, of a client. It is summed out only where the program runs for "
                    "one client and one draw"
                )
            raise ValueError(
                f"latent site {name!r} is discrete, and lies outside the clients plate: those of a row or of a client "
                "are summed out, not those of all. Fit the model at each of its values"
            )
        if latent and OBSERVATIONS in inside:
            raise NeedsOneClient(
                f"latent site {name!r} lies inside the observations plate (is its field missing from "
                "the federation, so that obs.get(...) is None?). Those of a single row are integrated out only "
                "where the program runs for one client and one draw"
            )
        if latent:
            try:
                biject_to(node["fn"].support)
            except NotImplementedError:
                raise ValueError(
                    f"latent site {name!r}: torch knows no way from the reals onto the values of "
                    f"{type(node['fn']).__name__}, which a guide needs. Of a mixture write the component as a discrete "
                    "variable of the row or client, which is summed out"
                ) from None
        joint = False
        if not latent and OBSERVATIONS not in inside and node["fn"].event_dim:
            longer = longer or traced(2)
            joint = longer.nodes[name]["fn"].event_shape != node["fn"].event_shape
        found[name] = Site(
            name=name,
            local=CLIENTS in inside,
            observed=not latent,
            per_row=OBSERVATIONS in inside,
            joint=joint,
            event_shape=node["fn"].event_shape,
            support=node["fn"].support,
            context=latent and CLIENTS in inside and CONTEXT in node["infer"],
            factor=factor,
        )
    if not any(site.local for site in found.values()):
        raise ValueError(
            "the model has no clients plate: open `with federation.clients():` around what belongs to "
            "one client"
        )
    if not any(site.observed for site in found.values()):
        raise ValueError("the model observes nothing: no site has obs=")
    return found


def _base(fn: Any) -> Any:
    while isinstance(fn, dist.Independent | dist.MaskedDistribution | Mixture):
        fn = fn.first if isinstance(fn, Mixture) else fn.base_dist
    return fn


def prior_draws(
    model: Model, found: Mapping[str, Site], federation: Federation, count: int, seed: int = 0
) -> Mapping[str, Any]:
    """The latent sites, traced at ``count`` draws of the prior on one client: ``(count, 1, 1, *event)``."""
    latent = [site.name for site in found.values() if not site.observed]
    batch = federation.batch(torch.arange(1)).head()
    with noise.seeded(seed), torch.no_grad(), handlers.given(batch.device, draws=count):
        with poutine.trace() as tracer, handlers.Until(latent):
            model(batch)
        return tracer.trace.nodes
