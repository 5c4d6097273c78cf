"""The sample sites of a model, classified as global or local, latent or observed, by tracing it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.data.batch import CLIENTS, OBSERVATIONS
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.moments import unconstrained_shape

ENDS = 0.1
"""The largest share of draws of a prior at an end of its support, by round-off for example."""
CONTEXT = "context"
"""The key of ``infer`` for the encoder of a local site: see :mod:`bayesfed.guides.encoders`."""


RESERVED = (
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
"""Names that no site may have: plates, ArviZ's dimensions and the auxiliary sites of a guide."""


@dataclass(frozen=True)
class Site:
    """A sample site of a model.

    Attributes:
        name: its name.
        local: whether it lies inside the clients plate.
        observed: whether it has data.
        per_row: whether it lies inside the observations plate.
        joint: observed, and all rows of a client are one event, so that they depend on each other given all variables.
        event_shape: shape of one value.
        support: Pyro's constraint.
        context: local, with an encoder that gives its value from the client's rows.
        factor: a ``pyro.factor``, which counts as observed but has no data.
        conditional: observed, with a client's variable integrated out: further rows are conditional on its own rows,
            see :class:`~bayesfed.elbo.handlers.GivenOwnRows`.
        in_training: conditional, in the steps of a round too.
        terms: the number of terms that the density of a row is the sum of: components of a mixture, or values of the
            variables that are summed or integrated out.
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
    conditional: bool = False
    in_training: bool = False
    terms: int = 1

    @property
    def dimensions(self) -> int:
        """The number of unconstrained numbers of one value."""
        return unconstrained_shape(self.support, self.event_shape).numel()


def global_dimensions(found: Mapping[str, Site]) -> int:
    """Return D, the number of unconstrained numbers of the global latent variables."""
    return sum(site.dimensions for site in found.values() if not site.local and not site.observed)


class NeedsOneClient(ValueError):
    """A variable that only :mod:`bayesfed.vmap.one_client` can sum out, integrate out or record."""


class _CheckNames(Messenger):
    """Fail on a site with a reserved name, or that is sampled twice, with a message that names it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, bool] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if handlers.is_plate(msg):
            return
        check_handled(msg)
        name, local = msg["name"], handlers.is_local(msg)
        if name in RESERVED:
            raise ValueError(
                f"site {name!r} has the name of a dimension or of a part of the guide ({', '.join(RESERVED)}): "
                "rename it"
            )
        if name in self.seen:
            where = {True: "inside the clients plate", False: "outside it"}
            raise ValueError(
                f"site {name!r} is sampled twice, {where[self.seen[name]]} and {where[local]}: a site is "
                "either global (outside) or local (inside); remove one or rename it"
            )
        self.seen[name] = local


def check_handled(msg: Mapping[str, Any]) -> None:
    """Fail on a site that a handler around the model hides or gives a value, or whose data are no tensor.

    Args:
        msg: the site's message in a run on one client, after the model's own handlers.
    """
    name, value = msg["name"], msg["value"]
    if msg["infer"].get("_do_not_trace"):
        raise ValueError(
            f"site {name!r} has infer={{'_do_not_trace': True}}, as ConjugateReparam gives it: leave that out, a "
            "variable that no handler sees has no posterior"
        )
    if msg["is_observed"] and not isinstance(value, torch.Tensor):
        raise ValueError(
            f"observed site {name!r} has a value of type {type(value).__name__}: give it a tensor"
        )
    if msg["done"] and not msg["is_observed"]:
        raise ValueError(
            f"latent site {name!r} is given a value by a handler around the model, such as poutine.replay: leave the "
            "handler out, or write the value into the program in place of pyro.sample"
        )
    for frame in msg["cond_indep_stack"]:
        if frame.name == CLIENTS and frame.size != 1:
            raise ValueError(
                f"site {name!r} lies in a plate {CLIENTS!r} that the model has made: open `with federation.clients():`"
            )
        if frame.full_size is not None:
            check_whole(frame.name, frame.full_size, frame.size)


def check_whole(plate: str, size: int, subsample_size: int | None) -> None:
    """Fail on a plate that takes a subsample of its own."""
    if subsample_size not in (None, size):
        raise ValueError(
            f"plate {plate!r} takes a subsample of its own, {subsample_size} of {size}: leave out subsample_size and "
            "subsample, and inside `with federation.observations()` the plate itself. bf.fit(..., batch_size=...) "
            "draws minibatches of rows"
        )


def expand_data(node: Mapping[str, Any]) -> Tensor:
    """Return the data of a site in the shape of its distribution.

    Raises:
        ValueError: they have another shape.
    """
    name, fn, value = node["name"], node["fn"], node["value"]
    try:
        return value.expand(fn.batch_shape + fn.event_shape)
    except RuntimeError:
        own = handlers.plates(node) - {CLIENTS, OBSERVATIONS, handlers.DRAWS}
        plates = "".join(f" In place of plate {name!r} write .to_event(1)." for name in own)
        raise ValueError(
            f"observed site {name!r}: values of shape {tuple(value.shape)} are no values of {name_of(fn)} with batch "
            f"shape {tuple(fn.batch_shape)} and event shape {tuple(fn.event_shape)}.{plates} What clients have "
            "observed is a field of the federation, obs[...] or federation.of_clients(...), with all rows of the "
            "batch: it needs no pyro.condition, and rows are left out by poutine.mask(mask=...), not by an index"
        ) from None


@dataclass(frozen=True, eq=False)
class InspectedModel:
    """A model whose sample sites are found once, and handed on to all that need them.

    Attributes:
        model: the Pyro model.
        federation: the clients' data.
        clients_apart: whether its densities are those under ``torch.vmap``, where no client or draw depends on another.

    Example:
        >>> from bayesfed import datasets, models
        >>> from bayesfed.elbo.sites import InspectedModel, sites
        >>> schools = datasets.eight_schools()
        >>> model = InspectedModel(models.eight_schools, schools)
        >>> sites(model, schools) is sites(model, schools)
        True
    """

    model: Model
    federation: Federation
    clients_apart: bool = False
    _found: dict[str, Site] = field(default_factory=dict, init=False, repr=False)

    @property
    def __name__(self) -> str:
        return getattr(self.model, "__name__", type(self.model).__name__)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model itself, such as one of the user's class."""
        if name.startswith("__") or name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    def find_sites(self) -> dict[str, Site]:
        """Return the sample sites, found once."""
        if not self._found:
            self._found.update(_find_sites(self.model, self.federation))
        return self._found

    def __call__(self, federation: Any) -> None:
        """Run the Pyro model."""
        if given := getattr(federation, "given", None):
            with handlers.GivenOwnRows(given):
                self.model(federation)
        else:
            self.model(federation)


def sites(model: Model, federation: Federation) -> dict[str, Site]:
    """The sample sites of a model, classified by tracing it on one client, once if the model is inspected.

    Raises:
        ValueError: no clients plate, an observed site outside it, two sites of one name or a reserved name, a latent
            site inside the observations plate, a discrete latent site, an unknown plate, or nothing observed.
    """
    if isinstance(model, InspectedModel) and model.federation is federation:
        return model.find_sites()
    return _find_sites(model, federation)


def _find_sites(model: Model, federation: Federation) -> dict[str, Site]:
    def traced(rows: int) -> Any:
        batch = federation.batch(torch.arange(1), torch.zeros(1, rows, dtype=torch.int64))
        with (
            noise.seeded(0),
            handlers.on(batch.device),
            handlers.Parameters(),
            _CheckNames(),
            handlers.NameReparametrised(),
        ):
            return poutine.trace(model).get_trace(batch)

    trace, longer = traced(1), None
    found = {}
    for name, node in handlers.sample_sites(trace).items():
        if node["infer"].get("_deterministic"):
            raise NeedsOneClient(
                f"the values of {name!r} are recorded only where the program runs for one client"
            )
        _check_plates(name, node)
        _check_distribution(name, node)
        inside, latent = handlers.plates(node), not node["is_observed"]
        if latent:
            with handlers.on(federation.device):
                _check_latent(name, node["fn"], inside)
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
            event_shape=torch.Size(node["fn"].event_shape),
            support=node["fn"].support,
            context=latent and CLIENTS in inside and CONTEXT in node["infer"],
            factor=_is_factor(node),
            conditional=not latent and hasattr(node["fn"], "given"),
            in_training=not latent and getattr(node["fn"], "in_training", False),
            terms=_terms(node["fn"]),
        )
    if not any(site.local for site in found.values()):
        raise ValueError(
            "the model has no clients plate: open `with federation.clients():` around what belongs to "
            "one client"
        )
    if not any(site.observed for site in found.values()):
        raise ValueError("the model observes nothing: no site has obs=")
    return found


def _terms(fn: Any) -> int:
    """Return the number of terms that a density is the sum of."""
    fn = innermost(fn)
    if isinstance(fn, torch.distributions.MixtureSameFamily):
        return int(fn.mixture_distribution.probs.shape[-1])
    return int(getattr(fn, "terms", 1))


def _check_distribution(name: str, node: Mapping[str, Any]) -> None:
    """Fail on a distribution without a density, or that does not say where its values lie."""
    fn, kind = node["fn"], name_of(node["fn"])
    if isinstance(innermost(fn), dist.Delta | dist.Empirical):
        raise ValueError(
            f"site {name!r} is {kind}, which has no density but points of probability one: name a value by "
            "pyro.deterministic, and add a log density by pyro.factor"
        )
    for has, read in (
        ("support", lambda: fn.support),
        ("log density", lambda: fn.log_prob(node["value"])),
    ):
        try:
            read()
        except NotImplementedError:
            problem = "is missing. Use another distribution, or a subclass that has one"
        except (RuntimeError, IndexError) as error:
            problem = f"cannot be computed for all clients at once ({str(error).splitlines()[0]})"
            if not node["value"].is_floating_point():
                problem += f": its values are of type {node['value'].dtype}, write .float()"
        else:
            continue
        raise ValueError(f"site {name!r}: the {has} of {kind} {problem}") from None


def innermost(fn: Any) -> Any:
    """A distribution without what masks, expands or reinterprets it."""
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution | dist.MaskedDistribution):
        fn = fn.base_dist
    return fn


def name_of(fn: Any) -> str:
    """The name of a distribution's class, for messages."""
    return type(innermost(fn)).__name__


def _check_plates(name: str, node: Mapping[str, Any]) -> None:
    """Fail on a site in an unknown plate, and on data outside the clients plate."""
    inside = handlers.plates(node)
    others = inside - {CLIENTS, OBSERVATIONS}
    if others:
        raise ValueError(
            f"site {name!r} lies in plate {others.pop()!r}: only the clients and observations "
            "plates may be open; make the dimension part of the event with .to_event()"
        )
    if CLIENTS in inside or not node["is_observed"]:
        return
    if _is_factor(node):
        raise ValueError(
            f"pyro.factor {name!r} lies outside the clients plate, where no data are: make it part of the "
            "distribution of a global site"
        )
    raise ValueError(
        f"observed site {name!r} lies outside the clients plate: data belong to clients, move "
        "it inside `with federation.clients():`. A value that pyro.condition gives a global variable is a constant: "
        "write it into the program in place of pyro.sample"
    )


def _check_latent(name: str, fn: Any, inside: Collection[str]) -> None:
    """Fail on a latent site that is discrete, of a row, or has no transform from the reals onto its support."""
    if OBSERVATIONS in inside:
        raise NeedsOneClient(
            f"latent site {name!r} lies inside the observations plate (is its field missing from "
            "the federation, so that obs.get(...) is None?). Those of a single row are integrated out only "
            "where the program runs for one client and one draw"
        )
    if fn.support.is_discrete:
        if CLIENTS in inside:
            raise NeedsOneClient(
                f"latent site {name!r} is discrete, of a client. It is summed out only where the program runs for "
                "one client and one draw"
            )
        raise ValueError(
            f"latent site {name!r} is discrete, and lies outside the clients plate: those of a row or of a client "
            "are summed out, not those of all. Fit the model at each of its values"
        )
    if 0 in fn.event_shape:
        raise ValueError(
            f"latent site {name!r}: a value of {name_of(fn)} has no numbers: leave it out"
        )
    try:
        possible = bool(handlers.origin(fn).isfinite().all())  # not where a bound is infinite
    except NotImplementedError:
        possible = False
    if not possible:
        raise ValueError(
            f"latent site {name!r}: torch has no transform from the reals onto the support of "
            f"{name_of(fn)}, which a guide needs. Of a mixture write the component as a discrete "
            "variable of the row or client, which is summed out"
        )


def _is_factor(node: Mapping[str, Any]) -> bool:
    """Return whether a site is a ``pyro.factor``, whose value holds no number."""
    return node["is_observed"] and node["fn"].event_shape[-1:] == (0,)


def prior_draws(
    model: Model, found: Mapping[str, Site], federation: Federation, count: int, seed: int = 0
) -> Mapping[str, Any]:
    """Trace the latent sites at ``count`` draws of the prior on one client: values ``(count, 1, 1, *event)``."""
    latent = [site.name for site in found.values() if not site.observed]
    batch = federation.batch(torch.arange(1)).head()
    given = handlers.given(batch.device, draws=count)
    with (
        noise.seeded(seed),
        torch.no_grad(),
        given,
        poutine.trace() as tracer,
        handlers.Until(latent),
    ):
        model(batch)
    nodes = tracer.trace.nodes
    for name in latent:
        u = biject_to(nodes[name]["fn"].support).inv(nodes[name]["value"])
        if (~u.isfinite()).float().mean() > ENDS:
            raise ValueError(
                f"latent site {name!r}: {name_of(nodes[name]['fn'])} takes values at an end of its support with "
                "positive probability, which no density describes. Leave out that part, or sum over it"
            )
    return nodes
