"""Comparison of models by leave-one-out cross-validation, from sums over observations or clients.

For models k, l and observations i it needs n, Σ_i elpd_ik, Σ_i elpd_ik elpd_il, Σ_i log p(y_i | all) under k, and the
numbers of observations whose Pareto k-hat is large. Standard errors are those of sums of n independent terms (Vehtari,
Gelman & Gabry 2017, *Practical Bayesian model evaluation*, section 5); stacking weights are of
:mod:`bayesfed.output.stacking`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np

from bayesfed.output.elpds import (
    Elpds,
    Unit,
    describe_difference,
    describe_observations,
    leave_each_out,
)
from bayesfed.output.posterior import Posterior
from bayesfed.output.stacking import MixtureSums, mixture_sums, stack

if TYPE_CHECKING:
    import pandas as pd

VERY_HIGH = 1.0
"""Pareto k-hat above which importance weights have no finite mean."""


@dataclass(frozen=True, eq=False)
class ElpdSums:
    """Sums over n observations, or clients, of the predictive densities of K models.

    Attributes:
        count: n.
        elpd: Σ_i elpd_ik, ``(K,)``.
        products: Σ_i elpd_ik elpd_il, ``(K, K)``.
        fit: Σ_i log p(y_i | all), ``(K,)``; NaN of clients.
        high: numbers of i whose k-hat is above its limit, and above 1, ``(2, K)``.
    """

    count: int
    elpd: np.ndarray
    products: np.ndarray
    fit: np.ndarray
    high: np.ndarray


def sum_elpds(models: Sequence[Elpds]) -> ElpdSums:
    """Sum the predictive densities of models over the same observations.

    Example:
        >>> import numpy as np
        >>> from bayesfed.output.comparison import sum_elpds
        >>> from bayesfed.output.elpds import Elpds
        >>> one = Elpds(np.array([-1.0, -2.0]), np.array([-0.9, -1.9]), np.array([0.1, 0.8]), 0.7)
        >>> found = sum_elpds([one])
        >>> found.elpd.tolist(), found.products.tolist(), found.high.tolist()
        ([-3.0], [[5.0]], [[1.0], [0.0]])
    """
    elpd = np.stack([one.elpd for one in models], 1)
    high = [[(one.khat > at).sum() for one in models] for at in (models[0].limit, VERY_HIGH)]
    fit = np.array([one.fit.sum() for one in models])
    return ElpdSums(len(elpd), elpd.sum(0), elpd.T @ elpd, fit, np.array(high, float))


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """How well models predict each observation, or client, from all others: the best model first.

    Attributes:
        table: by model ``elpd``, the sum of log predictive densities in nats, and its standard error ``se``; ``p_loo``,
            the effective number of parameters (of observations only); ``elpd_diff``, the best model's elpd minus this
            one's, and its standard error ``dse``; ``weight``, its stacking weight; ``high_k`` and ``very_high_k``, the
            numbers of observations, or clients, whose Pareto k-hat is above its limit and above 1.
        unit: ``"observation"`` or ``"client"``.
        count: n, the number of these.
        caveat: models whose numbers are not reliable.
    """

    table: pd.DataFrame
    unit: Unit
    count: int
    caveat: str

    def __repr__(self) -> str:
        heading = f"Leave-one-{self.unit}-out over {self.count:,} {self.unit}s"
        rounded = self.table.round(dict.fromkeys(("elpd", "se", "p_loo", "elpd_diff", "dse"), 1))
        table = rounded.round({"weight": 2}).to_string()
        return "\n".join(filter(None, (heading, table, self.caveat)))


def compare(
    models: Mapping[str, Posterior],
    unit: Unit = "observation",
    *,
    outcome: str | None = None,
    num_samples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Compare models that were fitted to the same rows by how well they predict each from all others.

    Args:
        models: name to posterior, of all clients of its fit.
        unit: ``"observation"``: rows of the clients that there are, by PSIS-LOO corrected for q (:func:`bayesfed.loo`);
            ``"client"``: all rows of a client, its own variables integrated out
            (:func:`bayesfed.leave_one_client_out`), which is how well a model predicts a new client.
        outcome: the observed site of ``unit="observation"``, if the models have several.
        num_samples: number of draws.
        seed: seed of the draws.

    Returns:
        A table like ``az.compare``'s, with stacking weights (Yao, Vehtari, Simpson & Gelman 2018).

    Raises:
        ValueError: there is no model; the models have other clients, rows or outcomes; ``unit`` is neither; the draws
            of a model have no importance weights.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> firms = datasets.grunfeld()
        >>> fits = {m.__name__: bf.fit(m, firms) for m in (models.varying_intercept, models.varying_slope)}
        >>> bf.compare(fits).table["elpd_diff"].round(-1).to_dict()
        {'varying_slope': 0.0, 'varying_intercept': 30.0}
    """
    if not models:
        raise ValueError("compare: give at least one model, as {name: posterior}")
    if unit not in get_args(Unit):
        raise ValueError(f"unit is {unit!r}; it must be 'observation' or 'client'")
    (first, *others), names = models.values(), list(models)
    what = describe_observations(first, unit, outcome)
    for name, other in zip(names[1:], others, strict=True):
        if other.federation.names != first.federation.names:
            raise ValueError(
                f"compare: {names[0]!r} and {name!r} have other clients, or other order"
            )
        there = describe_observations(other, unit, outcome)
        differs = describe_difference(what, there, first.federation.names)
        if differs is not None:
            raise ValueError(f"compare: {names[0]!r} and {name!r} are of other data: {differs}")
    found = [leave_each_out(one, unit, num_samples, seed, outcome) for one in models.values()]
    elpd = np.stack([one.elpd for one in found], 1)
    caveats = {name: one.caveat for name, one in models.items() if one.caveat}
    sums = sum_elpds(found)
    return compare_sums(
        names, sums, lambda weights: mixture_sums(elpd, weights), unit, found[0].limit, caveats
    )


def compare_sums(
    names: Sequence[str],
    sums: ElpdSums,
    ask: Callable[[np.ndarray], MixtureSums],
    unit: Unit,
    limit: float,
    caveats: Mapping[str, str],
) -> Comparison:
    """Compare models by sums over all observations, or clients.

    Args:
        names: of the K models.
        sums: of their predictive densities.
        ask: returns the sums for stacking at weights of the models.
        unit: what was left out.
        limit: the largest reliable k-hat.
        caveats: name to the caveat of a posterior that has one.
    """
    import pandas as pd

    count, best = round(sums.count), int(sums.elpd.argmax())
    weights = stack(count, len(names), ask)
    square = sums.products.diagonal()
    product = sums.products[best]
    table = pd.DataFrame(
        {
            "elpd": sums.elpd,
            "se": _standard_error(count, sums.elpd, square),
            "p_loo": sums.fit - sums.elpd,
            "elpd_diff": sums.elpd[best] - sums.elpd,
            "dse": _standard_error(
                count, sums.elpd[best] - sums.elpd, square[best] - 2 * product + square
            ),
            "weight": weights,
            "high_k": sums.high[0].astype(int),
            "very_high_k": sums.high[1].astype(int),
        },
        index=pd.Index(names, name="model"),
    ).sort_values("elpd", ascending=False, kind="stable")
    if unit == "client":
        table = table.drop(columns="p_loo")
    return Comparison(table, unit, count, _caveat(table, unit, count, limit, caveats))


def _standard_error(count: int, total: np.ndarray, square: np.ndarray) -> np.ndarray:
    """Return the standard error of sums of ``count`` terms from the sums of the terms and of their squares."""
    if count < 2:
        return np.full(len(total), np.nan)
    variance = np.maximum(square - total**2 / count, 0) / (count - 1)
    return np.asarray((count * variance) ** 0.5)


def _caveat(
    table: pd.DataFrame, unit: Unit, count: int, limit: float, caveats: Mapping[str, str]
) -> str:
    lines = [
        f"{name!r}: Pareto k > {limit:.2g} without {number:,} of {count:,} {unit}s, whose predictions are not reliable"
        for name, number in table["high_k"].items()
        if number
    ]
    return "\n".join([*lines, *(f"{name!r}: {text}" for name, text in caveats.items())])
