"""Shares of the variance of an outcome: Bayesian R², and the part of each grouping factor (ICC)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from bayesfed.data.absent import are_absent
from bayesfed.data.federation import Federation
from bayesfed.data.plural import plural
from bayesfed.effects.clients import check_rows_are_here
from bayesfed.effects.means import Expectation, expected_outcome, values_of_rows
from bayesfed.effects.question import caveat_of, level_text, outcome_of
from bayesfed.effects.result import Effects
from bayesfed.effects.rows import formula_of, rows_of
from bayesfed.elbo.sites import innermost, name_of
from bayesfed.formulas.predictors import GroupColumns
from bayesfed.output.posterior import Posterior
from bayesfed.vmap.mixtures import Mixture

LATENT = {"bernoulli": "logit", "binomial": "logit", "cumulative": "logit"}
"""Families whose residual variance on the scale of the link is π² / 3, that of the standard logistic distribution."""
OWN = ("gaussian", "lognormal")
"""Families whose residual variance on the scale of the linear predictor is sigma²."""


def bayes_r2(
    posterior: Posterior,
    *,
    rows: Any = None,
    outcome: str | None = None,
    prob: float = 0.94,
    num_samples: int = 1000,
    seed: int = 0,
) -> Effects:
    """Compute the Bayesian R²: the variance of the rows' expected outcomes, as a share of that of new outcomes.

    ::

        R²_s = V_fit / (V_fit + V_res)      V_fit = Var_j E[y_j | w_s, θ_s],      V_res = mean_j Var(y_j | w_s, θ_s)

    Expectations include the clients' random effects: it is the conditional R² of a mixed model.

    Args:
        posterior: of a formula or of any Pyro program.
        rows: see :class:`Settings`.
        outcome: the observed site, if there are several.
        prob: the probability of the interval.
        num_samples: S.
        seed: seed of the draws, which are those of ``posterior.sample``.

    Returns:
        One row. A row of a binomial outcome counts as often as it has trials.

    Raises:
        ValueError: the rows are elsewhere, as for the server of a fit between machines; or outcomes have no variance at
            some draws.

    Source: A. Gelman, B. Goodrich, J. Gabry, A. Vehtari (2019), "R-squared for Bayesian regression models", The
    American Statistician 73(3), 307–309, eq. 3, with the residual variance of the model.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.varying_intercept, datasets.grunfeld(), rounds=20)
        >>> r2 = bf.effects.bayes_r2(posterior)
        >>> r2.draws.shape, bool(((r2.draws > 0) & (r2.draws < 1)).all())
        (torch.Size([1000, 1]), True)
    """
    import pandas as pd

    if rows is None:
        check_rows_are_here(posterior, "bayes_r2")
    name = outcome_of(posterior.program, outcome)
    if name in posterior.program.derived:
        raise ValueError(f"outcome={name!r} is not observed: R² is of an outcome with a variance")
    found = rows_of(posterior, rows, "clients")
    federation = found.at({}).to(posterior.federation.device)
    wanted = Expectation(name, "clients", _mean_and_variance, num_samples, seed)
    fit, residual = _variances(posterior, federation, wanted)
    return Effects(
        labels=pd.DataFrame({"outcome": [name]}),
        draws=(fit / (fit + residual))[:, None],
        estimand="Bayesian R²",
        level=level_text("clients", found.clients, found.text, {}).replace("; mean of", ";"),
        prob=prob,
        caveat=caveat_of(posterior.program, posterior),
    )


def icc(
    posterior: Posterior, *, prob: float = 0.94, num_samples: int = 1000, seed: int = 0
) -> Effects:
    """Compute the intraclass correlations of a formula: the share of each grouping factor in the variance.

    The variance is that of the linear predictor's random effects and of the residuals, given the predictors. Its
    residual part is sigma² of Gaussian and log-Normal families (of the logarithm), π² / 3 of ``bernoulli``,
    ``binomial`` and ``cumulative``; other families are refused. The variance of random slopes is the mean over the rows
    of z'Σz, for the columns z of a row and the covariance Σ of the effects.

    Args:
        posterior: of a formula with ``( ... | g)``. With random intercepts only, global variables are enough: that of a
            server of a fit between machines, loaded without rows.
        prob: the probability of the intervals.
        num_samples: S.
        seed: seed of the draws, which are those of ``posterior.derived``.

    Returns:
        A row for each grouping factor, and one of the residuals; each draw's values add up to 1.

    Raises:
        ValueError: the model is no formula with groups, its family has no residual variance on this scale, the
            variance differs between rows (``sigma ~ x``), or slopes need rows that are elsewhere.

    Sources: P. C. D. Johnson (2014), "Extension of Nakagawa & Schielzeth's R²GLMM to random slopes models", Methods in
    Ecology and Evolution 5(9), 944–946; S. Nakagawa, P. C. D. Johnson, H. Schielzeth (2017), "The coefficient of
    determination R² and intra-class correlation coefficient from generalized linear mixed-effects models revisited and
    expanded", J. R. Soc. Interface 14.

    Example:
        >>> import bayesfed as bf, pandas as pd
        >>> frame = pd.DataFrame({"y": [1.0, 3.0, 2.0, 5.0], "x": [0.0, 1.0, 1.0, 2.0], "site": ["A", "A", "B", "B"]})
        >>> model = bf.formula("y ~ x + (1 | site)", frame)
        >>> shares = bf.effects.icc(bf.fit(model, model.federation, rounds=5))
        >>> shares.labels["variance"].tolist(), bool(((shares.draws.sum(1) - 1).abs() < 1e-9).all())
        (['site', 'residual'], True)
    """
    import pandas as pd

    formula = formula_of(posterior.program.model)
    if formula is None:
        raise ValueError("effects.icc is of a formula: its groups name the parts of the variance")
    groups = [g for p in formula.predictors if p.name == "mean" for g in p.groups]
    if not groups:
        raise ValueError(f"{formula.text!r} has no ( ... | g): there is no intraclass correlation")
    draws = {
        n: v.double().cpu()
        for n, v in posterior.derived(num_samples=num_samples, seed=seed).items()
    }
    if formula.family in LATENT:
        residual, scale = torch.full((num_samples,), math.pi**2 / 3, dtype=torch.float64), "logit"
    elif formula.family not in OWN:
        known = ", ".join((*OWN, *LATENT))
        raise ValueError(
            f"the {formula.family} family has no residual variance on the scale of the linear predictor: effects.icc "
            f"is of {known}; effects.bayes_r2 is of any family"
        )
    elif "sigma" not in draws:
        raise ValueError(
            f"sigma of {formula.text!r} differs between rows, so that there is no single residual variance: "
            "effects.bayes_r2 takes its mean over the rows"
        )
    else:
        residual, scale = draws["sigma"].square(), "linear predictor"
    parts: dict[str, Tensor] = {}
    for group in groups:
        part = _variance_of_effects(posterior.federation, group, draws)
        parts[group.factor] = parts.get(group.factor, 0.0) + part
    parts["residual"] = residual
    total = torch.stack(list(parts.values()), 1)
    return Effects(
        labels=pd.DataFrame({"variance": list(parts)}),
        draws=total / total.sum(1, keepdim=True),
        estimand=f"Share of the variance given the predictors, on the scale of the {scale}",
        level=f"between the levels of each factor; {plural(posterior.program.rows, 'row')}",
        prob=prob,
        caveat=caveat_of(posterior.program, posterior),
    )


def _variances(
    posterior: Posterior, federation: Federation, wanted: Expectation
) -> tuple[Tensor, Tensor]:
    """Return the variance of the rows' means and the mean of the rows' variances, ``(S,)`` each."""
    sums, centre = [], None
    for _, value, trials in values_of_rows(posterior, federation, wanted):
        if centre is None:
            centre = value[:, :, 0].mean()
        moments = [
            trials.expand(len(value), -1),
            *(trials * (value[:, :, 0] - centre) ** k for k in (1, 2)),
        ]
        sums.append(torch.stack([*moments, trials * value[:, :, -1]]).sum(2))
    count, first, second, residual = torch.stack(sums).sum(0)
    if int(count[0]) < 2:
        raise ValueError("R² needs two rows")
    return (second - first.square() / count) / (count - 1), residual / count


def _mean_and_variance(fn: Any) -> Tensor:
    """Return the mean and the variance of an outcome, of one trial if it is binomial: ``(*batch, 2)``."""
    if isinstance(fn, Mixture):
        centre = expected_outcome(fn.first).double().mean()  # squares are of small numbers
        parts = fn.expectation(lambda part: _mean_and_square(part, centre))
        variance = parts[..., 1] - (parts[..., 0] - centre).square()
        return torch.stack([parts[..., 0], variance], -1)
    base, mean = innermost(fn), expected_outcome(fn)
    if isinstance(base, dist.Binomial | dist.BetaBinomial):
        return torch.stack([mean, mean * (1 - mean)], -1)
    if mean.shape != fn.batch_shape:
        raise ValueError(
            f"{name_of(base)} is of categories or vectors: R² is of outcomes that are numbers"
        )
    try:
        return torch.stack(torch.broadcast_tensors(mean, fn.variance), -1)
    except (NotImplementedError, AttributeError):
        raise ValueError(f"{name_of(fn)} has no variance, which R² needs") from None


def _mean_and_square(fn: Any, centre: Tensor) -> Tensor:
    """Return the expectations of an outcome and of its squared distance from a number: ``(*batch, 2)``, in float64."""
    mean, variance = _mean_and_variance(fn).double().unbind(-1)
    return torch.stack([mean, variance + (mean - centre).square()], -1)


def _variance_of_effects(
    federation: Federation, group: GroupColumns, draws: Mapping[str, Tensor]
) -> Tensor:
    """Return the mean over the rows of the variance of a group's effects on a row, ``(S,)``."""
    sd = torch.stack([draws[f"{name}|{group.factor}_sigma"] for name in group.names], 1)
    if len(group.names) == 1 and group.intercept:
        return sd[:, 0].square()
    if are_absent(federation.fields):
        raise ValueError(
            f"effects.icc needs the rows for the slopes ({', '.join(group.names)} | {group.factor}), which stay at "
            "their institutions; with random intercepts only it needs no rows"
        )
    columns = federation[group.field].double().cpu()
    if group.intercept:
        columns = torch.cat([torch.ones(len(columns), 1, dtype=torch.float64), columns], 1)
    covariance = torch.diag_embed(sd.square())
    for j, k in itertools.combinations(range(len(group.names)), 2):
        name = f"cor({group.names[j]}, {group.names[k]})|{group.factor}"
        if name in draws:
            covariance[:, j, k] = covariance[:, k, j] = draws[name] * sd[:, j] * sd[:, k]
    return (covariance * (columns.T @ columns / len(columns))).sum((1, 2))
