"""``bf.formula``: a model from a formula and data, printable as the Pyro program that it is."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bayesfed.data.batch import Batch
from bayesfed.data.columns import client_name
from bayesfed.data.federation import Federation, Model
from bayesfed.data.frames import to_pandas
from bayesfed.formulas.agreement import (
    Agreement,
    add_totals,
    agree_on_columns,
    make_coding,
    share_levels,
)
from bayesfed.formulas.clients import code_clients, split_by_client
from bayesfed.formulas.coding import Coding
from bayesfed.formulas.families import Family, family_of, prior_code
from bayesfed.formulas.outcome import RESERVED, Outcome, check_outcome, location_and_unit
from bayesfed.formulas.parse import parse
from bayesfed.formulas.predictors import (
    Covariate,
    GroupColumns,
    Predictor,
    covariates_of,
    linear_predictors,
)
from bayesfed.formulas.program import program_code
from bayesfed.formulas.reports import own_levels, report_columns, sum_calls, sum_fields
from bayesfed.formulas.settings import FormulaSettings, likelihood_of
from bayesfed.formulas.terms import FormulaError, Terms

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class Formula:
    """A hierarchical model written from a formula; it is called with a federation, like any other Pyro program.

    Attributes:
        text: the formula.
        family: the family of the outcome.
        source: the code of the program, which ``print`` shows and which is run.
        federation: the clients that agreed on levels and scales, with the columns that the program reads.
        agreement: what they have agreed on.
        coding: the coding that follows from it.
        predictors: the linear predictors, of the outcome's mean first.
        frames: the clients' rows by name, for :mod:`bayesfed.effects`; they are not pickled.
        covariates: those of ``mi()`` and ``me()``, which are not known in each row.
    """

    text: str
    family: str
    source: str
    federation: Federation
    agreement: Agreement
    coding: Coding
    predictors: Sequence[Predictor]
    frames: Mapping[str, pd.DataFrame] | None = None
    covariates: Sequence[Covariate] = ()

    def __call__(self, federation: Federation | Batch) -> None:
        """Run the Pyro program."""
        self._program(federation)

    def __str__(self) -> str:
        return self.source

    def __repr__(self) -> str:
        return f"Formula: {self.text}, {self.family}; {self.federation}"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the frames, and the function, which pickle cannot write and the code makes again."""
        return {
            name: value for name, value in vars(self).items() if name not in ("_program", "frames")
        }

    @property
    def __name__(self) -> str:
        return self.text

    @property
    def settings(self) -> FormulaSettings:
        """The formula without its coding."""
        return FormulaSettings(self.text, self.family, self.coding.client)

    @cached_property
    def _program(self) -> Model:
        """The function that the code defines."""
        name = f"<formula {self.text}>"
        lines = self.source.splitlines(keepends=True)
        linecache.cache[name] = len(self.source), None, lines, name  # tracebacks show the line
        namespace: dict[str, Any] = {}
        exec(compile(self.source, name, "exec"), namespace)
        model: Model = namespace["model"]
        return model

    @property
    def coords(self) -> dict[str, list[str]]:
        """The names of the entries of vectors, which are coordinates in ``posterior.to_arviz()``."""
        found: dict[str, list[str]] = {}
        for group in self._groups:
            if group.place != "client" and group.factor not in self.coding.within:
                levels = self.coding.levels[group.factor]
                names = [":".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in levels]
                found |= {f"{name}|{group.factor}_dim_0": names for name in group.names}
        return found

    @property
    def effects(self) -> list[str]:
        """The names of a client's effects, in the data's units: ``["1|g", "x|g"]``."""
        groups = [group for group in self._groups if group.place != "global"]
        return [f"{name}|{group.factor}" for group in groups for name in group.names]

    @property
    def _groups(self) -> list[GroupColumns]:
        parts = (*self.predictors, *(covariate.predictor for covariate in self.covariates))
        return [group for predictor in parts for group in predictor.groups]

    def encode(self, data: Any) -> Federation:
        """Encode other rows, of the same or other clients, with the agreed coding, to predict or to personalise.

        Args:
            data: as for :func:`formula`; the column of the outcome may be absent.

        Raises:
            FormulaError: a column has missing values, or a level that no client had at the agreement.
            KeyError: a column is absent.
            TypeError: the data are no frame.
        """
        return code_clients(self.coding, split_by_client(_frames(data), self.coding.client))


def formula(
    text: str,
    data: Any,
    *,
    client: str | None = None,
    family: str = "gaussian",
    priors: Mapping[str, Any] | None = None,
) -> Formula:
    """Make a model from a formula in the notation of brms, bambi and lme4.

    ::

        y ~ x + z                 numbers; text is coded by treatment, C(year) treats numbers as text
        x*z, x:z, x/z             interactions
        np.log(x), I(x**2), {x/z}, center(x), scale(x), offset(np.log(n))
        0 + x                     no intercept
        (1 + x | g)               correlated effects of the levels of g; || uncorrelated
        (1 | g/h), (1 | g:h)      nested levels
        p(y, n), y | trials(n)    successes of n, of the binomial families
        y["yes"]                  1 where y is "yes"
        y | weights(w)            log densities of rows are multiplied by w; | cens(c): 1 or "right" where the time of
                                  an event is later; | se(s): standard errors that are known; + between several
        bs(x, knots=c(1, 2), lower_bound=0, upper_bound=3), poly(x, 2)
        mi(z), me(z, s)           a covariate with missing values, whose predictors are on a further line,
                                  z | mi() ~ x; a covariate that is measured with standard errors s
        mo(level)                 monotonic effects of ordered categories or whole numbers
        sigma ~ x + (1 | g)       on a further line: a parameter of the family with a predictor of its own

    Notation of R with one meaning here is translated: ``I(x^2)``, ``factor(g)``, ``(1 |p| g)``, ``cbind(y, n - y)``.

    If a factor is the client, or lies within it, ``g:h``, its random effects are local variables of the clients. Those
    of any other factor are global variables. Where every client has at most half of a factor's levels, such as
    identifiers, it has variables for its own levels alone: entry k of ``1|g:h`` is its level
    ``model.coding.own["g:h"][client][k]``, and a client with fewer levels than others has entries of the prior at the
    end. At the start each client sends, for each column, whether it holds numbers
    or text, the levels of text, and sums; the levels, means and standard deviations are computed from these.

    Default priors are those of rstanarm and bambi: with predictors centred, slopes ``Normal(0, 2.5 sd(y) / sd(x))``,
    the intercept ``Normal(mean(y), 2.5 sd(y))``, a group's standard deviations ``HalfNormal(2.5 sd(y) / sd(x))``,
    ``sigma`` ``HalfStudentT(4, sd(y))``; of ``lognormal`` y is its logarithm here. For other families with a log link
    sd(y) is replaced by 1 and mean(y) by its logarithm. For the logit link slopes have ``Normal(0, 1 / sd(x))``,
    effects of categories ``Normal(0, 1)``, the intercept ``Normal(0, 1.5)``, and standard deviations of groups
    ``HalfNormal(2.5 / sd(x))``. Predictors of further parameters have those of the logit link, but the intercept of a
    logarithm has ``Normal(0, 2.5)``, that of log ``sigma`` ``Normal(log sd(y), 1)``, and standard deviations of groups
    have ``HalfNormal(1 / sd(x))``. Correlations have ``LKJ(1)``. A covariate of ``mi`` or ``me`` has those of a
    Gaussian outcome, the shares of ``mo`` a uniform Dirichlet distribution.

    Args:
        text: the formula.
        data: a frame with one row per observation and a column that names the client; or client's name to frame. Frames
            are of pandas or polars, or Arrow tables.
        client: the column that names the client, or, if ``data`` is a mapping, the clients' name in the formula; by
            default the only grouping factor.
        family: the distribution of the outcome: ``"gaussian"``, ``"student_t"``, ``"lognormal"``, ``"gamma"``,
            ``"weibull"``, ``"exponential"``, ``"hurdle_gamma"``, ``"beta"``, ``"zero_inflated_beta"``, ``"bernoulli"``,
            ``"binomial"``, ``"beta_binomial"``, ``"poisson"``, ``"negative_binomial"``, these two with
            ``"zero_inflated_"`` or ``"hurdle_"`` before, ``"cumulative"`` or ``"categorical"``.
        priors: name in the results, or of a term with several columns, to a Pyro distribution:
            ``{"x": dist.Laplace(0.0, 1.0)}``. The prior of ``"Intercept"`` is that of the mean outcome with the
            predictors at their means.

    Returns:
        The model, to be fitted to its ``federation``. The program samples variables whose names begin with ``_``; the
        quantities in ``posterior.derived()`` and ArviZ are in the data's units and named as in bambi, whatever their
        priors.

    Raises:
        FormulaError: the formula cannot be parsed or does not fit the data; the message is one line with a remedy.
        KeyError: a column does not exist.
        ImportError: formulae is not installed: ``pip install 'bayesfed[formulas]'``.

    Example:
        >>> import bayesfed as bf, pandas as pd
        >>> frame = pd.DataFrame({"y": [1.0, 3.0, 2.0, 5.0], "x": [0.0, 1.0, 1.0, 2.0], "site": ["A", "A", "B", "B"]})
        >>> model = bf.formula("y ~ x + (1 | site)", frame)
        >>> model
        Formula: y ~ x + (1 | site), gaussian; Federation: 2 clients, 4 rows (2 to 2 a client), fields X[1], y
        >>> posterior = bf.fit(model, model.federation, rounds=2)
        >>> sorted(posterior.derived(num_samples=10))
        ['1|site', '1|site_sigma', 'Intercept', 'sigma', 'x']
    """
    terms, data = parse(text), _frames(data)
    family = family_of(family).name  # a mistake in it comes before the others
    settings = FormulaSettings(text, family, _client_of(terms, data, client))
    clients = split_by_client(data, settings.client)
    reports = {name: report_columns(settings, name, rows) for name, rows in clients.items()}
    found = agree_on_columns(reports, "client")
    agreement, own = share_levels(found, own_levels(settings, clients))
    coding = make_coding(settings, agreement, own)
    while sums := sum_calls(coding, agreement, clients):
        agreement = add_totals(agreement, sums)
        coding = make_coding(settings, agreement, own)
    check_predictors(settings, coding)
    federation = code_clients(coding, clients)
    agreement = add_totals(agreement, sum_fields(coding, settings.kind, federation))
    return write_formula(settings, agreement, coding, federation, clients, priors)


def write_formula(
    settings: FormulaSettings,
    agreement: Agreement,
    coding: Coding,
    federation: Federation,
    frames: Mapping[str, pd.DataFrame] | None = None,
    priors: Mapping[str, Any] | None = None,
) -> Formula:
    """Write the program of a formula from an agreement with all its sums.

    Args:
        settings: the formula.
        agreement: what all clients have agreed on.
        coding: the coding that follows from it.
        federation: the clients, coded.
        frames: their rows.
        priors: as for :func:`formula`.

    Raises:
        FormulaError: a column or the outcome is the same in all rows, or a name is used twice.
    """
    terms, kind, priors = coding.terms, settings.kind, dict(priors or {})
    check_outcome(coding, kind, agreement)
    at, unit = location_and_unit(coding, kind, agreement)
    predictors = linear_predictors(coding, kind, agreement, priors, at, unit)
    covariates = covariates_of(coding, kind, agreement, priors)
    likelihood = likelihood_of(terms, kind)
    parameters = {
        name: (parameter.prior, unit if parameter.in_units else 1.0)
        for name, parameter in kind.parameters_of(likelihood).items()
        if name not in terms.parameters
    }
    names = {
        f"{predictor.prefix}{label}": f"{predictor.prefix}{term.name}"
        for predictor in (*predictors, *(covariate.predictor for covariate in covariates))
        for term in coding.parameters.get(predictor.key, coding).common
        for label in term.labels
    }
    for label, term in names.items():
        if term in priors and term != label:
            priors.setdefault(label, priors[term])
    public = _names(predictors, covariates, parameters, kind, coding)
    for name in sorted({*priors} - {*public, *names.values()}):
        raise FormulaError(
            f"priors has {name!r}, which the model does not have: it has {', '.join(public)}"
        )
    code = {name: prior_code(name, prior) for name, prior in priors.items() if name in public}
    categories = len(coding.levels[coding.outcome]) if kind.categories else 0
    weighted = "weights" in terms.behind
    outcome = Outcome(coding.outcome, likelihood, parameters, categories, weighted)
    program = program_code(f"{settings.text}, {kind.name}.", outcome, predictors, code, covariates)
    return Formula(
        settings.text,
        kind.name,
        program,
        federation,
        agreement,
        coding,
        predictors,
        frames,
        covariates,
    )


def check_predictors(settings: FormulaSettings, coding: Coding) -> None:
    """Raise FormulaError for a formula without predictors."""
    if not (coding.intercept or coding.common or coding.terms.groups or coding.terms.own):
        raise FormulaError(f"formula {settings.text!r} has no predictors: y ~ 1 has an intercept")


def _frames(data: Any) -> pd.DataFrame | dict[str, pd.DataFrame]:
    """Return the data as a frame of pandas, or as one for each client."""
    if isinstance(data, Mapping):
        return {client_name(name): to_pandas(rows) for name, rows in data.items()}
    return to_pandas(data)


def _client_of(
    terms: Terms, data: pd.DataFrame | Mapping[str, pd.DataFrame], client: str | None
) -> str:
    """Return the column that names the client: by default the only grouping factor of one column.

    In frames of the clients' own it is absent, or the same in all rows of each.
    """
    import pandas as pd

    if client is not None:
        return client
    plain = list(dict.fromkeys(g.columns[0] for g in terms.all_groups if len(g.columns) == 1))
    if not isinstance(data, pd.DataFrame):
        frames = list(data.values())
        absent = [name for name in plain if any(name not in rows for rows in frames)]
        constant = [n for n in plain if all(n in rows and rows[n].nunique() < 2 for rows in frames)]
        plain = absent or constant
    if len(plain) != 1:
        found = ", ".join(plain) if plain else "the formula has no ( ... | g)"
        raise FormulaError(f"pass client=, the column that names the client of each row: {found}")
    return plain[0]


def _names(
    predictors: Sequence[Predictor],
    covariates: Sequence[Covariate],
    parameters: Mapping[str, Any],
    kind: Family,
    coding: Coding,
) -> list[str]:
    """Return the names of the model's variables in the data's units; raise FormulaError for a name used twice."""
    others = [*parameters] + ["threshold"] * kind.thresholds
    names, fields = list[str](), [coding.outcome]
    for covariate in covariates:
        names.append(f"{covariate.term.column}_sigma")
        fields.append(covariate.term.column)
    for predictor in (*predictors, *(covariate.predictor for covariate in covariates)):
        names += [f"{predictor.prefix}Intercept"] * (predictor.intercept is not None)
        names += [*predictor.labels, *others]
        others = []
        for group in predictor.groups:
            names += [f"{name}|{group.factor}_sigma" for name in group.names]
            fields += [group.factor] * (group.place != "client")
    twice = next((name for name in names if [*names, coding.outcome].count(name) > 1), None)
    twice = twice or next((n for n in fields[1:] if n in (coding.outcome, *RESERVED)), None)
    if twice is not None:
        raise FormulaError(
            f"the name {twice!r} is used twice (by a parameter of the {kind.name} family, or a column): rename the "
            "column"
        )
    return names
