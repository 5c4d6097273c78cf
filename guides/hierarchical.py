"""The automatic guide of a hierarchical model: a family for the globals, a row per client for the locals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to, constraints

from bayesfed.federation import Federation, Model
from bayesfed.guides.landing import Landing
from bayesfed.handlers import Noise, Parameters, is_plate, origin, particles, trusted
from bayesfed.program import Params, Site

CENTRE, SPREAD = "context.centre", "context.spread"
_FAR = 3.0  # spreads of q(z) over which what a client learnt is trusted to go on linearly
GlobalFamily = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Start:
    """The centre and spread of a site's prior, in unconstrained coordinates: flat tensors ``(P,)``.

    The guide works in units of these, so that one learning rate serves variables of any scale.
    """

    loc: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Hierarchical:
    """q(θ) Π_i q(w_i | θ) for any model.

    Globals: ``family`` gives q(z), z being all global variables, unconstrained and stacked.
    Locals, in unconstrained coordinates u, independent Normals; with ``conditioned=True`` each also
    depends on what its client sees before it, z and its own earlier variables, standardised and stacked in c:

        q(u_i | θ) ∝ p(u_i | θ) · N(u_i; a_i + e^{−r_i/2} A_i c, exp(−r_i − R_i c))

    The second factor stands for the client's likelihood and only its parameters (a, A, r, R) are learnt:
    where the prior of u_i is Normal and its likelihood too, this q holds the exact conditional posterior.
    Where the prior of u_i is not Normal it is left out of the product.

    Attributes:
        model: the Pyro model.
        family: :class:`~bayesfed.guides.MeanField`, :class:`~bayesfed.guides.FullRank` or
            :class:`~bayesfed.guides.Flow`.
        conditioned: see above; False gives q(w_i) independent of θ.
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
        z, _, _ = self.sample_globals()
        with _Guided(self, z):
            self.model(federation.head())

    def rebase(self, params: Params, local: Params) -> Params:
        """Clients' parameters written around where q(z) is now, their q(w_i | θ) staying what it is.

        c holds (z − m) / s with m and s of each client's own, so that what a client has learnt does not
        change while it is away and others move q(z). Before it learns again, m and s become the mean and
        spread of q(z), which makes its problem well conditioned: a' = a + e^{−r/2} A (m' − m) / s and
        A' = A s' / s, up to three spreads away; r and R likewise.

        Args:
            params: the global parameters.
            local: K clients' parameters.
        """
        if CENTRE not in local:
            return local
        with trusted(), Parameters(params), Noise({}):
            _, loc, scale = self.sample_globals()
        moved = ((loc - local[CENTRE]) / local[SPREAD]).clamp(-_FAR, _FAR)[..., None]
        stretched = (scale / local[SPREAD]).clamp(max=_FAR)[..., None, :]
        new, dims = dict(local), len(loc)
        for name in self.locals:
            a, r = local[f"{name}.loc"], local[f"{name}.log_precision"]
            a_weight, r_weight = local[f"{name}.loc_weight"], local[f"{name}.log_precision_weight"]
            new_r = r + (r_weight[..., :dims] @ moved).squeeze(-1)
            shift = (-r / 2).exp() * (a_weight[..., :dims] @ moved).squeeze(-1)
            narrower = ((new_r - r) / 2).exp()[..., None]
            new[f"{name}.loc"], new[f"{name}.log_precision"] = a + shift, new_r
            new[f"{name}.loc_weight"] = narrower * torch.cat(
                [a_weight[..., :dims] * stretched, a_weight[..., dims:]], -1
            )
            new[f"{name}.log_precision_weight"] = torch.cat(
                [r_weight[..., :dims] * stretched, r_weight[..., dims:]], -1
            )
        new[CENTRE], new[SPREAD] = loc.expand_as(local[CENTRE]), scale.expand_as(local[SPREAD])
        return {name: value.detach() for name, value in new.items()}

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

    def __init__(self, guide: Hierarchical, z: Tensor) -> None:
        super().__init__()
        self.guide = guide
        sizes = [len(start.loc) for start in guide.globals.values()]
        self.stacked = z
        self.z = dict(zip(guide.globals, z.split(sizes, -1) if sizes else [], strict=True))
        self.context: list[Tensor] = []
        self.standardise: dict[str, tuple[Tensor, Tensor]] = {}

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
        if msg["name"] in self.standardise:
            loc, scale = self.standardise[msg["name"]]
            u = biject_to(msg["fn"].support).inv(msg["value"])
            u = u.reshape((*u.shape[: u.ndim - len(_unconstrained_shape(msg["fn"]))], -1))
            self.context.append((u - loc) / scale)

    def _local(self, name: str, prior: Any) -> Any:
        start, clients = self.guide.locals[name], prior.batch_shape[-2]

        def param(what: str, value: Tensor) -> Tensor:
            rows = value.expand(clients, 1, *value.shape).clone
            return pyro.param(f"{name}.{what}", rows, event_dim=value.ndim)

        zeros = torch.zeros_like(start.loc)
        params = [param("loc", zeros), param("log_precision", zeros + 4.0)]
        if not self.guide.conditioned:
            return Landing(lambda a, r: _normal(prior, *_factor(start, a, r)), *params)
        if not self.context:
            rows = (clients, 1, self.stacked.shape[-1])
            centre = pyro.param(CENTRE, lambda: zeros.new_zeros(rows), event_dim=1)
            spread = pyro.param(SPREAD, lambda: zeros.new_ones(rows), event_dim=1)
            self.context.append((self.stacked - centre.detach()) / spread.detach())
        loc, precision = _factor(start, *(p.detach() for p in params))
        self.standardise[name] = loc, precision.rsqrt()
        c = _stack(self.context)
        weights = zeros.new_zeros(len(zeros), c.shape[-1])
        params += [param("loc_weight", weights), param("log_precision_weight", weights)]

        def conditional(a: Tensor, r: Tensor, a_weight: Tensor, r_weight: Tensor) -> Any:
            a = a + (-r.detach() / 2).exp() * (a_weight @ c[..., None]).squeeze(-1)
            r = r + (r_weight @ c[..., None]).squeeze(-1)
            return _normal(prior, *_times(prior, *_factor(start, a, r)))

        return Landing(conditional, *params)


def _factor(start: Start, loc: Tensor, log_precision: Tensor) -> tuple[Tensor, Tensor]:
    """Location and precision of N(u; a, e⁻ʳ), given in units of the prior's start.

    The factor starts narrow, e^{−r/2} = 0.14 of the prior's spread: then a moves at once to where the client's
    data want it. Starting wide, a first runs far beyond, the factor being too weak to pull, and must come back.
    """
    return start.loc + start.scale * loc, log_precision.exp() / start.scale.square()


def _times(prior: Any, loc: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Location and precision of the factor times the prior, where that is Normal."""
    gaussian = _gaussian(prior)
    if gaussian is None:
        return loc, precision
    prior_loc, prior_precision = gaussian[0], gaussian[1] ** -2
    total = prior_precision + precision
    return (prior_precision * prior_loc + precision * loc) / total, total


def _stack(parts: list[Tensor]) -> Tensor:
    batch = torch.broadcast_shapes(*(p.shape[:-1] for p in parts))
    return torch.cat([p.expand(*batch, p.shape[-1]) for p in parts], -1)


def _unconstrained_shape(prior: Any) -> torch.Size:
    return biject_to(prior.support).inverse_shape(prior.event_shape)


def _point(prior: Any, z: Tensor, start: Start) -> dist.Delta:
    """θ as a function of z, with log q(θ) − log q(z) = −log |det dθ/dz| as its density."""
    transform = biject_to(prior.support)
    batch = z.shape[:-1]
    u = (start.loc + start.scale * z).reshape((*batch, *_unconstrained_shape(prior)))
    value = transform(u)
    log_det = transform.log_abs_det_jacobian(u, value).reshape((*batch, -1)).sum(-1)
    log_det = log_det + start.scale.log().sum()
    return dist.Delta(value, log_density=-log_det, event_dim=len(prior.event_shape))


def _normal(prior: Any, loc: Tensor, precision: Tensor) -> Any:
    """Independent Normals in the prior's unconstrained coordinates, seen in its support."""
    shape, scale = _unconstrained_shape(prior), precision.rsqrt()
    loc, scale = (x.reshape((*x.shape[:-1], *shape)) for x in torch.broadcast_tensors(loc, scale))
    q = dist.Normal(loc, scale).to_event(len(shape))
    support = prior.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if support is constraints.real:
        return q
    return dist.TransformedDistribution(q, [biject_to(prior.support)])


def _gaussian(prior: Any) -> tuple[Tensor, Tensor] | None:
    """Location and scale of a prior that is Normal in unconstrained coordinates: ``(..., P)``; or None."""
    base = prior
    while isinstance(base, dist.Independent):
        base = base.base_dist
    if isinstance(base, dist.LogNormal):
        base = base.base_dist
        while isinstance(base, dist.Independent):
            base = base.base_dist
    if not isinstance(base, dist.Normal):
        return None
    batch = prior.batch_shape
    return tuple(x.expand(*batch, *prior.event_shape).reshape(*batch, -1) for x in (base.loc, base.scale))
