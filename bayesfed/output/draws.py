"""Weighted draws of what a posterior is over, some clients at a time: all that is made of a posterior is made of them.

    θ_s ~ q(θ),  w_is ~ q(w_i | θ_s)
    weight of draw s for client i:  p(w_is | θ_s) p(D_i | w_is, θ_s) / q(w_is | θ_s)  where the algorithm weighs, else 1

Draws are weighed where q(w_i | θ) is the prior, as under PAC-PFL. A point is a draw like any other; where q(θ) has
finitely many values, such as particles, each of them stands for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.chunks import PASS, weight
from bayesfed.data.chunks import chunks as cut
from bayesfed.data.federation import Federation
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.elbo import client_terms, draw, log_parts, server_pass
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.hierarchical import LOCAL
from bayesfed.output.evidence import COST, EACH, Candidates, candidates
from bayesfed.vmap.mixtures import ClientMixture

if TYPE_CHECKING:
    from bayesfed.output.posterior import Posterior

_MIDDLE = {"normal": 0.0, "uniform": 0.5}
Chunks = Iterator[tuple[Tensor, "Draws"]]
"""Positions of some clients, and their draws."""


@dataclass(frozen=True, eq=False)
class Draws:
    """S draws of θ and of K clients' variables.

    Attributes:
        values: by latent site of the model, as it samples them: ``(S, K or 1, 1, *event)``.
        count: S.
        log_weights: how much each draw counts for each client, ``(S, K)``; None where all count alike.
    """

    values: Mapping[str, Tensor]
    count: int
    log_weights: Tensor | None = None

    def log_probabilities(self, clients: int) -> Tensor:
        """The logarithms of the weights of each client's draws, made to sum to 1: ``(S, K)``."""
        if self.log_weights is None:
            return torch.full((self.count, clients), -math.log(self.count))
        return self.log_weights.log_softmax(0)

    def picked(self, groups: int, count: int, keys: Tensor) -> Draws:
        """Of equal groups of draws, one after the other, ``count`` each by weight, for every client by itself.

        Sampling importance resampling (Rubin 1987): as groups grow, draws from the client's posterior.

        Args:
            groups: G, of S / G draws each.
            count: draws from each group, with replacement.
            keys: the clients' noise streams, ``(K,)``.
        """
        if self.log_weights is None:
            raise ValueError("draws that all count alike have nothing to be picked by")
        size, clients = self.count // groups, len(keys)
        weights = self.log_weights.double().reshape(groups, size, clients)
        below = weights.softmax(1).cumsum(1).transpose(1, 2).contiguous()  # (G, K, size)
        u = noise.uniform(noise.fold(keys, noise.word("resample")), (groups, count)).transpose(0, 1)
        nth = torch.searchsorted(below, u.contiguous()).clamp(max=size - 1)  # (G, K, count)
        first = size * torch.arange(groups, device=nth.device)[:, None, None]
        nth = (first + nth).transpose(1, 2).reshape(-1, clients)
        who = torch.arange(clients, device=nth.device)
        values = {
            name: value.expand(-1, clients, *value.shape[2:])[nth, who]
            for name, value in self.values.items()
        }
        return Draws(values, groups * count)


def key_of(posterior: Posterior, seed: int, word: str = "posterior") -> Tensor:
    """The noise of a seed."""
    return noise.fold(noise.key(seed), noise.word(word)).to(posterior.federation.device)


def sampled(
    posterior: Posterior,
    num_samples: int,
    seed: int,
    *federations: Federation,
    centre: bool = False,
) -> Chunks:
    """Draws of θ from q, and one of w_i given each: where draws are weighed, one of several by its weight.

    Args:
        posterior: of the clients that are wanted.
        num_samples: S.
        seed: of the draws.
        *federations: other rows of these clients, which the chunks are made small for.
        centre: zero noise.
    """
    program, algorithm, key = posterior.program, posterior.algorithm, key_of(posterior, seed)
    theta = of_server(posterior, num_samples, key, centre)
    weighs = algorithm.weighs and bool(program.locals)
    if not weighs:
        for chunk in chunks(posterior, num_samples, *federations):
            yield chunk, of_clients(posterior, theta, num_samples, chunk, key, centre=centre)
        return
    each = algorithm.draws
    together = max(1, PASS // (each * max(1, program.variables)))
    blocks = [min(together, num_samples - at) for at in range(0, num_samples, together)]
    for chunk in chunks(posterior, each * blocks[0], *federations):
        parts, at = [], 0
        for number, size in enumerate(blocks):
            own = noise.fold(key, number)
            some = {name: value[at : at + size] for name, value in theta.items()}
            found = of_clients(posterior, some, size, chunk, own, each, weigh=True, centre=centre)
            parts.append(
                found.picked(size, 1, noise.fold(own, posterior.federation.stream_ids[chunk]))
            )
            at += size
        whole = {name: torch.cat([part.values[name] for part in parts]) for name in parts[0].values}
        yield chunk, Draws(_without_copies(program, whole), num_samples)


def weighted(
    posterior: Posterior, num_samples: int, seed: int, *federations: Federation, numbers: int = 1
) -> Chunks:
    """About ``num_samples`` draws with their weights: the components of a mixture.

    Where q(θ) has finitely many values, each stands for as many draws as the others; where nothing is random, one.
    ``numbers``: how many more numbers a draw of a client takes. Other arguments as for :func:`sampled`.
    """
    program, key = posterior.program, key_of(posterior, seed)
    theta, size = finite(posterior) or (of_server(posterior, num_samples, key), num_samples)
    random = program.randomness.keys() - set(program.random)
    each = max(1, num_samples // size) if random else 1
    weigh = posterior.algorithm.weighs
    for chunk in chunks(posterior, size * each, *federations, numbers=numbers):
        yield chunk, of_clients(posterior, theta, size, chunk, key, each, weigh=weigh)


def of_clients(
    posterior: Posterior,
    theta: Params,
    size: int,
    chunk: Tensor,
    key: Tensor,
    each: int = 1,
    *,
    weigh: bool = False,
    centre: bool = False,
) -> Draws:
    """Draws of some clients' variables given θ, ``each`` for every draw of it.

    Args:
        posterior: of the clients.
        theta: draws of the guide's global random sites, ``(S, 1, 1, *event)``.
        size: S.
        chunk: positions of K clients.
        key: noise, folded with the clients' names.
        each: draws of w_i for a draw of θ.
        weigh: find the log weights.
        centre: zero noise.
    """
    program, federation, count = posterior.program, posterior.federation, each * size
    rows = None if weigh or program.needs_rows else torch.zeros(len(chunk), 1, dtype=torch.int64)
    own, params = federation.batch(chunk, rows), params_of(posterior, chunk)
    keys = noise.fold(key, federation.stream_ids[chunk])
    given = {name: value.repeat_interleave(each, 0) for name, value in theta.items()}
    supplied = _noise(program, keys, count, local=True, centre=centre)
    if not centre and _closely(posterior):
        close = _candidates(posterior, given, count, chunk, key)
        given[LOCAL] = close.picked(keys)
    with torch.no_grad(), handlers.given(own.device, params, supplied, given, count):
        nodes = poutine.trace(program.guide).get_trace(own).nodes
    values = {
        site.name: nodes[site.name]["value"].expand(
            count, len(chunk) if site.local else 1, 1, *site.event_shape
        )
        for site in (*program.globals, *program.locals)
    }
    if not weigh:
        return Draws(values, count)
    own = posterior.algorithm.weighed(program, own)
    with torch.no_grad():
        return Draws(values, count, client_terms(program, params, given, own, supplied, count))


def finite(posterior: Posterior) -> tuple[Params, int] | None:
    """All values of the guide's global random sites, ``(k, 1, 1, *event)``, and k; None where there is no end of them.

    One, and no site, where θ is a point.
    """
    program = posterior.program
    if not program.random:
        return {}, 1
    if len(program.random) > 1:
        return None
    (name,) = program.random
    device, own = program.schema.device, program.local_params
    server = handlers.given(device, posterior.params, {}, draws=1, starting=own)
    with torch.no_grad(), server:
        fn: Any = poutine.trace(program.guide).get_trace(program.schema).nodes[name]["fn"]
    if not fn.has_enumerate_support:
        return None
    values = fn.enumerate_support(expand=True)
    return {name: values.reshape(len(values), 1, 1, *fn.event_shape)}, len(values)


def replayed(
    posterior: Posterior,
    model: Callable[[Any], Any],
    draws: Draws,
    chunk: Tensor,
    batch: Batch,
    prior: bool = False,
) -> Mapping[str, Any]:
    """The sites of the model run on rows of some clients at draws of its latent sites.

    What the clients' own rows say of their discrete variables is known, unless the draws are the prior's.
    """
    params = params_of(posterior, chunk)
    asks = posterior.program.kinds and not prior
    known = handlers.Known(of_kinds(posterior, draws, chunk)[0]) if asks else nullcontext()
    with (
        torch.no_grad(),
        known,
        handlers.given(batch.device, params, values=draws.values, draws=draws.count),
    ):
        return poutine.trace(model).get_trace(batch).nodes


def of_kinds(posterior: Posterior, draws: Draws, chunk: Tensor) -> tuple[Tensor, Mapping[str, int]]:
    """log p(z_i, own rows | draw) of clients' discrete variables, ``(S, K, 1, k)``, and how many values each has."""
    own, model = posterior.federation.batch(chunk), posterior.program.model
    nodes = replayed(posterior, model, draws, chunk, own, prior=True)
    *_, last = (node for node in nodes.values() if isinstance(node.get("fn"), ClientMixture))
    return last["fn"].evidence(last["value"]), last["fn"].variables


def derived(
    posterior: Posterior, draws: Draws, chunk: Tensor, batch: Batch
) -> Mapping[str, handlers.Derivation]:
    """What the model names by ``pyro.deterministic``, on rows of some clients at draws of its latent sites."""
    params, model = params_of(posterior, chunk), posterior.program.model
    at = handlers.given(batch.device, params, values=draws.values, draws=draws.count)
    with torch.no_grad(), at, handlers.Derived() as asked:
        model(batch)
    return asked.found


def log_densities(posterior: Posterior, num_samples: int, key: Tensor) -> tuple[Tensor, Tensor]:
    """log p(D, θ_s, w_s) and log q(θ_s, w_s) of draws from q, each ``(S,)``, in double precision.

    Args:
        posterior: whose draws are q's, neither weighed nor corrected.
        num_samples: S.
        key: noise; with that of :func:`key_of` the draws are those that :func:`sampled` gives.
    """
    program = posterior.program
    theta = of_server(posterior, num_samples, key)
    supplied = program.noise(key, num_samples, local=False)
    with torch.no_grad():
        schema, params = program.schema, posterior.params
        parts = log_parts(program, params, {}, schema, supplied, num_samples, local=False)
        log_p, log_q = (part[:, 0].double() for part in parts)
    for of_p, of_q in _of_clients(posterior, theta, num_samples, key):
        log_p, log_q = log_p + of_p.sum(1), log_q + of_q.sum(1)
    return log_p, log_q


Weigh = Callable[["Posterior", Params, int, Tensor, bool], Tensor]
"""What :func:`terms` is: between machines the sum of what the sites say."""


def elbo(posterior: Posterior, num_samples: int, seed: int, weigh: Weigh | None = None) -> Tensor:
    """The ELBO of all clients at draws of q, ``(S,)``."""
    program, key = posterior.program, key_of(posterior, seed, "elbo")
    with torch.no_grad():
        supplied = program.noise(key, num_samples, local=False)
        at_server = server_pass(program, posterior.params, supplied, num_samples)
    of_clients = (weigh or terms)(posterior, at_server.theta, num_samples, key, False)
    return at_server.term + of_clients.to(at_server.term.dtype)


def terms(
    posterior: Posterior, theta: Params, count: int, key: Tensor, closely: bool = False
) -> Tensor:
    """Σ_i log p(w_is, D_i | θ_s) − log q(w_is | θ_s) at draws of θ, and one of each client's variables: ``(S,)``.

    Or, looked at ``closely``, Σ_i log p(D_i | θ_s), see :mod:`bayesfed.output.evidence`.
    """
    total = torch.zeros(count, dtype=torch.float64, device=posterior.federation.device)
    if not closely:
        for log_p, log_q in _of_clients(posterior, theta, count, key):
            total += (log_p - log_q).sum(1)
        return total
    for chunk in chunks(posterior, COST * count, posterior.federation):
        total += _candidates(posterior, theta, count, chunk, key).evidence().sum(1)
    return total


def _candidates(
    posterior: Posterior, theta: Params, count: int, chunk: Tensor, key: Tensor
) -> Candidates:
    """Of some clients' variables."""
    program, federation = posterior.program, posterior.federation
    keys = noise.fold(key, federation.stream_ids[chunk])
    supplied = program.noise(keys, EACH // 2 * count, local=True)
    batch, params = federation.batch(chunk), params_of(posterior, chunk)
    return candidates(program, params, theta, batch, supplied, count)


def _of_clients(
    posterior: Posterior, theta: Params, count: int, key: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """log p(w_is, D_i | θ_s) and log q(w_is | θ_s) of some clients at a time, each ``(S, K)``.

    In double precision, since those of many clients are added up.
    """
    program, federation = posterior.program, posterior.federation
    for chunk in chunks(posterior, count, federation):
        keys = noise.fold(key, federation.stream_ids[chunk])
        supplied = program.noise(keys, count, local=True)
        batch, params = federation.batch(chunk), params_of(posterior, chunk)
        with torch.no_grad():
            log_p, log_q = log_parts(program, params, theta, batch, supplied, count, local=True)
        yield log_p.double(), log_q.double()


def params_of(posterior: Posterior, chunk: Tensor) -> Params:
    """All parameters, the local ones of some clients."""
    return posterior.params | {name: v[chunk] for name, v in posterior.local_params.items()}


def chunks(
    posterior: Posterior, count: int, *federations: Federation, numbers: int = 1
) -> Iterator[Tensor]:
    """Positions of clients, some at a time, that ``count`` draws of them and of their rows are not too many.

    ``numbers``: how many numbers a draw of a client takes, where that is more than its variables. The rows are those
    of the given federations, and the clients' own where the draws need them.
    """
    program, own = posterior.program, posterior.federation
    count = COST * count if _closely(posterior) else count
    if posterior.algorithm.weighs or program.needs_rows or program.kinds or _closely(posterior):
        federations = (own, *federations)
    lengths = sum((f.lengths for f in federations), torch.zeros_like(own.lengths))
    size = max(numbers, program.variables)
    return cut(lengths, *weight(size, own.numbers_per_row, count, program.points))


def _closely(posterior: Posterior) -> bool:
    """Whether clients' variables are drawn as the posterior's correction weighed them."""
    return posterior.correction is not None and posterior.correction.closely


def of_server(posterior: Posterior, count: int, key: Tensor, centre: bool = False) -> Params:
    """Draws of the guide's global random sites, ``(S, 1, 1, *event)``."""
    program = posterior.program
    if posterior.correction is not None and not centre:
        return posterior.correction.drawn(count, key)
    supplied = _noise(program, key, count, local=False, centre=centre)
    with torch.no_grad():
        return draw(program, posterior.params, supplied, count)


def of_globals(posterior: Posterior, count: int, seed: int) -> Params:
    """Draws of the model's global sites alone, ``(S, *event)``: no client is asked."""
    program = posterior.program
    theta = of_server(posterior, count, key_of(posterior, seed))
    device, own = program.schema.device, program.local_params
    server = handlers.given(device, posterior.params, {}, theta, count, starting=own)
    with torch.no_grad(), server:
        nodes = poutine.trace(program.guide).get_trace(program.schema).nodes
    return {
        site.name: nodes[site.name]["value"].expand(count, 1, 1, *site.event_shape)[:, 0, 0]
        for site in program.globals
    }


def _noise(
    program: Program, keys: Tensor, count: int, *, local: bool, centre: bool
) -> dict[str, list[Tensor]]:
    """What the guide needs for its local or global sites; in the middle for the centre."""
    found = program.noise(keys, count, local=local)
    if not centre:
        return found
    return {
        name: [
            torch.full_like(part, _MIDDLE[random.kind])
            for part, random in zip(parts, program.randomness[name], strict=True)
        ]
        for name, parts in found.items()
    }


def _without_copies(program: Program, values: Mapping[str, Tensor]) -> Params:
    """Global sites without the clients' dimension, in which all are the same."""
    return {
        name: value if program.sites[name].local else value[:, :1] for name, value in values.items()
    }
