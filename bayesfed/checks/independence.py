"""Check that the density of a client depends on that client and that draw alone.

A step runs several clients and draws as one batch, padded to the longest client; the server runs the model without
data. A reduction over a dimension too many, a statistic over padded rows or a prior that reads data then changes the
densities without an error. So the log density of every site is compared, at the same values: two clients together and
each alone, two draws together and each alone, rows in another order if minibatches shuffle them, with data and without.
Of a model that has run under vmap for one client and one draw, padding alone needs to be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.data.batch import Batch, Fields
from bayesfed.data.federation import Federation
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.elbo import run
from bayesfed.elbo.program import Params, Program
from bayesfed.elbo.sites import InspectedModel
from bayesfed.vmap.compare import CLIENT_ADVICE, check_same, densities, two_clients

OTHERS = 16
"""The number of clients that are compared, each beside the longest, of a model that does not run under vmap."""
Densities = dict[str, Tensor]
"""Sample site to log density of S draws and K clients ``(S, K)``, or of a global site ``(S, 1)``."""


@torch.no_grad()
def check_independence(program: Program, federation: Federation, shuffled: bool) -> None:
    """Compare the log densities of two clients and two draws together and apart.

    Args:
        program: the model/guide pair.
        federation: the clients' data.
        shuffled: rows come in minibatches, in any order.

    Raises:
        ValueError: names the site, what it depends on and what to write.
    """
    if shuffled and program.kinds:
        raise ValueError(
            f"site {program.kinds[0]!r} is discrete, of a client, and summed out: the density of its rows is no sum "
            "over rows, which a minibatch could represent. Leave out batch_size"
        )
    first = _pair(program, federation)
    _, positions, pair, point = first
    together = point.densities(pair)

    def compare(
        one: Densities, other: Densities, problem: str, between_draws: bool = False
    ) -> None:
        try:
            check_same(one, other, problem, between_draws=between_draws)
        except ValueError:
            check_same(
                together,
                point.densities(pair),
                "differs from one run to the next at the same values: the model draws numbers of its own. Sample them "
                "with pyro.sample, which no poutine.block may hide, or give them as data",
            )
            raise

    apart = isinstance(program.model, InspectedModel) and program.model.clients_apart
    pairs = [first]
    if isinstance(program.model, InspectedModel) and not apart:
        # it may read a number off its data that only some clients have
        last = len(federation) - 1
        some = torch.linspace(0, last, OTHERS, device="cpu").round().long().unique()
        pairs += [_pair(program, federation, other) for other in some.tolist()]
    for clients, slots, batch, at in pairs:
        both = together if batch is pair else at.densities(batch)
        for k, name in enumerate(federation.names[i] for i in clients.tolist()):
            rows = slots[k, slots[k] >= 0][None]
            if apart and rows.shape[1] == slots.shape[1]:
                continue
            compare(
                {site: v[:, k : k + 1] if v.shape[1] > 1 else v for site, v in both.items()},
                at.client(k).densities(federation.batch(clients[k : k + 1], rows)),
                f"depends, for client {name!r}, on which other clients are in the batch, or on padding. "
                f"{CLIENT_ADVICE}",
                between_draws=True,
            )
    if not pair.mask.all():
        compare(
            together,
            point.densities(_padded_by_last_rows(pair)),
            f"depends on padding, in place of the rows that a client has not. {CLIENT_ADVICE}",
            between_draws=True,
        )
    for s in () if apart else range(2):
        compare(
            {site: value[s : s + 1] for site, value in together.items()},
            point.draw(s).densities(pair),
            "depends on other draws, which stand in front: reduce over a dimension, value.sum(-1), not value.sum(), "
            "and index from the right, value[..., 0]",
        )
    if shuffled:
        root = noise.key(0).to(federation.device)
        order = noise.shuffle(root[None], (positions[:1] >= 0).sum(-1))[0].cpu()
        compare(
            {site: value[:, :1] for site, value in together.items()},
            point.client(0).densities(federation.batch(first[0][:1], order[None])),
            "depends on the order of a client's rows, which minibatches take at random: leave out batch_size",
        )
    names = {site.name for site in program.globals}
    compare(
        {site: value for site, value in together.items() if site in names},
        point.client(0).densities(program.schema),
        "is global, and its prior depends on the clients' data or their number, which the server does not have: give "
        "it constants",
    )


def _padded_by_last_rows(batch: Batch) -> Batch:
    """Return a batch in which padding repeats each client's last row in place of its first."""
    at, last = torch.arange(len(batch), device=batch.device), batch.mask.sum(-1) - 1
    fields = {}
    for name, value in batch.fields.items():
        mask = batch.mask.reshape(*batch.mask.shape, *[1] * (value.ndim - 2))
        fields[name] = torch.where(mask, value, value[at, last][:, None])
    return replace(batch, fields=Fields(fields))


@dataclass(frozen=True)
class _Point:
    """The values at which densities are compared.

    Attributes:
        program: the model/guide pair.
        params: the parameters, ``(K, ...)`` if a client has its own.
        values: draws of the latent sites, ``(S, K or 1, 1, *event)``.
    """

    program: Program
    params: Params
    values: Params

    def client(self, k: int) -> _Point:
        """The values of one client."""
        own, sites = self.program.local_params, self.program.sites
        params = {n: v[k : k + 1] if n in own else v for n, v in self.params.items()}
        values = {n: v[:, k : k + 1] if sites[n].local else v for n, v in self.values.items()}
        return _Point(self.program, params, values)

    def draw(self, s: int) -> _Point:
        """The values of one draw."""
        return replace(self, values={n: v[s : s + 1] for n, v in self.values.items()})

    def densities(self, batch: Batch) -> Densities:
        """The log densities of all sites."""
        draws = len(next(iter(self.values.values()))) if self.values else 2
        with handlers.given(batch.device, self.params, values=self.values, draws=draws):
            nodes = poutine.trace(self.program.model).get_trace(batch).nodes
        found = {}
        with pyro.validation_enabled(False):
            each = densities({name: nodes[name] for name in self.program.sites})
        for name, site in self.program.sites.items():
            density = each[name].sum(-1) if each[name].ndim else each[name]
            found[name] = density.expand(draws, len(batch) if site.local else 1)
        return found


def _pair(
    program: Program, federation: Federation, other: int | None = None
) -> tuple[Tensor, Tensor, Batch, _Point]:
    """The longest client and another: their positions and those of their rows, the batch, and values for it."""
    clients, positions = two_clients(federation, other)
    batch = federation.batch(clients, positions)
    keys = noise.fold(noise.key(0).to(federation.device), federation.stream_ids[clients])
    return clients, positions, batch, _two_draws(program, batch, keys)


def _two_draws(program: Program, batch: Batch, keys: Tensor) -> _Point:
    """Two different values of each latent site near the guide's start."""
    params = program.init | program.init_locals(batch)
    root = noise.key(0).to(batch.device)
    supplied = program.noise(root, 2, local=False) | program.noise(keys, 2, local=True)
    _, trace = run(program, params, {}, batch, supplied, 2, program.local_params)
    generator = torch.Generator().manual_seed(0)
    values = {}
    for site in (*program.globals, *program.locals):
        node = trace.nodes[site.name]
        transform = biject_to(node["fn"].support)
        u = transform.inv(node["value"])
        lead = (2, len(batch) if site.local else 1, 1)
        u = u.expand(*lead, *u.shape[node["value"].ndim - len(site.event_shape) :]).clone()
        # point estimates differ too
        u[1] += 0.3 * torch.randn(u[1].shape, generator=generator, device="cpu").to(u)
        values[site.name] = transform(u)
    return _Point(program, params, values)
