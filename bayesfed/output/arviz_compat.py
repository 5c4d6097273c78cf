"""One interface for ArviZ 0.2x and ArviZ 1.x, which has xarray's DataTree for InferenceData."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.x warns of its 1.0 once a day
    import arviz as az

__all__ = ["OLD", "az", "dataset", "ess_and_rhat", "power_scaling", "product"]

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


def ess_and_rhat(draws: np.ndarray) -> tuple[float, float]:
    """Return the smallest effective size and the largest rank-normalised R-hat of ``(chains, draws, D)``.

    The size is the smaller of the bulk's and the tails' (Vehtari, Gelman, Simpson, Carpenter & Bürkner 2021).
    """
    found = xr.Dataset({"z": (("chain", "draw", "of"), draws)})
    sizes = [float(az.ess(found, method=method)["z"].min()) for method in ("bulk", "tail")]
    return min(sizes), float(az.rhat(found, method="rank")["z"].max())


def power_scaling(groups: Mapping[str, xr.Dataset], component: str) -> xr.Dataset:
    """Return the sensitivity of each variable to power-scaling of a component, ``"prior"`` or ``"likelihood"``."""
    data = product(groups)
    if OLD:
        return az.psens(data, component=component)
    return az.psense(data, group=component)  # type: ignore[attr-defined]
