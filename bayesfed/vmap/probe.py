"""One run of a model under vmap on two clients, at draws of its prior, from which its structure is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import transform_to

from bayesfed.data.batch import OBSERVATIONS, Batch
from bayesfed.data.federation import Model
from bayesfed.elbo import handlers
from bayesfed.vmap.compare import densities
from bayesfed.vmap.levels import Layout
from bayesfed.vmap.one_client import OneClient
from bayesfed.vmap.rerun import Marginalised

DRAWS = 2


@dataclass(frozen=True)
class Probe:
    """A run of a model for one client and one draw under vmap, and what it needs to run again at the same values.

    Attributes:
        program: the model, to be run under vmap.
        batch: the rows of two clients.
        params: the parameters, unconstrained; each client has its own value of global ones too.
        nodes: the sample sites of the trace, by name, but for variables that are summed or integrated out.
        layouts: the layouts of these sites.
        marginalised: the variables that are summed or integrated out.
        derived: the values that the model names by ``pyro.deterministic``.
        written: the latent sites into whose values the model writes.
    """

    program: OneClient
    batch: Batch
    params: Mapping[str, Tensor]
    nodes: Mapping[str, Any]
    layouts: Mapping[str, Layout]
    marginalised: Mapping[str, Marginalised]
    derived: Mapping[str, Tensor]
    written: Sequence[str] = ()

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """The values of the latent sites."""
        return {n: node["value"] for n, node in self.nodes.items() if not node["is_observed"]}

    @cached_property
    def densities(self) -> dict[str, Tensor]:
        """The log densities of all sites."""
        return densities(self.nodes)

    @property
    def of_rows(self) -> list[str]:
        """The sites inside the observations plate."""
        return [name for name in self.layouts if OBSERVATIONS in handlers.plates(self.nodes[name])]

    def run_again(self, model: Model) -> dict[str, Any]:
        """The sample sites of a model at the same parameters and values."""
        with handlers.given(self.batch.device, self.params, values=self.values, draws=DRAWS):
            return handlers.sample_sites(poutine.trace(model).get_trace(self.batch))

    def changed_by(self, name: str) -> dict[str, Tensor]:
        """The log densities and derived values after a site inside the observations plate has changed its value."""
        at = handlers.given(self.batch.device, self.params, values=self.values, draws=DRAWS)
        with at, handlers.Derived() as derived, poutine.trace() as tracer:
            self.program.run(self.batch, changed=name)
        found = densities(handlers.sample_sites(tracer.trace), first=True)
        return found | {n: derivation.value for n, derivation in derived.found.items()}


def run_probe(model: Model, batch: Batch) -> Probe:
    """Run a model under vmap at draws of its prior; its parameters lie near their initial values."""
    try:
        return _run_probe(OneClient(model), batch)
    except RuntimeError:  # vmap refuses some writes into tensors
        return _run_probe(OneClient(model, writes=True), batch)


def _run_probe(program: OneClient, batch: Batch) -> Probe:
    params: dict[str, Tensor] | None = None
    while True:
        at = handlers.given(batch.device, params, draws=DRAWS)
        with at as recorder, handlers.Derived() as derived, poutine.trace() as tracer:
            run = program.run(batch)
        if params is not None or not recorder.seen:
            break
        params = _params_of_clients(recorder.seen, len(batch))
    values = {name: derivation.value for name, derivation in derived.found.items()}
    nodes = handlers.sample_sites(tracer.trace)
    return Probe(
        program,
        batch,
        params or {},
        nodes,
        run.layouts,
        run.rows.marginalised,
        values,
        run.written,
    )


def _params_of_clients(seen: Mapping[str, Any], clients: int) -> dict[str, Tensor]:
    """The parameters, unconstrained, with a value of its own for each client, near the initial one."""
    params = {}
    for name, found in seen.items():
        value = transform_to(found["constraint"]).inv(found["value"])
        if not found["local"]:
            value = value.expand(clients, 1, *value.shape)
        params[name] = value + 0.1 * torch.randn_like(value)
    return params
