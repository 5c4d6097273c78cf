"""A question about a posterior: a quantity, the rows over which it is averaged, and the groups of these rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import numpy as np
import torch
from torch import Tensor

from bayesfed.data.plural import plural
from bayesfed.effects.means import (
    Expectation,
    Level,
    Sums,
    expected_outcome,
    mean_of,
    sum_over_rows,
)
from bayesfed.effects.result import Effects, text_of
from bayesfed.effects.rows import Rows, Setting, formula_of, rows_of
from bayesfed.elbo.program import Program
from bayesfed.formulas.families import FAMILIES, Family, Link
from bayesfed.output.posterior import Posterior

if TYPE_CHECKING:
    import pandas as pd

Scale = Literal["response", "link"]
MOST_GROUPS = 1000
"""The largest number of groups of rows."""


class Settings(TypedDict, total=False):
    """Settings that all estimands have.

    Attributes:
        level: ``"clients"`` (default), over these clients, each with its own variables; ``"average"``, at the average
            client, whose variables are at the centre of their prior given θ: random effects are 0; ``"new"``, for one
            new client, whose variables are drawn from their prior given θ.
        rows: the rows over which means are taken. By default those of the posterior's clients; a frame or a federation;
            ``"balanced"``, for a formula, see :func:`marginal_means`. At the level of the clients, each client has all
            rows of a frame that does not name the client.
        at: variable to a value that it has in all rows, such as ``{"exposure": 1.0}``.
        by: variables whose values group the rows, with a result for each group; or the column of the client; or
            variable to the values that its groups have.
        weights: a variable by which rows are weighted; by default they are equal. A row of a binomial outcome counts as
            often as it has trials, and its expectation is the probability.
        scale: ``"response"`` (default), the expected outcome, or ``"link"``, the linear predictor of a formula.
        outcome: the observed site, or a quantity of rows or clients that the model names by ``pyro.deterministic``; by
            default the only observed site. A site with categories has a result for each, its probability.
        prob: the probability of the intervals, by default 0.94.
        num_samples: S, by default 1,000.
        seed: seed of the draws, which are those of ``posterior.sample``.
    """

    level: Level
    rows: Any
    at: Setting | None
    by: str | Sequence[str] | Mapping[str, Sequence[Any]] | None
    weights: str | None
    scale: Scale
    outcome: str | None
    prob: float
    num_samples: int
    seed: int


@dataclass(frozen=True)
class Question:
    """What is asked of a posterior, checked.

    Attributes:
        quantity: the quantity in words.
        level: the level and the rows in words.
        link: the link function of a linear predictor; None for other quantities.
        groups: the labels of the groups of rows.
        prob: the probability of intervals.
        rows: the rows over which means are taken; None where they are elsewhere.
        sums: computes the sums over rows at some settings of the variables.
        caveat: returns a warning, or an empty text.
        categories: the names of the outcome's categories; by default 0, 1, ...
    """

    quantity: str
    level: str
    link: Link | None
    groups: list[dict[str, Any]]
    prob: float
    rows: Rows | None
    sums: Callable[[Sequence[Setting]], Sums]
    caveat: Callable[[], str]
    categories: Sequence[Any] = ()

    def means(self, settings: Sequence[Setting]) -> Tensor:
        """Return the means of the quantity at some settings of the variables, ``(S, Q, G, C)``.

        Raises:
            ValueError: a group has no rows.
        """
        found = self.sums(settings)
        empty = (found.weight == 0).any(0).tolist()
        if any(empty):
            raise ValueError(
                f"no rows, or only rows of weight 0: {self.groups[empty.index(True)] or 'all'}"
            )
        return found.means

    def labels(self, means: Tensor, own: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
        """Return the labels of quantities ``(S, len(own), G, C)``: their own, those of groups, and categories."""
        import pandas as pd

        categories = self.categories or range(means.shape[-1])
        entries: list[Any] = [{"category": c} for c in categories] if means.shape[-1] > 1 else [{}]
        found = [{**a, **b, **c} for a in own for b in self.groups for c in entries]
        return pd.DataFrame(found, index=range(len(found)))

    def effects(
        self,
        own: Sequence[Mapping[str, Any]],
        values: Tensor,
        estimand: str,
        null: float | None = None,
    ) -> Effects:
        """Return the result for quantities ``(S, len(own), G, C)`` with their own labels."""
        labels = self.labels(values, own)
        return Effects(
            labels=labels,
            draws=values.flatten(1),
            estimand=estimand,
            level=self.level,
            null=null,
            prob=self.prob,
            link=self.link,
            within=tuple(n for n in labels if n in self.groups[0] or n == "category"),
            caveat=self.caveat(),
        )


def make_question(
    posterior: Posterior,
    *,
    level: Level = "clients",
    rows: Any = None,
    at: Setting | None = None,
    by: str | Sequence[str] | Mapping[str, Sequence[Any]] | None = None,
    weights: str | None = None,
    scale: Scale = "response",
    outcome: str | None = None,
    prob: float = 0.94,
    num_samples: int = 1000,
    seed: int = 0,
) -> Question:
    """Check what a user asks; arguments as in :class:`Settings`.

    Raises:
        ValueError: an argument is not one of its values, or does not apply to the model.
        KeyError: a variable does not exist.
    """
    for name, value, allowed in (
        ("level", level, get_args(Level)),
        ("scale", scale, get_args(Scale)),
    ):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}: one of {', '.join(map(repr, allowed))}")
    if not 0 < prob < 1:
        raise ValueError(f"prob is {prob}: the probability of intervals, in (0, 1)")
    found, at = rows_of(posterior, rows, level), dict(at or {})
    family = _family(posterior, outcome) if scale == "link" else None
    predictor = None if family is None else family.linear_predictor
    wanted = Expectation(
        outcome_of(posterior.program, outcome),
        level,
        mean_of(expected_outcome if predictor is None else predictor),
        num_samples,
        seed,
    )
    link = None if family is None else family.link
    quantity = quantity_of(posterior.program, wanted.outcome, link)
    if family is not None and (family.thresholds or {"zi", "hu"} & family.parameters.keys()):
        quantity = f"linear predictor of {wanted.outcome}"
    groups, group = group_rows(found, by)
    given = np.ones(found.count) if weights is None else found.column(weights).astype(float)
    if not (np.isfinite(given).all() and (given >= 0).all()):
        raise ValueError(f"weights={weights!r} has negative or missing values")

    def sums(settings: Sequence[Setting]) -> Sums:
        rows = [found.at({**at, **setting}) for setting in settings]
        return sum_over_rows(posterior, rows, group, len(groups), torch.as_tensor(given), wanted)

    return Question(
        quantity,
        level_text(level, found.clients, found.text, at),
        link,
        groups,
        prob,
        found,
        sums,
        lambda: caveat_of(posterior.program, posterior),
        _categories(posterior, wanted.outcome),
    )


def group_rows(
    rows: Rows, by: str | Sequence[str] | Mapping[str, Sequence[Any]] | None
) -> tuple[list[dict[str, Any]], Tensor]:
    """Return the labels of G groups of rows, and the group of each row: int64 ``(rows,)``.

    Raises:
        ValueError: there are more groups than are shown, or rows of none.
        KeyError: a variable does not exist.
    """
    names = [by] if isinstance(by, str) else list(by or ())
    keys = list(zip(*(rows.column(name).tolist() for name in names), strict=True))
    keys = keys or [()] * rows.count
    groups = sorted(set(keys), key=lambda key: tuple(map(_sortable, key)))
    if isinstance(by, Mapping):
        groups = list(itertools.product(*by.values()))
    if len(groups) > MOST_GROUPS:
        raise ValueError(
            f"by={by!r} has {len(groups):,} values: at most {MOST_GROUPS:,} groups are shown"
        )
    number = {key: i for i, key in enumerate(groups)}
    if other := set(keys) - number.keys():
        raise ValueError(
            f"by: rows have {dict(zip(names, other.pop(), strict=True))}, which is not given"
        )
    labels = [dict(zip(names, key, strict=True)) for key in groups]
    return labels, torch.tensor([number[key] for key in keys])


def caveat_of(program: Program, posterior: Any) -> str:
    """Return the caveat of a posterior, and a warning if its global variables are a point estimate."""
    point = "θ is a point estimate: intervals leave out its uncertainty"
    return "\n".join(filter(None, ("" if program.random else point, posterior.caveat)))


def quantity_of(program: Program, outcome: str, link: Link | None) -> str:
    """Return the name of a quantity, such as ``"E[y]"``."""
    if outcome in program.derived:
        return outcome
    return f"E[{outcome}]" if link in (None, "identity") else f"{link} E[{outcome}]"


def level_text(level: Level, clients: int, rows: str, at: Setting) -> str:
    """Return the level and the rows in words."""
    where = {
        "clients": "at this client, with its own variables"
        if clients == 1
        else f"over these {plural(clients, 'client')}, each with its own variables",
        "average": "at the average client, whose variables are at the centre of their prior given θ",
        "new": "for a new client, whose variables are drawn from their prior given θ",
    }[level]
    fixed = ", ".join(f"{name} = {text_of(value)}" for name, value in at.items())
    return f"{where}; mean of {rows}" + (fixed and f", {fixed}")


def _family(posterior: Posterior, outcome: str | None) -> Family:
    """Return the family whose linear predictor is wanted.

    Raises:
        ValueError: the outcome is not that of a formula, or has several predictors.
    """
    formula = formula_of(posterior.program.model)
    if formula is None or outcome not in (None, formula.coding.outcome):
        raise ValueError(
            'scale="link" is of the outcome of a formula: name the linear predictor in the model, '
            'pyro.deterministic("eta", ...), and pass outcome="eta"'
        )
    family = FAMILIES[formula.family]
    if family.linear_predictor is None:
        raise ValueError(
            f'scale="link": the {formula.family} family has a predictor for each category: use "response"'
        )
    return family


def _categories(posterior: Posterior, outcome: str) -> Sequence[Any]:
    """Return the levels of the outcome of a formula, if it is one of several categories."""
    formula = formula_of(posterior.program.model)
    if formula is None or not formula.coding.categories or outcome != formula.coding.outcome:
        return ()
    return formula.coding.levels[outcome]


def _sortable(value: Any) -> tuple[bool, Any]:
    """Return a key that sorts numbers before text."""
    return isinstance(value, str), value


def outcome_of(program: Program, outcome: str | None) -> str:
    """Return the name of the site whose expectation is taken.

    Raises:
        ValueError: there are several and none is named, or rows have no expectation of their own.
    """
    rows = [n for n, dims in program.derived.items() if dims]
    names, formula = [site.name for site in program.observed], formula_of(program.model)
    if outcome is None and (formula is not None or len(names) == 1):
        outcome = names[0] if formula is None else formula.coding.outcome
    if outcome not in (*names, *rows):
        raise ValueError(
            f"outcome is {outcome!r}: one of {', '.join([*names, *rows]) or 'none'}; a quantity of the rows that the "
            'model names by pyro.deterministic("risk", ...) is one too'
        )
    if program.joint:
        raise ValueError(
            f"the rows of a client are one event of {outcome!r}: posterior.predictive(rows).mean has expectations"
        )
    return outcome
