"""The linear predictors of a formula: their columns, with the constants that standardise them, and their priors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bayesfed.formulas.agreement import Agreement
from bayesfed.formulas.coding import Coding
from bayesfed.formulas.families import Family, Parameter
from bayesfed.formulas.own_terms import TermCode, covariate_code, moments_of, monotonic_code
from bayesfed.formulas.terms import FormulaError, OwnTerm


@dataclass(frozen=True)
class Columns:
    """The columns of one field, and the constants that standardise them.

    Attributes:
        labels: names of the columns.
        mean: means to subtract; zeros for columns that are not centred.
        sd: standard deviations to divide by.
        prior_sd: prior standard deviations of the standardised coefficients.
    """

    labels: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    sd: tuple[float, ...] = ()
    prior_sd: tuple[float, ...] = ()


@dataclass(frozen=True)
class GroupColumns:
    """The effects of one ``( ... | g)``.

    Attributes:
        factor: ``g``.
        key: the factor, with a number if it has several groups, after the name of its predictor.
        field: the field of its columns.
        names: the names of its effects: that of the intercept, if there is one, and the columns.
        columns: the columns of the other effects.
        correlated: see :class:`~bayesfed.formulas.terms.Group`.
        place: ``"client"``, the factor is the client; ``"within"``, levels within a client; ``"global"``.
        levels: the number of the factor's levels, unless it is the client.
        prior_sd: prior standard deviation of the standardised scale of the intercept's effects.
    """

    factor: str
    key: str
    field: str
    names: tuple[str, ...]
    columns: Columns
    correlated: bool
    place: str
    levels: int = 1
    prior_sd: float = 2.5

    @property
    def intercept(self) -> bool:
        """Its first effect is that of the intercept."""
        return len(self.names) > len(self.columns.labels)


@dataclass(frozen=True)
class Predictor:
    """A linear predictor, of the outcome's mean or of another parameter, see :mod:`bayesfed.formulas.program`.

    Attributes:
        name: ``"mean"``, or the name of the parameter.
        key: the part of names of sites and variables that distinguishes it from others; empty for the mean.
        prefix: of the names in the results.
        field: of its columns.
        link: of the parameter; None for the mean, whose inverse link is in the likelihood.
        loc: the centre of the predictor, in the data's units.
        scale: its unit.
        intercept: the code of the prior of its standardised intercept.
        offset: the field of its offset.
        common: columns of the common terms.
        groups: the groups' effects.
        own: the terms that formulae does not code.
    """

    name: str
    key: str
    prefix: str
    field: str
    link: str | None
    loc: float
    scale: float
    intercept: str | None
    offset: str | None
    common: Columns
    groups: Sequence[GroupColumns]
    own: Sequence[TermCode] = ()

    @property
    def labels(self) -> list[str]:
        """The names of its coefficients, without the intercept."""
        return [*self.common.labels, *(term.label for term in self.own)]

    @property
    def value(self) -> str:
        """The variable that has its values."""
        return re.sub(r"\W", "_", self.name)

    def variable(self, name: str) -> str:
        """Return a name of a variable that no other predictor has."""
        return re.sub(r"\W", "_", f"{name}_{self.key}") if self.key else name


@dataclass(frozen=True)
class Covariate:
    """A covariate that is not known in each row: it has a Normal distribution around a linear predictor.

    Attributes:
        term: the term of the outcome's predictor.
        sd: its standard deviation.
        predictor: the linear predictor of its mean.
    """

    term: OwnTerm
    sd: float
    predictor: Predictor


def covariates_of(
    coding: Coding, kind: Family, agreement: Agreement, priors: Mapping[str, Any]
) -> list[Covariate]:
    """Return the covariates that are not known in each row; arguments as for :func:`linear_predictors`."""
    found = list[Covariate]()
    for column, term in coding.terms.uncertain.items():
        mean, sd = moments_of(term, agreement)
        predictor = _predictor(
            f"mean_{column}",
            column,
            None,
            coding.parameters[column],
            kind,
            agreement,
            priors,
            mean,
            sd,
            covariate=True,
        )
        found.append(Covariate(term, sd, predictor))
    return found


def linear_predictors(
    coding: Coding,
    kind: Family,
    agreement: Agreement,
    priors: Mapping[str, Any],
    at: float,
    unit: float,
) -> list[Predictor]:
    """Return the linear predictors: of the mean, or of each category but the first, and of parameters.

    Args:
        coding: the agreed coding.
        kind: the family.
        agreement: with the sums of the coded columns.
        priors: the user's, by name.
        at: the centre of the outcome on the scale of the predictor.
        unit: the unit of the outcome.
    """
    of_mean = {"mean": ""}
    if kind.categories and not kind.thresholds:
        others = coding.levels[coding.outcome][1:]
        of_mean = {f"mean_{i}": f"mu{level}" for i, level in enumerate(others, start=1)}
    found = [
        _predictor(name, key, None, coding, kind, agreement, priors, at, unit)
        for name, key in of_mean.items()
    ]
    for name, part in coding.parameters.items():
        if name in coding.terms.uncertain:
            continue
        centre = math.log(unit) if kind.parameters[name].in_units else 0.0
        found.append(
            _predictor(
                name, name, kind.parameters[name], part, kind, agreement, priors, centre, 1.0
            )
        )
    return found


def _predictor(
    name: str,
    key: str,
    parameter: Parameter | None,
    coding: Coding,
    kind: Family,
    agreement: Agreement,
    priors: Mapping[str, Any],
    at: float,
    unit: float,
    *,
    covariate: bool = False,
) -> Predictor:
    """Return one linear predictor, of the outcome unless it is of a ``parameter`` or ``covariate``."""
    of_mean = not (parameter or covariate)
    fields, prefix = "" if of_mean else f"{key}.", f"{key}_" if key else ""
    link = parameter.link if parameter else "identity" if covariate else kind.link
    offset = f"{fields}offset" if coding.offset else None
    centre = at - (float(agreement.moments(offset)[0][0]) if offset else 0.0)
    standardised = covariate or (kind.standardised and of_mean)
    loc = _to_digits(centre, unit) if standardised and coding.intercept else 0.0
    prior = "dist.Normal(0.0, 2.5)"
    if not standardised:
        spread = 1.5 if link == "logit" else 1.0 if parameter and parameter.in_units else 2.5
        prior = f"dist.Normal({to_seven_digits(centre)}, {spread})"
    has_intercept = coding.intercept and not (kind.thresholds and of_mean)
    narrow = parameter is not None or link == "logit"
    common = _columns(
        agreement, f"{fields}X", prefix, coding.common, coding.intercept, narrow=narrow
    )
    own = [
        monotonic_code(term, agreement, fields, prefix, centred=coding.intercept, narrow=narrow)
        for term in coding.terms.monotonic
    ]
    own += [
        covariate_code(term, agreement, prefix, centred=coding.intercept, narrow=narrow)
        for term in coding.terms.uncertain.values()
    ]
    return Predictor(
        name=name,
        key=key,
        prefix=prefix,
        field=f"{fields}X",
        link=parameter.link if parameter else None,
        loc=loc,
        scale=unit,
        intercept=prior if has_intercept else None,
        offset=offset,
        common=common,
        groups=_groups(
            coding, agreement, priors, fields, key, prefix, narrow=parameter is not None
        ),
        own=own,
    )


def _columns(
    agreement: Agreement,
    name: str,
    prefix: str,
    terms: list[Any],
    centred: bool,
    *,
    narrow: bool = False,
) -> Columns:
    """Compute the means and standard deviations of some terms' columns, from sums.

    With narrow priors, on the scale of log odds, the prior standard deviation of the effects of categories is 1 in the
    data's units.
    """
    columns = [(str(label), term) for term in terms for label in term.labels]
    if not columns:
        return Columns()
    mean, sd = (value.tolist() for value in agreement.moments(name))
    for (label, _), m, s in zip(columns, mean, sd, strict=True):
        if not s > 0:
            raise FormulaError(
                f"{label} is the same in all rows, or varies by less than a millionth of its size ({m:.4g}): leave it "
                "out, or subtract a common offset"
            )
    means = tuple(_to_digits(m, s) if centred else 0.0 for m, s in zip(mean, sd, strict=True))
    sds = tuple(map(to_seven_digits, sd))
    prior_sd = [2.5] * len(sds)
    if narrow:
        of_categories = [all(c.kind == "categoric" for c in t.components) for _, t in columns]
        prior_sd = [s if own else 1.0 for s, own in zip(sds, of_categories, strict=True)]
    labels = tuple(f"{prefix}{label}" for label, _ in columns)
    return Columns(labels, means, sds, tuple(prior_sd))


def _groups(
    coding: Coding,
    agreement: Agreement,
    priors: Mapping[str, Any],
    fields: str,
    predictor: str,
    prefix: str,
    *,
    narrow: bool,
) -> list[GroupColumns]:
    """Return the groups' effects of a predictor.

    Predictors of correlated effects are centred, unless the user gives the prior of the intercepts' scale, which refers
    to predictors at 0.
    """
    found: list[GroupColumns] = []
    for key, group in coding.keyed_groups:
        exprs = coding.expressions(group)
        slopes = [expr for expr in exprs if expr.kind != "intercept"]
        intercept = len(slopes) < len(exprs)
        own = f"{prefix}1|{group.factor}_sigma" in priors
        centred = group.correlated and intercept and not own
        field = f"{fields}X|{key}"
        columns = _columns(agreement, field, prefix, slopes, centred, narrow=narrow)
        within = coding.client in group.columns
        place = "client" if group.columns == [coding.client] else "within" if within else "global"
        found.append(
            GroupColumns(
                factor=group.factor,
                key=f"{predictor}.{key}" if predictor else key,
                field=field,
                names=(f"{prefix}1",) * intercept + columns.labels,
                columns=columns,
                correlated=group.correlated,
                place=place,
                levels=coding.count_levels(group.factor),
                prior_sd=1.0 if narrow else 2.5,
            )
        )
    return found


def to_seven_digits(value: float) -> float:
    """Round to seven digits."""
    return float(f"{value:.7g}")


def _to_digits(mean: float, sd: float) -> float:
    """Round a mean to a millionth of the standard deviation."""
    return round(mean, 6 - math.floor(math.log10(sd)))
