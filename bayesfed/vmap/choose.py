"""The choice of how a model runs for all clients and draws of a batch: as it is if that is right, else under vmap.

A model written for one client and one draw is right under vmap (:mod:`bayesfed.vmap.one_client`). Many models are also
right with draws and clients as dimensions in front, which takes fewer operations. Both are tried, at draws of the
prior.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.sites import InspectedModel, NeedsOneClient, sites
from bayesfed.vmap.compare import CLIENT_ADVICE, check_same, densities, same, two_clients
from bayesfed.vmap.error_messages import readable_error
from bayesfed.vmap.one_client import OneClient
from bayesfed.vmap.probe import DRAWS, Probe, run_probe
from bayesfed.vmap.summed_out import sum_out


def for_batches(model: Model, federation: Federation) -> InspectedModel:
    """The model in the form that runs on batches.

    Raises:
        ValueError: it cannot be run (names the line and what to write instead); or, for all clients at once and without
            draws, it gives other densities than for each client alone (names the site).

    Example:
        >>> import bayesfed as bf, pyro, pyro.distributions as dist
        >>> from bayesfed.vmap.choose import for_batches
        >>> def effects(federation, first=lambda effect: effect[..., 0]):
        ...     effect = pyro.sample("effect", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        ...     with federation.clients(), federation.observations() as obs:
        ...         pyro.sample("y", dist.Normal(first(effect), 1.0), obs=obs.get("y"))
        >>> data = bf.Federation.from_arrays({"a": {"y": [1.0, 3.0]}, "b": {"y": [2.0]}})
        >>> for_batches(effects, data).model is effects
        True
        >>> type(for_batches(lambda f: effects(f, lambda effect: effect[0]), data).model).__name__
        'OneClient'
    """
    as_it_is, batch = InspectedModel(model, federation), federation.batch(*two_clients(federation))
    with noise.seeded(0), torch.no_grad():
        try:
            probe = run_probe(model, batch)
        except Exception as error:
            _check_batched(as_it_is, federation, batch, error)
            return as_it_is
        if probe.written:
            raise ValueError(
                f"site {probe.written[0]!r}: the model writes into the value that pyro.sample returned, and so changes "
                "the value whose density counts. Write into a copy of it: value = pyro.sample(...).clone()"
            )
        try:
            batched = _runs_batched(model, probe)
            repeats = batched or same(probe.densities, densities(probe.run_again(probe.program)))
        except Exception:  # an error in the data, which build_program reports
            return InspectedModel(probe.program, federation)
        if not any(layout.local for layout in probe.layouts.values()):
            return as_it_is  # no clients plate, which sites reports
        if not repeats:  # the model draws numbers of its own, which check_independence reports
            return as_it_is
        program = sum_out(probe, federation.gaps)
        if batched and not program.covariates:
            return InspectedModel(model, federation, clients_apart=True)
        _check_pooled(program, probe)
        return InspectedModel(program, federation, clients_apart=True)


def _check_batched(
    model: InspectedModel, federation: Federation, batch: Batch, error: Exception
) -> None:
    """Fail if a model that fails under vmap also fails with clients and draws as dimensions in front."""
    readable = readable_error(error, model.__name__)
    with suppress(Exception):
        with handlers.given(batch.device, draws=DRAWS):
            model(batch)
        sites(model, federation)
        return
    if readable is not error:
        try:
            sites(model, federation)
        except NeedsOneClient:
            raise readable from None
        except Exception as other:
            raise readable_error(other, model.__name__) from other
    raise readable from None if readable is error else error


def _runs_batched(model: Model, probe: Probe) -> bool:
    """Return whether the model has the same sites and densities without vmap."""
    alone = probe.densities
    if probe.marginalised:
        return False
    with suppress(Exception):
        together = probe.run_again(model)
        alike = probe.layouts.keys() == together.keys() and _alike(probe.nodes, together)
        return alike and same(alone, densities(together))
    return False


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two traces have the same sites, with the same shapes and in the same plates."""

    def shapes(nodes: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: (node["fn"].event_shape, handlers.plates(node) - {handlers.DRAWS})
            for name, node in nodes.items()
        }

    return shapes(one) == shapes(other)


def _check_pooled(program: OneClient, probe: Probe) -> None:
    """Fail if the model on two clients at once, without draws, gives other densities than for each client alone."""
    batch, values, layouts = probe.batch, probe.values, probe.layouts
    with handlers.given(batch.device, values=values, draws=DRAWS):
        nodes = handlers.sample_sites(poutine.trace(program).get_trace(batch))
    alone: dict[str, Tensor] = {}
    for name, density in densities(nodes, first=True).items():
        width = len(batch) if layouts[name].local else density.shape[1]
        alone[name] = density.expand(DRAWS, width, -1).double().sum((1, 2))[:, None]
    together = []
    for draw in range(DRAWS):
        own = {name: layouts[name].pooled(value[draw]) for name, value in values.items()}
        own |= {name: v.layout.pooled(v.value[draw]) for name, v in probe.marginalised.items()}
        try:
            with handlers.given(batch.device, values=own):
                nodes = handlers.sample_sites(poutine.trace(program.model).get_trace(batch))
            together.append({n: density.double().sum() for n, density in densities(nodes).items()})
        except Exception:
            return  # the model cannot be run on pooled data
    pooled = {name: torch.stack([run[name] for run in together])[:, None] for name in alone}
    check_same(
        pooled,
        alone,
        "depends on which other clients are in the batch: run for two clients at once it is another than for each "
        f"alone. {CLIENT_ADVICE}",
        between_draws=True,
    )
