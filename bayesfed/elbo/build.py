"""From a model and a guide to a program: checked, and its structure found by tracing and by gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import transform_to

from bayesfed.data.batch import Batch, Fields
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.elbo import client_losses, client_terms, draw, local_priors, run
from bayesfed.elbo.moments import Moments
from bayesfed.elbo.program import Anchor, Program
from bayesfed.elbo.sites import sites


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
    params, recorder = handlers.Parameters(), handlers.Noise(None)
    with handlers.on(batch.device), params, recorder, handlers.draws_plate(1):
        guide_trace = poutine.trace(guide).get_trace(batch)
    guides = set(params.seen)
    guide_sites = handlers.sample_sites(guide_trace)
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
    derived = handlers.Derived()
    with handlers.on(batch.device), params, recorder, handlers.draws_plate(1), derived:
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
        resting=tuple(name for name in local_params if name not in guides),
        constraints=constraint,
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
    keys = noise.fold(noise.key(0).to(batch.device), federation.stream_ids[batch.index])
    program = _with_direct(program, batch, keys)
    return program if random else _with_anchors(program, batch, keys)


def _with_direct(program: Program, batch: Batch, keys: Tensor) -> Program:
    """Find the global parameters that a client's term reads other than through the draws."""
    root = noise.key(0).to(batch.device)
    values = draw(program, program.init, program.noise(root, 1, local=False), 1)
    values = {name: value.detach() for name, value in values.items()}
    leaves = {name: value.clone().requires_grad_() for name, value in program.init.items()}
    params, supplied = leaves | program.init_locals(batch), program.noise(keys, 1, local=True)
    terms = client_terms(program, params, values, batch, supplied, 1)
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
    for site in (*program.locals, *program.likelihood):
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
