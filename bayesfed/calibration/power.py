"""``bf.power``: how often a study would show what it is made to show, by simulation."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from bayesfed.algorithms import Algorithm
from bayesfed.algorithms.table import SFVI
from bayesfed.calibration.replications import FitOptions, Record, Study, run_replications
from bayesfed.calibration.result import describe_ends, replication_table
from bayesfed.data.columns import UnknownName
from bayesfed.data.federation import Federation, Model
from bayesfed.data.plural import plural
from bayesfed.effects.hypotheses import evaluate, variables_of
from bayesfed.elbo.handlers import on_cpu
from bayesfed.output.posterior import Posterior

if TYPE_CHECKING:
    import pandas as pd

SAMPLES = 2000
"""Draws of each posterior."""


@dataclass(frozen=True)
class Claims:
    """A measure of replications: the posterior of claims, and whether they are true.

    Attributes:
        texts: hypotheses and functions, see :func:`bayesfed.effects.hypotheses`.
        prob: the probability of the intervals.
    """

    texts: tuple[str, ...]
    prob: float

    def __call__(self, posterior: Posterior, truth: Mapping[str, Tensor], seed: int) -> Record:
        """Return for each claim its probability, the ends of its interval, its true value and whether it is true."""
        variables = variables_of(posterior, SAMPLES, seed)
        clients = {name: i for i, name in enumerate(posterior.federation.names)}
        found = []
        for text in self.texts:
            value, holds = evaluate(text, variables, clients)
            ends = torch.tensor([(1 - self.prob) / 2, (1 + self.prob) / 2], dtype=torch.float64)
            lower, upper = value.double().quantile(ends.to(value.device)).tolist()
            found.append(
                {
                    "probability": None if holds is None else float(holds.double().mean()),
                    "lower": lower,
                    "upper": upper,
                    **self.truth(text, truth, clients),
                }
            )
        return {"claims": found}

    @staticmethod
    def truth(text: str, truth: Mapping[str, Tensor], clients: Mapping[str, int]) -> Record:
        """Return the true value of a claim and whether it is true; None if a variable is not simulated."""
        try:
            value, holds = evaluate(text, {n: v[None] for n, v in truth.items()}, clients)
        except UnknownName:
            return {"truth": None, "true": None}
        return {"truth": float(value), "true": None if holds is None else bool(holds)}


@dataclass(frozen=True, eq=False, repr=False)
class Power:
    """How often each of several claims is shown, over replications of a simulated study and its fit.

    Attributes:
        outcomes: a row for each replication and claim: ``shown``; the posterior ``probability`` of a hypothesis; the
            ends of the interval of its left side minus its right side, ``lower`` and ``upper``; the ``truth`` of that
            difference, and whether the hypothesis is ``true``.
        replications: a row for each replication, see :class:`~bayesfed.calibration.result.Calibration`.
        title: the study, in words.
        prob: the probability that a hypothesis must have to be shown, and that of the intervals.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> schools = datasets.eight_schools()
        >>> found = bf.power(
        ...     models.eight_schools, schools, ["mu > 0", "mu"], at={"mu": 8.0}, n=3, rounds=2, progress=False
        ... )
        >>> found.table["claim"].tolist(), found.table["power"].between(0, 1).all()
        (['mu > 0', 'mu'], np.True_)
    """

    outcomes: pd.DataFrame
    replications: pd.DataFrame
    title: str
    prob: float

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each claim.

        ``power`` is the share of the replications that have a posterior in which the claim is shown, ``error`` its
        standard error, with a success and a failure added so that it is not 0; ``if_true`` and ``if_false`` the shares
        among those in which a hypothesis is true or false; ``covered`` the share of intervals with the true value;
        ``width`` the mean width of the intervals.
        """
        import pandas as pd

        rows = []
        for claim, part in self.outcomes.groupby("claim", sort=False):
            shown, n = part["shown"].astype(float), len(part)
            width = (part["upper"] - part["lower"]).mean()
            nearly = (shown.sum() + 1) / (n + 2)  # so that 0 and 1 have an error
            covered = part["truth"].between(part["lower"], part["upper"])
            rows.append(
                {
                    "claim": claim,
                    "power": shown.mean(),
                    "error": math.sqrt(nearly * (1 - nearly) / (n + 2)),
                    "if_true": shown[part["true"].eq(True)].mean(),
                    "if_false": shown[part["true"].eq(False)].mean(),
                    "covered": covered.mean() if part["truth"].notna().all() else math.nan,
                    "width": width,
                }
            )
        return pd.DataFrame(rows)

    @property
    def caveat(self) -> str:
        """The replications that failed or did not converge, by number."""
        return describe_ends(self.replications)

    def __repr__(self) -> str:
        table = self.table.to_string(index=False, float_format=_short, na_rep="-")
        return "\n".join(filter(None, (self.title, self._rule, table, self.caveat)))

    def _repr_html_(self) -> str:
        table = self.table.to_html(index=False, float_format=_short, na_rep="-", border=0)
        lines = [html.escape(line) for line in (self.title, self._rule)]
        below = "<br>".join(map(html.escape, self.caveat.splitlines()))
        return "<br>".join(lines) + table + below

    @property
    def _rule(self) -> str:
        return (
            f"A hypothesis is shown if its posterior probability is at least {self.prob:g}, a number if its interval "
            f"of {self.prob:g} excludes 0"
        )


def _short(value: float) -> str:
    return f"{value:.3g}"


@on_cpu()
def power(
    model: Model,
    federation: Federation,
    claims: str | Sequence[str],
    algorithm: Algorithm | None = None,
    *,
    at: Mapping[str, Any] | None = None,
    prob: float = 0.95,
    n: int = 200,
    simulate: Model | None = None,
    path: str | Path | None = None,
    jobs: int = 1,
    seed: int = 0,
    progress: bool | None = None,
    **options: Unpack[FitOptions],
) -> Power:
    """Compute the power of a study for claims, or their assurance: the probability that it will show them.

    Each of n replications simulates the outcomes of the clients, from true values given by ``at`` and otherwise drawn
    from their priors, and fits them as :func:`bayesfed.fit` does. Without ``at`` the result is the assurance (O'Hagan,
    Stevens & Campbell 2005), the mean power over the prior. For other numbers of clients and rows, give a federation of
    that size, such as :func:`bayesfed.simulations.resample` makes.

    Args:
        model: the Pyro program that is fitted.
        federation: the clients, as for :func:`bayesfed.calibrate`.
        claims: hypotheses such as ``"beta[0] > 0"``, which are shown if their posterior probability is at least
            ``prob``, and numbers such as ``"beta[0]"``, which are shown if their central interval of
            probability ``prob`` excludes 0. See :func:`bayesfed.effects.hypotheses`.
        algorithm: by default :class:`~bayesfed.SFVI`.
        at: global variable to its true value. A coefficient of a formula can be given if it has a prior of its own.
        prob: the probability that is needed.
        n: number of replications. With 200 a power of 80 % has a standard error of 3 %.
        simulate: the program that true values and outcomes are drawn from, whose priors are those of the design; by
            default ``model``.
        path: as for :func:`bayesfed.calibrate`, like the following.
        jobs: number of processes.
        seed: of all replications.
        progress: show a progress bar.
        **options: of the fits, :class:`~bayesfed.calibration.replications.FitOptions`.

    Raises:
        ValueError: a claim cannot be read, ``prob`` is out of range, or as :func:`bayesfed.calibrate`.
        KeyError: a claim or ``at`` names no variable.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> more = bf.simulations.resample(datasets.eight_schools(), clients=20, seed=0)
        >>> found = bf.power(models.eight_schools, more, "mu > 0", n=3, rounds=2, progress=False)
        >>> found.outcomes.columns.tolist()
        ['replication', 'claim', 'shown', 'probability', 'lower', 'upper', 'truth', 'true']
    """
    if not 0 < prob < 1:
        raise ValueError(f"prob is {prob}; it must be between 0 and 1")
    chosen = SFVI() if algorithm is None else algorithm
    texts = (claims,) if isinstance(claims, str) else tuple(claims)
    measure, given = Claims(texts, prob), dict(at or {})
    study = Study(model, federation, chosen, simulate or model, options, given, seed, measure)
    study.check()
    truth, _ = study.fitted.draw(seed)
    clients = {name: i for i, name in enumerate(federation.names)}
    for text in texts:
        evaluate(text, {name: value[None] for name, value in truth.items()}, clients)
    records = run_replications(
        study,
        n,
        kind={"kind": "power", "claims": list(texts), "prob": prob},
        title="power" if given else "assurance",
        path=path,
        jobs=jobs,
        progress=progress,
    )
    values = ", ".join(f"{name} = {value}" for name, value in given.items())
    title = f"Power at {values}" if given else "Assurance, true values from the prior"
    size = f"{plural(len(federation), 'client')}, {plural(federation.rows, 'row')}, {plural(n, 'replication')}"
    return Power(
        _outcomes(records, texts, prob), replication_table(records), f"{title}; {size}", prob
    )


def _outcomes(records: Sequence[Record], texts: Sequence[str], prob: float) -> pd.DataFrame:
    """Return a row for each replication that has a posterior, and each claim."""
    import pandas as pd

    rows = []
    for record in records:
        for text, found in zip(texts, record.get("claims", ()), strict=False):
            excluded = not found["lower"] <= 0 <= found["upper"]
            share = found["probability"]
            shown = excluded if share is None else share >= prob
            rows.append({"replication": record["number"], "claim": text, "shown": shown, **found})
    return pd.DataFrame(rows).astype({"probability": float, "truth": float})
