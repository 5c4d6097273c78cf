"""From draws and data, in the form of :func:`bayesfed.output.inference_data.data_groups`, to the facts of a study."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from bayesfed.data.plural import plural
from bayesfed.report.facts import ByClient, Global, Study
from bayesfed.report.numbers import highest_density

MOST_GLOBALS, MOST_LOCALS, LARGE = 60, 6, 20
"""The most numbers of global variables and of a client's variables that are shown, and of one that is not left out."""
GRID = 60
"""The number of points at which densities are shown."""
Groups = Mapping[str, xr.Dataset]


def make_study(
    groups: Groups, *, sensitivity: Mapping[str, tuple[float, float]], **given: Any
) -> Study:
    """Collect the facts of a fit.

    Args:
        groups: its draws and data: ``posterior``, and if available ``prior``, ``posterior_predictive``,
            ``observed_data``, ``prior_predictive`` and ``history``.
        sensitivity: to power-scaling of prior and likelihood, by label of a global variable.
        **given: the other attributes of :class:`~bayesfed.report.facts.Study`.
    """
    posterior = groups.get("posterior", xr.Dataset())
    attrs: Mapping[str, Any] = next(iter(groups.values())).attrs
    names = global_names(posterior)
    numbers = _first_numbers(posterior, names)
    draws = posterior.sizes.get("chain", 1) * posterior.sizes.get("draw", 1)
    effective = _effective(np.stack([d for _, d in numbers[:8]], 1)) if numbers else float(draws)
    chains = attrs.get("chains_ess")
    effective = effective if chains is None else min(effective, float(chains))
    prior = groups.get("prior", xr.Dataset())
    before = dict(_first_numbers(prior, [name for name in names if name in prior]))
    shown = list(itertools.islice(_locals(posterior), MOST_LOCALS))
    history = groups.get("history", xr.Dataset())
    return Study(
        algorithm=str(attrs["algorithm"]),
        seed=int(attrs["seed"]),
        rounds=int(attrs["rounds"]),
        draws=draws,
        effective=effective,
        converged=bool(attrs["converged"]) if "converged" in attrs else None,
        caveat=str(attrs.get("caveat", "")),
        khat=_number(attrs, "khat"),
        khat_limit=float(attrs.get("khat_limit", 0.7)),
        corrected=str(attrs.get("corrected", "")),
        rhat=_number(attrs, "chains_rhat"),
        ess=_number(attrs, "chains_ess"),
        epsilon=_number(attrs, "epsilon"),
        globals=[
            _global(label, values, before.get(label), effective, sensitivity.get(label))
            for label, values in numbers
        ],
        more_globals=sum(posterior[name][0, 0].size for name in names) - len(numbers),
        params={
            str(name): f"{plural(value.size, 'number')}"
            if value.size > 1
            else f"{value.item():.4g}"
            for name, value in groups.get("params", xr.Dataset()).items()
        },
        locals=shown,
        more_locals=sum(posterior[n][0, 0, 0].size for n in _local_names(posterior)) - len(shown),
        checks=list(_checks(groups, "posterior_predictive")),
        prior_checks=list(_checks(groups, "prior_predictive", pooled=True)),
        elbo=history["elbo"].values.ravel() if "elbo" in history else np.zeros(0),
        seconds=float(history["seconds"].sum()) if "seconds" in history else 0.0,
        **given,
    )


def labels(value: xr.DataArray) -> list[str]:
    """Return a label for each number of a variable's draw, in order: its name, with the coordinates of an entry."""
    places = itertools.product(*(value[dim].values.tolist() for dim in value.dims[2:]))
    return [f"{value.name}[{', '.join(map(str, at))}]" if at else str(value.name) for at in places]


def scalars(value: xr.DataArray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield label and draws ``(S,)`` of each number of a variable, whose first dims are ``chain`` and ``draw``."""
    draws = value.values.reshape(value.shape[0] * value.shape[1], -1)
    for label, own in zip(labels(value), draws.T, strict=True):
        yield label, own.astype(float)


def global_names(posterior: xr.Dataset) -> list[str]:
    """Return the names of the variables that are neither a client's nor a row's."""
    own = {"chain", "draw"}
    return [
        str(name)
        for name, value in posterior.items()
        if all(dim in own or str(dim).startswith(f"{name}_dim_") for dim in value.dims)
    ]


def _first_numbers(draws: xr.Dataset, names: Sequence[str]) -> list[tuple[str, np.ndarray]]:
    every = itertools.chain.from_iterable(scalars(draws[name]) for name in names)
    return list(itertools.islice(every, MOST_GLOBALS))


def _number(attrs: Mapping[str, Any], name: str) -> float | None:
    return float(attrs[name]) if name in attrs else None


def _effective(draws: np.ndarray) -> float:
    """Estimate how many of S draws ``(S, P)`` count, from how often they are repeated.

    Two of them are equal with probability Σ w², where w are the normalised weights by which they were resampled.
    """
    count = len(draws)
    times = np.unique(draws, axis=0, return_counts=True)[1].astype(float)
    equal = ((times**2).sum() - count) / (count * (count - 1))
    return max(1.0, 1 / (1 / count + equal))


def _global(
    label: str,
    draws: np.ndarray,
    prior: np.ndarray | None,
    effective: float,
    sensitivity: tuple[float, float] | None,
) -> Global:
    lower, upper = highest_density(draws, 0.94).tolist()
    sd = float(draws.std(ddof=1))
    edges = _edges(draws)
    nothing = np.full(GRID, np.nan)
    before = None
    if prior is not None and np.isfinite(prior).all():
        before = (float(np.median(prior)), *highest_density(prior, 0.94).tolist())
    return Global(
        label=label,
        mean=float(draws.mean()),
        sd=sd,
        interval=(lower, upper),
        mcse=sd / effective**0.5,
        prior=before,
        density=np.stack(
            [_density(draws, edges), nothing if prior is None else _density(prior, edges)]
        ),
        sensitivity=sensitivity,
    )


def _edges(draws: np.ndarray) -> np.ndarray:
    """Return edges of bins over the range of draws and a quarter of it on each side, and six more bins at each end."""
    lower, upper = np.quantile(draws, [0.002, 0.998]) if np.isfinite(draws).all() else (0.0, 1.0)
    margin = max((upper - lower) / 4, 1e-6 * max(1.0, abs(lower)))
    width = (upper - lower + 2 * margin) / GRID
    return lower - margin + width * np.arange(-6, GRID + 7)


def _density(draws: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the share of draws in each bin, smoothed by a Gaussian of two bins, ``(60,)``."""
    shares = np.histogram(draws, edges)[0] / len(draws)
    kernel = np.exp(-np.square(np.arange(-6, 7) / 2) / 2)
    return np.convolve(shares, kernel / kernel.sum(), "valid")


def _local_names(posterior: xr.Dataset) -> list[str]:
    """Return the names of the clients' variables."""
    own = {"chain", "draw", "client"}
    return [
        str(name)
        for name, value in posterior.items()
        if "client" in value.dims
        and all(dim in own or str(dim).startswith(f"{name}_dim_") for dim in value.dims)
    ]


def _locals(posterior: xr.Dataset) -> Iterator[ByClient]:
    """Yield the numbers of the clients' variables, but for those of large ones."""
    for name in _local_names(posterior):
        value = posterior[name]
        if value[0, 0, 0].size > LARGE:
            continue
        names = [str(client) for client in value["client"].values]
        entries = labels(value.isel(client=0, drop=True))
        draws = value.values.reshape(-1, len(names), len(entries))
        for label, own_draws in zip(entries, np.moveaxis(draws, 2, 0), strict=True):
            yield _by_client(label, names, own_draws)


def _by_client(label: str, names: list[str], draws: np.ndarray, **more: Any) -> ByClient:
    wide, narrow = (highest_density(draws, prob) for prob in (0.94, 0.5))
    return ByClient(label, names, draws.mean(0), wide, narrow, **more)


def _checks(groups: Groups, predictive: str, *, pooled: bool = False) -> Iterator[ByClient]:
    """Yield a check of the mean of each client's outcomes and, unless they are binary or few, one of their sd.

    Args:
        groups: see :func:`make_study`.
        predictive: the group of the predictions.
        pooled: all clients count as one.
    """
    predicted = groups.get(predictive, xr.Dataset())
    observed = groups.get("observed_data", xr.Dataset())
    for name in map(str, predicted):
        dims = predicted[name].dims[2:]
        if len(dims) != 1 or name not in observed or observed[name].dims != dims:
            continue
        whose = "client" if dims[0] == "client" else f"{dims[0]}_client"
        owner = np.array(["all"] * observed[name].size) if pooled else observed[whose].values
        names = list(dict.fromkeys(map(str, owner)))
        position = {client: number for number, client in enumerate(names)}
        codes = np.array([position[str(client)] for client in owner])
        order = np.argsort(codes, kind="stable")
        outcomes = _Outcomes(codes[order], observed[name].values[order].astype(float))
        drawn = predicted[name].values.reshape(-1, len(order))[:, order]
        if "classes" in predicted[name].attrs:
            right = outcomes.mean(drawn == outcomes.seen)
            yield _by_client(f"share of {name} that is predicted right", names, right)
            continue
        yield _check(f"mean of {name}", names, outcomes.mean(outcomes.seen), outcomes.mean(drawn))
        if outcomes.vary:
            yield _check(f"sd of {name}", names, outcomes.sd(outcomes.seen), outcomes.sd(drawn))


class _Outcomes:
    """Outcomes, sorted by client."""

    def __init__(self, codes: np.ndarray, seen: np.ndarray) -> None:
        self.seen = seen
        self._counts = np.bincount(codes).astype(float)
        self._starts = np.searchsorted(codes, np.arange(len(self._counts)))

    @property
    def vary(self) -> bool:
        """True if sds are of interest: outcomes are not binary, and every client has three of them."""
        return bool(len(np.unique(self.seen)) > 2 and (self._counts > 2).all())

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of each client's values, the last dim of which is the rows."""
        return np.add.reduceat(values, self._starts, axis=-1, dtype=float) / self._counts

    def sd(self, values: np.ndarray) -> np.ndarray:
        """Return the standard deviation of each client's values."""
        squares = self.mean(np.square(values, dtype=float))
        return np.sqrt(np.maximum(squares - self.mean(values) ** 2, 0.0))


def _check(label: str, names: list[str], seen: np.ndarray, drawn: np.ndarray) -> ByClient:
    tail = (drawn > seen).mean(0) + (drawn == seen).mean(0) / 2
    return _by_client(label, names, drawn, observed=seen, tail=tail)
