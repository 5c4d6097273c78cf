"""Means of the expected outcome over rows, at each draw of the posterior: sums over clients divided by sums of weights.

    M_qg(θ_s) = Σ_i Σ_{j ∈ g} a_ij E[y_ij | x_ij set to q, w_is, θ_s] / Σ_i Σ_{j ∈ g} a_ij

for settings q of some variables, groups g of rows and weights a_ij. Everything in :mod:`bayesfed.effects` is a function
of these means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import biject_to

from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation
from bayesfed.data.rows import rows_of_clients
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.moments import moments
from bayesfed.elbo.program import Program
from bayesfed.elbo.sites import innermost, name_of
from bayesfed.output.client_draws import Draws
from bayesfed.output.draws import (
    client_chunks,
    derive,
    draw_globals,
    equal_draws,
    flatten_rows,
    run_model,
)
from bayesfed.output.fitted import Fitted
from bayesfed.vmap.mixtures import Mixture

Level = Literal["clients", "average", "new"]


@dataclass(frozen=True)
class Expectation:
    """The quantity whose means are wanted.

    Attributes:
        outcome: an observed site, whose expectation is taken, or a ``pyro.deterministic`` value.
        level: ``"clients"``: each client's own variables; ``"average"``: the centre of their prior given θ; ``"new"``:
            one draw from their prior given θ.
        statistic: function of the distribution of the outcome, such as :func:`expected_outcome`.
        num_samples: S.
        seed: seed of the draws, which are those of ``posterior.sample``.
    """

    outcome: str
    level: Level
    statistic: Callable[[Any], Tensor]
    num_samples: int
    seed: int


@dataclass(frozen=True)
class Sums:
    """Weighted sums over rows: ``total`` ``(S, Q, G, C)`` for C categories, ``weight`` ``(Q, G)``, in float64."""

    total: Tensor
    weight: Tensor

    @property
    def means(self) -> Tensor:
        """The weighted means, ``(S, Q, G, C)``."""
        return self.total / self.weight.unsqueeze(-1)


def sum_over_rows(
    fitted: Fitted,
    settings: Sequence[Federation],
    groups: Tensor,
    number: int,
    weights: Tensor,
    wanted: Expectation,
) -> Sums:
    """Sum the expected outcome over the rows of all clients, at each draw.

    Args:
        fitted: a posterior.
        settings: Q times the same rows, with different values of some fields.
        groups: the group of each row, in 0, ..., G − 1: int64 ``(rows,)``.
        number: G.
        weights: the weight of each row, ``(rows,)``.
        wanted: the quantity.

    Raises:
        ValueError: the expectation does not exist, or the level does not apply to the model.
        KeyError: a client took no part in the fit, at the level of the clients.
    """
    device = fitted.federation.device
    found = [
        _sum_one(fitted, rows.to(device), groups, number, weights, wanted) for rows in settings
    ]
    return Sums(
        *(
            torch.stack(part, axis)
            for part, axis in zip(zip(*found, strict=True), (1, 0), strict=True)
        )
    )


def _sum_one(
    fitted: Fitted,
    federation: Federation,
    groups: Tensor,
    number: int,
    weights: Tensor,
    wanted: Expectation,
) -> tuple[Tensor, Tensor]:
    """Return the sums of one setting, ``(S, G, C)`` and ``(G,)``."""
    totals, weight = list[Tensor](), torch.zeros(number, dtype=torch.float64)
    for rows, value, trials in values_of_rows(fitted, federation, wanted):
        own, where = weights[rows].double() * trials, groups[rows]
        part = value.new_zeros(len(value), number, value.shape[2])
        totals.append(part.index_add_(1, where, value * own[:, None]))
        weight.index_add_(0, where, own)
    return torch.stack(totals).sum(0), weight


def values_of_rows(
    fitted: Fitted, federation: Federation, wanted: Expectation
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield positions of the rows of some clients, the quantity ``(S, rows, C)`` and the trials ``(rows,)``."""
    for few, chunk, draws in draws_at_level(
        fitted, federation, wanted.level, wanted.num_samples, wanted.seed
    ):
        batch = federation.batch(chunk)
        value, trials, per_row = _outcome(few, draws, chunk, batch, wanted)
        rows = rows_of_clients(federation.offsets, chunk.tolist())
        if not per_row:  # the first row of each client
            rows = federation.offsets[chunk]
        yield rows, value, trials


def draws_at_level(
    fitted: Fitted, federation: Federation, level: Level, count: int, seed: int
) -> Iterator[tuple[Fitted, Tensor, Draws]]:
    """Yield a posterior of the rows' clients, positions of some of them, and draws of θ and of their variables."""
    program = fitted.program
    names = [site.name for site in program.locals]
    if level == "clients":
        few = fitted.select(federation.names)
        for chunk, draws in equal_draws(few, count, seed, federation):
            own, other = _head(few.federation, chunk), _head(federation, chunk)
            at_own, at_other = (_log_priors(few, draws, chunk, rows) for rows in (own, other))
            _check_same(at_own, at_other, "the fields of the clients' own rows")
            yield few, chunk, draws
        return
    _check_level(program, level)
    few = replace(fitted, federation=federation, local_params={})
    globals_ = {n: v[:, None, None] for n, v in draw_globals(fitted, count, seed).items()}
    first, new = torch.arange(1), Draws(globals_, count)
    if level == "new":
        with noise.seeded(seed):
            values = _from_prior(few, new, first, _head(federation, first), centre=False)
        new = Draws(globals_ | values, count)
        at_first = _log_priors(few, new, first, _head(federation, first))
    for chunk in client_chunks(few, count, federation):
        head = _head(federation, chunk)
        if level == "average":
            values = _from_prior(few, new, chunk, head, centre=True) if names else {}
            yield few, chunk, Draws(globals_ | values, count)
        else:
            _check_same(at_first, _log_priors(few, new, chunk, head), "fields of the client")
            yield few, chunk, new


def _head(federation: Federation, chunk: Tensor) -> Batch:
    """Return the first rows of some clients."""
    return federation.batch(chunk, torch.zeros(len(chunk), 1, dtype=torch.int64))


def _check_level(program: Program, level: Level) -> None:
    """Fail where clients have no variables with a prior from which the average or a new client could be made."""
    if program.kinds or program.conditional or program.resting or program.joint:
        raise ValueError(
            f"level={level!r} needs clients whose variables all have a prior and are not summed or integrated out: "
            'use level="clients"'
        )


class _FromPrior(Messenger):
    """Give clients' variables the centre of their prior, or a draw from it."""

    def __init__(self, names: Sequence[str], centre: bool) -> None:
        super().__init__()
        self.names, self.centre = names, centre

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.names and not msg["done"]:
            fn = msg["fn"]
            msg["value"] = biject_to(fn.support)(moments(fn).loc) if self.centre else fn.sample()
            msg["done"] = True


def _from_prior(
    fitted: Fitted, draws: Draws, chunk: Tensor, head: Batch, *, centre: bool
) -> dict[str, Tensor]:
    """Return clients' variables at the centre of their prior given θ, or drawn from it: ``(S, K, 1, *event)``."""
    names = [site.name for site in fitted.program.locals]
    nodes = _trace_latent(fitted, draws, chunk, head, _FromPrior(names, centre))
    return {name: nodes[name]["value"] for name in names}


def _log_priors(fitted: Fitted, draws: Draws, chunk: Tensor, head: Batch) -> dict[str, Tensor]:
    """Return the log prior density of clients' variables given θ, ``(S, K, 1)`` each."""
    nodes = _trace_latent(fitted, draws, chunk, head, nullcontext())
    names = [site.name for site in fitted.program.locals]
    return {name: nodes[name]["fn"].log_prob(nodes[name]["value"]) for name in names}


def _trace_latent(
    fitted: Fitted, draws: Draws, chunk: Tensor, head: Batch, source: Any
) -> Mapping[str, Any]:
    """Run the model until its latent sites are sampled; return the nodes of its trace."""
    params, latent = fitted.params_of(chunk), [site.name for site in fitted.program.latent]
    given = handlers.given(head.device, params, values=draws.values, draws=draws.count)
    with torch.no_grad(), source, given, poutine.trace() as tracer, handlers.Until(latent):
        fitted.program.model(head)
    return tracer.trace.nodes


def _check_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], what: str) -> None:
    """Fail if the prior of clients' variables depends on fields that differ."""
    for name, value in one.items():
        if not torch.allclose(value.expand_as(other[name]), other[name], 1e-3, 1e-3):
            raise ValueError(
                f'the prior of {name!r} depends on {what}, which are set to other values here: use level="average", '
                'or set these fields for all rows by at= with level="new"'
            )


def _outcome(
    fitted: Fitted, draws: Draws, chunk: Tensor, batch: Batch, wanted: Expectation
) -> tuple[Tensor, Tensor, bool]:
    """Return the expected outcome ``(S, rows, C)``, the trials ``(rows,)``, and whether it is one of rows."""
    name, program = wanted.outcome, fitted.program
    trials = torch.ones(1, 1, 1, device=batch.device)
    if name in program.derived:
        site: Any = derive(fitted, draws, chunk, batch)[name]
        value, family = site.value, ""
    else:
        site = program.sites[name]
        with handlers.BeforeOutcome(name):
            fn = run_model(fitted, program.model, draws, chunk, batch)[name]["fn"]
        integrated = is_integrated(fn)
        value = wanted.statistic(fn)
        base = innermost(fn.first if integrated else fn)
        family = f" is {name_of(base if integrated else fn)}, which"
        if isinstance(base, dist.Binomial | dist.BetaBinomial) and not fn.event_shape:
            trials = base.total_count.expand(fn.batch_shape)[:1]
    flat = flatten_rows(value, site, batch, draws.count).cpu().double()
    if not flat.isfinite().all():
        raise ValueError(
            f"{name!r}{family} has no finite expectation at some draws and rows. Name another quantity of the rows in "
            'the model, such as pyro.deterministic("risk", ...), and pass outcome="risk"'
        )
    weights = flatten_rows(trials.expand(1, *trials.shape[1:]), site, batch, 1)[0]
    return flat.reshape(*flat.shape[:2], -1), weights.cpu().double(), site.per_row


def is_integrated(fn: Any) -> bool:
    """Return whether a variable of the rows has been integrated out of a distribution."""
    return isinstance(fn, Mixture) and fn.copies > 1


def mean_of(statistic: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Return the function whose value, where a variable of the rows is integrated out, is the mean over its nodes."""

    def mean(fn: Any) -> Tensor:
        value: Tensor = fn.expectation(statistic) if is_integrated(fn) else statistic(fn)
        return value

    return mean


def expected_outcome(fn: Any) -> Tensor:
    """Return the expectation of a distribution: probabilities ``(*batch, C)`` of categories, else ``(*batch, *event)``.

    That of a binomial or beta-binomial distribution is the probability of a success, that of Student's t its location.

    Raises:
        ValueError: the distribution has no ``mean``.

    Example:
        >>> import torch, pyro.distributions as dist
        >>> from bayesfed.effects.means import expected_outcome
        >>> expected_outcome(dist.Categorical(torch.tensor([0.25, 0.75])))
        tensor([0.2500, 0.7500])
    """
    if isinstance(fn, Mixture) and fn.copies == 1:
        parts = [
            (weight.exp(), expected_outcome(part)) for weight, part in fn.weighted_components()
        ]
        return torch.stack(
            [w.reshape(*w.shape, *[1] * (e.ndim - w.ndim)) * e for w, e in parts]
        ).sum(0)
    base = innermost(fn)
    if isinstance(base, dist.Categorical | dist.OneHotCategorical):
        return base.probs
    if isinstance(base, dist.Binomial):
        return base.probs
    if isinstance(base, dist.BetaBinomial):
        return base.concentration1 / (base.concentration1 + base.concentration0)
    try:
        return base.loc if isinstance(base, dist.StudentT) else fn.mean
    except (NotImplementedError, AttributeError):
        if fn.has_enumerate_support and not fn.event_shape:  # such as an ordinal outcome
            return fn.log_prob(fn.enumerate_support(expand=False)).movedim(0, -1).exp()
        raise ValueError(
            f"{name_of(fn)} has no mean: name a quantity of the rows in the model, such as "
            'pyro.deterministic("risk", ...), and pass outcome="risk"'
        ) from None
