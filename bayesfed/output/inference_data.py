"""A posterior as ArviZ data, with named dimensions and the clients' names as coordinates."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from pyro import poutine
from torch import Tensor
from torch.distributions.constraints import integer_interval

from bayesfed.data.absent import are_absent
from bayesfed.elbo import handlers, noise
from bayesfed.engine.progress import show_work
from bayesfed.output.dependent_rows import NotGaussian
from bayesfed.output.fitted import Fitted
from bayesfed.output.khat import DRAWS, affordable_draws, has_density, limit
from bayesfed.output.log_densities import log_densities
from bayesfed.output.outcomes import NoSampler
from bayesfed.output.predictions import derived, log_likelihood, predict, sample
from bayesfed.output.prior import derived_from_prior, log_prior, prior_predictive, sample_prior
from bayesfed.output.without_rows import (
    derive_globals,
    global_parameters,
    sample_global_prior,
)
from bayesfed.tracing.garbage import without_garbage_collection

if TYPE_CHECKING:
    import arviz as az

Dims = tuple[str, ...]
Arrays = dict[str, tuple[Dims, np.ndarray]]


def to_arviz(
    fitted: Fitted,
    num_samples: int = 1000,
    *,
    seed: int = 0,
    khat: float | None = None,
    caveat: str = "",
) -> az.InferenceData | xr.DataTree:
    """Return posterior, prior, predictions, log likelihoods, densities, data and the run's history for ArviZ.

    Draws of q, and of importance sampling, are independent and form one chain. ``r_hat``, which compares chains, is NaN
    then, and would not measure the distance of q from the posterior; the attributes ``khat`` and ``caveat`` do. Draws
    of chains, see :meth:`bayesfed.Posterior.with_chains`, are given chain by chain, evenly spaced.

    Args:
        fitted: a posterior.
        num_samples: number of draws; of chains in all, each as many, at least four.
        seed: seed of the draws.
        khat: Pareto k-hat of q, stored as an attribute if given.
        caveat: a warning about q, stored as an attribute if not empty.

    Returns:
        An ``arviz.InferenceData``, under ArviZ 1.x an ``xarray.DataTree``, of the groups

        - ``posterior`` (with the model's derived values, but without its auxiliary variables, whose names start with
          ``_``), ``posterior_predictive``, ``log_likelihood``;
        - ``sample_stats``: ``log_p`` and ``log_q`` of each draw, log p(D, θ, w) and log q(θ, w), if the draws have a
          density: not for point estimates, particles, or a corrected posterior (attribute ``corrected``);
        - ``log_prior``: the prior log density of each global variable, for ``az.psens``, if q(θ) has a density;
        - ``prior``, ``prior_predictive``: draws of the model, with its parameters as they were fitted, and the derived
          values outside the clients plate;
        - ``params``: the model's ``pyro.param``, constrained, in a group of their own since they have no draws (per
          chain);
        - ``observed_data``, ``constant_data``, ``history`` (per chain and round).

        All groups but the data have the dim ``chain``, so that ``az.concat(one, other, dim="chain")`` joins fits.

        Dims are ``chain``, ``draw``, ``client``, ``observation``, ``round`` and ``<site>_dim_<j>``, whose coordinates
        are the levels of a formula's factors. The data have the coordinate ``observation_client``. A slash in a name
        is replaced by a colon, since netCDF cannot store it. Predicted classes have the attribute ``classes``. If
        outcomes of a site are missing, those that are observed have the dim ``<site>_observed`` in all groups, and the
        others are in ``predictions``, dim ``<site>_missing``.
        Of a posterior that was loaded without rows there are the groups that need none, of the global variables.
        The log likelihoods of a Gaussian process are those of all rows of a client together; there are no predictions
        if the rows of a client are one event that is not multivariate Normal.

    Warns:
        UserWarning: the model's observed sites have no sampler, or cannot be drawn at some draw from the prior.
    """
    with without_garbage_collection():
        from bayesfed.output.arviz_compat import product  # ArviZ takes a second to import

    with show_work("draws, predictions and densities"):
        return product(data_groups(fitted, num_samples, seed=seed, khat=khat, caveat=caveat))


def data_groups(
    fitted: Fitted, num_samples: int, *, seed: int = 0, khat: float | None, caveat: str
) -> dict[str, xr.Dataset]:
    """Return the groups of :func:`to_arviz` by name, but for those that are empty."""
    program, federation = fitted.program, fitted.federation
    chains = 1 if fitted.correction is None else fitted.correction.chains
    if chains > 1:
        num_samples = chains * max(4, num_samples // chains)
    if are_absent(federation.fields):
        return _global_groups(fitted, num_samples, chains, seed, attributes(fitted, khat, caveat))
    latent = {site.name: ("client",) if site.local else () for site in program.latent}
    rows = [site.name for site in program.observed if site.per_row or site.joint]
    likelihood_dims: dict[str, Dims] = {
        s.name: ("observation",) if s.per_row else ("client",) for s in program.likelihood
    }
    data_dims = {**likelihood_dims, **dict.fromkeys(rows, ("observation",))}
    observed, params = find_data(fitted)
    covariates = {
        name: _labelled(name, value, ("observation",))
        for name, value in ((name, federation[name]) for name in federation.fields)
        if not any(_same(value, data) for data in observed.values())
    }
    likelihood = log_likelihood(fitted, federation, num_samples, seed)
    with noise.seeded(seed):
        prior = sample_prior(fitted, num_samples)
        from_prior = prior_predictive(fitted, prior, num_samples)
        more_from_prior = derived_from_prior(fitted, prior, num_samples)
    try:
        predicted = predict(fitted, federation, num_samples, seed)
    except NotGaussian:
        predicted = {}
    except NoSampler as error:
        warnings.warn(str(error), stacklevel=4)
        predicted = {}
    missing: dict[str, Tensor] = {}
    axes = {"observation": np.arange(federation.rows)}
    for name in rows:
        absent = observed[name].isnan().reshape(federation.rows, -1).all(1)
        if not absent.any():
            continue
        present_dim, absent_dim = f"{name}_observed", f"{name}_missing"
        axes |= {
            dim: which.nonzero()[:, 0].cpu().numpy()
            for dim, which in ((present_dim, ~absent), (absent_dim, absent))
        }
        if likelihood_dims[name] == ("observation",):
            likelihood_dims[name] = (present_dim,)
            likelihood[name] = likelihood[name][:, ~absent]
        if name in predicted:
            missing[name] = predicted[name][:, absent]
        data_dims[name], observed[name] = (present_dim,), observed[name][~absent]
        for values in (predicted, from_prior):
            if name in values:
                values[name] = values[name][:, ~absent]

    def draws(values: Mapping[str, Tensor], inner: Mapping[str, Dims]) -> Arrays:
        return _by_chain(values, inner, chains)

    drawn = sample(fitted, num_samples, seed)
    random = program.globals and (fitted.correction is not None or has_density(fitted))
    priors = log_prior(fitted, drawn) if random else {}
    more = derived(fitted, federation, num_samples, seed) if program.derived else {}
    groups: dict[str, Arrays] = {
        "posterior": draws(_public(drawn) | more, latent | dict(program.derived)),
        "posterior_predictive": draws(predicted, data_dims),
        "predictions": draws(missing, {name: (f"{name}_missing",) for name in missing}),
        "log_likelihood": draws(likelihood, likelihood_dims),
        "log_prior": draws(priors, dict.fromkeys(priors, ())),
        "sample_stats": draws(_densities(fitted, num_samples, seed), {"log_p": (), "log_q": ()}),
        "prior": draws(_public(prior) | more_from_prior, latent | dict(program.derived)),
        "prior_predictive": draws(from_prior, data_dims),
        "observed_data": {n: _labelled(n, v, data_dims[n]) for n, v in observed.items()},
        "constant_data": covariates,
        "params": params,
        "history": {
            n: _labelled(n, v[None], ("chain", "round")) for n, v in fitted.history.items()
        },
    }
    attrs = attributes(fitted, khat, caveat)
    sets = {
        name: _dataset(arrays, axes, fitted, attrs, owners="data" in name or name == "predictions")
        for name, arrays in groups.items()
        if arrays
    }
    for site in program.observed:
        predictive = sets.get("posterior_predictive", xr.Dataset()).get(without_slashes(site.name))
        last = getattr(site.support, "upper_bound", None)
        if predictive is not None and isinstance(site.support, integer_interval):
            predictive.attrs |= {"classes": last + 1} if isinstance(last, int) else {}  # no counts
    return sets


def _global_groups(
    fitted: Fitted, num_samples: int, chains: int, seed: int, attrs: Mapping[str, Any]
) -> dict[str, xr.Dataset]:
    """Return the groups of a posterior without rows; the clients' variables are in it if their moments are here."""
    drawn = sample(fitted, num_samples, seed)
    more = derived(fitted, fitted.federation, num_samples, seed)
    with noise.seeded(seed):
        prior = sample_global_prior(fitted, num_samples)
    random = fitted.program.globals and (fitted.correction is not None or has_density(fitted))
    tensors = {
        "posterior": _public(drawn) | more,
        "log_prior": log_prior(fitted, drawn) if random else {},
        "prior": _public(prior) | derive_globals(fitted, prior, num_samples),
    }
    program = fitted.program
    local = {site.name for site in program.locals}
    local |= {name for name, found in program.derived.items() if "client" in found}
    groups = {
        name: _by_chain(values, {n: ("client",) * (n in local) for n in values}, chains)
        for name, values in tensors.items()
    }
    groups["params"] = {
        name: _labelled(name, value[None], ("chain",))
        for name, value in global_parameters(fitted).items()
    }
    groups["history"] = {
        name: _labelled(name, v[None], ("chain", "round")) for name, v in fitted.history.items()
    }
    return {
        name: _dataset(arrays, {}, fitted, attrs, owners=False)
        for name, arrays in groups.items()
        if arrays
    }


def _by_chain(values: Mapping[str, Tensor], inner: Mapping[str, Dims], chains: int) -> Arrays:
    """Split draws ``(S, *)``, of one chain after the other in turn, and name their dimensions."""
    return {
        name: _labelled(
            name, value.unflatten(0, (-1, chains)).transpose(0, 1), ("chain", "draw", *inner[name])
        )
        for name, value in values.items()
    }


def _public(draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the model's auxiliary variables, ``_name``."""
    return {name: value for name, value in draws.items() if not name.startswith("_")}


def _labelled(name: str, value: Tensor, dims: Dims) -> tuple[Dims, np.ndarray]:
    """Add names ``<name>_dim_<j>`` of the dimensions that have none."""
    extra = tuple(f"{name}_dim_{j}" for j in range(value.ndim - len(dims)))
    return (*dims, *extra), value.detach().cpu().numpy()


def attributes(fitted: Fitted, khat: float | None, caveat: str) -> dict[str, Any]:
    """Return the attributes of all groups."""
    attrs = {
        "inference_library": "bayesfed",
        "algorithm": str(fitted.algorithm),
        "seed": fitted.seed,
        "rounds": len(fitted.history["elbo"]),
    }
    if fitted.converged is not None:
        attrs["converged"] = int(fitted.converged)  # netCDF has no booleans
    if fitted.epsilon is not None:
        attrs["epsilon"] = fitted.epsilon
    if khat is not None:
        mended = fitted.correction
        affordable = min(DRAWS, affordable_draws(fitted, fitted.federation.rows))
        attrs |= {"khat": khat, "khat_limit": limit(affordable if mended is None else mended.count)}
    if fitted.correction is not None:
        chains = fitted.correction.chains > 1
        how = "Hamiltonian Monte Carlo" if chains else "importance sampling"
        attrs["corrected"] = f"draws of θ are by {how}, in place of draws from q(θ)"
        if chains:
            attrs |= {"chains_rhat": fitted.correction.rhat, "chains_ess": fitted.correction.ess}
    if caveat:
        attrs["caveat"] = caveat
    return attrs


def _dataset(
    arrays: Arrays,
    axes: Mapping[str, np.ndarray],
    fitted: Fitted,
    attrs: Mapping[str, Any],
    *,
    owners: bool,
) -> xr.Dataset:
    """Add coordinates to arrays; ``axes`` holds the row numbers of the dims that are rows, ``owners`` adds the clients.

    ArviZ's ``to_dataframe`` makes columns of every coordinate.
    """
    federation = fitted.federation
    used = {
        dim: size
        for dims, value in arrays.values()
        for dim, size in zip(dims, value.shape, strict=True)
    }
    coords: dict[str, Any] = {dim: np.arange(size) for dim, size in used.items()}
    if "round" in used:
        coords["round"] = np.arange(1, used["round"] + 1)
    if "client" in used:
        coords["client"] = np.array(federation.names)
    for dim in axes.keys() & used.keys():
        owner = federation.owner.cpu().numpy()[axes[dim]]
        coords[dim] = axes[dim]
        if owners:
            coords[f"{dim}_client"] = (dim, np.array(federation.names)[owner])
    named = getattr(fitted.program.model, "coords", {})
    coords |= {dim: named[dim] for dim in named.keys() & used.keys()}
    found = xr.Dataset(dict(arrays), coords=coords, attrs=attrs)
    return found.rename({name: without_slashes(name) for name in map(str, found.variables)})


def without_slashes(name: str) -> str:
    """Return a name that netCDF can store: it separates groups by slashes.

    Example:
        >>> from bayesfed.output.inference_data import without_slashes
        >>> without_slashes("I(visits / days)")
        'I(visits : days)'
    """
    return name.replace("/", ":")


def find_data(fitted: Fitted) -> tuple[dict[str, Tensor], Arrays]:
    """Run the model on all rows to find its data and its parameters.

    Returns:
        The data of the observed sites, flat: site name to ``(rows, *event)``, NaN where missing. And the model's
        ``pyro.param``, constrained.
    """
    program, federation = fitted.program, fitted.federation
    found: dict[str, list[Tensor]] = {site.name: [] for site in program.observed}
    common: dict[str, Tensor] = {}
    own: dict[str, list[Tensor]] = {}
    for chunk in program.chunks(federation):
        batch = federation.batch(chunk)
        given = handlers.given(batch.device, fitted.params_of(chunk), {})
        with torch.no_grad(), given as parameters:
            nodes = poutine.trace(program.model).get_trace(batch).nodes
        for name, param in parameters.seen.items():
            if name in fitted.local_params:
                own.setdefault(name, []).append(param["value"])
            else:
                common[name] = param["value"]
        for site in program.observed:
            value = nodes[site.name]["value"]
            if batch.gaps and site.per_row:
                there = nodes[site.name]["mask"].reshape(*value.shape[:2], *[1] * (value.ndim - 2))
                value = value.where(there, torch.nan)
            value = value if site.per_row else value.squeeze(1)
            rows = site.per_row or site.joint
            found[site.name].append(value[batch.mask] if rows else value)
    local = {name: torch.cat(values).squeeze(1) for name, values in own.items()}
    return (
        {name: torch.cat(parts) for name, parts in found.items()},
        {name: _labelled(name, value[None], ("chain",)) for name, value in common.items()}
        | {
            name: _labelled(name, value[None], ("chain", "client")) for name, value in local.items()
        },
    )


def _same(value: Tensor, data: Tensor) -> bool:
    """Return whether two tensors are equal, NaN counting as equal to NaN."""
    if value.shape != data.shape:
        return False
    return bool(((value == data) | (value.isnan() & data.isnan())).all())


def _densities(fitted: Fitted, num_samples: int, seed: int) -> dict[str, Tensor]:
    """Compute log p(D, θ, w) and log q(θ, w) of the draws, if they have densities."""
    if fitted.correction is not None or not has_density(fitted):
        return {}
    log_p, log_q = log_densities(fitted, num_samples, fitted.key(seed))
    return {"log_p": log_p, "log_q": log_q}
