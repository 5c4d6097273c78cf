"""Weighted draws of θ and of clients' variables, for some clients at a time.

    θ_s ~ q(θ),  w_is ~ q(w_i | θ_s)
    weight of draw s for client i:  p(w_is | θ_s) p(D_i | w_is, θ_s) / q(w_is | θ_s)  if the guide weights draws, else 1

A guide weights its draws if q(w_i | θ) is the prior, as under PAC-PFL. A point estimate is a single draw. If q(θ) has
finitely many values, such as particles, all of them are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.chunks import EACH_VARIABLE, PASS, chunks, weight
from bayesfed.data.federation import Federation
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.elbo import client_terms, draw
from bayesfed.elbo.own_rows import centre_noise
from bayesfed.elbo.program import Params, Program
from bayesfed.elbo.sites import Site
from bayesfed.guides.hierarchical import LOCAL
from bayesfed.guides.particles import has_modes
from bayesfed.output.client_draws import Draws
from bayesfed.output.conditionals import has_block
from bayesfed.output.evidence import EACH
from bayesfed.output.fitted import Fitted
from bayesfed.output.locals_given_theta import draw_guide_locals
from bayesfed.output.outcomes import NoSampler, Outcomes
from bayesfed.output.particle_clients import draw_around_modes
from bayesfed.vmap.mixtures import ClientMixture

KEPT = 10_000_000
"""The largest size of a posterior's last draws, in numbers, that are kept for predictions and log likelihoods."""
Chunks = Iterator[tuple[Tensor, Draws]]
"""Positions of some clients, and their draws."""


_Kept = tuple[tuple[int, int, bool] | None, dict[tuple[int, ...], Draws]]
_last_draws: WeakKeyDictionary[Fitted, _Kept] = WeakKeyDictionary()
"""Of each posterior the draws that were made last: number, seed and centre, and by clients."""


def equal_draws(
    fitted: Fitted, num_samples: int, seed: int, *federations: Federation, centre: bool = False
) -> Chunks:
    """Yield draws of θ and one of w_i given each, with equal weights.

    If the guide weights draws, each draw of w_i is chosen from several by its weight.

    Args:
        fitted: q of the clients that are wanted.
        num_samples: S.
        seed: seed of the draws.
        *federations: other rows of these clients that are evaluated at the draws; chunks are made small enough for
            them.
        centre: use the centre of q (zero noise) for every draw.

    The draws of the last call are kept, if they are at most :data:`KEPT` numbers.
    """
    program, key = fitted.program, fitted.key(seed)
    theta = draw_theta(fitted, num_samples, key, centre)
    if program.weights_draws and program.locals:
        yield from _resampled_draws(fitted, theta, num_samples, key, federations, centre)
        return
    kept = _kept_draws(fitted, (num_samples, seed, centre))
    for chunk in client_chunks(fitted, num_samples, *federations):
        clients = tuple(chunk.tolist())
        draws = kept.get(clients) or _assembled(fitted, kept, chunk)
        if draws is None:
            draws = draw_clients(fitted, theta, num_samples, chunk, key, centre=centre)
            if num_samples * len(fitted.federation) * max(1, program.variables) <= KEPT:
                kept[clients] = draws
        yield chunk, draws


def _kept_draws(fitted: Fitted, which: tuple[int, int, bool]) -> dict[tuple[int, ...], Draws]:
    """Return the draws of a posterior that were made last, by clients; none if they were other draws."""
    last, kept = _last_draws.get(fitted, (None, {}))
    if last != which:
        kept = {}
        _last_draws[fitted] = which, kept
    return kept


def _assembled(
    fitted: Fitted, kept: Mapping[tuple[int, ...], Draws], chunk: Tensor
) -> Draws | None:
    """Return the draws of some clients from kept ones of other sets of clients; None if they are not all there."""
    at = {client: (some, k) for some in kept for k, client in enumerate(some)}
    if not chunk.numel() or not at.keys() >= set(chunk.tolist()):
        return None
    found = [at[client] for client in chunk.tolist()]
    values = {
        site.name: torch.cat([kept[some].values[site.name][:, k : k + 1] for some, k in found], 1)
        if site.local
        else kept[found[0][0]].values[site.name]
        for site in fitted.program.latent
    }
    return Draws(values, kept[found[0][0]].count)


def _resampled_draws(
    fitted: Fitted,
    theta: Params,
    num_samples: int,
    key: Tensor,
    federations: Sequence[Federation],
    centre: bool,
) -> Chunks:
    """Yield draws of w_i given each draw of θ, chosen by weight from several, for blocks of draws of θ at a time."""
    program, each = fitted.program, fitted.program.local_draws
    together = max(1, PASS // (each * max(1, program.variables)))
    blocks = [min(together, num_samples - at) for at in range(0, num_samples, together)]
    for chunk in client_chunks(fitted, each * blocks[0], *federations):
        parts, at = [], 0
        for number, size in enumerate(blocks):
            own = noise.fold(key, number)
            some = {name: value[at : at + size] for name, value in theta.items()}
            found = draw_clients(fitted, some, size, chunk, own, each, weights=True, centre=centre)
            keys = noise.fold(own, fitted.federation.stream_ids[chunk])
            parts.append(found.resample(size, 1, keys))
            at += size
        whole = {name: torch.cat([part.values[name] for part in parts]) for name in parts[0].values}
        yield chunk, Draws(_globals_once(program, whole), num_samples)


def weighted_draws(
    fitted: Fitted, num_samples: int, seed: int, *federations: Federation, numbers: int = 1
) -> Chunks:
    """Yield about ``num_samples`` draws with their weights: the components of a mixture.

    If q(θ) has finitely many values, each has the same number of draws of w_i; if nothing is random, there is one draw.

    Args:
        fitted: q of the clients that are wanted.
        num_samples: S, about.
        seed: seed of the draws.
        *federations: as for :func:`equal_draws`.
        numbers: size of a client's draw in numbers, if larger than that of its variables.
    """
    program, key = fitted.program, fitted.key(seed)
    theta, size = theta_support(fitted) or (draw_theta(fitted, num_samples, key), num_samples)
    random = program.randomness.keys() - set(program.random)
    each = max(1, num_samples // size) if random else 1
    weights = program.weights_draws
    for chunk in client_chunks(fitted, size * each, *federations, numbers=numbers):
        yield chunk, draw_clients(fitted, theta, size, chunk, key, each, weights=weights)


def draw_theta(fitted: Fitted, count: int, key: Tensor, centre: bool = False) -> Params:
    """Draw the guide's global random sites, ``(S, 1, 1, *event)``: from q(θ), or from its correction."""
    program = fitted.program
    if fitted.correction is not None and not centre:
        return fitted.correction.sample(count, key)
    supplied = _guide_noise(program, key, count, local=False, centre=centre)
    with torch.no_grad():
        return draw(program, fitted.params, supplied, count)


def theta_support(fitted: Fitted) -> tuple[Params, int] | None:
    """Return all values of the guide's global random sites, ``(k, 1, 1, *event)``, and k; None if infinitely many.

    If θ is a point estimate, k is 1 and there is no site.
    """
    program = fitted.program
    if not program.random:
        return {}, 1
    if len(program.random) > 1:
        return None
    (name,) = program.random
    fn = _trace_guide_on_server(fitted, {}, 1)[name]["fn"]
    if not fn.has_enumerate_support:
        return None
    values = fn.enumerate_support(expand=True)
    return {name: values.reshape(len(values), 1, 1, *fn.event_shape)}, len(values)


def draw_globals(fitted: Fitted, count: int, seed: int) -> Params:
    """Draw the model's global sites, ``(S, *event)``, without any client's data."""
    return globals_at(fitted, draw_theta(fitted, count, fitted.key(seed)), count)


def globals_at(fitted: Fitted, theta: Params, count: int) -> Params:
    """Return the model's global sites, ``(S, *event)``, at S draws of the guide's."""
    nodes = _trace_guide_on_server(fitted, theta, count)
    return {
        site.name: nodes[site.name]["value"].expand(count, 1, 1, *site.event_shape)[:, 0, 0]
        for site in fitted.program.globals
    }


def draw_clients(
    fitted: Fitted,
    theta: Params,
    size: int,
    chunk: Tensor,
    key: Tensor,
    each: int = 1,
    *,
    weights: bool = False,
    centre: bool = False,
) -> Draws:
    """Draw some clients' variables given θ, ``each`` times for every draw of it.

    Args:
        fitted: q of the clients.
        theta: draws of the guide's global random sites, ``(S, 1, 1, *event)``.
        size: S.
        chunk: positions of K clients.
        key: noise key, folded with the clients' names.
        each: number of draws of w_i for a draw of θ.
        weights: compute the log weights.
        centre: use zero noise.
    """
    program, federation, count = fitted.program, fitted.federation, each * size
    rows = None if weights or program.needs_rows else torch.zeros(len(chunk), 1, dtype=torch.int64)
    own, params = federation.batch(chunk, rows), fitted.params_of(chunk)
    keys = noise.fold(key, federation.stream_ids[chunk])
    given = {name: value.repeat_interleave(each, 0) for name, value in theta.items()}
    if weights and has_modes(program):
        return draw_around_modes(program, given, count, own, keys, centre)
    are_drawn = not centre and bool(fitted.laplace or fitted.resampled)
    if are_drawn:
        given |= draw_guide_locals(fitted, given, count, chunk, key)
    with_noise = weights or not are_drawn
    supplied = _guide_noise(program, keys, count, local=True, centre=centre) if with_noise else {}
    guide = program.guide
    if LOCAL in given and has_block(program):
        guide = partial(guide.at_block, u=given[LOCAL])
    with torch.no_grad(), handlers.given(own.device, params, supplied, given, count):
        nodes = poutine.trace(guide).get_trace(own).nodes
    values = {
        site.name: nodes[site.name]["value"].expand(
            count, len(chunk) if site.local else 1, 1, *site.event_shape
        )
        for site in program.latent
    }
    if not weights:
        return Draws(values, count)
    own = program.temper(own)
    with torch.no_grad():
        return Draws(values, count, client_terms(program, params, given, own, supplied, count))


def run_model(
    fitted: Fitted,
    model: Callable[[Any], Any],
    draws: Draws,
    chunk: Tensor,
    batch: Batch,
    prior: bool = False,
    left_out: bool = False,
) -> Mapping[str, Any]:
    """Run a model on rows of some clients at draws of its latent sites; return the nodes of its trace.

    Variables of clients that are summed or integrated out have their distribution given the clients' own rows, or their
    prior if ``prior``; with ``left_out`` the rows are these rows, and each is conditional on the others.
    """
    known: Any = nullcontext()
    if fitted.program.kinds and not prior:
        known = handlers.Known(discrete_log_joint(fitted, draws, chunk)[0])
    elif fitted.program.conditional and not prior:
        use = "left_out" if left_out else "given"
        known = handlers.GivenOwnRows({use: find_evidence(fitted, draws, chunk)})
    with torch.no_grad(), known, Outcomes(), _given_draws(fitted, draws, chunk, batch):
        try:
            return poutine.trace(model).get_trace(batch).nodes
        except NoSampler as error:  # Pyro adds all shapes
            raise NoSampler(str(error).split("\n")[0]) from None


def discrete_log_joint(
    fitted: Fitted, draws: Draws, chunk: Tensor
) -> tuple[Tensor, Mapping[str, int]]:
    """Compute log p(z_i, own rows | draw) of clients' discrete variables z_i, for all combinations of their values.

    Returns:
        ``(S, K, 1, k)``, and the number of values of each variable.
    """
    own, model = fitted.federation.batch(chunk), fitted.program.model
    nodes = run_model(fitted, model, draws, chunk, own, prior=True)
    *_, last = (node for node in nodes.values() if isinstance(node.get("fn"), ClientMixture))
    return last["fn"].evidence(last["value"]), last["fn"].variables


def find_evidence(fitted: Fitted, draws: Draws, chunk: Tensor) -> dict[str, Tensor]:
    """Return the evidence of clients' own rows at each draw, by site with a variable integrated out."""
    own = fitted.federation.batch(chunk)
    with handlers.FindEvidence() as evidence:
        run_model(fitted, fitted.program.model, draws, chunk, own, prior=True)
    return evidence.found


def derive(
    fitted: Fitted, draws: Draws, chunk: Tensor, batch: Batch
) -> Mapping[str, handlers.Derivation]:
    """Compute the model's ``pyro.deterministic`` sites on rows of some clients at draws of its latent sites."""
    with (
        torch.no_grad(),
        _given_draws(fitted, draws, chunk, batch),
        handlers.Derived() as derived,
    ):
        fitted.program.model(batch)
    return derived.found


def flatten_rows(
    value: Tensor, site: Site | handlers.Derivation, batch: Batch, count: int
) -> Tensor:
    """Expand to ``(S, K, B, *)`` and flatten to ``(S, rows, *)``; a site outside the rows becomes ``(S, K, *)``."""
    if site.per_row:
        return value.expand(count, *batch.mask.shape, *value.shape[3:])[:, batch.mask]
    return value.expand(count, len(batch), 1, *value.shape[3:])[:, :, 0]


def client_chunks(
    fitted: Fitted, count: int, *federations: Federation, numbers: int = 1
) -> Iterator[Tensor]:
    """Yield positions of clients, as many at a time as ``count`` draws of them and of their rows fit into memory.

    The rows are those of the given federations, and the clients' own if the draws depend on them.

    Args:
        fitted: q of the clients.
        count: number of draws.
        *federations: rows of the same clients.
        numbers: size of a client's draw in numbers, if larger than that of its variables.
    """
    program, own = fitted.program, fitted.federation
    reads_rows = program.weights_draws or program.needs_rows or program.kinds or program.conditional
    if reads_rows or fitted.laplace:
        federations = (own, *federations)
    lengths = sum((f.lengths for f in federations), torch.zeros_like(own.lengths))
    size = max(numbers, EACH_VARIABLE * program.variables)
    client, row = weight(size, own.numbers_per_row, count, program.points)
    if fitted.laplace:  # several candidates, whose densities are computed in blocks of draws
        client = EACH * client
        row = row if reads_rows or len(federations) > 1 else row // EACH
    return chunks(lengths, client, row)


def _given_draws(fitted: Fitted, draws: Draws, chunk: Tensor, batch: Batch) -> Any:
    """Give the program the clients' parameters and draws of its latent sites."""
    params = fitted.params_of(chunk)
    return handlers.given(batch.device, params, values=draws.values, draws=draws.count)


def _trace_guide_on_server(fitted: Fitted, theta: Params, count: int) -> Mapping[str, Any]:
    """Run the guide without any client's data at draws of θ; return the nodes of its trace."""
    program = fitted.program
    device, own = program.schema.device, program.local_params
    with torch.no_grad(), handlers.given(device, fitted.params, {}, theta, count, starting=own):
        return poutine.trace(program.guide).get_trace(program.schema).nodes


def _guide_noise(
    program: Program, keys: Tensor, count: int, *, local: bool, centre: bool
) -> dict[str, list[Tensor]]:
    """Return the noise of the guide's local or global sites, or the centre of its distribution."""
    made = centre_noise if centre else Program.noise
    return made(program, keys, count, local=local)


def _globals_once(program: Program, values: Mapping[str, Tensor]) -> Params:
    """Drop the clients' dimension of global sites, along which all values are equal."""
    return {
        name: value if program.sites[name].local else value[:, :1] for name, value in values.items()
    }
