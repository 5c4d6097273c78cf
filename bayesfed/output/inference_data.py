"""A posterior as ArviZ has it: named dims, the clients' names as coordinates."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from pyro import poutine
from torch import Tensor

from bayesfed.elbo import handlers, noise
from bayesfed.elbo.sites import Site
from bayesfed.output.arviz_compat import az, product
from bayesfed.output.dependent_rows import NotGaussian
from bayesfed.output.draws import Draws, chunks, key_of, log_densities, params_of, replayed
from bayesfed.output.khat import has_density
from bayesfed.output.mixture import by_row

if TYPE_CHECKING:
    from bayesfed.output.posterior import Posterior

Dims = tuple[str, ...]
Arrays = dict[str, tuple[Dims, np.ndarray]]


def to_arviz(
    posterior: Posterior, num_samples: int = 1000, *, seed: int = 0
) -> az.InferenceData | xr.DataTree:
    """Posterior, prior, predictions, log-likelihoods, densities, data and the run's history.

    The draws are independent, and so are one chain: ``r_hat``, which compares chains, is NaN, and would say nothing of
    how far q is from the posterior. That the attribute ``khat`` does, and ``caveat`` in words.

    Args:
        posterior: a fitted posterior.
        num_samples: draws of everything.
        seed: of the draws.

    Returns:
        An ``arviz.InferenceData``, under ArviZ 1.x an ``xarray.DataTree``, of the groups

        - ``posterior`` (with what the model derives, but without its working variables, which it calls ``_name``),
          ``posterior_predictive``, ``log_likelihood``;
        - ``sample_stats``: ``log_p`` and ``log_q`` of each draw, log p(D, θ, w) and log q(θ, w), where the draws are
          those of a density: not of points, particles, or draws that were weighed (the attribute ``corrected``);
        - ``prior``, ``prior_predictive``: draws of the model, with its parameters as they were fitted;
        - ``params``: the model's ``pyro.param``, constrained. They have no draws, so no table shows them as certain;
        - ``observed_data``, ``constant_data``, ``history`` (per round).

        Dims are ``chain``, ``draw``, ``client``, ``observation`` (with the coordinate ``observation_client``),
        ``round`` and ``<site>_dim_<j>``. Where outcomes of a site are missing, those that are there have the dim
        ``<site>_observed``, in all groups, and the others are in ``predictions``, dim ``<site>_missing``. Of a
        Gaussian process the log-likelihoods are those of all rows of a client together; where these cannot be
        conditioned on there are no predictions.

    Warns:
        UserWarning: the model's observed sites cannot be drawn at some draw from the prior.
    """
    program, federation = posterior.program, posterior.federation
    latent = {site.name: ("client",) if site.local else () for site in _latent(posterior)}
    rows = [site.name for site in program.observed if site.per_row or site.joint]
    weighed: dict[str, Dims] = {
        s.name: ("observation",) if s.per_row else ("client",) for s in program.likelihood
    }
    seen = {**weighed, **dict.fromkeys(rows, ("observation",))}
    observed, params = _data(posterior)
    covariates = {
        name: _labelled(name, value, ("observation",))
        for name, value in ((name, federation[name]) for name in federation.fields)
        if not any(_same(value, data) for data in observed.values())
    }
    likelihood = posterior.log_likelihood(None, num_samples, seed=seed)
    with noise.seeded(seed):
        prior = _prior(posterior, num_samples)
        imagined = _prior_predictive(posterior, prior, num_samples)
    try:
        predicted = posterior.predict(None, num_samples, seed=seed)
    except NotGaussian:
        predicted = {}
    missing: dict[str, Tensor] = {}
    axes = {"observation": np.arange(federation.rows)}
    for name in rows:
        gone = observed[name].isnan().reshape(federation.rows, -1).all(1)
        if not gone.any():
            continue
        there, not_there = f"{name}_observed", f"{name}_missing"
        axes |= {
            dim: which.nonzero()[:, 0].cpu().numpy()
            for dim, which in ((there, ~gone), (not_there, gone))
        }
        if weighed[name] == ("observation",):
            weighed[name], likelihood[name] = (there,), likelihood[name][:, ~gone]
        if name in predicted:
            missing[name] = predicted[name][:, gone]
        seen[name], observed[name] = (there,), observed[name][~gone]
        for values in (predicted, imagined):
            if name in values:
                values[name] = values[name][:, ~gone]

    def draws(values: Mapping[str, Tensor], inner: Mapping[str, Dims]) -> Arrays:
        return {
            name: _labelled(name, value[None], ("chain", "draw", *inner[name]))
            for name, value in values.items()
        }

    derived = posterior.derived(None, num_samples, seed=seed) if program.derived else {}
    groups: dict[str, Arrays] = {
        "posterior": draws(
            _public(posterior.sample(num_samples, seed=seed)) | derived,
            latent | dict(program.derived),
        ),
        "posterior_predictive": draws(predicted, seen),
        "predictions": draws(missing, {name: (f"{name}_missing",) for name in missing}),
        "log_likelihood": draws(likelihood, weighed),
        "sample_stats": draws(_densities(posterior, num_samples, seed), {"log_p": (), "log_q": ()}),
        "prior": draws(_public(prior), latent),
        "prior_predictive": draws(imagined, seen),
        "observed_data": {n: _labelled(n, v, seen[n]) for n, v in observed.items()},
        "constant_data": covariates,
        "params": params,
        "history": {n: _labelled(n, v, ("round",)) for n, v in posterior.history.items()},
    }
    return product(
        {name: _dataset(arrays, axes, posterior) for name, arrays in groups.items() if arrays}
    )


def _public(draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what the program keeps for itself, ``_name``."""
    return {name: value for name, value in draws.items() if not name.startswith("_")}


def _labelled(name: str, value: Tensor, dims: Dims) -> tuple[Dims, np.ndarray]:
    extra = tuple(f"{name}_dim_{j}" for j in range(value.ndim - len(dims)))
    return (*dims, *extra), value.detach().cpu().numpy()


def _dataset(arrays: Arrays, axes: Mapping[str, np.ndarray], posterior: Posterior) -> xr.Dataset:
    """Arrays with their coordinates; ``axes`` has those dims that are rows, with the rows' numbers."""
    federation = posterior.federation
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
        coords[f"{dim}_client"] = (dim, np.array(federation.names)[owner])
    attrs = {
        "inference_library": "bayesfed",
        "algorithm": str(posterior.algorithm),
        "seed": posterior.seed,
    }
    if posterior.epsilon is not None:
        attrs["epsilon"] = posterior.epsilon
    if posterior.khat is not None:
        attrs["khat"] = posterior.khat
    if posterior.correction is not None:
        attrs["corrected"] = "draws of θ that all clients have weighed stand for q(θ)"
    if posterior.caveat:
        attrs["caveat"] = posterior.caveat
    return xr.Dataset(dict(arrays), coords=coords, attrs=attrs)


def _latent(posterior: Posterior) -> list[Site]:
    return [*posterior.program.globals, *posterior.program.locals]


def _data(posterior: Posterior) -> tuple[dict[str, Tensor], Arrays]:
    """What the model says of itself, run on all rows.

    Returns:
        The data that the observed sites condition on, flat: site name to ``(rows, *event)``, NaN where missing.
        And its ``pyro.param``, constrained.
    """
    program, federation = posterior.program, posterior.federation
    found: dict[str, list[Tensor]] = {site.name: [] for site in program.observed}
    common: dict[str, Tensor] = {}
    own: dict[str, list[Tensor]] = {}
    for chunk in program.chunks(federation):
        batch = federation.batch(chunk)
        given = handlers.given(batch.device, params_of(posterior, chunk), {})
        with torch.no_grad(), given as parameters:
            nodes = poutine.trace(program.model).get_trace(batch).nodes
        for name, param in parameters.seen.items():
            if name in posterior.local_params:
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
        {name: _labelled(name, value, ()) for name, value in common.items()}
        | {name: _labelled(name, value, ("client",)) for name, value in local.items()},
    )


def _same(value: Tensor, data: Tensor) -> bool:
    if value.shape != data.shape:
        return False
    return bool(((value == data) | (value.isnan() & data.isnan())).all())


def _densities(posterior: Posterior, num_samples: int, seed: int) -> dict[str, Tensor]:
    """log p(D, θ, w) and log q(θ, w) of the draws, where there are such."""
    if posterior.correction is not None or not has_density(posterior):
        return {}
    log_p, log_q = log_densities(posterior, num_samples, key_of(posterior, seed))
    return {"log_p": log_p, "log_q": log_q}


def _prior(posterior: Posterior, num_samples: int) -> dict[str, Tensor]:
    """Draws of the latent sites from the model alone, some clients at a time."""
    program, federation = posterior.program, posterior.federation
    common: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {site.name: [] for site in program.locals}
    latent = _latent(posterior)
    with torch.no_grad():
        for chunk in chunks(posterior, num_samples):
            head = federation.batch(chunk, torch.zeros(len(chunk), 1, dtype=torch.int64))
            params = params_of(posterior, chunk)
            given = {name: value[:, None, None] for name, value in common.items()}
            with (
                handlers.given(head.device, params, values=given, draws=num_samples),
                poutine.trace() as tracer,
                handlers.Until([site.name for site in latent]),
            ):
                program.model(head)
            for site in latent:
                shape = (num_samples, len(chunk) if site.local else 1, 1, *site.event_shape)
                value = tracer.trace.nodes[site.name]["value"].expand(shape).squeeze(2)
                if site.local:
                    parts[site.name].append(value)
                else:
                    common[site.name] = value.squeeze(1)
    return common | {name: torch.cat(values, 1) for name, values in parts.items()}


def _prior_predictive(
    posterior: Posterior, prior: Mapping[str, Tensor], num_samples: int
) -> dict[str, Tensor]:
    """Draws of the observed sites at draws from the prior: ``(S, rows, *event)``, ``(S, N, *event)`` of clients."""
    program, federation = posterior.program, posterior.federation
    model = poutine.uncondition(program.model)
    parts: dict[str, list[Tensor]] = {site.name: [] for site in program.observed}
    try:
        for chunk in chunks(posterior, num_samples, federation):
            batch = federation.batch(chunk)
            values = {
                site.name: prior[site.name][:, chunk if site.local else None, None]
                for site in _latent(posterior)
            }
            some = Draws(values, num_samples)
            nodes = replayed(posterior, model, some, chunk, batch, prior=True)
            for site in program.observed:
                value = nodes[site.name]["value"]
                if site.joint:
                    value = value.squeeze(2).expand(num_samples, *batch.mask.shape)
                    parts[site.name].append(value[:, batch.mask])
                else:
                    parts[site.name].append(by_row(value, site, batch, num_samples))
    except (RuntimeError, ValueError) as error:
        warnings.warn(
            f"there is no prior_predictive, as at some draw from the prior: {error}", stacklevel=4
        )
        return {}
    return {name: torch.cat(values, 1) for name, values in parts.items()}
