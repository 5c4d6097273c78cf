"""Check the rows of all clients against the model: values outside a site's support, missing covariates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.distributions.util import broadcast_shape
from torch import Tensor

from bayesfed.checks.supports import at_edge, has_density, in_support
from bayesfed.data.batch import OBSERVATIONS, Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.elbo import run
from bayesfed.elbo.index_checks import checked_indices
from bayesfed.elbo.program import Program
from bayesfed.elbo.sites import expand_data, name_of


def check_rows(rows: Any) -> None:
    """Raise a TypeError for something other than a federation."""
    if not isinstance(rows, Federation):
        raise TypeError(
            f"rows are a Federation, not a {type(rows).__name__}: Federation.from_frame(frame, client=...), or "
            "encode(frame) of a formula"
        )


def check_data(program: Program, federation: Federation) -> None:
    """Check every row of every client, in one run of the model in chunks.

    Raises:
        ValueError: names the client and row. An observed value lies outside its site's support, a field that the
            model reads as one of the client differs between its rows, or a covariate is missing.
    """
    observed = [site.name for site in program.observed]
    server = program.noise(noise.key(0).to(federation.device), 1, local=False)
    for chunk in program.chunks(federation):
        batch = federation.batch(chunk)
        keys = noise.fold(noise.key(0).to(federation.device), federation.stream_ids[chunk])
        supplied = server | program.noise(keys, 1, local=True)
        given: dict[str, Any] = {"batch": batch, "noise": supplied, "draws": 1}
        with torch.no_grad(), checked_indices(federation.device):
            _, model = run(program, program.init, {}, **given, starting=program.local_params)
        for field in batch.fields.constant:
            _check_constant(federation.select([federation.names[i] for i in chunk.tolist()]), field)

        def again(at: dict[str, Any] = given) -> Any:
            params = {
                n: v + 0.3 for n, v in (program.init | program.init_locals(at["batch"])).items()
            }
            with torch.no_grad():
                return run(program, params, {}, **at)[1].nodes

        _check_outcomes(
            {name: model.nodes[name] for name in observed}, federation, chunk, batch, again
        )


@torch.no_grad()
def check_first_outcomes(model: Model, federation: Federation) -> None:
    """Check the rows of two clients as :func:`check_data` does, for a model that fails on their first rows."""
    chunk = torch.arange(min(2, len(federation)))
    batch = federation.batch(chunk)
    try:
        with noise.seeded(0), handlers.given(batch.device, draws=1):
            nodes = handlers.sample_sites(poutine.trace(model).get_trace(batch))
    except Exception:
        return  # it is not the outcomes
    data = {
        name: node
        for name, node in nodes.items()
        if node["is_observed"] and handlers.is_local(node) and node["value"].numel()
    }
    _check_outcomes(data, federation, chunk, batch, lambda: nodes)


def _check_outcomes(
    nodes: Mapping[str, Any],
    federation: Federation,
    chunk: Tensor,
    batch: Batch,
    again: Callable[[], Any],
) -> None:
    """Check the observed sites of a chunk of clients; ``again`` gives them at other values of the parameters."""
    for name, node in nodes.items():
        fn, in_rows = node["fn"], OBSERVATIONS in handlers.plates(node)
        value = expand_data(node) if in_rows else node["value"]
        if batch.gaps:
            _check_gaps(federation, chunk, batch, name, node)
        inside, problem = in_support(fn, value), f"outside its support ({fn.support})"
        edge = at_edge(fn, value) & torch.as_tensor(True if node["mask"] is None else node["mask"])
        if inside.all() and edge.any():  # a density may be finite there at some parameters only
            fns = fn, again()[name]["fn"]
            inside = ~edge | (has_density(fns[0], value) & has_density(fns[1], value))
            problem = (
                "an end of its support, where the density is zero or infinite: no such row can come from it. Give "
                "these rows a distribution of their own, or leave them out"
            )
        inside = inside.expand(broadcast_shape(inside.shape, fn.batch_shape))
        inside = inside.reshape(len(chunk), -1)
        if in_rows:
            inside = inside | ~batch.mask
        if not inside.all():
            client, row = (~inside).nonzero()[0].tolist()
            value = value.expand(fn.batch_shape + fn.event_shape)
            raise ValueError(
                f"client {federation.names[int(chunk[client])]!r}, row {row}: observed site {name!r} is "
                f"{value.reshape(inside.shape + fn.event_shape)[client, row].tolist()}. Of {name_of(fn)} this is "
                f"{problem}"
            )


def _check_constant(federation: Federation, field: str) -> None:
    """Fail on a field of ``federation.of_clients`` that differs between a client's rows."""
    value = federation[field]
    first = value[federation.offsets[:-1].to(value.device)][federation.owner]
    differs = (value != first).reshape(len(value), -1).any(-1)
    if differs.any():
        row = int(differs.nonzero()[0])
        client = int(federation.owner[row])
        raise ValueError(
            f"client {federation.names[client]!r}, row {row - int(federation.offsets[client])}: field {field!r} "
            "differs between the client's rows, and the model takes it for one of the client, "
            "federation.of_clients(...). Read it with obs[...], or give every row of the client the same number"
        )


def _check_gaps(
    federation: Federation, chunk: Tensor, batch: Batch, name: str, node: Mapping[str, Any]
) -> None:
    """Fail on a row whose log density is NaN because a covariate is missing."""
    density = node["fn"].log_prob(node["value"])
    lost = (density.isnan() & batch.mask).flatten(0, -3).any(0)
    if lost.any():
        client, row = lost.nonzero()[0].tolist()
        if node["value"].reshape(*lost.shape, -1)[client, row].isnan().any():
            raise ValueError(
                f"client {federation.names[int(chunk[client])]!r}, row {row}: site {name!r} is missing in part "
                f"({int(lost.sum())} such rows). The other entries can count if entries are independent, as in "
                f"Normal(...).to_event(1), or multivariate Normal, not under {name_of(node['fn'])}: leave such rows "
                "out (missing='drop')"
            )
        missing = [
            field
            for field, value in batch.fields.items()
            if value.is_floating_point() and value[client, row].isnan().any()
        ]
        raise ValueError(
            f"client {federation.names[int(chunk[client])]!r}, row {row}: {', '.join(missing) or 'a field'} is "
            f"missing, and site {name!r} depends on it ({int(lost.sum())} such rows). Only outcomes may be "
            "missing, and covariates that have a prior, x = pyro.sample(..., obs=obs[...]): else leave such rows out "
            "(missing='drop'), or fill them in"
        )
