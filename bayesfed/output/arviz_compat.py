"""One interface for ArviZ 0.2x and ArviZ 1.x, which has xarray's DataTree for InferenceData and other defaults.

Functions whose arguments differ between the versions are called here, with probabilities and kinds of intervals given
explicitly.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.x warns of its 1.0 once a day
    import arviz as az

__all__ = ["OLD", "az", "dataset", "datasets", "ess_and_rhat", "hdi", "product", "summary"]

OLD = az.__version__.startswith("0.")
"""True under ArviZ 0.2x."""


def product(groups: Mapping[str, xr.Dataset]) -> az.InferenceData | xr.DataTree:
    """Put named groups together as the installed ArviZ represents them."""
    if OLD:
        return az.InferenceData(**groups, warn_on_custom_groups=False)
    return xr.DataTree.from_dict(dict(groups))


def dataset(found: az.InferenceData | xr.DataTree, group: str) -> xr.Dataset:
    """Return one group."""
    part: Any = found[group]
    return part if OLD else part.to_dataset()


def datasets(found: az.InferenceData | xr.DataTree) -> dict[str, xr.Dataset]:
    """Return all groups by name."""
    tree: Any = found
    return {name: dataset(found, name) for name in (tree.groups() if OLD else tree.children)}


def hdi(draws: xr.Dataset, prob: float) -> Mapping[str, np.ndarray]:
    """Compute highest-density intervals by variable, ``(*shape, 2)``."""
    found = az.hdi(draws, **{"hdi_prob" if OLD else "prob": prob})
    return {str(name): value.values for name, value in found.items()}


def summary(draws: xr.Dataset, names: Sequence[str]) -> pd.DataFrame:
    """Tabulate ``mean``, ``sd`` and the 94 % highest-density interval ``hdi_3%``, ``hdi_97%`` of all scalars."""
    columns = ["mean", "sd", "hdi_3%", "hdi_97%"]
    if not names:
        return pd.DataFrame(columns=columns)
    kind = {"hdi_prob": 0.94} if OLD else {"ci_prob": 0.94, "ci_kind": "hdi"}
    table = az.summary(draws, var_names=list(names), kind="stats", round_to="none", **kind)
    return pd.DataFrame(table.to_numpy(float), table.index, columns)


def ess_and_rhat(draws: np.ndarray) -> tuple[float, float]:
    """Return the smallest bulk effective size and the largest rank-normalised R-hat of ``(chains, draws, D)``."""
    found = xr.Dataset({"z": (("chain", "draw", "of"), draws)})
    ess, rhat = az.ess(found, method="bulk"), az.rhat(found, method="rank")
    return float(ess["z"].min()), float(rhat["z"].max())
