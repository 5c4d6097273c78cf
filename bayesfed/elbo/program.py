"""A model and its guide, classified by tracing: what is global, what is local, what is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import transform_to

from bayesfed.data.batch import CLIENTS, OBSERVATIONS, Batch, Fields
from bayesfed.data.chunks import chunks, weight
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.moments import Moments
from bayesfed.elbo.terms import client_losses, client_terms, draw, local_priors, run

"""Rows, and numbers of their variables, of clients that are looked at together."""

CONTEXT = "context"
"""The mark of a local site that is made from rows, ``infer={"context": encode}``: see :mod:`bayesfed.elbo.context`."""
Params = dict[str, Tensor]
"""Parameter name to unconstrained tensor; local ones have one row per client in front."""


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
    """

    name: str
    local: bool
    observed: bool
    per_row: bool
    joint: bool
    event_shape: torch.Size
    support: Any
    context: bool = False


class _Watch(Messenger):
    """Name a site that is sampled twice, before Pyro's own message does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, bool] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if handlers.is_plate(msg):
            return
        name, local = msg["name"], handlers.is_local(msg)
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
        ValueError: no clients plate, an observed site outside it, a site named twice, a latent site
            inside the observations plate, a discrete latent site, a plate around a global site, or
            nothing observed.
    """

    def traced(rows: int) -> Any:
        batch = federation.batch(torch.arange(1), torch.zeros(1, rows, dtype=torch.int64))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            with handlers.on(batch.device), handlers.Parameters({}), _Watch():
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
        if not latent and CLIENTS not in inside:
            raise ValueError(
                f"observed site {name!r} lies outside the clients plate: data belong to clients, move "
                "it inside `with federation.clients():`"
            )
        if latent and OBSERVATIONS in inside:
            raise ValueError(
                f"latent site {name!r} lies inside the observations plate (is its field missing from "
                "the federation, so that obs.get(...) is None?). Latent variables are global or one "
                "per client; sum or integrate out those of a single row"
            )
        if latent and node["fn"].support.is_discrete:
            raise ValueError(
                f"latent site {name!r} is discrete: sum it out of the model, variational inference "
                "here needs continuous latent variables"
            )
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
        )
    if not any(site.local for site in found.values()):
        raise ValueError(
            "the model has no clients plate: open `with federation.clients():` around what belongs to "
            "one client"
        )
    if not any(site.observed for site in found.values()):
        raise ValueError("the model observes nothing: no site has obs=")
    return found


def prior_draws(
    model: Model, found: Mapping[str, Site], federation: Federation, count: int, seed: int = 0
) -> Mapping[str, Any]:
    """The latent sites, traced at ``count`` draws of the prior on one client: ``(count, 1, 1, *event)``."""
    latent = [site.name for site in found.values() if not site.observed]
    batch = federation.batch(torch.arange(1)).head()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with torch.no_grad(), handlers.given(batch.device, draws=count):
            with poutine.trace() as tracer, handlers.Until(latent):
                model(batch)
            return tracer.trace.nodes


class Anchor(NamedTuple):
    """What a Normal local prior stands on.

    Attributes:
        loc: the parameter that is its unconstrained location, if one alone is.
        log_scale: the parameter that is the logarithm of its scale, if one alone is.
        fixed: its scale depends on no parameter.
    """

    loc: str | None
    log_scale: str | None
    fixed: bool


@dataclass(frozen=True)
class Program:
    """A model/guide pair, ready to run as pure functions of (parameters, batch, noise).

    Attributes:
        model: the Pyro model.
        guide: the Pyro guide; what it offers beside being called is known to the algorithm that has chosen it.
        sites: the model's sites by name.
        random: the guide's global random sites: the server draws them and sends them to the clients.
        direct: global parameters that a client's term reads directly, and so are sent too.
        constraints: constraint of every parameter.
        init: unconstrained initial value of every global parameter.
        schema: one client with one row of zeros: what a server without data runs the program on.
        randomness: the random tensors that each guide site needs.
        clients: N, the number of clients in the federation.
        rows: Σ n_i.
        unread: global parameters that the likelihood does not depend on, given the local variables.
        anchors: by local site with a Normal prior, the parameters that are its location and its log scale.
        reads: by local or observed site, the parameters that its law depends on, also through the site's parents in
            the clients plate; of a program whose globals are points.
    """

    model: Model
    guide: Any
    sites: Mapping[str, Site]
    random: tuple[str, ...]
    direct: tuple[str, ...]
    local_params: tuple[str, ...]
    constraints: Mapping[str, Any]
    init: Params
    schema: Batch
    randomness: Mapping[str, list[noise.Draw]]
    clients: int
    rows: int
    unread: frozenset[str] = frozenset()
    anchors: Mapping[str, Anchor] = field(default_factory=dict)
    reads: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def guide_name(self) -> str:
        """What the guide is, in words."""
        named = "__str__" in vars(type(self.guide))
        return str(self.guide) if named else "a guide of your own"

    @property
    def joint(self) -> bool:
        """Whether the rows of a client depend on each other given all variables: a Gaussian process."""
        return any(site.joint for site in self.observed)

    @property
    def globals(self) -> list[Site]:
        """The model's global latent sites."""
        return [s for s in self.sites.values() if not s.local and not s.observed]

    @property
    def locals(self) -> list[Site]:
        """The model's local latent sites."""
        return [s for s in self.sites.values() if s.local and not s.observed]

    @property
    def contexts(self) -> list[Site]:
        """Those local latent sites that the model makes from a client's rows."""
        return [s for s in self.locals if s.context]

    @property
    def observed(self) -> list[Site]:
        """The model's observed sites."""
        return [s for s in self.sites.values() if s.observed]

    def noise(self, keys: Tensor, draws: int, *, local: bool) -> dict[str, list[Tensor]]:
        """Noise for the guide's local (or global) sites.

        Args:
            keys: int64, ``(K,)`` for K clients, or ``()`` for the server. K keys with ``local=False``
                give each client draws of the global sites of its own. More dimensions in front, such as
                steps, stand in front of the result.
            draws: S.
            local: for the local sites, else for the global ones.

        Returns:
            Site name to tensors of shape ``(S, K, 1, ...)``, or ``(S, 1, 1, ...)`` for the server.
        """
        supplied = {}
        keys = keys.reshape(1, 1) if keys.ndim == 0 else keys[..., None, :, None]
        for name, parts in self.randomness.items():
            if (name in self.random) == local:
                continue
            path = noise.word(name), torch.arange(draws, device=keys.device)[:, None, None]
            supplied[name] = [
                draw(keys, self.schema.scale.dtype, (*path, number))
                for number, draw in enumerate(parts)
            ]
        return supplied

    @property
    def size(self) -> int:
        """How many numbers the global parameters and one client's variables are."""
        return self.variables + sum(value.numel() for value in self.init.values())

    @property
    def variables(self) -> int:
        """How many numbers one client's variables are."""
        return sum(site.event_shape.numel() for site in self.locals)

    @property
    def laplace_params(self) -> list[str]:
        """The local parameters for which the guide has a closed form, its ``laplace`` method."""
        return list(getattr(self.guide, "laplace_params", ()))

    def laplace(self, params: Mapping[str, Tensor], phi: Params, batch: Batch) -> Params:
        """The guide's closed form of its local parameters, for K clients ``(K, 1, ...)``."""
        with handlers.given(batch.device, {**params, **phi}, noise={}):
            return self.guide.laplace(batch, phi)

    def init_locals(self, batch: Batch) -> Params:
        """Initial local parameters of K clients: tensors of shape ``(K, ...)``."""
        with handlers.given(batch.device, self.init, noise={}) as recorder:
            self.guide(batch)
            if not set(self.local_params) <= recorder.seen.keys():  # the model has some too
                self.model(batch.head())
        found = {}
        for name in self.local_params:
            seen = recorder.seen[name]
            value = transform_to(seen["constraint"]).inv(seen["value"])
            found[name] = value.detach().contiguous()
        return found

    def chunks(self, federation: Federation, copies: int = 1) -> Iterator[Tensor]:
        """Positions of all clients, some at a time, that ``copies`` of their rows and variables are not too many."""
        return chunks(
            federation.lengths, *weight(self.variables, federation.numbers_per_row, copies)
        )

    @property
    def needs_rows(self) -> bool:
        """Whether the guide reads the clients' rows, as one of the user's own may."""
        return getattr(self.guide, "needs_rows", True)

    def starts(self, federation: Federation) -> Iterator[Batch]:
        """All clients, some at a time, with as many of their rows as the guide's start needs."""
        for some in self.chunks(federation):
            rows = None if self.needs_rows else torch.zeros(len(some), 1, dtype=torch.int64)
            yield federation.batch(some, rows)


def build(model: Model, guide: Callable[[Any], Any], federation: Federation) -> Program:
    """Trace a model and a guide on two clients and classify their sites and parameters.

    Raises:
        ValueError: see :func:`sites`; the guide misses a site, has one that the model lacks, puts one
            on the other side of the boundary, or has a local parameter without a row per client.
        NotImplementedError: a guide site that cannot be drawn from normal or uniform noise.
    """
    found = sites(model, federation)
    first = torch.arange(min(2, len(federation)))
    batch = federation.batch(first, torch.zeros(len(first), 1, dtype=torch.int64))
    params, recorder = handlers.Parameters({}), handlers.Noise(None)
    with handlers.on(batch.device), params, recorder, handlers.draws_plate(1):
        guide_trace = poutine.trace(guide).get_trace(batch)
    guide_sites = {
        name: node
        for name, node in guide_trace.nodes.items()
        if node["type"] == "sample" and not handlers.is_plate(node)
    }
    for site in found.values():
        if site.observed:
            continue
        if site.name not in guide_sites:
            has = ", ".join(n for n in guide_sites if n in found) or "none of the model's"
            raise ValueError(
                f"the guide misses site {site.name!r} of the model; it has {has}. Add "
                f"pyro.sample({site.name!r}, ...) to it"
            )
        if handlers.is_local(guide_sites[site.name]) != site.local:
            kind = ("global", "local")[site.local]
            raise ValueError(
                f"site {site.name!r} is {kind} in the model but not in the guide: it must lie on the "
                "same side of the clients plate in both"
            )
    for name, node in guide_sites.items():
        if name not in found and not node["infer"].get("is_auxiliary"):
            raise ValueError(
                f"the guide samples {name!r}, which the model does not; if it is auxiliary, say "
                "infer={'is_auxiliary': True}"
            )
    with handlers.on(batch.device), params, recorder, handlers.draws_plate(1):
        poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(batch)
    init, constraint, local_params = {}, {}, []
    for name, seen in params.seen.items():
        constraint[name] = seen["constraint"]
        value = seen["value"]
        if seen["local"]:
            if value.shape[:2] != (len(batch), 1):
                raise ValueError(
                    f"local parameter {name!r} has shape {tuple(value.shape)}: inside the clients plate "
                    "a parameter has a row per client, shape (K, 1, *event) with K = len(federation)"
                )
            local_params.append(name)
        else:
            init[name] = transform_to(seen["constraint"]).inv(value).detach().clone()
    random = tuple(
        n for n, s in guide_sites.items() if not handlers.is_local(s) and not handlers.is_point(s)
    )
    schema = federation.batch(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1).long())
    zeros = {name: torch.zeros_like(value) for name, value in schema.fields.items()}
    program = Program(
        model=model,
        guide=guide,
        sites=found,
        random=random,
        direct=(),
        local_params=tuple(local_params),
        constraints=constraint,
        init=init,
        schema=Batch(Fields(zeros), schema.mask, torch.ones_like(schema.scale), schema.index),
        randomness=recorder.draws,
        clients=len(federation),
        rows=federation.rows,
    )
    keys = noise.fold(noise.key(0).to(batch.device), federation.stream_ids[batch.index])
    program = _with_shared(program, batch, keys)
    return program if random else _with_anchors(program, batch, keys)


def _with_shared(program: Program, batch: Batch, keys: Tensor) -> Program:
    """Find the global parameters that a client's term reads other than through the draws."""
    root = noise.key(0).to(batch.device)
    values = draw(program, program.init, program.noise(root, 1, local=False), 1)
    values = {name: value.detach() for name, value in values.items()}
    leaves = {name: value.clone().requires_grad_() for name, value in program.init.items()}
    terms = client_terms(program, leaves, values, batch, program.noise(keys, 1, local=True), 1)
    if not terms.requires_grad:
        return program
    grads = torch.autograd.grad(terms.sum(), list(leaves.values()), allow_unused=True)
    read = tuple(name for name, grad in zip(leaves, grads, strict=True) if grad is not None)
    return replace(program, direct=read)


def _with_anchors(program: Program, batch: Batch, keys: Tensor) -> Program:
    """Find what the local priors stand on, and the parameters that only they read, for globals that are points."""
    local = program.init_locals(batch)
    leaves = {
        name: value.clone().requires_grad_() for name, value in (program.init | local).items()
    }
    losses = client_losses(program, leaves, batch, program.noise(keys, 1, local=True), 1)
    unread = set(program.init)
    if losses.nll.requires_grad:
        grads = torch.autograd.grad(losses.nll.sum(), list(leaves.values()), allow_unused=True)
        unread -= {name for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    reads = _reads(program, leaves, batch, keys)
    at: list[tuple[dict[str, Tensor], dict[str, Moments]]] = []
    for trial in range(2):
        generator = torch.Generator().manual_seed(trial)
        moved = {
            name: value.detach() + 0.3 * torch.randn(value.shape, generator=generator).to(value)
            for name, value in leaves.items()
        }
        moved = {name: value.requires_grad_() for name, value in moved.items()}
        at.append((moved, local_priors(program, moved, batch)))

    def same(site: str, field: str) -> str | None:
        """The parameter that this moment of the site's prior is, wherever the parameters lie."""
        for name in leaves:
            if name not in reads[site]:
                continue
            for params, priors in at:
                found = getattr(priors[site], field)
                found = found.log() if field == "scale" else found
                value = params[name]
                if not _reaches(value.shape, found.shape) or not torch.allclose(
                    found, value.expand_as(found), rtol=1e-4, atol=1e-4
                ):
                    break
            else:
                return name
        return None

    anchors = {
        site.name: Anchor(
            same(site.name, "loc"),
            same(site.name, "scale"),
            not at[0][1][site.name].scale.requires_grad,
        )
        for site in program.locals
        if at[0][1][site.name].exact
    }
    return replace(program, unread=frozenset(unread), anchors=anchors, reads=reads)


def _reads(
    program: Program, leaves: Mapping[str, Tensor], batch: Batch, keys: Tensor
) -> dict[str, frozenset[str]]:
    """Which parameters the law of each local or observed site depends on, its own value given."""
    supplied, found = program.noise(keys, 1, local=True), {}
    _, model = run(program, leaves, {}, batch, supplied, 1)
    for site in (*program.locals, *program.observed):
        node = model.nodes[site.name]
        with pyro.validation_enabled(False):
            log_prob = node["fn"].log_prob(node["value"].detach())
        grads: Sequence[Tensor | None] = [None] * len(leaves)
        if log_prob.requires_grad:
            grads = torch.autograd.grad(
                log_prob.sum(), list(leaves.values()), allow_unused=True, retain_graph=True
            )
        found[site.name] = frozenset(
            name for name, grad in zip(leaves, grads, strict=True) if grad is not None
        )
    return found


def _reaches(shape: torch.Size, target: torch.Size) -> bool:
    """Whether a tensor of that shape expands to the target."""
    try:
        return torch.broadcast_shapes(shape, target) == target
    except RuntimeError:
        return False
