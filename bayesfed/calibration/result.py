"""The result of a calibration: ranks, coverage, tests and their words."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from bayesfed.calibration import plots, uniformity
from bayesfed.calibration.uniformity import DRAWS
from bayesfed.data.plural import plural
from bayesfed.output.fitted import Fitted

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr
    from matplotlib.figure import Figure

PROBS = (0.5, 0.8, 0.9, 0.95)
"""The probabilities of the intervals whose coverage is in the table."""
LEVEL = 0.05
"""The probability that any variable of a calibrated fit is called off."""


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """Ranks of true values among draws of their posteriors, over replications of a simulation and a fit.

    ``print`` shows, for each variable, a p-value, the coverage of its intervals and in words what is off.

    Attributes:
        ranks: the rank of the true value among 199 draws, 0 to 199, by variable: dims ``replication`` and those that
            the variable has in ArviZ.
        truths: the true values.
        means: the posterior means.
        sds: the posterior standard deviations.
        replications: a row for each replication: ``failed``, the message of its error, or empty; ``converged``, empty
            for a given number of rounds; ``khat``; ``draws``, how they were made; ``rounds``; ``seconds``;
            ``caveat``, that of its posterior. Those that failed have no ranks.
        title: the model and the method.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> schools = datasets.eight_schools()
        >>> found = bf.calibrate(models.eight_schools, schools, n=4, rounds=2, progress=False)
        >>> found.coverage(0.9)["theta"].dims
        ('client',)
        >>> found.replications["failed"].tolist()
        ['', '', '', '']
    """

    ranks: xr.Dataset
    truths: xr.Dataset
    means: xr.Dataset
    sds: xr.Dataset
    replications: pd.DataFrame
    title: str

    @property
    def n(self) -> int:
        """The number of replications that have ranks."""
        return self.ranks.sizes["replication"]

    @property
    def z_scores(self) -> xr.Dataset:
        """(mean − truth) / sd: with standard deviations above 1 where intervals are too narrow."""
        with np.errstate(invalid="ignore", divide="ignore"):  # of constants
            return (self.means - self.truths) / self.sds

    def coverage(self, prob: float) -> xr.Dataset:
        """Return the share of replications in which the central interval has the true value, by entry.

        Args:
            prob: the probability of the interval, a multiple of 0.01.

        Raises:
            ValueError: it is not.
        """
        return self._inside(prob).mean("replication")

    def _inside(self, prob: float) -> xr.Dataset:
        tail = round((1 - prob) / 2 * (DRAWS + 1), 6)
        if not (0 < prob < 1 and tail == round(tail)):
            raise ValueError(f"prob is {prob}: give a multiple of 0.01 between 0 and 1")
        return (self.ranks >= tail) & (self.ranks <= DRAWS - tail)

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each variable.

        ``p`` is the p-value of uniform ranks, of several entries combined by the Cauchy combination test; ``p_bias``
        that of symmetric ranks (VSBC), which does not see the width of intervals; ``coverage_90`` the share of
        intervals of 90 % with the true value, over replications and entries, and ``error_90`` its standard error over
        replications; ``z_mean`` and ``z_sd`` the mean and standard deviation of the z-scores; ``sd_ratio`` the median
        posterior standard deviation over that of the prior, half the width of the central 68 % of the true values;
        ``off`` in words what is off, or empty.
        """
        import pandas as pd

        names, z, rows = list(map(str, self.ranks)), self.z_scores, []
        for name in names:
            row: dict[str, Any] = {"variable": name}
            parts = list(_entries(self.ranks[name]))
            each = np.concatenate([uniformity.p_uniform(part, DRAWS) for part in parts])
            bias = np.array([uniformity.p_symmetric(part, DRAWS) for part in parts])
            row |= {"p": _one(each), "p_bias": _one(bias)}
            for prob in PROBS:
                inside = _flat(self._inside(prob)[name]).mean(1)
                share, number = inside.mean(), f"{100 * prob:.0f}"
                binomial = math.sqrt(prob * (1 - prob) / self.n)
                clusters = inside.std(ddof=1) / math.sqrt(self.n)
                single = self.ranks[name].ndim == 1
                row |= {
                    f"coverage_{number}": share,
                    f"error_{number}": binomial if single else clusters,
                }
            scores = _flat(z[name])
            low, high = np.quantile(_flat(self.truths[name]), [0.16, 0.84], axis=0)
            spread = (high - low) / 2  # some priors have no standard deviation
            row |= {"z_mean": scores.mean(), "z_sd": scores.std()}
            with np.errstate(invalid="ignore", divide="ignore"):
                row["sd_ratio"] = float(np.median(np.median(_flat(self.sds[name]), 0) / spread))
            flat = np.concatenate(parts, 1)
            words = uniformity.in_words(*uniformity.shift_and_spread(flat, DRAWS))
            row["off"] = words if row["p"] * len(names) < LEVEL else ""
            rows.append(row)
        return pd.DataFrame(rows)

    @property
    def p_value(self) -> float:
        """The smallest p-value of all variables, times their number (Bonferroni)."""
        return min(1.0, len(self.table) * float(self.table["p"].min()))

    @property
    def off(self) -> dict[str, str]:
        """By variable in words what is off; empty if nothing is found."""
        found = self.table.set_index("variable")["off"]
        return {str(name): words for name, words in found.items() if words}

    @property
    def caveat(self) -> str:
        """The replications that failed or did not converge, by number."""
        return describe_ends(self.replications)

    @property
    def verdict(self) -> str:
        """A sentence for each variable that is off, or one that none is."""
        if self.off:
            return "\n".join(f"{name}: {words}" for name, words in self.off.items())
        return (
            f"No variable is off: p-values times their number are above {LEVEL:g}. "
            f"{plural(self.n, 'replication finds', 'replications find')} faults "
            f"that move the coverage of 90 % by about {2 * math.sqrt(0.09 / self.n):.0%}"
        )

    def __repr__(self) -> str:
        table = self._shown().to_string(index=False)
        return "\n".join(filter(None, (self._heading, table, self.verdict, self.caveat)))

    def _repr_html_(self) -> str:
        table = self._shown().to_html(index=False, border=0)
        below = "\n".join(filter(None, (self.verdict, self.caveat))).splitlines()
        return f"{html.escape(self._heading)}{table}{'<br>'.join(map(html.escape, below))}"

    @property
    def _heading(self) -> str:
        seconds = float(self.replications["seconds"].sum())
        return f"{self.title}, {plural(len(self.replications), 'replication')}, {seconds:,.0f} s"

    def _shown(self) -> pd.DataFrame:
        """Return the table as text."""
        import pandas as pd

        table = self.table
        columns = {
            "variable": table["variable"],
            "p": table["p"].map(_p),
            "bias": table["p_bias"].map(_p),
        }
        for prob in PROBS:
            k = f"{100 * prob:.0f}"
            pairs = zip(table[f"coverage_{k}"], table[f"error_{k}"], strict=True)
            columns[f"{k}%"] = pd.Series([f"{100 * c:.0f} ± {100 * e:.0f}" for c, e in pairs])
        columns |= {
            "z": table["z_mean"].map("{:.2f}".format),
            "sd of z": table["z_sd"].map("{:.2f}".format),
        }
        columns["sd/prior"] = table["sd_ratio"].map("{:.2g}".format)
        columns["off"] = table["off"].replace("", "-")
        return pd.DataFrame(columns)

    def plot_ecdf(self, names: Sequence[str] | None = None) -> Figure:
        """Plot by variable the ECDF of the ranks minus that of uniform ones, with its simultaneous 95 % band.

        Of a variable with several entries there is a line for each. See :func:`bayesfed.calibration.plots.plot_ecdf`.
        """
        return plots.plot_ecdf(self.ranks, names)

    def plot_ranks(self, names: Sequence[str] | None = None) -> Figure:
        """Plot by variable a histogram of the ranks; see :func:`bayesfed.calibration.plots.plot_ranks`."""
        return plots.plot_ranks(self.ranks, names)


def _flat(values: xr.DataArray) -> np.ndarray:
    """Return ``(n, E)``."""
    return values.to_numpy().reshape(values.sizes["replication"], -1)


def _entries(ranks: xr.DataArray) -> Iterator[np.ndarray]:
    """Yield ranks ``(n, N)`` of each entry, of all clients."""
    array = ranks.transpose("replication", *["client"] * ("client" in ranks.dims), ...).to_numpy()
    array = array.reshape(len(array), ranks.sizes.get("client", 1), -1)
    for entry in range(array.shape[2]):
        yield array[:, :, entry]


def _one(p_values: np.ndarray) -> float:
    return float(p_values[0]) if len(p_values) == 1 else uniformity.combine(p_values)


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "<0.001"


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:10]))
    return f"number{'s' * (len(numbers) > 1)} {shown}{', ...' * (len(numbers) > 10)}"


def describe_ends(table: pd.DataFrame) -> str:
    """Name the replications that failed, did not converge or have a caveat, by number; empty if there are none.

    Args:
        table: the replications of a :class:`Calibration`.
    """
    found = []
    failed = table.index[table["failed"] != ""].tolist()
    if failed:
        found.append(
            f"{len(failed)} of {plural(len(table), 'replication')} failed and have no ranks, {_some(failed)}: "
            f"{table['failed'][failed[0]]}"
        )
    moving = table.index[table["converged"].eq(False)].tolist()
    if moving:
        found.append(
            f"{len(moving)} of {plural(len(table), 'fit')} had not converged, {_some(moving)}"
        )
    other = table.index[(table["caveat"] != "") & ~table["converged"].eq(False)].tolist()
    if other:
        found.append(
            f"{plural(len(other), 'fit has a caveat of its', 'fits have a caveat of their')} own, {_some(other)}"
        )
    return "\n".join(found)


def replication_table(records: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a row for each replication, by its number."""
    import pandas as pd

    columns = ("failed", "converged", "khat", "draws", "rounds", "seconds", "caveat")
    table = pd.DataFrame([{c: r.get(c) for c in columns} for r in records])
    table.index = pd.Index([r["number"] for r in records], name="replication")
    table["khat"] = table["khat"].astype(float)
    return table.assign(caveat=table["caveat"].fillna(""))


def to_dataset(values: Mapping[int, Mapping[str, Any]], fitted: Fitted) -> xr.Dataset:
    """Return nested lists by replication and variable as a Dataset, with the names of clients as coordinates."""
    import xarray as xr  # takes a while to import

    program = fitted.program
    dims: dict[str, tuple[str, ...]] = {
        site.name: ("client",) if site.local else () for site in program.latent
    }
    dims |= program.derived
    names = next(iter(values.values()))
    found, coords = {}, {"replication": list(values), "client": list(fitted.federation.names)}
    for name in names:
        array = np.array([one[name] for one in values.values()])
        extra = range(array.ndim - 1 - len(dims[name]))
        axes = ("replication", *dims[name], *(f"{name}_dim_{j}" for j in extra))
        found[name] = axes, array
    used = {axis for axes, _ in found.values() for axis in axes}
    named = getattr(program.model, "coords", {})
    coords |= {axis: named[axis] for axis in named if axis in used}
    return xr.Dataset(found, coords={axis: coords[axis] for axis in coords if axis in used})
