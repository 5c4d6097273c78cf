"""Leave-one-out of draws from q, which are no draws from the posterior.

    elpd_i = log Σ_s r_is p(y_i | θ_s, w_s) / Σ_s r_is,   r_is = p(θ_s, w_s, D) / q(θ_s, w_s) / p(y_i | θ_s, w_s)

with the weights r_is smoothed by Pareto's law (Magnusson, Riis Andersen, Jonasson & Vehtari 2019, *Bayesian
leave-one-out cross-validation for large data*). ``az.loo`` leaves out p / q: it takes draws for the posterior's.
So they are, as far as θ goes, where all clients have weighed them (:mod:`bayesfed.output.correction`).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import arviz as az
    import xarray as xr


def loo(idata: az.InferenceData | xr.DataTree, var_name: str | None = None) -> az.ELPDData:
    """PSIS-LOO corrected for q, pointwise; ``az.compare`` and ``az.plot_khat`` take it as they take ``az.loo``'s.

    Under ArviZ 1.x it is ``az.loo_approximate_posterior``, under 0.2x the same formula. Of a posterior whose draws of θ
    were weighed as the fit ended it is ``az.loo``: they are no longer q's.

    Args:
        idata: what :meth:`Posterior.to_arviz` gave, also out of a file.
        var_name: which observed site, where there are several.

    Raises:
        ValueError: the draws have no density q: points and particles, and private runs.

    Warns:
        UserWarning: Pareto's k is above ArviZ's ``good_k`` for some rows; where that is so for most, q is too far
            from the posterior to be corrected.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> posterior = bf.fit(models.varying_intercept, datasets.grunfeld(), bf.PVI(), rounds=30)
        >>> round(bf.loo(posterior.to_arviz()).n_data_points)
        220
    """
    from bayesfed.output.arviz_compat import OLD, az, dataset

    attrs = dataset(idata, "posterior").attrs
    if "corrected" in attrs:
        return az.loo(idata, pointwise=True, var_name=var_name)
    if "sample_stats" not in idata:
        algorithm = attrs.get("algorithm", "q")
        raise ValueError(
            f"the draws have no log_q to be corrected by ({algorithm}: points and particles have no density, and of "
            "private runs it is not kept): az.loo takes them as they are"
        )
    stats = dataset(idata, "sample_stats")
    log_p, log_q = stats["log_p"], stats["log_q"]
    if not OLD:
        corrected = az.loo_approximate_posterior  # type: ignore[attr-defined]
        return corrected(idata, log_p, log_q, pointwise=True, var_name=var_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the k of what is not corrected
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
    if found["warning"]:
        warnings.warn(
            f"Estimated shape parameter of Pareto distribution is greater than {found['good_k']:.2f} for "
            f"{int((k > found['good_k']).sum())} of {k.size} observations: see bayesfed.loo",
            stacklevel=2,
        )
    return found
