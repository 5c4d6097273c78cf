"""The ELBO, partitioned: one term per client and the server's.

    ELBO = server_term(θ) + Σ_i client_term_i(θ, w_i, D_i)
    server_term   = log p(θ) − log q(θ)
    client_term_i = log p(w_i | θ) + log p(D_i | w_i, θ) − log q(w_i | θ)

Each function is pure: its result depends on its arguments only, and noise is one of them. All K clients and S draws
run as one batched pass of the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from bayesfed.data.batch import Batch
from bayesfed.elbo import handlers
from bayesfed.elbo.log_density import sum_log_density
from bayesfed.elbo.moments import Moments, moments, unconstrained
from bayesfed.tracing.compiler import traceable

if TYPE_CHECKING:
    from bayesfed.elbo.program import Program

Draws = Mapping[str, Tensor]
Noise = Mapping[str, Sequence[Tensor]]


class Terms(NamedTuple):
    """The two parts of the ELBO, per draw: ``server`` ``(S, 1)`` or ``(S, K)``, ``clients`` ``(S, K)``."""

    server: Tensor
    clients: Tensor


def run(
    program: Program,
    params: Mapping[str, Tensor],
    values: Draws,
    batch: Batch,
    noise: Noise,
    draws: int,
    starting: Sequence[str] = (),
) -> tuple[Any, Any]:
    """Trace the guide, and the model replayed against it, with all parameters, values and noise given."""
    with handlers.given(batch.device, params, noise, values, draws, starting):
        guide = poutine.trace(program.guide).get_trace(batch)
        model = poutine.trace(poutine.replay(program.model, trace=guide)).get_trace(batch)
    return guide, model


def _log_prob(trace: Any, *, local: bool, skip: Sequence[str] = ()) -> Tensor | float:
    """Σ log p over a trace's local or global sites: ``(S, K or 1)``; 0 if there are none."""
    total: Tensor | float = 0.0
    with pyro.validation_enabled(False):
        for name, node in handlers.sample_sites(trace).items():
            if name not in skip and handlers.is_local(node) == local:
                total = total + sum_log_density(node)
    return total


def log_ratio(guide: Any, model: Any, *, local: bool, skip: Sequence[str] = ()) -> Tensor | float:
    """Σ log p − Σ log q over the local or the global sites, as :func:`_log_prob`; log q leaves out ``skip``."""
    return _log_prob(model, local=local) - _log_prob(guide, local=local, skip=skip)


def _terms(value: Tensor | float, like: Tensor, draws: int, clients: int) -> Tensor:
    """A log ratio as ``(S, clients)``."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(draws, clients)


@traceable
def draw(
    program: Program, params: Mapping[str, Tensor], noise: Noise, draws: int
) -> dict[str, Tensor]:
    """The draws of the guide's global random sites, which the server sends to the clients.

    Args:
        program: the model/guide pair.
        params: global parameters (unconstrained).
        noise: of the global sites, see :meth:`~bayesfed.elbo.program.Program.noise`.
        draws: S.

    Returns:
        Site name to draws of shape ``(S, 1, 1, *event)``.
    """
    own = program.local_params
    with (
        handlers.given(program.schema.device, params, noise, draws=draws, starting=own),
        poutine.trace() as tracer,
        handlers.Until(program.random),
    ):
        program.guide(program.schema)
    return {name: tracer.trace.nodes[name]["value"] for name in program.random}


def client_terms(
    program: Program,
    params: Mapping[str, Tensor],
    values: Draws,
    batch: Batch,
    noise: Noise,
    draws: int,
) -> Tensor:
    """The clients' ELBO terms given the server's draws.

    Args:
        program: the model/guide pair.
        params: global parameters (each also with a row per client, ``(K, 1, ...)``) and the cohort's
            local ones, ``(K, 1, ...)``; all unconstrained.
        values: draws of the global random sites, ``(S, 1, 1, *event)`` or one per client,
            ``(S, K, 1, *event)``.
        batch: the cohort's data.
        noise: of the local sites.
        draws: S.

    Returns:
        ``(S, K)``. Rows of clients do not interact: the gradient of the sum is every client's own.
    """
    guide, model = run(program, params, values, batch, noise, draws)
    return _terms(log_ratio(guide, model, local=True), batch.scale, draws, len(batch))


@dataclass(frozen=True, eq=False)
class Losses:
    """The parts of the negative ELBO term, per client ``(K,)``.

    Attributes:
        nll: −E_q[log p(D_i | w_i, θ)] of all n_i rows.
        rows: n_i.
    """

    nll: Tensor
    rows: Tensor
    _locals: Sequence[tuple[Any, Any]]
    _traces: tuple[Any, Any]

    @cached_property
    def divergence(self) -> Tensor:
        """KL(q(w_i) ‖ p(w_i | θ)), in closed form if there is one; for a point estimate −log p(w_i | θ).

        For a point estimate the scale of a Normal prior is a constant and its normaliser is left out: the density at a
        point has no maximum in the scale.
        """
        total = torch.zeros_like(self.nll)
        for q, p in self._locals:
            if handlers.is_point(q) and (normal := moments(p["fn"])).exact:
                u = unconstrained(p["fn"], q["value"])
                gap = ((u - normal.loc) / normal.scale.detach()).square() / 2
                gap = gap.reshape((*gap.shape[: q["value"].ndim - q["fn"].event_dim], -1)).sum(-1)
            else:
                try:
                    gap = kl_divergence(*_once(q["fn"], p["fn"]))
                except NotImplementedError:
                    gap = q["fn"].log_prob(q["value"]) - p["fn"].log_prob(p["value"])
            total = total + gap.sum(-1).mean(0)
        return total

    @cached_property
    def hyper(self) -> Tensor:
        """−log p(θ) in unconstrained coordinates; 0 if no global variable is random."""
        found = log_ratio(*self._traces, local=False)
        # point estimates: equal for all draws
        one = found[:1] if isinstance(found, Tensor) else found
        return -_terms(one, self.rows, 1, len(self.rows))[0]


def _once(*fns: Any) -> tuple[Any, ...]:
    """Normals that are equal for all draws, reduced to one draw; other distributions unchanged."""
    found = []
    for fn in fns:
        base = fn.base_dist if isinstance(fn, Independent) else fn
        if len(fn.batch_shape) < 3:  # none at all
            found.append(fn)
            continue
        if not isinstance(base, Normal) or base.loc.stride(0) or base.scale.stride(0):
            return fns
        one = Normal(base.loc[:1], base.scale[:1], validate_args=False)
        event = fn.reinterpreted_batch_ndims if isinstance(fn, Independent) else 0
        found.append(Independent(one, event, validate_args=False) if event else one)
    return tuple(found)


def client_losses(
    program: Program,
    params: Mapping[str, Tensor],
    batch: Batch,
    noise: Noise,
    draws: int,
) -> Losses:
    """The parts of K clients' negative ELBO terms, for a guide whose globals are point estimates.

    Arguments as in :func:`client_terms`.
    """
    guide, model = run(program, params, {}, batch, noise, draws)
    sites = [(guide.nodes[site.name], model.nodes[site.name]) for site in program.locals]
    return Losses(_nll(program, model, batch, draws), batch.rows, sites, (guide, model))


def centred_losses(program: Program, params: Mapping[str, Tensor], batch: Batch) -> Losses:
    """The losses of K clients whose variables lie at the centre of their priors, differentiable in the parameters.

    It takes one run of the model, where :func:`local_priors` and then :func:`client_losses` would take two.
    """
    names = [site.name for site in program.globals]
    origin = handlers.given(batch.device, params, noise={}, draws=1)
    with origin, poutine.trace() as guide, handlers.Until(names):
        program.guide(batch)
    with handlers.given(batch.device, params, draws=1), handlers.Centred():
        replayed = poutine.replay(program.model, trace=guide.trace)
        model = poutine.trace(replayed).get_trace(batch)
    return Losses(_nll(program, model, batch, 1), batch.rows, (), (guide.trace, model))


def _nll(program: Program, model: Any, batch: Batch, draws: int) -> Tensor:
    """−log p(D_i | w_i, θ) of all n_i rows, the mean over draws: ``(K,)``."""
    nll = batch.scale.new_zeros(draws, len(batch))
    with pyro.validation_enabled(False):
        for site in program.likelihood:
            nll = nll - sum_log_density(model.nodes[site.name])
    return nll.mean(0)


def local_priors(
    program: Program, params: Mapping[str, Tensor], batch: Batch
) -> dict[str, Moments]:
    """The moments of the local sites' priors given the parameters, with earlier local variables at their centre.

    The tensors are ``(K, 1, *shape)``, differentiable in the parameters.
    """
    above, names = ([site.name for site in sites] for sites in (program.globals, program.locals))
    with handlers.given(batch.device, params, noise={}):
        with poutine.trace() as guide, handlers.Until(above):
            program.guide_of_globals(batch.head())
        given = {name: guide.trace.nodes[name]["value"] for name in above}
        with handlers.Until(names), handlers.Values(given), handlers.Centred() as centred:
            program.model(batch.head())
    found = {}
    for site in program.locals:
        fn, value = centred.found[site.name]
        at = moments(fn)
        shape = (len(batch), 1, *unconstrained(fn, value).shape[len(fn.batch_shape) :])
        found[site.name] = Moments(at.loc.expand(shape), at.scale.expand(shape), at.exact)
    return found


def _of_server(
    program: Program,
    params: Mapping[str, Tensor],
    values: Draws,
    noise: Noise,
    draws: int,
) -> tuple[Any, Any]:
    """Trace the guide and the model as :func:`run`, without any client's data, up to the last global site."""
    device, own = program.schema.device, program.local_params
    names = [site.name for site in program.globals]
    with handlers.given(device, params, noise, values, draws, own):
        with poutine.trace() as guide, handlers.Until([*program.random, *names]):
            program.guide_of_globals(program.schema)
        with poutine.trace() as model, handlers.Until(names):
            poutine.replay(program.model, trace=guide.trace)(program.schema)
    return guide.trace, model.trace


class ServerTerm(NamedTuple):
    """The server's part of the ELBO at S draws of θ.

    Attributes:
        term: log p(θ) − log q(θ), ``(S,)``.
        log_prior: log p(θ) in the coordinates of the draws, ``(S,)``.
        theta: the draws, as :func:`draw` returns them. All are differentiable.
    """

    term: Tensor
    log_prior: Tensor
    theta: dict[str, Tensor]


def server_pass(
    program: Program, params: Mapping[str, Tensor], noise: Noise, draws: int
) -> ServerTerm:
    """The server's draws of θ and its part of the ELBO.

    Args:
        program: the model/guide pair.
        params: global parameters (unconstrained).
        noise: of the global sites.
        draws: S.
    """
    guide, model = _of_server(program, params, {}, noise, draws)
    like = program.schema.scale
    term, prior = (
        _terms(log_ratio(guide, model, local=False, skip=skip), like, draws, 1).squeeze(-1)
        for skip in ((), program.random)
    )
    return ServerTerm(term, prior, {name: guide.nodes[name]["value"] for name in program.random})


def log_prior(program: Program, params: Mapping[str, Tensor], values: Draws, draws: int) -> Tensor:
    """log p(θ) of given draws in the coordinates of the draws (Jacobian included): shape ``(S,)``."""
    guide, model = _of_server(program, params, values, {}, draws)
    total = log_ratio(guide, model, local=False, skip=program.random)
    return _terms(total, program.schema.scale, draws, 1).squeeze(-1)


def log_parts(
    program: Program,
    params: Mapping[str, Tensor],
    values: Draws,
    batch: Batch,
    noise: Noise,
    draws: int,
    *,
    local: bool,
) -> tuple[Tensor, Tensor]:
    """The log densities of the model and of the guide, whose difference is an ELBO term.

    Arguments as in :func:`client_terms`; the server's batch is the program's schema.

    Returns:
        ``(S, K)``, ``(S, K)``: log p(w_i, D_i | θ) and log q(w_i | θ); for the server log p(θ) and log q(θ).
    """
    own = () if local else program.local_params
    guide, model = run(program, params, values, batch, noise, draws, own)
    p, q = (
        _terms(_log_prob(trace, local=local), batch.scale, draws, len(batch))
        for trace in (model, guide)
    )
    return p, q


def elbo_terms(
    program: Program,
    params: Mapping[str, Tensor],
    values: Draws,
    batch: Batch,
    noise: Noise,
    draws: int,
) -> Terms:
    """Both parts of the ELBO in one pass; arguments as in :func:`client_terms`.

    ``server`` is ``(S, K)`` if parameters, values or noise have a row per client. It leaves out −log q of values that
    are given.
    """
    guide, model = run(program, params, values, batch, noise, draws)
    server = torch.as_tensor(
        log_ratio(guide, model, local=False, skip=list(values)),
        dtype=batch.scale.dtype,
        device=batch.scale.device,
    )
    clients = _terms(log_ratio(guide, model, local=True), batch.scale, draws, len(batch))
    return Terms(server.expand(draws, server.shape[-1] if server.ndim else 1), clients)
