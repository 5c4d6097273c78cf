"""Effects at draws of the posterior, with a table and a plot."""

from __future__ import annotations

import html
import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from bayesfed.data.plural import plural

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Comparison = Literal["difference", "ratio", "odds_ratio"]


@dataclass(frozen=True, eq=False, repr=False)
class Effects:
    """R quantities at S draws of the posterior: predictions, comparisons, slopes or hypotheses.

    ``print`` shows the estimand, the level, and a table; :meth:`to_frame` returns the table. Intervals are
    equal-tailed, so that those of a ratio are the exponentials of those of its logarithm.

    Attributes:
        labels: R rows of labels, such as the values of the variables.
        draws: ``(S, R)``.
        estimand: the quantity, in words.
        level: the level and the rows, in words.
        null: the value without an effect: 0 for differences, 1 for ratios; None for predictions.
        prob: the probability of the intervals.
        link: the link function, if the quantities are linear predictors.
        within: the labels that are equal in both members of a pair, see :meth:`pairs`.
        caveat: the posterior's caveat.
        tests: further columns, of hypotheses, ranks and centiles.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.varying_intercept, datasets.grunfeld(), rounds=20)
        >>> effect = bf.effects.comparisons(posterior, "x[0]")
        >>> effect.to_frame().columns.tolist()
        ['term', 'contrast', 'mean', 'sd', '3%', '97%', 'P(>0)']
        >>> effect.draws.shape
        torch.Size([1000, 1])
    """

    labels: pd.DataFrame
    draws: Tensor
    estimand: str
    level: str
    null: float | None = None
    prob: float = 0.94
    link: str | None = None
    within: tuple[str, ...] = ()
    caveat: str = ""
    tests: pd.DataFrame | None = None

    def to_frame(self) -> pd.DataFrame:
        """Return labels, mean, standard deviation, interval, and the posterior probability to exceed ``null``."""
        values, below = self.draws.numpy(), (1 - self.prob) / 2
        lower, upper = np.quantile(values, [below, 1 - below], axis=0)
        table = self.labels.assign(
            **{
                "mean": values.mean(0),
                "sd": values.std(0, ddof=1),
                f"{100 * below:.3g}%": lower,
                f"{100 * (1 - below):.3g}%": upper,
            }
        )
        if self.null is not None:
            table[f"P(>{self.null:g})"] = (values > self.null).mean(0)
        return table if self.tests is None else table.join(self.tests)

    def __repr__(self) -> str:
        table = self.to_frame().to_string(index=False, float_format=_four_digits)
        return "\n".join(filter(None, (*self._heading, table, self.caveat)))

    def _repr_html_(self) -> str:
        table = self.to_frame().to_html(index=False, float_format=_four_digits, border=0)
        lines = [html.escape(line) for line in (*self._heading, self.caveat) if line]
        return "<br>".join(lines) + table

    @property
    def _heading(self) -> tuple[str, str]:
        return f"{self.estimand}, {plural(len(self.draws), 'draw')}", f"Level: {self.level}"

    def pairs(self, comparison: Comparison = "difference") -> Effects:
        """Return all pairwise contrasts of predictions, as ``pairs`` of emmeans does.

        Contrasts are of predictions with equal labels ``within``: one group of ``by``, one category of the outcome.

        Args:
            comparison: see :func:`bayesfed.effects.comparisons`.

        Raises:
            ValueError: these are no predictions, or the comparison does not apply to their scale.

        Example:
            >>> import bayesfed as bf
            >>> from bayesfed import datasets, models
            >>> posterior = bf.fit(models.varying_intercept, datasets.grunfeld(), rounds=20)
            >>> means = bf.effects.predictions(posterior, {"x[0]": [1.0, 2.0, 3.0]})
            >>> means.pairs().labels["contrast"].tolist()
            ['2 - 1', '3 - 1', '3 - 2']
        """
        if self.null is not None or self.tests is not None:
            raise ValueError("pairs are of predictions and marginal means")
        import pandas as pd

        own = [name for name in self.labels if name not in self.within]
        names = [", ".join(map(text_of, row)) for row in self.labels[own].itertuples(index=False)]
        keys = list(self.labels[list(self.within)].itertuples(index=False, name=None))
        found, draws = [], []
        for i, j in itertools.combinations(range(len(names)), 2):
            if keys[i] == keys[j]:
                value, contrast = compare(self.draws[:, j], self.draws[:, i], comparison, self.link)
                label = {"contrast": contrast.format(names[j], names[i])}
                found.append(label | dict(zip(self.within, keys[i], strict=True)))
                draws.append(value)
        if not found:
            raise ValueError("there is a single prediction: name variables with several values")
        return replace(
            self,
            labels=pd.DataFrame(found),
            draws=torch.stack(draws, 1),
            estimand=comparison_of(self.estimand, comparison, self.link),
            null=0.0 if comparison == "difference" else 1.0,
        )

    def ranks(self, among: str | None = None) -> Effects:
        """Return the ranks of the rows at each draw; rank 1 is the smallest value. Equal values share a rank.

        Args:
            among: the label whose values are ranked, such as the column of the client; rows are ranked among those that
                are equal in all other labels. By default the first label.

        Returns:
            The posterior of the ranks, with the probabilities to be the lowest and the highest.

        Raises:
            ValueError: these are hypotheses, or there is nothing to rank.

        Example:
            >>> import bayesfed as bf
            >>> from bayesfed import datasets, models
            >>> posterior = bf.fit(models.eight_schools, datasets.eight_schools(), rounds=20)
            >>> ranks = bf.effects.random_effects(posterior, "theta").ranks()
            >>> ranks.to_frame().columns.tolist()
            ['school', 'mean', 'sd', '3%', '97%', 'P(lowest)', 'P(highest)']
            >>> bool((ranks.draws.sum(1) == 36).all())
            True
        """
        import pandas as pd

        if self.tests is not None:
            raise ValueError("ranks are of random effects, predictions, comparisons and slopes")
        among = str(self.labels.columns[0]) if among is None and len(self.labels.columns) else among
        if among not in self.labels:
            raise ValueError(f"no label {among!r} to rank: {', '.join(self.labels) or 'none'}")
        others = self.labels.drop(columns=among).itertuples(index=False, name=None)
        groups: dict[Any, list[int]] = {}
        for row, key in enumerate(others):
            groups.setdefault(key, []).append(row)
        ranks, tests = (
            torch.empty_like(self.draws, dtype=torch.float64),
            np.empty((len(self.labels), 2)),
        )
        for rows in groups.values():
            if len(rows) < 2:
                raise ValueError(
                    f"one row for each {', '.join(self.labels)}: there is nothing to rank"
                )
            values = self.draws[:, rows].contiguous()
            ordered = values.sort(1).values
            below = torch.searchsorted(ordered, values)
            until = torch.searchsorted(ordered, values, right=True)
            ranks[:, rows] = (below + until + 1).double() / 2
            ends = (below == 0), (until == len(rows))
            tests[rows] = torch.stack([end.double().mean(0) for end in ends], 1).numpy()
        return replace(
            self,
            draws=ranks,
            estimand=f"Rank, from the smallest, of {self.estimand}",
            null=None,
            link=None,
            tests=pd.DataFrame(tests, columns=["P(lowest)", "P(highest)"]),
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot mean and intervals, of probability ``prob`` and one half, of each row; with ``null`` as a line.

        Observed values, of :func:`bayesfed.effects.centiles`, are black diamonds.

        Predictions at three and more numbers of a variable are a curve with a band for each combination of the other
        labels.

        Args:
            ax: axes of matplotlib; by default new ones.
        """
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(layout="constrained")
        numbers = [n for n, x in self.labels.items() if x.dtype.kind in "if" and x.nunique() > 2]
        if self.null is None and numbers and numbers[0] not in self.within:
            _curves(self, ax, str(numbers[0]))
        else:
            _forest(self, ax)
        ax.set_title(self.level, fontsize="small", wrap=True)
        return ax


def compare(
    high: Tensor, low: Tensor, comparison: Comparison, link: str | None
) -> tuple[Tensor, str]:
    """Compare two means at each draw; return the values and the form of the contrast's label.

    Args:
        high: means, or mean linear predictors.
        low: those that they are compared with.
        comparison: see :func:`bayesfed.effects.comparisons`.
        link: the link function, if the means are linear predictors.

    Raises:
        ValueError: the comparison does not apply.
    """
    if comparison == "difference":
        return high - low, "{} - {}"
    if link == "identity":
        raise ValueError('a link of identity has no ratios: comparison="difference"')
    if link is not None and comparison == "ratio":
        return (high - low).exp(), "{} / {}"
    if comparison not in ("ratio", "odds_ratio") or link is not None:
        raise ValueError(
            f'comparison={comparison!r}: "difference", "ratio" or, of probabilities, "odds_ratio"; on the scale of the '
            'link "ratio" is the odds ratio of the logit link'
        )
    both = torch.stack([high, low])
    if (both <= 0).any() or (comparison == "odds_ratio" and (both >= 1).any()):
        needed = "above 0" if comparison == "ratio" else "between 0 and 1"
        raise ValueError(f'comparison={comparison!r} needs means {needed}: use "difference"')
    odds = both / (1 - both) if comparison == "odds_ratio" else both
    return odds[0] / odds[1], "{} / {}"


def comparison_of(quantity: str, comparison: Comparison, link: str | None) -> str:
    """Return the name of a comparison of a quantity, such as ``"Odds ratio of E[y]"``."""
    if comparison == "ratio" and link is not None:
        return f"{_OF_LINK[link]}, the exponential of the difference of {quantity}"
    return f"{comparison.replace('_', ' ').capitalize()} of {quantity}"


_OF_LINK = {"logit": "Odds ratio", "log": "Ratio"}


def text_of(value: Any) -> str:
    """Return a value of a variable as text, whole numbers without decimals."""
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def _four_digits(value: float) -> str:
    return f"{value:.4g}"


def _forest(effects: Effects, ax: Axes) -> None:
    """Plot intervals, one below the other."""
    values, at = effects.draws.numpy(), -np.arange(effects.draws.shape[1])
    ends = [(1 - effects.prob) / 2, 0.25, 0.75, (1 + effects.prob) / 2]
    lower, first, third, upper = np.quantile(values, ends, axis=0)
    if effects.null is not None:
        ax.axvline(effects.null, color="0.7", linewidth=1, zorder=0)
    ax.hlines(at, lower, upper, color=_BLUE, linewidth=1.2)
    ax.hlines(at, first, third, color=_BLUE, linewidth=3.5)
    ax.plot(values.mean(0), at, "o", color=_BLUE, markerfacecolor="white")
    if effects.tests is not None and "observed" in effects.tests:
        ax.plot(effects.tests["observed"], at, "D", color="black", markersize=5)
    rows = effects.labels.itertuples(index=False)
    ax.set_yticks(at, ["  ".join(map(text_of, row)) for row in rows])
    ax.set_ylim(at[-1] - 0.6, 0.6)
    ax.set_xlabel(effects.estimand)


def _curves(effects: Effects, ax: Axes, variable: str) -> None:
    """Plot means and intervals against a variable, a curve for each other label."""
    table, (lower, upper) = (
        effects.to_frame(),
        np.quantile(
            effects.draws.numpy(), [(1 - effects.prob) / 2, (1 + effects.prob) / 2], axis=0
        ),
    )
    table = table.assign(lower=lower, upper=upper)
    others = [name for name in effects.labels if name != variable]
    parts = table.groupby(others, sort=False) if others else [((), table)]
    for key, part in parts:
        part = part.sort_values(variable)
        label = ", ".join(map(text_of, key))
        (line,) = ax.plot(part[variable], part["mean"], label=label or None)
        ax.fill_between(
            part[variable], part.lower, part.upper, alpha=0.2, color=line.get_color(), linewidth=0
        )
    if others:
        ax.legend(title=", ".join(others))
    ax.set_xlabel(variable)
    ax.set_ylabel(effects.estimand)


_BLUE = "#2f6db0"
