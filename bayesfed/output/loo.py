"""Leave-one-out cross-validation with draws from q in place of draws from the posterior.

    elpd_i = log Σ_s r_is p(y_i | θ_s, w_s) / Σ_s r_is,   r_is = p(θ_s, w_s, D) / q(θ_s, w_s) / p(y_i | θ_s, w_s)

with the weights r_is smoothed by a generalised Pareto distribution (Magnusson, Riis Andersen, Jonasson & Vehtari 2019,
*Bayesian leave-one-out cross-validation for large data*). ``az.loo`` leaves out p / q, as it expects draws from the
posterior. It is right, as far as θ is concerned, for a corrected posterior (:mod:`bayesfed.output.correction`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from bayesfed.data.plural import plural

if TYPE_CHECKING:
    import arviz as az
    import xarray as xr


def loo(idata: az.InferenceData | xr.DataTree, var_name: str | None = None) -> az.ELPDData:
    """Compute PSIS-LOO corrected for q, pointwise, in the form that ``az.compare`` and ``az.plot_khat`` accept.

    Under ArviZ 1.x it is ``az.loo_approximate_posterior``, under 0.2x the same formula. For a corrected posterior,
    whose draws of θ are from importance sampling and not from q, it is ``az.loo``.

    Args:
        idata: the result of :meth:`Posterior.to_arviz`, also read from a file.
        var_name: name of the observed site, if there are several.

    Raises:
        ValueError: the draws have no density q, as with point estimates, particles and private runs; or there are no
            log likelihoods.

    Warns:
        UserWarning: Pareto k is above ArviZ's ``good_k`` for some rows; it names the clients with most of them. If it
            is for most rows, q is too far from the posterior to be corrected.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.varying_intercept, datasets.grunfeld(), bf.PVI(), rounds=30)
        >>> round(bf.loo(posterior.to_arviz()).n_data_points)
        220
    """
    if "log_likelihood" not in idata:
        raise ValueError(
            "leave-one-out needs the log likelihoods of rows: use posterior.to_arviz() of a posterior that was loaded "
            "with its rows, bf.Posterior.load(path, model, federation)"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Estimated shape parameter")  # names no client
        found = _elpd(idata, var_name)
    return _with_clients(found, idata)


def elpd_of_draws(groups: Mapping[str, xr.Dataset]) -> tuple[np.ndarray, np.ndarray]:
    """Return PSIS-LOO and Pareto k of each observation, ``(n,)``, without warnings.

    Args:
        groups: of :func:`bayesfed.output.inference_data.to_arviz`, ``log_likelihood`` of a single site and, unless its
            attribute ``corrected`` says that draws are from the posterior, ``sample_stats``.
    """
    from bayesfed.output.arviz_compat import OLD, product

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Estimated shape parameter")
        found = _elpd(product(groups), None)
    elpd = found["loo_i"] if OLD else found["elpd_i"]
    return elpd.values, found["pareto_k"].values


def _elpd(idata: az.InferenceData | xr.DataTree, var_name: str | None) -> az.ELPDData:
    """Compute PSIS-LOO corrected for q by ArviZ's functions."""
    from bayesfed.output.arviz_compat import OLD, az, dataset

    attrs = dataset(idata, "log_likelihood").attrs  # draws of large variables may not be in a file
    if "corrected" in attrs:
        return az.loo(idata, pointwise=True, var_name=var_name, reff=1.0)
    if "sample_stats" not in idata:
        algorithm = attrs.get("algorithm", "q")
        raise ValueError(
            f"the draws have no log_q, which the correction needs ({algorithm}: point estimates and particles have no "
            "density, and it is not kept for private runs): use az.loo, which takes them as draws from the posterior"
        )
    stats = dataset(idata, "sample_stats")
    log_p, log_q = stats["log_p"], stats["log_q"]
    if not OLD:
        corrected = az.loo_approximate_posterior  # type: ignore[attr-defined]
        return corrected(idata, log_p, log_q, pointwise=True, var_name=var_name)
    found = az.loo(idata, pointwise=True, var_name=var_name, reff=1.0)
    name = next(iter(idata["log_likelihood"])) if var_name is None else var_name
    log_lik = idata["log_likelihood"][name].astype(float)
    sample = {"__sample__": ("chain", "draw")}
    log_weights, k = az.psislw((log_p - log_q - log_lik).stack(sample).transpose(..., "__sample__"))
    elpd = (log_weights + log_lik.stack(sample)).reduce(np.logaddexp.reduce, "__sample__")
    found["p_loo"] += found["elpd_loo"] - float(elpd.sum())
    found["elpd_loo"] = float(elpd.sum())
    found["se"] = float(elpd.size * elpd.var()) ** 0.5
    found["loo_i"], found["pareto_k"] = elpd.rename("loo_i"), k
    found["warning"] = bool((k > found["good_k"]).any())
    return found


def _with_clients(found: az.ELPDData, idata: az.InferenceData | xr.DataTree) -> az.ELPDData:
    """Add each observation's client as a coordinate, and warn of those with a heavy tail of importance weights."""
    (dim,) = found["pareto_k"].dims
    name = "client" if dim == "client" else f"{dim}_client"
    for part in ("pareto_k", "loo_i", "elpd_i"):
        if dim != "client" and hasattr(found, part):
            found[part] = found[part].assign_coords({name: idata["observed_data"][name]})
    k = found["pareto_k"]
    bad = (k > found["good_k"]).values
    if bad.any():
        counts = Counter(k[name].values[bad].tolist())
        most = ", ".join(f"{client!r} {count}" for client, count in counts.most_common(3))
        warnings.warn(
            f"Pareto k is above {found['good_k']:.2f} for {bad.sum()} of {plural(k.size, 'observation')}, "
            f"of {plural(len(counts), 'client')} (most of {most}): their predictions without themselves are not "
            "reliable. See bayesfed.loo",
            stacklevel=3,
        )
    return found
