"""A posterior as ArviZ's InferenceData: named dims, the clients' names as coordinates."""

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
from bayesfed.output.draws import chunks, params_of
from bayesfed.output.joint import NotGaussian

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ announces its refactoring once a day
    import arviz as az

if TYPE_CHECKING:
    from bayesfed.output.posterior import Posterior


def to_arviz(
    posterior: Posterior, num_samples: int = 1000, *, chains: int = 4, seed: int = 0
) -> az.InferenceData:
    """Posterior, prior, predictions, log-likelihoods, data and the run's history.

    Args:
        posterior: a fitted posterior.
        num_samples: draws in all, divided among the chains.
        chains: ArviZ's diagnostics want several. The draws are independent, so ``r_hat`` near 1 and full
            effective sample sizes say nothing about the fit of the guide.
        seed: of the draws.

    Returns:
        Groups ``posterior`` (with what the model derives, but without its working variables, which it calls ``_name``),
        ``posterior_predictive``, ``log_likelihood``, ``prior``, ``observed_data``, ``constant_data`` and ``history``
        (per round). Of a Gaussian process the log-likelihoods are those of all rows of a client together; where these
        cannot be conditioned on there are no predictions. Dims are ``chain``, ``draw``, ``client``, ``observation``
        (with the coordinate ``observation_client``), ``round`` and ``<site>_dim_<j>``.

    Raises:
        ValueError: ``num_samples`` is not a multiple of ``chains``.
    """
    if num_samples % chains:
        raise ValueError(f"num_samples ({num_samples}) must be a multiple of chains ({chains})")
    program, federation = posterior.program, posterior.federation
    local = {site.name for site in program.locals}
    weighed: dict[str, tuple[str, ...]] = {
        s.name: ("observation",) if s.per_row else ("client",) for s in program.likelihood
    }
    rows = {s.name: ("observation",) for s in program.observed if s.per_row or s.joint}
    seen = {**weighed, **rows}

    def draws(values: Mapping[str, Tensor], inner: Mapping[str, tuple[str, ...]]) -> xr.Dataset:
        arrays = {}
        for name, value in values.items():
            shaped = value.reshape(chains, -1, *value.shape[1:])
            arrays[name] = _labelled(name, shaped, ("chain", "draw", *inner[name]))
        return _dataset(arrays, posterior)

    latent: dict[str, tuple[str, ...]] = {
        site.name: ("client",) if site.name in local else ()
        for site in (*program.globals, *program.locals)
    }
    observed = _observed(posterior)
    covariates = {
        name: _labelled(name, value, ("observation",))
        for name, value in ((name, federation[name]) for name in federation.fields)
        if not any(value is data or _same(value, data) for data in observed.values())
    }
    likelihood = posterior.log_likelihood(None, num_samples, seed=seed)
    for name, value in likelihood.items():
        if federation.gaps and not value.isfinite().all():  # of the rows that have an outcome
            likelihood[name] = value[:, ~value[0].isnan()]
            weighed[name] = (f"{name}_observed",)
    try:
        predicted = posterior.predict(None, num_samples, seed=seed)
    except NotGaussian:
        predicted = {}
    groups = {
        "posterior": draws(
            _public(posterior.sample(num_samples, seed=seed))
            | (posterior.derived(None, num_samples, seed=seed) if program.derived else {}),
            {**latent, **program.derived},
        ),
        "posterior_predictive": draws(predicted, seen),
        "log_likelihood": draws(likelihood, weighed),
        "prior": draws(_public(_prior(posterior, num_samples, seed)), latent),
        "observed_data": _dataset(
            {n: _labelled(n, v, seen[n]) for n, v in observed.items()}, posterior
        ),
        "constant_data": _dataset(covariates, posterior),
        "history": _dataset(
            {n: _labelled(n, v, ("round",)) for n, v in posterior.history.items()}, posterior
        ),
    }
    return az.InferenceData(
        **{name: group for name, group in groups.items() if group.data_vars},
        warn_on_custom_groups=False,
    )


def _public(draws: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what the program keeps for itself, ``_name``."""
    return {name: value for name, value in draws.items() if not name.startswith("_")}


def _labelled(
    name: str, value: Tensor, dims: tuple[str, ...]
) -> tuple[tuple[str, ...], np.ndarray]:
    extra = tuple(f"{name}_dim_{j}" for j in range(value.ndim - len(dims)))
    return (*dims, *extra), value.detach().cpu().numpy()


def _dataset(
    arrays: Mapping[str, tuple[tuple[str, ...], np.ndarray]], posterior: Posterior
) -> xr.Dataset:
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
    if "observation" in used:
        owner = np.array(federation.names)[federation.owner.cpu().numpy()]
        coords["observation_client"] = ("observation", owner)
    attrs = {
        "inference_library": "bayesfed",
        "algorithm": type(posterior.algorithm).__name__,
        "seed": posterior.seed,
    }
    if posterior.epsilon is not None:
        attrs["epsilon"] = posterior.epsilon
    if posterior.khat is not None:
        attrs["khat"] = posterior.khat
    if posterior.caveat:
        attrs["caveat"] = posterior.caveat
    return xr.Dataset(dict(arrays), coords=coords, attrs=attrs)


def _observed(posterior: Posterior) -> dict[str, Tensor]:
    """The data that the observed sites condition on, flat: site name to ``(rows, *event)``."""
    program, federation = posterior.program, posterior.federation
    found: dict[str, list[Tensor]] = {site.name: [] for site in program.observed}
    for chunk in program.chunks(federation):
        batch = federation.batch(chunk)
        params = params_of(posterior, chunk)
        with torch.no_grad(), handlers.given(batch.device, params, {}):
            nodes = poutine.trace(program.model).get_trace(batch).nodes
        for site in program.observed:
            value = nodes[site.name]["value"]
            if batch.gaps and site.per_row:
                there = nodes[site.name]["mask"].reshape(*value.shape[:2], *[1] * (value.ndim - 2))
                value = value.where(there, torch.nan)
            value = value if site.per_row else value.squeeze(1)
            rows = site.per_row or site.joint
            found[site.name].append(value[batch.mask] if rows else value)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _same(value: Tensor, data: Tensor) -> bool:
    return value.shape == data.shape and bool((value == data).all())


def _prior(posterior: Posterior, num_samples: int, seed: int) -> dict[str, Tensor]:
    """Draws of the latent sites from the model alone, some clients at a time."""
    program, federation = posterior.program, posterior.federation
    common: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {site.name: [] for site in program.locals}
    names = [site.name for site in (*program.globals, *program.locals)]
    with torch.no_grad(), noise.seeded(seed):
        for chunk in chunks(posterior, num_samples):
            head = federation.batch(chunk, torch.zeros(len(chunk), 1, dtype=torch.int64))
            params = params_of(posterior, chunk)
            given = {name: value[:, None, None] for name, value in common.items()}
            with (
                handlers.given(head.device, params, values=given, draws=num_samples),
                poutine.trace() as tracer,
                handlers.Until(names),
            ):
                program.model(head)
            for site in (*program.globals, *program.locals):
                shape = (num_samples, len(chunk) if site.local else 1, 1, *site.event_shape)
                value = tracer.trace.nodes[site.name]["value"].expand(shape).squeeze(2)
                if site.local:
                    parts[site.name].append(value)
                else:
                    common[site.name] = value.squeeze(1)
    return common | {name: torch.cat(values, 1) for name, values in parts.items()}
