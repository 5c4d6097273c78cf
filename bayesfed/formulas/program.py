"""A formula as the code of a Pyro program: it samples standardised coefficients and names them in the data's units.

With m and s the means and standard deviations of the columns x_k and of the outcome (0 and 1 unless the link is the
identity), and a, b_k, u the standardised coefficients::

    mean      = m_y + s_y (a + Σ_k b_k (x_k − m_k) / s_k + …) + offset
    x_k       = s_y / s_k · b_k
    Intercept = m_y + s_y (a − Σ_k b_k m_k / s_k)
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bayesfed.formulas.families import IMPORTS
from bayesfed.formulas.outcome import Outcome
from bayesfed.formulas.own_terms import TermCode, covariate_lines
from bayesfed.formulas.predictors import Columns, Covariate, GroupColumns, Predictor
from bayesfed.formulas.statements import (
    EXACT,
    named,
    number,
    numbers,
    over,
    quoted,
    sample,
    sample_named,
    tensor,
    times,
)

HEAD = """\
import pyro
import pyro.distributions as dist
import torch
{}

def model(federation):
"""
INDENT = "    "


@dataclass
class _Code:
    """Lines of code outside and inside the clients plate and inside that of observations, and terms of a predictor."""

    outside: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    sum: list[str] = field(default_factory=list)
    suffixes: list[str] = field(default_factory=list)


def program_code(
    title: str,
    outcome: Outcome,
    predictors: Sequence[Predictor],
    priors: Mapping[str, str],
    covariates: Sequence[Covariate] = (),
) -> str:
    """Write the code of the program.

    Args:
        title: its docstring.
        outcome: its name and distribution.
        predictors: of the mean and of other parameters; of several categories, one for each but the first.
        priors: name in the data's units to the code of a prior that replaces the default.
        covariates: those that are not known in each row.
    """
    code = _Code()
    for covariate in covariates:
        _covariate(code, covariate, priors)
    for place, predictor in enumerate(predictors):
        _effects(code, predictor, priors)
        if place == 0:
            _parameters(code, outcome, predictor, priors)
        for group in predictor.groups:
            _group(code, predictor, group, priors)
        _linear_predictor(code, predictor)
    if "logits," in outcome.likelihood:
        names = [predictor.name for predictor in predictors if predictor.link is None]
        code.rows.append(f"logits = [torch.zeros_like({names[0]}), {', '.join(names)}]")
    observed = sample(outcome.name, f"{outcome.likelihood}, obs=obs.get({quoted(outcome.name)})")
    if outcome.weighted:
        code.rows.append('with pyro.poutine.scale(scale=obs["weights"]):')
        observed = INDENT + observed
    lines = [f'"""{title}"""', *code.outside, "with federation.clients():"]
    inner = [*code.inside, "with federation.observations() as obs:"]
    lines += [INDENT + line for line in inner]
    lines += [2 * INDENT + line for line in (*code.rows, observed)]
    body = "".join(f"{INDENT}{line}\n" for line in lines)
    imports = [f"from {m} import {n}\n" for n, m in IMPORTS.items() if f"{n}(" in body]
    return HEAD.format("".join(imports)) + body


def _covariate(code: _Code, covariate: Covariate, priors: Mapping[str, str]) -> None:
    """Write a covariate that is not known in each row: its linear predictor, and its distribution."""
    predictor, column = covariate.predictor, covariate.term.column
    _effects(code, predictor, priors)
    for group in predictor.groups:
        _group(code, predictor, group, priors)
    _linear_predictor(code, predictor)
    prior = priors.get(f"{column}_sigma", "")
    outside, rows = covariate_lines(covariate.term, covariate.sd, predictor.value, prior)
    code.outside += outside
    code.rows += rows


def _effects(code: _Code, predictor: Predictor, priors: Mapping[str, str]) -> None:
    """Write the standardised intercept and slopes of a predictor, and those in the data's units."""
    if predictor.intercept is not None:
        _intercept(code, predictor, priors)
    for term in predictor.own:
        _own_term(code, predictor, term, priors)
    if predictor.common.labels:
        _common(code, predictor, priors)
    elif predictor.intercept is not None:
        _intercept_in_units(code, predictor)


def _linear_predictor(code: _Code, predictor: Predictor) -> None:
    """Write the sum of the terms of a predictor, and the inverse link of a parameter."""
    total = " + ".join(code.sum) or "torch.zeros(())"
    code.sum.clear()
    value = total if predictor.scale == 1 else f"{number(predictor.scale)} * ({total})"
    value = value if predictor.loc == 0 else f"{number(predictor.loc, EXACT)} + {value}"
    if predictor.offset is not None:
        value += f" + obs[{quoted(predictor.offset)}]"
    if predictor.link is not None:
        value = f"({value}){'.exp()' if predictor.link == 'log' else '.sigmoid()'}"
    code.rows.append(f"{predictor.value} = {value}")


def _intercept(code: _Code, predictor: Predictor, priors: Mapping[str, str]) -> None:
    """Write the standardised intercept; a user's prior is that of the outcome with the predictors at their means."""
    name, variable = f"{predictor.prefix}Intercept", predictor.variable("intercept")
    value = sample(f"_{variable}", priors.get(name, predictor.intercept))
    if name in priors:
        shifted = f"({value} - {number(predictor.loc, EXACT)})" if predictor.loc else value
        value = over(shifted, predictor.scale)
    code.outside.append(f"{variable} = {value}")
    code.sum.append(variable)


def _common(code: _Code, predictor: Predictor, priors: Mapping[str, str]) -> None:
    """Write the standardised slopes of the common terms, and the slopes and the intercept in the data's units."""
    common, beta = predictor.common, predictor.variable("beta")
    x = "x" if predictor.field == "X" else predictor.variable("x")
    units = [predictor.scale / sd for sd in common.sd]
    prior = "dist.Normal(torch.zeros({}), {})"
    lines, by_default = _vector(
        beta, f"_{beta}", common.labels, prior, common.prior_sd, units, priors
    )
    code.outside += lines
    if predictor.intercept is not None:
        _intercept_in_units(code, predictor)
    for k in by_default:
        code.outside.append(named(common.labels[k], times(units[k], f"{beta}[..., {k}]")))
    standardised = f"{x} = {_standardised(predictor.field, common)}"
    code.rows += [standardised] * (standardised not in code.rows)
    code.sum.append(f"({beta} * {x}).sum(-1)")


def _own_term(code: _Code, predictor: Predictor, term: TermCode, priors: Mapping[str, str]) -> None:
    """Write the standardised coefficient of a term that formulae does not code, and that in the data's units."""
    slope, unit = _slope(term), predictor.scale / term.sd
    prior = "dist.Normal(torch.zeros({}), {})"
    lines, by_default = _vector(
        slope, f"_slope|{term.label}", [term.label], prior, [term.prior_sd], [unit], priors
    )
    code.outside += [*term.lines, *lines]
    if by_default:
        code.outside.append(named(term.label, times(unit, f"{slope}[..., 0]")))
    code.sum.append(f"{slope}[..., 0] * {term.value}")


def _slope(term: TermCode) -> str:
    return re.sub(r"\W", "_", f"slope_{term.label}")


def _vector(
    variable: str,
    site: str,
    names: Sequence[str],
    default: str,
    scales: Sequence[float],
    units: Sequence[float],
    priors: Mapping[str, str],
) -> tuple[list[str], list[int]]:
    """Write a vector of standardised variables, some of which may have a user's prior in the data's units.

    Returns:
        The lines, and the positions of the variables with the default prior.
    """
    lines, by_default = [], [k for k, name in enumerate(names) if name not in priors]
    if by_default:
        prior = default.format(len(by_default), tensor([scales[k] for k in by_default]))
        lines.append(f"{variable} = {sample(site, f'{prior}.to_event(1)')}")
    if len(by_default) < len(names):
        parts = [
            over(sample_named(name, priors[name]), units[k])
            if name in priors
            else f"{variable}[..., {by_default.index(k)}]"
            for k, name in enumerate(names)
        ]
        lines.append(f"{variable} = torch.stack([{', '.join(parts)}], -1)")
    return lines, by_default


def _intercept_in_units(code: _Code, predictor: Predictor) -> None:
    """Write the intercept in the data's units."""
    value, beta = predictor.variable("intercept"), predictor.variable("beta")
    if any(predictor.common.mean):
        value = f"{value} - ({beta} * {_ratios(predictor.common)}).sum(-1)"
    for term in predictor.own:
        value += f" - {_slope(term)}[..., 0] * {term.shift}" if term.shift else ""
    if predictor.scale != 1:
        value = f"{number(predictor.scale)} * ({value})"
    if predictor.loc != 0:
        value = f"{number(predictor.loc, EXACT)} + {value}"
    code.outside.append(named(f"{predictor.prefix}Intercept", value))


def _ratios(common: Columns) -> str:
    """Write the columns' means in standard deviations."""
    return tensor([m / s for m, s in zip(common.mean, common.sd, strict=True)])


def _parameters(
    code: _Code, outcome: Outcome, predictor: Predictor, priors: Mapping[str, str]
) -> None:
    """Write the parameters of the family that have no predictor, and the thresholds between categories."""
    for name, (default, scale) in outcome.parameters.items():
        if name in priors or scale == 1:
            code.outside.append(f"{name} = {sample_named(name, priors.get(name, default))}")
        else:
            code.outside.append(f"{name} = {number(scale)} * {sample(f'_{name}', default)}")
            code.outside.append(named(name, name))
    if "cutpoints" in outcome.likelihood:
        uniform = f"dist.Dirichlet(torch.ones({outcome.categories}))"
        prior = f"dist.TransformedDistribution({uniform}, [SimplexToOrderedTransform()])"
        code.outside.append(f"cutpoints = {sample('_cutpoints', prior)}")
        common = predictor.common
        shift = f" + (beta * {_ratios(common)}).sum(-1, keepdim=True)" * any(common.mean)
        for term in predictor.own:
            shift += (
                f" + ({_slope(term)}[..., 0] * {term.shift}).unsqueeze(-1)" if term.shift else ""
            )
        code.outside.append(named("threshold", f"cutpoints{shift}"))


def _group(
    code: _Code, predictor: Predictor, group: GroupColumns, priors: Mapping[str, str]
) -> None:
    """Write a group's scales τ and effects u ~ Normal(0, τ), or if correlated Normal(0, diag(τ) L Lᵀ diag(τ))."""
    suffix = re.sub(r"\W", "_", group.key)
    while suffix in code.suffixes:
        suffix += "_"
    code.suffixes.append(suffix)
    tau, u, of, unit = f"tau_{suffix}", f"u_{suffix}", f"|{group.factor}", predictor.scale
    names = group.names
    units = [unit] * group.intercept + [unit / sd for sd in group.columns.sd]
    _scales(code, group, tau, units, not any(group.columns.mean), priors)
    where = code.outside if group.place == "global" else code.inside
    levels = () if group.place == "client" else (group.levels,)
    zeros = f"torch.zeros({', '.join(map(str, (*levels, len(names))))})"
    lines: list[str] = []
    centre = predictor.variable("intercept")
    of_client = group.place == "client" and group.intercept
    if predictor.link and centre in code.sum and of_client and len(names) == 1:
        # the effect of a parameter with the intercept: the two apart need many more rounds, and may diverge
        code.sum.remove(centre)
        prior, effects = f"dist.Normal({centre}, {tau})", [f"{u} - {centre}"]
    elif len(names) == 1:
        prior = f"dist.Normal(0.0, {tau})"
        if levels:
            prior = f"dist.Normal(torch.zeros({group.levels}), {tau}.unsqueeze(-1)).to_event(1)"
        effects = [times(units[0], u)]
    elif group.correlated:
        tril = f"tril_{suffix}"
        prior = f"dist.MultivariateNormal({zeros}, scale_tril={tril})"
        if levels:
            prior = f"dist.MultivariateNormal({zeros}, scale_tril={tril}.unsqueeze(-3)).to_event(1)"
        _correlations(code, group, suffix, _units(group, unit, units), priors)
        lines = [f"effects_{suffix} = (units_{suffix} @ {u}.unsqueeze(-1)).squeeze(-1)"]
        effects = [f"effects_{suffix}[..., {k}]" for k in range(len(names))]
    else:
        scale = f"{tau}.unsqueeze(-2)" if levels else tau
        prior = f"dist.Normal({zeros}, {scale}).to_event({1 + len(levels)})"
        effects = [times(units[k], f"{u}[..., {k}]") for k in range(len(names))]
    lines += [named(name + of, value) for name, value in zip(names, effects, strict=True)]
    where += [f"{u} = {sample(f'_u|{group.key}', prior)}", *lines]
    _contribution(code, group, suffix, u)


def _scales(
    code: _Code,
    group: GroupColumns,
    tau: str,
    units: Sequence[float],
    in_units: bool,
    priors: Mapping[str, str],
) -> None:
    """Write the standardised scales τ; if ``in_units``, also the scales in the data's units."""
    names = [f"{name}|{group.factor}_sigma" for name in group.names]
    sds = [group.prior_sd] * group.intercept + list(group.columns.prior_sd)
    site = f"_tau|{group.key}"
    if len(names) > 1:
        lines, by_default = _vector(tau, site, names, "dist.HalfNormal({1})", sds, units, priors)
        code.outside += lines
        for k in by_default if in_units else ():
            code.outside.append(named(names[k], times(units[k], f"{tau}[..., {k}]")))
    elif names[0] in priors:
        code.outside.append(f"{tau} = {over(sample_named(names[0], priors[names[0]]), units[0])}")
    else:
        code.outside.append(f"{tau} = {sample(site, f'dist.HalfNormal({number(sds[0])})')}")
        code.outside.append(named(names[0], times(units[0], tau)))


def _units(group: GroupColumns, scale: float, units: Sequence[float]) -> list[list[float]]:
    """Return the matrix from standardised effects to effects in the data's units."""
    matrix: list[list[float]] = np.diag(units).tolist()
    if any(group.columns.mean):
        shifts = zip(group.columns.mean, group.columns.sd, strict=True)
        matrix[0][1:] = [-scale * mean / sd for mean, sd in shifts]
    return matrix


def _correlations(
    code: _Code,
    group: GroupColumns,
    suffix: str,
    matrix: list[list[float]],
    priors: Mapping[str, str],
) -> None:
    """Write the Cholesky factor of the effects' covariance, and scales and correlations in the data's units."""
    size, names = len(group.names), group.names
    if size == 2:  # LKJ(1), in operations that can be traced
        rho = f"rho_{suffix}"
        rows = f"torch.stack([one, 0.0 * one], -1), torch.stack([{rho}, (1.0 - {rho}.square()).sqrt()], -1)"
        lines = [
            f"{rho} = {sample(f'_rho|{group.key}', 'dist.Uniform(-1.0, 1.0)')}",
            f"one = torch.ones_like({rho})",
            f"chol_{suffix} = torch.stack([{rows}], -2)",
        ]
    else:
        prior = f"dist.LKJCholesky({size}, 1.0)"
        lines = [f"chol_{suffix} = {sample(f'_chol|{group.key}', prior)}"]
    lines += [
        f"tril_{suffix} = tau_{suffix}.unsqueeze(-1) * chol_{suffix}",
        f"units_{suffix} = torch.tensor([{', '.join(numbers(row) for row in matrix)}])",
        f"spread_{suffix} = units_{suffix} @ tril_{suffix}",
        f"sd_{suffix} = spread_{suffix}.square().sum(-1).sqrt()",
    ]
    for k, name in enumerate(f"{name}|{group.factor}_sigma" for name in names):
        if any(group.columns.mean) and name not in priors:
            lines.append(named(name, f"sd_{suffix}[..., {k}]"))
    for j, k in itertools.combinations(range(size), 2):
        product = f"(spread_{suffix}[..., {j}, :] * spread_{suffix}[..., {k}, :]).sum(-1)"
        value = f"{product} / (sd_{suffix}[..., {j}] * sd_{suffix}[..., {k}])"
        lines.append(named(f"cor({names[j]}, {names[k]})|{group.factor}", value))
    code.outside += lines


def _contribution(code: _Code, group: GroupColumns, suffix: str, u: str) -> None:
    """Write the terms that a group adds to a row's linear predictor."""
    several, z = len(group.names) > 1, f"z_{suffix}"
    if group.columns.labels:
        code.rows.append(f"{z} = {_standardised(group.field, group.columns)}")
    own, index = u, f"obs[{quoted(group.factor)}].long()"
    if group.place == "global":
        own = f"own_{suffix}"
        code.rows.append(f"{own} = {u}[{index}]")
    elif group.place == "within":
        own = f"own_{suffix}"
        here, last = (f"here_{suffix}.unsqueeze(-1)", -2) if several else (f"here_{suffix}", -1)
        code.rows += [
            f"here_{suffix} = torch.nn.functional.one_hot({index}, {group.levels})",
            f"{own} = ({u} * {here}).sum({last})",
        ]
    if not several:
        code.sum.append(own if group.intercept else f"{own} * {z}[..., 0]")
    elif group.intercept:
        code.sum += [f"{own}[..., 0]", f"({own}[..., 1:] * {z}).sum(-1)"]
    else:
        code.sum.append(f"({own} * {z}).sum(-1)")


def _standardised(name: str, columns: Columns) -> str:
    """Write a field's standardised columns."""
    shifted = f"obs[{quoted(name)}]"
    if any(columns.mean):
        shifted = f"({shifted} - {tensor(columns.mean, EXACT)})"
    return f"{shifted} / {tensor(columns.sd)}"
