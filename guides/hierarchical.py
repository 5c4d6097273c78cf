"""The automatic guide of a hierarchical model: a family for the globals, a row per client for the locals."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.handlers import Until, draws_plate, given, is_plate, origin
from bayesfed.elbo.log_density import log_density
from bayesfed.elbo.program import Params
from bayesfed.elbo.sites import Site, prior_draws
from bayesfed.guides import client_factor, local
from bayesfed.guides.block import chained
from bayesfed.guides.family import Family
from bayesfed.guides.local import Start
from bayesfed.guides.sticking_the_landing import StickingTheLanding
from bayesfed.tracing.compiler import traceable

LOCAL = "local"
"""The auxiliary site that holds the local variables of the block as one unconstrained vector a client."""


class _BlockPrior(NamedTuple):
    """The Normal prior of K clients' block at the centre of q(θ), in its units, and that centre and its scale."""

    loc: Tensor
    precision: Tensor
    z: Tensor
    unit: Tensor


@dataclass(frozen=True)
class Hierarchical:
    """q(θ) Π_i q(w_i | θ) for any model.

    Globals: ``family`` gives q(z), z being all global variables, unconstrained and stacked. The model's own
    ``pyro.param`` stay what they are, points.
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
        block: the local sites that share one Gaussian factor: all of them, unless they are too many numbers.
        normal: those of the block whose priors are Normal, with a location that is linear in other sites of the block,
            if it depends on local sites at all. The factor stands for the likelihood and the priors of the others.
        chain: where there are such locations, the block's variables are this matrix times their innovations, what each
            adds to that location, of which the factor is one: ``(P, P)``.
    """

    model: Model
    family: Family
    conditioned: bool
    globals: Mapping[str, Start]
    locals: Mapping[str, Start]
    block: tuple[str, ...] = ()
    normal: tuple[str, ...] = ()
    chain: Tensor | None = None
    needs_rows = False

    def __call__(self, federation: Any) -> None:
        """Sample every latent site of the model."""
        z, loc, scale = self.sample_globals()
        head = federation.head()
        context = (z - loc.detach()) / scale.detach()
        guided = _Guided(self, z, context, self.block_prior(z, head) if self.block else None)
        with federation.clients():
            guided.open(len(head))
        with guided, Until([*self.globals, *self.locals]):
            self.model(head)

    @property
    def block_start(self) -> Start:
        """The start of the block's variables as one vector."""
        starts = [self.locals[name] for name in self.block]
        return Start(*(torch.cat([getattr(s, f) for s in starts]) for f in ("loc", "scale")))

    def block_parts(self, u: Tensor) -> dict[str, Tensor]:
        """The sites of the block from that vector, ``(..., P)``."""
        u = u if self.chain is None else u @ self.chain.mT.to(u)
        sizes = [len(self.locals[name].loc) for name in self.block]
        return dict(zip(self.block, u.split(sizes, -1), strict=True))

    def block_prior(self, z: Tensor, head: Any) -> tuple[Tensor, Tensor]:
        """Location and scale of the block's Normal priors ``(..., P)``; infinitely wide where there is none."""
        priors = _Priors(self, z)
        if self.normal:
            with priors, Until(self.normal):
                self.model(head)
        wide = {n: (s.loc, torch.full_like(s.loc, torch.inf)) for n, s in self.locals.items()}
        found = wide | {name: priors.found[name] for name in self.normal}
        locs, scales = zip(*(found[name] for name in self.block), strict=True)
        return _stack(locs), _stack(scales)

    @property
    def laplace_params(self) -> list[str]:
        """The local parameters that :meth:`laplace` gives."""
        if not self.block:
            return []
        size = sum(len(self.locals[name].loc) for name in self.block)
        names = ["loc", "log_precision", "loc_weight", "precision_weight"]
        return [f"{LOCAL}.{name}" for name in names + ["tril"] * (size > 1)]

    def laplace(self, params: Params, phi: Params, batch: Any) -> Params:
        """The parameters of the block's factor from the likelihood's curvature, for K clients ``(K, 1, ...)``.

        Each client stops where its next step is worth nothing, whatever the others do. Only on a CPU it is asked
        whether all have: asking waits for a device.
        """
        params = {**params, **phi}
        at = self._block_prior(params, batch)
        u, still = phi[f"{LOCAL}.loc"], batch.scale.new_ones(len(batch))
        for _ in range(client_factor.NEWTON_STEPS):
            u, still = self._climbed(params, batch, at, u, still)
            if still.device.type == "cpu" and not bool(still.any()):
                break
        found = self._factor(params, batch, at, u)
        for name in ("loc_weight", "precision_weight"):
            rest = phi[f"{LOCAL}.{name}"].shape[-1] - found[name].shape[-1]
            found[name] = torch.nn.functional.pad(found[name], (0, rest))
        return {f"{LOCAL}.{name}": found[name] for name in found if f"{LOCAL}.{name}" in phi}

    @traceable
    def _block_prior(self, params: Params, batch: Any) -> _BlockPrior:
        with given(batch.device, params, noise={}):
            _, loc, scale = self.sample_globals()
            z, unit = (x.detach().expand(len(batch), 1, -1) for x in (loc, scale))
            prior = self.block_prior(z, batch.head())
        centre, spread = (x.detach().expand(len(batch), 1, -1) for x in prior)
        start = self.block_start
        return _BlockPrior(
            (centre - start.loc) / start.scale, (start.scale / spread).square(), z, unit
        )

    @traceable
    def _climbed(
        self, params: Params, batch: Any, at: _BlockPrior, u: Tensor, still: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The variables after a Newton step of those who are still on their way, 1; and who then still are."""

        def log_joint(u: Tensor) -> Tensor:
            far = (at.precision * (u - at.loc).square()).sum((-2, -1))
            return self._log_likelihood(params, batch, u, at.z) - far / 2

        least = at.precision.where(at.precision > 0, 1.0)
        step, worth = client_factor.newton_step(log_joint, least, u)
        further = client_factor.best(log_joint, u, step)
        on_the_way = still.reshape(-1, 1, 1) > 0
        return torch.where(on_the_way, further, u), still * (worth > client_factor.THERE)

    @traceable
    def _factor(
        self, params: Params, batch: Any, at: _BlockPrior, mode: Tensor
    ) -> dict[str, Tensor]:
        found = client_factor.factor(partial(self._log_likelihood, params, batch), mode, at.z)
        for name in ("loc_weight", "precision_weight"):
            found[name] = found[name] * at.unit[..., None, :]
        return found

    def _log_likelihood(self, params: Params, batch: Any, u: Tensor, z: Tensor) -> Tensor:
        """Of S values of the block's variables, ``(S, K)``."""
        start = self.block_start
        likelihood = _Likelihood(self, z, self.block_parts(start.loc + start.scale * u))
        with given(batch.device, params, noise={}), likelihood, draws_plate(len(u)):
            self.model(batch)
        return likelihood.total

    def coordinates(self) -> dict[str, Tensor]:
        """Origin and unit of every site's coordinates, ``(2, P)``: they come from draws of the prior."""
        starts = {**self.globals, **self.locals}
        return {name: torch.stack([start.loc, start.scale]) for name, start in starts.items()}

    def placed(self, coordinates: Mapping[str, Tensor]) -> Hierarchical:
        """The same guide in these coordinates, where they are of a site's shape."""

        def moved(own: Mapping[str, Start]) -> dict[str, Start]:
            given = {
                name: Start(*coordinates[name])
                for name, start in own.items()
                if name in coordinates and coordinates[name].shape[1:] == start.loc.shape
            }
            return {**own, **given}

        return replace(self, globals=moved(self.globals), locals=moved(self.locals))

    def __str__(self) -> str:
        locals_ = "conditioned" if self.conditioned else "mean-field"
        globals_ = type(self.family).__name__ if self.globals else "point"
        return f"{globals_} globals, {locals_} locals"

    def sample_globals(self) -> tuple[Tensor, Tensor, Tensor]:
        """z and the location and scale that make it comparable across dimensions."""
        start = _origin(self.globals)
        return self.family(start) if self.globals else (start, start, start)


def automatic(
    model: Model,
    sites: Mapping[str, Site],
    federation: Federation,
    family: Family,
    conditioned: bool,
    draws: int = 100,
) -> Hierarchical:
    """The :class:`Hierarchical` guide of a model, started from the median and spread of its prior."""
    nodes = prior_draws(model, sites, federation, draws)
    starts: dict[bool, dict[str, Start]] = {False: {}, True: {}}
    unconstrained: Params = {}
    for site in sites.values():
        if site.observed:
            continue
        node = nodes[site.name]
        u = biject_to(node["fn"].support).inv(node["value"]).reshape(draws, -1).to(federation.dtype)
        unconstrained[site.name] = u
        starts[site.local][site.name] = _start(u)
    guide = Hierarchical(model, family, conditioned, starts[False], starts[True])
    if not conditioned:
        return guide
    if not 0 < sum(len(start.loc) for start in guide.locals.values()) <= local.FULL_UP_TO:
        return guide
    head, block = federation.batch(torch.arange(1)).head(), tuple(guide.locals)
    normal, links = chained([_priors_at(guide, head, seed) for seed in range(2)])
    guide = replace(guide, block=block, normal=normal)
    if not links.any():
        return guide
    links = torch.eye(len(links)).to(links) - links
    u = torch.cat([unconstrained[name] for name in block], -1) @ links.mT.to(federation.dtype)
    moved = dict(zip(block, u.split([len(guide.locals[n].loc) for n in block], -1), strict=True))
    starts[True] |= {name: _start(value) for name, value in moved.items()}
    return replace(guide, locals=starts[True], chain=torch.linalg.inv(links))


def _start(u: Tensor) -> Start:
    """Median and spread of draws ``(S, P)``."""
    low, middle, high = u.quantile(u.new_tensor([0.16, 0.5, 0.84]), dim=0)
    return Start(middle, ((high - low) / 2).clamp(0.01, 100.0))


def _priors_at(
    guide: Hierarchical, batch: Any, seed: int
) -> tuple[Params, dict[str, tuple[Tensor, Tensor]]]:
    """Some values of the local variables, and the Normal priors there."""
    generator = torch.Generator().manual_seed(seed)

    def somewhere(start: Start) -> Tensor:
        return torch.randn(len(start.loc), generator=generator).to(start.loc)

    z = torch.cat([somewhere(s) for s in guide.globals.values()] or [torch.zeros(0)])
    at = {name: somewhere(start).requires_grad_() for name, start in guide.locals.items()}
    priors = _Priors(guide, z, at)
    with torch.enable_grad(), given(batch.device), priors, Until(guide.locals):
        guide.model(batch)
    return at, priors.found


def _origin(starts: Mapping[str, Start]) -> Tensor:
    """z = 0, ``(D,)``."""
    return torch.cat([torch.zeros_like(start.loc) for start in starts.values()] or [torch.zeros(0)])


class _Values(Messenger):
    """Run the model for its own sake: the globals from z, nothing seen by the handlers outside."""

    def __init__(self, guide: Hierarchical, z: Tensor) -> None:
        super().__init__()
        self.guide = guide
        sizes = [len(start.loc) for start in guide.globals.values()]
        self.z = dict(zip(guide.globals, z.split(sizes, -1) if sizes else [], strict=True))


class _Priors(_Values):
    """Note the Normal priors of the local sites given the globals, local variables at their origin, or as given."""

    def __init__(self, guide: Hierarchical, z: Tensor, at: Params | None = None) -> None:
        super().__init__(guide, z)
        self.at = at or {}
        self.found: dict[str, tuple[Tensor, Tensor]] = {}

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        msg["stop"] = True
        if is_plate(msg) or msg["value"] is not None:
            return
        if name in self.z:
            msg["value"] = point(fn, self.z[name], self.guide.globals[name])()
        elif name in self.guide.locals:
            prior = local.gaussian(fn)
            if prior is not None:
                self.found[name] = prior
            msg["value"] = point(fn, self.at[name])() if name in self.at else origin(fn)
        else:
            msg["value"] = origin(fn)
        msg["done"] = True


class _Likelihood(_Values):
    """Run the model with z and the block's variables given; add up the likelihood and priors that are not Normal."""

    def __init__(self, guide: Hierarchical, z: Tensor, u: Mapping[str, Tensor]) -> None:
        super().__init__(guide, z)
        self.u = u
        self.total: Any = 0.0

    def _pyro_sample(self, msg: Any) -> None:
        name, fn = msg["name"], msg["fn"]
        msg["stop"] = True
        if is_plate(msg):
            return
        if msg["is_observed"]:
            self.total = self.total + log_density(msg).sum(-1)
        elif name in self.z:
            msg["value"] = point(fn, self.z[name], self.guide.globals[name])()
        else:
            at = point(fn, self.u[name])
            msg["value"] = at()
            if name not in self.guide.normal:
                self.total = self.total + (fn.log_prob(msg["value"]) - at.log_density).sum(-1)
        msg["done"] = True


class _Guided(_Values):
    """Run the model with every latent site drawn from the guide, the observed ones hidden."""

    def __init__(
        self,
        guide: Hierarchical,
        z: Tensor,
        context: Tensor,
        prior: tuple[Tensor, Tensor] | None,
    ) -> None:
        super().__init__(guide, z)
        self.context = [context]
        self.prior = prior
        self.rows: dict[str, dict[str, Tensor]] = {}
        self.drawn_from: dict[str, Any] = {}
        self.u: dict[str, Tensor] = {}

    def open(self, clients: int) -> None:
        """The parameters of K clients, a row each, and the draw of their block, in the clients plate."""
        block, context = self.guide.block, self.context[0].shape[-1]
        starts = {LOCAL: self.guide.block_start} if block else {}
        starts |= {n: start for n, start in self.guide.locals.items() if n not in block}
        for name, start in starts.items():
            if self.guide.conditioned:
                params = local.conditional_start(start, context)
                context += len(start.loc)
            else:
                params = local.independent_start(start)
            self.rows[name] = {
                what: pyro.param(
                    f"{name}.{what}",
                    value.expand(clients, 1, *value.shape).clone,
                    event_dim=value.ndim,
                )
                for what, value in params.items()
            }
        if block:
            q = self._local(LOCAL, starts[LOCAL], self.prior)
            rows = self.rows[LOCAL].values()
            one = StickingTheLanding(lambda *p: _with_event(q(*p)), *rows)
            u = pyro.sample(LOCAL, one, infer={"is_auxiliary": True})
            if len(block) < len(self.guide.locals):
                self.context.append(local.whiten(self.drawn_from[LOCAL], u))
            self.u = self.guide.block_parts(u)

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if is_plate(msg):
            msg["stop"] = True  # its one row is nobody else's business
        elif name in self.z:
            msg["fn"] = point(msg["fn"], self.z[name], self.guide.globals[name])
        elif name in self.u:
            msg["fn"] = point(msg["fn"], self.u[name])
        elif name in self.guide.locals:
            prior = msg["fn"]
            q = self._local(name, self.guide.locals[name], local.gaussian(prior))
            rows = self.rows[name].values()
            msg["fn"] = StickingTheLanding(lambda *p: local.seen(prior, q(*p)), *rows)
        else:
            if msg["value"] is None:
                msg["value"] = origin(msg["fn"])
            msg["done"] = msg["stop"] = True

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] in self.drawn_from:
            q, u = self.drawn_from[msg["name"]], biject_to(msg["fn"].support).inv(msg["value"])
            u = u.reshape((*msg["value"].shape[: -msg["fn"].event_dim or None], -1))
            self.context.append(local.whiten(q, u))

    def _local(
        self, name: str, start: Start, prior: tuple[Tensor, Tensor] | None
    ) -> Callable[..., Any]:
        """q of K clients' variable as a function of its parameters."""
        if self.guide.conditioned:
            family = partial(local.conditional, start, prior, _stack(self.context))
        else:
            family = partial(local.independent, start)

        def q(*rows: Tensor) -> Any:
            if self.guide.conditioned and all(map(operator.is_, rows, self.rows[name].values())):
                return self.drawn_from[name]
            return family(**dict(zip(self.rows[name], rows, strict=True)))

        if self.guide.conditioned:
            self.drawn_from[name] = family(**self.rows[name])
        return q


def _with_event(q: Any) -> Any:
    return q.to_event(1) if isinstance(q, dist.Normal) else q


def _stack(parts: Sequence[Tensor]) -> Tensor:
    batch = torch.broadcast_shapes(*(p.shape[:-1] for p in parts))
    return torch.cat([p.expand(*batch, p.shape[-1]) for p in parts], -1)


def point(prior: Any, z: Tensor, start: Start | None = None) -> dist.Delta:
    """θ as a function of z, with log q(θ) − log q(z) = −log |det dθ/dz| as its density."""
    transform = biject_to(prior.support)
    batch = z.shape[:-1]
    start = (
        Start(torch.zeros_like(z[..., :1]), torch.ones_like(z[..., :1])) if start is None else start
    )
    shape = transform.inverse_shape(prior.shape())[len(prior.batch_shape) :]
    u = (start.loc + start.scale * z).reshape((*batch, *shape))
    value = transform(u)
    log_det = transform.log_abs_det_jacobian(u, value).reshape((*batch, -1)).sum(-1)
    log_det = log_det + start.scale.log().sum(-1)
    return dist.Delta(value, log_density=-log_det, event_dim=len(prior.event_shape))
