"""Build a program from a model and a guide: check them, and find their structure from one trace and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import broadcast_shape
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import transform_to

from bayesfed.data.batch import Batch, Fields
from bayesfed.data.federation import Federation, Model
from bayesfed.data.plural import plural
from bayesfed.elbo import handlers
from bayesfed.elbo.elbo import local_priors, log_ratio
from bayesfed.elbo.log_density import log_density
from bayesfed.elbo.moments import Moments
from bayesfed.elbo.program import Params, PriorParameters, Program
from bayesfed.elbo.sites import Site, sites


def build(model: Model, guide: Callable[[Any], Any], federation: Federation) -> Program:
    """Trace a model and a guide on two clients and classify their sites and parameters.

    Raises:
        ValueError: see :func:`sites`; the guide is one of Pyro's autoguides, misses a site, has one that the model
            lacks, puts one on the other side of the clients plate, or has a local variable or parameter without a row
            per client.
        NotImplementedError: a guide site that cannot be drawn from normal or uniform noise.
    """
    if isinstance(guide, AutoGuide):
        raise ValueError(
            f"guide is Pyro's {type(guide).__name__}, which has one set of parameters for all clients together. Leave "
            "it out: SFVI() makes a Normal guide, SFVI(global_guide=MeanField()) one of independent globals, FedAvg "
            'has point estimates; or write the guide as a function, see "Your own guide" in docs/models.md'
        )
    found = sites(model, federation)
    first = torch.arange(min(2, len(federation)))
    batch = federation.batch(first, torch.zeros(len(first), 1, dtype=torch.int64))
    params, recorder = handlers.Parameters(), handlers.Noise(None)
    leaves, derived = _Leaves(), handlers.Derived()
    with handlers.on(batch.device), params, recorder, leaves, handlers.draws_plate(1):
        with _ConstantDraws():
            guide_trace = poutine.trace(guide).get_trace(batch)
        in_guide, guide_sites = set(params.seen), handlers.sample_sites(guide_trace)
        _check_sites(found, guide_sites, len(batch))
        with derived:
            model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(batch)
    init, local = _initial_values(params.seen, len(batch))
    random = tuple(
        n for n, s in guide_sites.items() if not handlers.is_local(s) and not handlers.is_point(s)
    )
    terms = log_ratio(guide_trace, model_trace, local=True)
    schema = federation.batch(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1).long())
    zeros = {name: torch.zeros_like(value) for name, value in schema.fields.items()}
    program = Program(
        model=model,
        guide=guide,
        sites=found,
        random=random,
        direct=tuple(name for name in leaves.read_by(terms) if name in init),
        local_params=tuple(local),
        resting=tuple(name for name in local if name not in in_guide),
        constraints={name: seen["constraint"] for name, seen in params.seen.items()},
        init=init,
        schema=Batch(Fields(zeros), schema.mask, torch.ones_like(schema.scale), schema.index),
        randomness=recorder.draws,
        clients=len(federation),
        rows=federation.rows,
        derived={
            name: ("observation",) * one.per_row or ("client",) * one.local
            for name, one in derived.found.items()
        },
    )
    if random:
        return program
    nodes = model_trace.nodes
    likelihood = sum(log_density(nodes[site.name]).sum() for site in program.likelihood)
    reads = {
        site.name: frozenset(leaves.read_by(_log_prob_of_constant(nodes[site.name])))
        for site in (*program.locals, *program.likelihood)
    }
    return replace(
        program,
        unread=frozenset(init).difference(leaves.read_by(likelihood)),
        anchors=_prior_parameters(program, init | local, reads, batch),
        reads=reads,
    )


class _Leaves(Messenger):
    """Make each parameter a leaf of the autograd graph."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}

    def _pyro_post_param(self, msg: Any) -> None:
        msg["value"] = self.found.setdefault(msg["name"], msg["value"].requires_grad_())

    def read_by(self, value: Tensor | float) -> list[str]:
        """The parameters that a value depends on, other than through global draws."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return []
        leaves = list(self.found.values())
        grads = torch.autograd.grad(value.sum(), leaves, allow_unused=True, retain_graph=True)
        return [name for name, grad in zip(self.found, grads, strict=True) if grad is not None]


class _ConstantDraws(Messenger):
    """Make each global draw of a guide a constant."""

    def _pyro_post_sample(self, msg: Any) -> None:
        if not (handlers.is_plate(msg) or handlers.is_local(msg) or handlers.is_point(msg)):
            msg["value"] = msg["value"].detach()


def _check_sites(found: Mapping[str, Site], guide_sites: Mapping[str, Any], clients: int) -> None:
    """Fail unless the guide has the model's latent sites, local ones with a row per client, and no others."""
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
        shape = guide_sites[site.name]["value"].shape
        rows = shape[: len(shape) - len(site.event_shape)][-2:]
        if site.local and not _expands_to(rows, torch.Size([clients, 1])):
            raise ValueError(
                f"the guide's local variable {site.name!r} has shape {tuple(shape)} for {plural(clients, 'client')}: "
                "inside clients() it has one row per client, as its parameters do, (K, 1, *event): pyro.param(name, "
                "lambda: torch.zeros(len(batch), 1)), within the plate"
            )
    for name, node in guide_sites.items():
        if name not in found and not node["infer"].get("is_auxiliary"):
            raise ValueError(
                f"the guide samples {name!r}, which the model does not; if it is auxiliary, say "
                "infer={'is_auxiliary': True}"
            )


def _initial_values(seen: Mapping[str, Mapping[str, Any]], clients: int) -> tuple[Params, Params]:
    """The unconstrained initial values of the global and of the local parameters.

    Raises:
        ValueError: a local parameter has no row per client.
    """
    found: dict[bool, Params] = {False: {}, True: {}}
    for name, param in seen.items():
        value = param["value"]
        if param["local"]:
            handlers.check_local_param(name, value, clients)
        unconstrained = transform_to(param["constraint"]).inv(value)
        found[param["local"]][name] = unconstrained.detach().clone()
    return found[False], found[True]


def _log_prob_of_constant(node: Mapping[str, Any]) -> Tensor:
    """The log density of a site's value, which counts as a constant."""
    with pyro.validation_enabled(False):
        return node["fn"].log_prob(node["value"].detach())


def _prior_parameters(
    program: Program, start: Params, reads: Mapping[str, Collection[str]], batch: Batch
) -> dict[str, PriorParameters]:
    """Find the parameters that are the location or the log scale of a Normal local prior.

    A parameter is the location of a prior if both are equal at two random values of all parameters.
    """
    at: list[tuple[Params, dict[str, Moments]]] = []
    for trial in range(2):
        generator = torch.Generator().manual_seed(trial)
        params = {
            name: value
            + 0.3 * torch.randn(value.shape, generator=generator, device="cpu").to(value)
            for name, value in start.items()
        }
        params = {name: value.requires_grad_() for name, value in params.items()}
        at.append((params, local_priors(program, params, batch)))

    def equal_to(site: str, field: str) -> str | None:
        """The parameter that is this field of the prior's moments, if there is one."""
        for name in start:
            if name not in reads[site]:
                continue
            for params, priors in at:
                found = getattr(priors[site], field)
                found = found.log() if field == "scale" else found
                value = params[name]
                if not _expands_to(value.shape, found.shape) or not torch.allclose(
                    found, value.expand_as(found), rtol=1e-4, atol=1e-4
                ):
                    break
            else:
                return name
        return None

    return {
        name: PriorParameters(
            loc=equal_to(name, "loc"),
            log_scale=equal_to(name, "scale"),
            fixed=not prior.scale.requires_grad,
        )
        for name, prior in at[0][1].items()
        if prior.exact
    }


def _expands_to(shape: torch.Size, target: torch.Size) -> bool:
    """Return whether a tensor of one shape can be expanded to the other."""
    try:
        return broadcast_shape(shape, target) == target
    except ValueError:
        return False
