"""``bf.formula``: a model from a formula and data, printable as the Pyro program that it is."""

from __future__ import annotations

import linecache
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from bayesfed.data.batch import Batch
from bayesfed.data.columns import check_columns, client_name
from bayesfed.data.federation import Federation, Model
from bayesfed.data.frames import to_pandas
from bayesfed.data.standardise import moments
from bayesfed.formulas.agreement import agree
from bayesfed.formulas.coding import Coding
from bayesfed.formulas.families import FAMILIES, family_of, prior_code
from bayesfed.formulas.program import Columns, GroupColumns, Outcome, program_code
from bayesfed.formulas.terms import FormulaError, Group, Terms, parse

if TYPE_CHECKING:
    import pandas as pd

_RESERVED = ("X", "offset", "trials")
"""Names of the predictors' fields, which an outcome may not have."""


@dataclass(frozen=True, eq=False, repr=False)
class Formula:
    """A hierarchical model written from a formula; it is called with a federation, like any other Pyro program.

    Attributes:
        text: the formula.
        family: the family of the outcome.
        source: the code of the program, which ``print`` shows and which is run.
        federation: the clients that agreed on levels and scales, with the columns that the program reads.
        coding: the agreed coding.
        frames: the clients' rows by name, for :mod:`bayesfed.effects`; they are not pickled.
    """

    text: str
    family: str
    source: str
    federation: Federation
    coding: Coding
    frames: Mapping[str, pd.DataFrame] | None = None

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
        for group in self.coding.terms.groups:
            if group.columns != [self.coding.client] and group.factor not in self.coding.own:
                levels = self.coding.levels[group.factor]
                names = [":".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in levels]
                found |= {f"{name}|{group.factor}_dim_0": names for name in self._names(group)}
        return found

    @property
    def effects(self) -> list[str]:
        """The names of a client's effects, in the data's units: ``["1|g", "x|g"]``."""
        groups = [g for g in self.coding.terms.groups if self.coding.client in g.columns]
        return [f"{name}|{group.factor}" for group in groups for name in self._names(group)]

    def _names(self, group: Group) -> list[str]:
        """Return the names of a group's effects: ``"1"`` and the labels of columns."""
        exprs = self.coding.expressions(group)
        return [n for e in exprs for n in (["1"] if e.kind == "intercept" else e.labels)]

    def encode(self, data: Any) -> Federation:
        """Encode other rows, of the same or other clients, with the agreed coding, to predict or to personalise.

        Args:
            data: as for :func:`formula`; the column of the outcome may be absent.

        Raises:
            FormulaError: a column is absent, has missing values, or has a level that no client had at the agreement.
        """
        return _federation(self.coding, _clients(_frames(data), self.coding.client))


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
        p(y, n), y | trials(n)    successes of n, of the binomial family
        y["yes"]                  1 where y is "yes"

    Notation of R with one meaning here is translated: ``I(x^2)``, ``factor(g)``, ``(1 |p| g)``, ``cbind(y, n - y)``.

    If a factor is the client, or lies within it, ``g:h``, its random effects are local variables of the clients. Those
    of any other factor are global variables. Where every client has at most half of a factor's levels, such as
    identifiers, it has variables for its own levels alone: entry k of ``1|g:h`` is its level
    ``model.coding.own["g:h"][client][k]``, and a client with fewer levels than others has entries of the prior at the
    end. At the start each client sends, for each column, whether it holds numbers
    or text, the levels of text, and sums; the levels, means and standard deviations are computed from these.

    Default priors are those of rstanarm and bambi: with predictors centred, slopes ``Normal(0, 2.5 sd(y) / sd(x))``,
    the intercept ``Normal(mean(y), 2.5 sd(y))``, a group's standard deviations ``HalfNormal(2.5 sd(y) / sd(x))``,
    ``sigma`` ``HalfStudentT(4, sd(y))``. For the log link sd(y) is replaced by 1 and mean(y) by its logarithm. For the
    logit link slopes have ``Normal(0, 1 / sd(x))``, effects of categories ``Normal(0, 1)`` and the intercept
    ``Normal(0, 1.5)``. Correlations have ``LKJ(1)``.

    Args:
        text: the formula.
        data: a frame with one row per observation and a column that names the client; or client's name to frame. Frames
            are of pandas or polars, or Arrow tables.
        client: the column that names the client, or, if ``data`` is a mapping, the clients' name in the formula; by
            default the only grouping factor.
        family: ``"gaussian"``, ``"student_t"``, ``"bernoulli"``, ``"binomial"``, ``"beta"``, ``"poisson"``,
            ``"negative_binomial"`` or ``"gamma"``, with links identity, logit and log.
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
    text, family, priors = " ".join(text.split()), family_of(family), dict(priors or {})
    terms, data = parse(text), _frames(data)
    client = _client_of(terms, data, client)
    clients = _clients(data, client)
    coding = agree(terms, clients, client)
    if not (coding.intercept or coding.common or terms.groups):
        raise FormulaError(f"formula {text!r} has no predictors: y ~ 1 has an intercept")
    federation = _federation(coding, clients)
    outcome = _outcome(coding, family, federation)
    logit = FAMILIES[family].link == "logit"
    common = _columns(federation, "X", coding.common, coding.intercept, logit=logit)
    groups = _groups(coding, federation, priors)
    names = {label: term.name for term in coding.common for label in term.labels}
    for label, term in names.items():
        if term in priors and term != label:
            priors.setdefault(label, priors[term])
    public = _names(common, groups, family, coding)
    for name in sorted({*priors} - {*public, *names.values()}):
        raise FormulaError(
            f"priors has {name!r}, which the model does not have: it has {', '.join(public)}"
        )
    code = {name: prior_code(name, prior) for name, prior in priors.items() if name in public}
    title = f"{text}, {family}."
    program = program_code(title, FAMILIES[family], outcome, common, groups, code)
    return Formula(text, family, program, federation, coding, clients)


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
    plain = list(dict.fromkeys(g.columns[0] for g in terms.groups if len(g.columns) == 1))
    if not isinstance(data, pd.DataFrame):
        frames = list(data.values())
        absent = [name for name in plain if any(name not in rows for rows in frames)]
        constant = [n for n in plain if all(n in rows and rows[n].nunique() < 2 for rows in frames)]
        plain = absent or constant
    if len(plain) != 1:
        found = ", ".join(plain) if plain else "the formula has no ( ... | g)"
        raise FormulaError(f"pass client=, the column that names the client of each row: {found}")
    return plain[0]


def _clients(
    data: pd.DataFrame | Mapping[str, pd.DataFrame], client: str
) -> dict[str, pd.DataFrame]:
    """Return each client's rows, with its name as a column."""
    import pandas as pd

    if not isinstance(data, pd.DataFrame):
        return {name: rows.assign(**{client: name}) for name, rows in data.items()}
    check_columns("frame", [client], data.columns)
    nameless = data[client].isna().to_numpy()
    if nameless.any():
        raise FormulaError(
            f"row {data.index[nameless.argmax()]} has no client: {client!r} is missing there"
        )
    found = data.groupby(client, sort=False, observed=True)
    return {client_name(name): rows for name, rows in found}


def _federation(coding: Coding, clients: Mapping[str, pd.DataFrame]) -> Federation:
    """Code the clients' fields, all rows at once, which is faster than by client and gives the same."""
    import pandas as pd

    try:
        fields = coding.fields("all", pd.concat(list(clients.values()), ignore_index=True))
    except (ValueError, KeyError):  # code each client alone, for an error that names it
        own = {name: coding.fields(name, rows) for name, rows in clients.items()}
    else:
        ends = np.cumsum([len(rows) for rows in clients.values()])[:-1]
        parts = {label: np.split(values, ends) for label, values in fields.items()}
        own = {
            name: {label: part[i] for label, part in parts.items()}
            for i, name in enumerate(clients)
        }
    return Federation.from_arrays(own, client_dim=coding.client)


def _outcome(coding: Coding, family: str, federation: Federation) -> Outcome:
    """Compute the constants of the outcome, from sums."""
    name = coding.outcome
    if name in _RESERVED:
        raise FormulaError(
            f"the outcome cannot have the name {name!r}, which a field of the predictors has: rename it"
        )
    binary = bool(((federation[name] == 0) | (federation[name] == 1)).all())
    if ("trials" in federation.fields) != (family == "binomial"):
        remedy = "; for outcomes of 0 and 1 take 'bernoulli'" if binary else ""
        raise FormulaError(
            f"family {family!r}: the binomial family, and only it, has an outcome p(y, n), successes y of n trials"
            f"{remedy}"
        )
    if binary and family == "gaussian":
        warnings.warn(
            f"the outcome {name!r} is 0 or 1 in all rows, and the family is 'gaussian': family='bernoulli' has "
            "probabilities and log odds",
            stacklevel=3,
        )
    offset = float(moments(federation, "offset")[0]) if coding.offset else 0.0
    mean, sd = (float(value) for value in moments(federation, name))
    link = FAMILIES[family].link
    if link == "identity":
        if not sd > 0:
            raise FormulaError(
                f"the outcome {name!r} is the same in all rows, or overflows: a model needs an outcome that varies"
            )
        loc = _to_digits(mean - offset, sd) if coding.intercept else 0.0
        intercept = "dist.Normal(0.0, 2.5)" if coding.intercept else None
        return Outcome(name, loc, _to_seven_digits(sd), intercept, coding.offset)
    centre = 0.0 if link == "logit" or mean <= 0 else math.log(mean)
    prior = f"dist.Normal({_to_seven_digits(centre - offset)}, {1.5 if link == 'logit' else 2.5})"
    return Outcome(name, 0.0, 1.0, prior if coding.intercept else None, coding.offset)


def _columns(
    federation: Federation, name: str, terms: list[Any], centred: bool, *, logit: bool = False
) -> Columns:
    """Compute the means and standard deviations of some terms' columns, from sums.

    With the logit link the prior standard deviation of the effects of categories is 1 in the data's units.
    """
    columns = [(str(label), term) for term in terms for label in term.labels]
    if not columns:
        return Columns()
    mean, sd = (value.tolist() for value in moments(federation, name))
    for (label, _), m, s in zip(columns, mean, sd, strict=True):
        if not s > 0:
            raise FormulaError(
                f"{label} is the same in all rows, or varies by less than a millionth of its size ({m:.4g}): leave it "
                "out, or subtract a common offset"
            )
    means = tuple(_to_digits(m, s) if centred else 0.0 for m, s in zip(mean, sd, strict=True))
    sds = tuple(map(_to_seven_digits, sd))
    prior_sd = [2.5] * len(sds)
    if logit:
        of_categories = [all(c.kind == "categoric" for c in t.components) for _, t in columns]
        prior_sd = [s if own else 1.0 for s, own in zip(sds, of_categories, strict=True)]
    return Columns(tuple(label for label, _ in columns), means, sds, tuple(prior_sd))


def _groups(
    coding: Coding, federation: Federation, priors: Mapping[str, Any]
) -> list[GroupColumns]:
    """Return the groups' effects.

    Predictors of correlated effects are centred, unless the user gives the prior of the intercepts' scale, which refers
    to predictors at 0.
    """
    found: list[GroupColumns] = []
    for key, group in coding.keyed_groups:
        exprs = coding.expressions(group)
        slopes = [expr for expr in exprs if expr.kind != "intercept"]
        intercept = len(slopes) < len(exprs)
        own = f"1|{group.factor}_sigma" in priors
        centred = group.correlated and intercept and not own
        columns = _columns(federation, f"X|{key}", slopes, centred)
        within = coding.client in group.columns
        place = "client" if group.columns == [coding.client] else "within" if within else "global"
        levels = coding.count_levels(group.factor)
        found.append(
            GroupColumns(group.factor, key, intercept, columns, group.correlated, place, levels)
        )
    return found


def _names(common: Columns, groups: list[GroupColumns], family: str, coding: Coding) -> list[str]:
    """Return the names of the model's variables in the data's units; raise FormulaError for a name used twice."""
    names = ["Intercept"] * coding.intercept + [*common.labels, *FAMILIES[family].parameters]
    for group in groups:
        names += [f"{name}|{group.factor}_sigma" for name in group.names]
    fields = [coding.outcome, *(group.factor for group in groups if group.place != "client")]
    twice = next((name for name in names if [*names, coding.outcome].count(name) > 1), None)
    twice = twice or next((name for name in fields[1:] if name == coding.outcome), None)
    if twice is not None:
        raise FormulaError(
            f"the name {twice!r} is used twice (by a parameter of the {family} family, or a column): rename the column"
        )
    return names


def _to_seven_digits(value: float) -> float:
    """Round to seven digits."""
    return float(f"{value:.7g}")


def _to_digits(mean: float, sd: float) -> float:
    """Round a mean to a millionth of the standard deviation."""
    return round(mean, 6 - math.floor(math.log10(sd)))
