"""Clients compared with each other: random effects with ranks, and centiles of outcomes in predictive distributions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, get_args

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.absent import are_absent
from bayesfed.data.columns import UnknownName
from bayesfed.data.federation import Federation
from bayesfed.data.plural import plural
from bayesfed.effects.hypotheses import evaluate, variables_of
from bayesfed.effects.means import Level, draws_at_level
from bayesfed.effects.question import caveat_of, group_rows, level_text, outcome_of
from bayesfed.effects.result import Effects
from bayesfed.effects.rows import rows_of
from bayesfed.elbo import noise
from bayesfed.elbo.sites import innermost, name_of
from bayesfed.models.cox import PiecewiseExponential
from bayesfed.models.weibull_survival import CensoredWeibull
from bayesfed.output.draws import flatten_rows, run_model
from bayesfed.output.fitted import Fitted
from bayesfed.output.posterior import Posterior


def random_effects(
    posterior: Posterior,
    variable: str,
    *,
    benchmark: float | str = 0.0,
    prob: float = 0.94,
    num_samples: int = 1000,
    seed: int = 0,
) -> Effects:
    """Return each client's own variable minus a benchmark, with the posterior probability that it exceeds it.

    ``.ranks()`` of the result is the posterior of the clients' ranks.

    Args:
        posterior: of a formula, whose random effects are ``"1|hospital"``, ``"x|hospital"``, or of any Pyro program.
        variable: a variable inside the clients plate, sampled or ``pyro.deterministic``; a vector has a row for each
            entry.
        benchmark: a number, or a function of global variables as in :func:`hypotheses`, such as ``"mu"``.
        prob: the probability of the intervals.
        num_samples: S.
        seed: seed of the draws, which are those of ``posterior.sample``.

    Returns:
        A row for each client, in the posterior's order, and for each entry of a vector.

    Raises:
        ValueError: the clients' variables are elsewhere, as for the server of a fit between machines; or the benchmark
            cannot be read.
        KeyError: the clients have no such variable.

    Source: H. Goldstein, D. J. Spiegelhalter (1996), "League tables and their limitations", JRSS A 159(3), 385–443.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=20)
        >>> schools = bf.effects.random_effects(posterior, "theta", benchmark="mu")
        >>> schools.to_frame().columns.tolist()
        ['school', 'mean', 'sd', '3%', '97%', 'P(>0)']
        >>> schools.draws.shape
        torch.Size([1000, 8])
    """
    import pandas as pd

    check_rows_are_here(posterior, "random_effects", moments=True)
    program, federation = posterior.program, posterior.federation
    variables = variables_of(posterior, num_samples, seed)
    local = {site.name for site in program.locals} | {n for n, d in program.derived.items() if d}
    own = [name for name in variables if name in local and not name.startswith("_")]
    if variable not in own:
        known = ", ".join(own) or "they have none"
        raise UnknownName(f"the clients have no variable {variable!r}: {known}")
    value, estimand = variables[variable].double(), variable
    if benchmark != 0:
        above: Any = benchmark
        if isinstance(benchmark, str):
            outside = {name: found for name, found in variables.items() if name not in local}
            above, _ = evaluate(benchmark, outside, {})
            above = above.double().reshape(-1, *[1] * (value.ndim - 1))
        value, estimand = value - above, f"{variable} - {benchmark}"
    labels = pd.DataFrame(
        [
            {federation.client_dim: name} | ({"entry": ", ".join(map(str, at))} if at else {})
            for name in federation.names
            for at in itertools.product(*map(range, value.shape[2:]))
        ]
    )
    return Effects(
        labels=labels,
        draws=value.flatten(1),
        estimand=estimand,
        level=f"{plural(len(federation), 'client')}, each with its own variables",
        null=0.0,
        prob=prob,
        caveat=caveat_of(program, posterior),
    )


def centiles(
    posterior: Posterior,
    *,
    by: str | Sequence[str] | None = None,
    level: Level = "clients",
    rows: Any = None,
    outcome: str | None = None,
    prob: float = 0.94,
    num_samples: int = 1000,
    seed: int = 0,
) -> Effects:
    """Compare observed outcomes with their predictive distribution given the rows' covariates: centiles.

    Of single rows, as in a normative model; or, grouped ``by`` the client or another variable, of the mean outcome of
    each group. At the average client these are the limits of a funnel plot, adjusted for the rows' covariates; for a
    new client they include the spread between clients. The centile of an observed value y is P(Y < y) + P(Y = y) / 2,
    estimated from S draws, so that it is between 1 / (2 (S + 1)) and 1 − 1 / (2 (S + 1)).

    Rows of the fit have contributed to the posterior. To compare a client, say Delft, with the others alone, give
    ``posterior.without("Delft")``, its rows as ``rows``, and ``level="new"``.

    Args:
        posterior: of a formula or of any Pyro program.
        by: variables whose values group the rows, such as the column of the client; by default each row is by itself.
        level: ``"clients"``, each client with its own variables; ``"average"``, at the average client; ``"new"``, for
            a new client, see :class:`Settings`.
        rows: a frame or a federation with outcomes; by default the rows of the posterior's clients. Rows whose outcome
            is missing are left out.
        outcome: the observed site, if there are several.
        prob: the probability of the intervals.
        num_samples: S.
        seed: seed of the draws.

    Returns:
        The predictive distribution of each row or group, with the columns ``rows``, ``observed`` and ``centile``.
        A row of a binomial outcome counts as often as it has trials.

    Raises:
        ValueError: the rows are elsewhere, as for the server of a fit between machines; outcomes are censored, are
            vectors or categories without order, or all are missing.

    Source: D. J. Spiegelhalter (2005), "Funnel plots for comparing institutional performance", Statistics in Medicine
    24(8), 1185–1202.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.varying_intercept, datasets.grunfeld(), rounds=20)
        >>> found = bf.effects.centiles(posterior, by="firm", level="average").to_frame()
        >>> found.columns.tolist()
        ['firm', 'mean', 'sd', '3%', '97%', 'rows', 'observed', 'centile']
        >>> bool(found["centile"].between(0, 1).all())
        True
    """
    import pandas as pd

    if rows is None:
        check_rows_are_here(posterior, "centiles")
    if level not in get_args(Level):
        raise ValueError(f"level is {level!r}: one of {', '.join(map(repr, get_args(Level)))}")
    program, found = posterior.program, rows_of(posterior, rows, level)
    name = outcome_of(program, outcome)
    if name in program.derived:
        raise ValueError(f"outcome={name!r} is not observed: it has no centile")
    federation = found.at({}).to(posterior.federation.device)
    drawn, observed, trials = _draw_outcomes(posterior, federation, name, level, num_samples, seed)
    if by is None:
        owner = federation.owner.tolist()
        labels = [{federation.client_dim: federation.names[i]} for i in owner]
        group = torch.arange(len(owner))
        if len(observed) != len(owner):
            raise ValueError(
                f"{name!r} is an outcome of clients: pass by={federation.client_dim!r}"
            )
    else:
        labels, group = group_rows(found, by)
        group = group if len(observed) == len(group) else group[federation.offsets[:-1].cpu()]
    there = observed.isfinite()
    count = torch.zeros(len(labels), dtype=torch.int64).index_add_(0, group, there.long())
    if not bool(there.any()):
        raise ValueError(f"the rows have no outcome {name!r}: centiles are of observed outcomes")
    kept = count > 0
    weight = torch.zeros(len(labels), dtype=torch.float64).index_add_(
        0, group[there], trials[there]
    )

    def means(values: Tensor) -> Tensor:
        total = values.new_zeros(*values.shape[:-1], len(labels))
        return (total.index_add_(-1, group[there], values[..., there]) / weight)[..., kept]

    drawn, observed = means(drawn), means(observed)
    below = (drawn < observed).sum(0) + 0.5 * (drawn == observed).sum(0)
    return Effects(
        labels=pd.DataFrame([label for label, keep in zip(labels, kept, strict=True) if keep]),
        draws=drawn,
        estimand=f"{name}, predicted" if by is None else f"mean of {name}, predicted",
        level=level_text(level, found.clients, found.text, {}).replace("; mean of", ";"),
        prob=prob,
        tests=pd.DataFrame(
            {
                "rows": count[kept].numpy(),
                "observed": observed.numpy(),
                "centile": ((below + 0.5) / (len(drawn) + 1)).numpy(),
            }
        ),
        caveat=caveat_of(program, posterior),
    )


def check_rows_are_here(posterior: Any, name: str, *, moments: bool = False) -> None:
    """Raise a ValueError that names a function if the clients' rows, or their ``moments`` too, are elsewhere."""
    here = False
    if isinstance(posterior, Posterior):
        federation = posterior.federation.sufficient if moments else posterior.federation
        here = not are_absent(federation.fields)
    if not here:
        raise ValueError(
            f"effects.{name} needs the clients' rows or variables, which stay at their institutions: an institution "
            "calls it for its own clients, with bf.Posterior.load(path, model, federation)"
        )


def _draw_outcomes(
    fitted: Fitted, federation: Federation, name: str, level: Level, count: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return draws of the outcome ``(S, rows)``, the observed values and the trials ``(rows,)``, in float64."""
    program, parts = fitted.program, list[tuple[Tensor, Tensor, Tensor]]()
    site, model = program.sites[name], poutine.uncondition(program.model)
    for few, chunk, draws in draws_at_level(fitted, federation, level, count, seed):
        batch = federation.batch(chunk)
        node = run_model(few, program.model, draws, chunk, batch)[name]
        trials = _check_outcome(name, node["fn"])
        with noise.seeded(noise.word(f"{seed} {int(chunk[0])}")):
            drawn = run_model(few, model, draws, chunk, batch)[name]["value"]
        mask = torch.as_tensor(True if node["mask"] is None else node["mask"])
        seen = node["value"].where(mask.to(batch.device), torch.nan)
        rows = [flatten_rows(value, site, batch, n) for value, n in ((drawn, count), (seen, 1))]
        at = flatten_rows(trials.expand(1, *batch.mask.shape), site, batch, 1)
        parts.append((rows[0], rows[1][0], at[0]))
    return tuple(torch.cat(part, -1).cpu().double() for part in zip(*parts, strict=True))  # type: ignore[return-value]


def _check_outcome(name: str, fn: Any) -> Tensor:
    """Return the trials of an outcome; fail if it has no centile."""
    base = innermost(fn)
    if fn.event_shape or isinstance(base, dist.Categorical | dist.OneHotCategorical):
        raise ValueError(
            f"{name!r} is {name_of(base)}: centiles are of outcomes that are numbers, not vectors or categories"
        )
    if isinstance(base, CensoredWeibull | PiecewiseExponential) and bool((base.event != 1).any()):
        raise ValueError(
            f"{name!r} has censored rows, whose outcomes are not observed: no centiles"
        )
    if isinstance(base, dist.Binomial | dist.BetaBinomial):
        return base.total_count[:1]
    return torch.ones(())
