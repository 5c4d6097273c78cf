"""Log densities of draws from q, summed over clients: the ELBO, and the importance weights of draws of θ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.data.moments import is_of_moments
from bayesfed.elbo import noise
from bayesfed.elbo.elbo import log_parts, server_pass
from bayesfed.elbo.program import Params, Program
from bayesfed.output.conditionals import has_block, is_exact, is_laplace, rows_width
from bayesfed.output.draws import draw_theta
from bayesfed.output.evidence import chunks_by_blocks, evidence_chunks
from bayesfed.output.failing_draws import skip_failing
from bayesfed.output.fitted import Fitted
from bayesfed.output.locals_given_theta import evidence_by_laplace
from bayesfed.output.sum_of_evidence import sum_by_laplace, sum_of_evidence
from bayesfed.tracing.blocks import in_blocks

OF_GUIDE = 16
"""Draws of a client's variables from q(w_i | θ) for one of θ, where one is not enough and Laplace does not apply."""
PROBED, QUIET = 50, 0.003
"""Draws of θ at which the variance of estimates by one draw is measured, and up to which one draw is enough."""
NOISE, DENSITIES = 2, 4
"""Numbers in memory at one draw of θ: for the noise of each of a client's variables, and for its log densities."""


class Probe(NamedTuple):
    """Draws of θ at which Laplace approximations are asked for next if estimates by draws from q(w_i | θ) are noisy.

    Attributes:
        first: they are the first so many of the draws.
        repeats: so many draws after these are the first ones again, so that their differences show the noise.
    """

    first: int
    repeats: int


class SumLogWeights(Protocol):
    """A function like :func:`sum_log_weights`; in a deployment it asks the institutions and adds up their answers."""

    def __call__(  # noqa: D102
        self,
        fitted: Fitted,
        theta: Params,
        count: int,
        key: Tensor,
        laplace: bool = False,
        probe: Probe | None = None,
    ) -> Tensor: ...


def log_densities(fitted: Fitted, num_samples: int, key: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log p(D, θ_s, w_s) and log q(θ_s, w_s) of draws from q, each ``(S,)``, in double precision.

    Args:
        fitted: without a correction, and with a guide whose draws have equal weights.
        num_samples: S.
        key: noise key. With ``fitted.key(seed)`` the draws are those of
            :func:`~bayesfed.output.draws.equal_draws`.
    """
    program, fitted = fitted.program, fitted.sufficient
    theta = draw_theta(fitted, num_samples, key)
    supplied = program.noise(key, num_samples, local=False)
    with torch.no_grad():
        schema, params = program.schema, fitted.params
        parts = log_parts(program, params, {}, schema, supplied, num_samples, local=False)
        log_p, log_q = (part[:, 0].double() for part in parts)
    for client_log_p, client_log_q in _client_log_densities(fitted, theta, num_samples, key):
        log_p, log_q = log_p + client_log_p.sum(1), log_q + client_log_q.sum(1)
    return log_p, log_q


def sum_log_weights(
    fitted: Fitted,
    theta: Params,
    count: int,
    key: Tensor,
    laplace: bool = False,
    probe: Probe | None = None,
) -> Tensor:
    """Estimate Σ_i log p(D_i | θ_s) at draws of θ: ``(S,)``, in double precision.

    The estimate uses one draw of each client's variables, log p(w_is, D_i | θ_s) − log q(w_is | θ_s). With ``laplace``,
    and where q(w_i | θ) is Laplace's approximation but not exact, it uses several draws from such an approximation at
    θ_s, see :mod:`bayesfed.output.evidence`. It is −∞ where the program fails to factorise a matrix, such as a
    covariance that overflows at a draw far in the tails.

    Args:
        fitted: q of the clients.
        theta: draws of the guide's global random sites, ``(S, 1, 1, *event)``.
        count: S.
        key: noise key.
        laplace: use Laplace approximations in place of q(w_i | θ).
        probe: what may be asked next; without effect in one process.
    """
    fitted = fitted.sufficient
    names = tuple(theta)

    def at(position: Tensor, *values: Tensor) -> tuple[Tensor]:
        some, size, start = dict(zip(names, values, strict=True)), len(position), int(position[0])
        own = noise.fold(key, start) if start else key  # the parts have noise of their own
        if is_exact(fitted.program):
            return (sum_of_evidence(fitted, some, size, own, _sum_by_draws),)
        if laplace or is_laplace(fitted.program):
            return (sum_of_evidence(fitted, some, size, own, sum_by_laplace),)
        return (_sum_by_draws(fitted, some, size, own),)

    nothing = torch.full((1,), -torch.inf, dtype=torch.float64, device=fitted.federation.device)
    (total,) = skip_failing(at, [torch.arange(count), *theta.values()], lambda *_: (nothing,))
    return total


def _sum_by_draws(fitted: Fitted, theta: Params, count: int, key: Tensor) -> Tensor:
    """Sum the clients' estimates from one draw of q(w_i | θ), ``(S,)``; arguments as of :func:`sum_log_weights`."""
    total = torch.zeros(count, dtype=torch.float64, device=fitted.federation.device)
    for log_p, log_q in _client_log_densities(fitted, theta, count, key):
        total += (log_p - log_q).sum(1)
    return total


def log_evidence_of_clients(fitted: Fitted, theta: Params, count: int, key: Tensor) -> Tensor:
    """Estimate log p(D_i | θ_s) of each client, its own variables integrated out: ``(S, K)``, in double precision.

    Of most clients by one draw of these from q(w_i | θ_s). Of clients for whom two such estimates differ, by several
    draws from a Laplace approximation at θ_s where that applies, or else from q. Exact if clients have no random
    variables.

    Args:
        fitted: q of the clients.
        theta: draws of the guide's global random sites, ``(S, 1, 1, *event)``.
        count: S.
        key: noise key.
    """
    if is_of_moments(fitted.federation):
        fitted = fitted.sufficient
    program = fitted.program

    def by_draws(theta: Params, count: int, each: int, key: Tensor) -> Tensor:
        repeated = {name: v.repeat(each, *[1] * (v.ndim - 1)) for name, v in theta.items()}
        ratios = [p - q for p, q in _client_log_densities(fitted, repeated, each * count, key)]
        return torch.cat(ratios, 1).unflatten(0, (each, count)).logsumexp(0) - math.log(each)

    found, few = by_draws(theta, count, 1, key), min(PROBED, count)
    if not program.randomness.keys() - set(program.random):
        return found
    first = {name: value[:few] for name, value in theta.items()}
    again = by_draws(first, few, 1, noise.fold(key, 1))
    noisy = ~((found[:few] - again).square().mean(0) < 2 * QUIET)
    if noisy.any() and not (has_block(program) and program.learns_locals):
        return by_draws(theta, count, OF_GUIDE, key)
    for chunk in evidence_chunks(fitted, count) if noisy.any() else ():
        if len(some := chunk[noisy[chunk].to(chunk.device)]):
            found[:, some] = evidence_by_laplace(fitted, theta, count, some, key)
    return found


def noise_of_clients(fitted: Fitted, theta: Params, count: int, key: Tensor) -> Tensor:
    """Estimate the variance of each client's estimate of log p(D_i | θ_s) by one draw from q(w_i | θ_s): ``(K,)``.

    From two estimates at each draw of θ; arguments as of :func:`log_evidence_of_clients`.
    """
    twice = {name: value.repeat(2, *[1] * (value.ndim - 1)) for name, value in theta.items()}
    ratios = [p - q for p, q in _client_log_densities(fitted.sufficient, twice, 2 * count, key)]
    once, again = torch.cat(ratios, 1).split(count)
    return (once - again).square().mean(0) / 2


def elbo(
    fitted: Fitted, num_samples: int, seed: int, log_weights: SumLogWeights = sum_log_weights
) -> Tensor:
    """Compute the ELBO of all clients at draws from q, ``(S,)``; ``log_weights`` as :func:`sum_log_weights`."""
    program, key = fitted.program, fitted.key(seed, "elbo")
    with torch.no_grad():
        supplied = program.noise(key, num_samples, local=False)
        at_server = server_pass(program, fitted.params, supplied, num_samples)
    client_terms = log_weights(fitted, at_server.theta, num_samples, key, False)
    return at_server.term + client_terms.to(at_server.term.dtype)


def _client_log_densities(
    fitted: Fitted, theta: Params, count: int, key: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield log p(w_is, D_i | θ_s) and log q(w_is | θ_s), ``(S, K)`` in double precision, of some clients at a time."""
    program, federation = fitted.program, fitted.federation
    for chunk in chunks_by_blocks(fitted, count, NOISE * program.variables + DENSITIES):
        keys = noise.fold(key, federation.stream_ids[chunk])
        supplied = program.noise(keys, count, local=True)
        batch, params = federation.batch(chunk), fitted.params_of(chunk)
        names = tuple(theta), tuple((name, len(parts)) for name, parts in supplied.items())
        of_draws = [*theta.values(), *(x for parts in supplied.values() for x in parts)]
        if not of_draws:  # nothing is random
            with torch.no_grad():
                log_p, log_q = log_parts(program, params, {}, batch, {}, count, local=True)
        else:
            numbers = max(rows_width(program, batch), len(chunk) * program.workspace)
            fixed = params, batch, *names
            log_p, log_q = in_blocks(_log_parts, program, fixed, of_draws, numbers)
        yield log_p.double(), log_q.double()


def _log_parts(
    program: Program,
    params: Params,
    batch: Batch,
    sites: Sequence[str],
    noises: Sequence[tuple[str, int]],
    *of_draws: Tensor,
) -> list[Tensor]:
    """Compute log p(w_is, D_i | θ_s) and log q(w_is | θ_s), ``(S, K)`` each.

    Args:
        program: the model and its guide.
        params: parameters of the program and of K clients.
        batch: their rows.
        sites: the names of the guide's global sites.
        noises: the names of its local sites, each with the number of tensors of noise that it needs.
        of_draws: values of the former, then the noise of the latter.
    """
    rest = iter(of_draws)
    theta = {name: next(rest) for name in sites}
    supplied = {name: [next(rest) for _ in range(number)] for name, number in noises}
    count = len(of_draws[0])
    return [*log_parts(program, params, theta, batch, supplied, count, local=True)]
