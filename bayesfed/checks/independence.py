"""What a client contributes may depend on that client and that draw alone: a model that mixes them is refused.

A step runs several clients and draws as one batch, padded to the longest client; the server runs the program without
data. A reduction over a dimension too many, a statistic over padded rows or a prior that reads data then changes the
answer without an error. So the log density of every site is compared, at the same values: two clients together and each
alone, two draws together and each alone, rows in another order where minibatches shuffle them, with data and without.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.elbo import run
from bayesfed.elbo.log_density import log_density
from bayesfed.elbo.program import Params, Program
from bayesfed.vmap.choose import two

Densities = dict[str, Tensor]
"""By site, log density of S draws and K clients ``(S, K)``, or of global sites ``(S, 1)``."""


@torch.no_grad()
def check_independence(program: Program, federation: Federation, shuffled: bool) -> None:
    """Compare two clients and two draws together and apart.

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
            "over rows that a minibatch could stand for. Leave out batch_size"
        )
    clients, positions = two(federation)
    rows = (positions >= 0).sum(-1).tolist()
    pair = federation.batch(clients, positions)

    params = program.init | program.init_locals(pair)
    root = noise.key(0).to(federation.device)
    supplied = program.noise(root, 2, local=False)
    supplied |= program.noise(noise.fold(root, federation.stream_ids[clients]), 2, local=True)
    _, trace = run(program, params, {}, pair, supplied, 2)
    generator = torch.Generator().manual_seed(0)
    values = {}
    for site in (*program.globals, *program.locals):  # the second draw elsewhere, for points too
        node = trace.nodes[site.name]
        transform = biject_to(node["fn"].support)
        u = transform.inv(node["value"])
        lead = (2, 2 if site.local else 1, 1)
        u = u.expand(*lead, *u.shape[node["value"].ndim - len(site.event_shape) :]).clone()
        u[1] += 0.3 * torch.randn(u[1].shape, generator=generator).to(u)
        values[site.name] = transform(u)

    def densities(batch: Batch, draw: slice = slice(2), client: slice = slice(2)) -> Densities:
        """Of some of the draws and clients."""
        own = {n: v[client] if n in program.local_params else v for n, v in params.items()}
        some = {n: v[draw] for n, v in values.items()}
        some |= {site.name: some[site.name][:, client] for site in program.locals}
        return _densities(program, own, some, batch, draw.stop - (draw.start or 0))

    together = densities(pair)
    _compare(
        together,
        densities(pair),
        "differs from one run to the next at the same values: the model draws numbers of its own. Sample them with "
        "pyro.sample, or give them as data",
    )
    for k, name in enumerate(federation.names[i] for i in clients.tolist()):
        alone = federation.batch(clients[k : k + 1], positions[k : k + 1, : rows[k]])
        own = {site: v[:, k : k + 1] if v.shape[1] > 1 else v for site, v in together.items()}
        _compare(
            own,
            densities(alone, client=slice(k, k + 1)),
            f"depends, for client {name!r}, on which other clients are in the batch, or on padding: every client has "
            "its own entry at dim -2 and its rows at dim -1. Reduce over a dimension, value.sum(-1), not value.sum(); "
            "work out means over rows or clients beforehand; observe inside `with federation.observations()`",
            apart=True,
        )
    for s in range(2):
        _compare(
            {site: value[s : s + 1] for site, value in together.items()},
            densities(pair, draw=slice(s, s + 1)),
            "depends on other draws, which stand in front: reduce over a dimension, value.sum(-1), not value.sum(), "
            "and index from the right, value[..., 0]",
        )
    if shuffled:
        order = noise.shuffle(root[None], torch.tensor(rows[:1]))[0].cpu()
        _compare(
            {site: value[:, :1] for site, value in together.items()},
            densities(federation.batch(clients[:1], order[None]), client=slice(1)),
            "depends on the order of a client's rows, which minibatches take at random: leave out batch_size",
        )
    names = {site.name for site in program.globals}
    _compare(
        {site: value for site, value in together.items() if site in names},
        densities(program.schema, client=slice(1)),
        "is global, and its prior depends on the clients' data or their number, which the server does not have: give "
        "it constants",
    )


def _densities(
    program: Program, params: Params, values: Mapping[str, Tensor], batch: Batch, draws: int
) -> Densities:
    """The log densities of all sites at these values."""
    with handlers.given(batch.device, params, values=values, draws=draws):
        nodes = poutine.trace(program.model).get_trace(batch).nodes
    found = {}
    for name, site in program.sites.items():
        node = nodes[name]
        with pyro.validation_enabled(False):
            density = log_density(node)
        density = density.sum(-1) if density.ndim else density
        found[name] = density.expand(draws, len(batch) if site.local else 1)
    return found


def _compare(one: Densities, other: Densities, what: str, *, apart: bool = False) -> None:
    """Fail on a site whose densities differ by more than single precision accounts for.

    With ``apart`` it is compared by how much the two draws differ: what padding adds to every draw alike, such as a
    normaliser, moves nothing.
    """
    for site, value in one.items():
        expected, round_off = other[site].to(value), 1e-2 + 1e-5 * float(value.abs().max())
        if apart:
            value, expected = value[0] - value[1], expected[0] - expected[1]
        error = (value - expected).abs()
        if (error > round_off + 1e-3 * expected.abs()).any() or (
            error.isnan() & expected.isfinite()
        ).any():
            raise ValueError(f"the log density of site {site!r} {what}")
