"""The automatic guide of a hierarchical model: a family for the globals, a row per client for the locals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.federation import Federation, Model
from bayesfed.guides import local
from bayesfed.guides.landing import Landing
from bayesfed.guides.local import Start
from bayesfed.handlers import is_plate, origin, particles, trusted
from bayesfed.program import Site

GlobalFamily = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Hierarchical:
    """q(θ) Π_i q(w_i | θ) for any model.

    Globals: ``family`` gives q(z), z being all global variables, unconstrained and stacked.
    Locals: see :mod:`bayesfed.guides.local`. With ``conditioned=True`` q(w_i | θ) is the prior times a Gaussian
    factor that depends on what the client has seen before, z and its own earlier variables; else q(w_i) is
    mean-field and independent of θ.

    Attributes:
        model: the Pyro model.
        family: :class:`~bayesfed.guides.MeanField`, :class:`~bayesfed.guides.FullRank` or
            :class:`~bayesfed.guides.Flow`.
        conditioned: see above.
        globals: global latent sites, in order, and their start.
        locals: local latent sites and their start.
    """

    model: Model
    family: GlobalFamily
    conditioned: bool
    globals: Mapping[str, Start]
    locals: Mapping[str, Start]
    needs_rows = False

    def __call__(self, federation: Any) -> None:
        """Sample every latent site of the model."""
        z, loc, scale = self.sample_globals()
        with _Guided(self, z, (z - loc.detach()) / scale.detach()):
            self.model(federation.head())

    def sample_globals(self) -> tuple[Tensor, Tensor, Tensor]:
        """z and the location and scale that make it comparable across dimensions."""
        if not self.globals:
            nothing = next(iter(self.locals.values())).loc.new_zeros(0)
            return nothing, nothing, nothing
        return self.family(torch.cat([torch.zeros_like(s.loc) for s in self.globals.values()]))


def automatic(
    model: Model,
    sites: Mapping[str, Site],
    federation: Federation,
    family: GlobalFamily,
    conditioned: bool,
    draws: int = 100,
) -> Hierarchical:
    """The :class:`Hierarchical` guide of a model, started from the median and spread of its prior."""
    batch = federation.batch(torch.arange(1)).head()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with trusted(), particles(draws):
            trace = poutine.trace(model).get_trace(batch)
    starts: dict[bool, dict[str, Start]] = {False: {}, True: {}}
    for site in sites.values():
        if site.observed:
            continue
        node = trace.nodes[site.name]
        u = biject_to(node["fn"].support).inv(node["value"]).reshape(draws, -1).to(federation.dtype)
        low, middle, high = u.quantile(torch.tensor([0.16, 0.5, 0.84], dtype=u.dtype), dim=0)
        starts[site.local][site.name] = Start(middle, ((high - low) / 2).clamp(0.01, 100.0))
    return Hierarchical(model, family, conditioned, starts[False], starts[True])


class _Guided(Messenger):
    """Run the model with every latent site drawn from the guide, the observed ones hidden."""

    def __init__(self, guide: Hierarchical, z: Tensor, context: Tensor) -> None:
        super().__init__()
        self.guide = guide
        sizes = [len(start.loc) for start in guide.globals.values()]
        self.z = dict(zip(guide.globals, z.split(sizes, -1) if sizes else [], strict=True))
        self.context = [context]
        self.drawn_from: dict[str, Any] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if is_plate(msg):
            msg["stop"] = True  # its one row is nobody else's business
            return
        if name in self.z:
            msg["fn"] = _point(msg["fn"], self.z[name], self.guide.globals[name])
        elif name in self.guide.locals:
            msg["fn"] = self._local(name, msg["fn"])
        else:
            if msg["value"] is None:
                msg["value"] = origin(msg["fn"])
            msg["done"] = msg["stop"] = True

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] in self.drawn_from:
            q = self.drawn_from[msg["name"]]
            u = biject_to(msg["fn"].support).inv(msg["value"])
            self.context.append(local.whiten(q, u.reshape(q.loc.shape)))

    def _local(self, name: str, prior: Any) -> Any:
        start, clients = self.guide.locals[name], prior.batch_shape[-2]

        def param(what: str, value: Tensor) -> Tensor:
            rows = value.expand(clients, 1, *value.shape).clone
            return pyro.param(f"{name}.{what}", rows, event_dim=value.ndim)

        if not self.guide.conditioned:
            params = local.independent_start(start)
            family = partial(local.independent, start)
        else:
            c = _stack(self.context)
            params = local.conditional_start(start, c.shape[-1])
            family = partial(local.conditional, start, local.gaussian(prior), c)
        rows = {what: param(what, value) for what, value in params.items()}
        if self.guide.conditioned:
            self.drawn_from[name] = family(**rows)
        return Landing(lambda *p: local.seen(prior, family(**dict(zip(rows, p, strict=True)))), *rows.values())


def _stack(parts: list[Tensor]) -> Tensor:
    batch = torch.broadcast_shapes(*(p.shape[:-1] for p in parts))
    return torch.cat([p.expand(*batch, p.shape[-1]) for p in parts], -1)


def _point(prior: Any, z: Tensor, start: Start) -> dist.Delta:
    """θ as a function of z, with log q(θ) − log q(z) = −log |det dθ/dz| as its density."""
    transform = biject_to(prior.support)
    batch = z.shape[:-1]
    u = (start.loc + start.scale * z).reshape((*batch, *transform.inverse_shape(prior.event_shape)))
    value = transform(u)
    log_det = transform.log_abs_det_jacobian(u, value).reshape((*batch, -1)).sum(-1)
    log_det = log_det + start.scale.log().sum()
    return dist.Delta(value, log_density=-log_det, event_dim=len(prior.event_shape))
