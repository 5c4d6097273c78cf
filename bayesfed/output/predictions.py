"""Draws, predictions and log likelihoods of a posterior, by site of the model."""

from __future__ import annotations

from collections.abc import Mapping

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.absent import RowsAbsent, are_absent
from bayesfed.data.federation import Federation
from bayesfed.data.moments import is_of_moments, rows_at_hand
from bayesfed.elbo import noise
from bayesfed.output import dependent_rows
from bayesfed.output.draws import (
    derive,
    discrete_log_joint,
    equal_draws,
    flatten_rows,
    run_model,
    weighted_draws,
)
from bayesfed.output.fitted import Fitted
from bayesfed.output.without_rows import derive_globals, sample_globals
from bayesfed.vmap.mixtures import ClientMixture


def sample(
    fitted: Fitted, num_samples: int, seed: int, *, centre: bool = False
) -> dict[str, Tensor]:
    """Draw every latent site, see :meth:`bayesfed.Posterior.sample`."""
    if are_absent(fitted.federation.sufficient.fields):
        return sample_globals(fitted, num_samples, seed, centre=centre)
    parts: dict[str, list[Tensor]] = {}
    for _, draws in equal_draws(fitted, num_samples, seed, centre=centre):
        for name, value in draws.values.items():
            parts.setdefault(name, []).append(value.squeeze(2))
    return {
        name: torch.cat(values, 1)
        if fitted.program.sites[name].local
        else values[0].squeeze(1).clone()
        for name, values in parts.items()
    }


def predict(
    fitted: Fitted, federation: Federation, num_samples: int, seed: int
) -> dict[str, Tensor]:
    """Draw from the posterior predictive, see :meth:`bayesfed.Posterior.predict`."""
    program = fitted.program
    few, model = fitted.select(federation.names), poutine.uncondition(program.model)
    with noise.seeded(seed):
        if program.joint:
            (site,) = program.observed
            return {site.name: dependent_rows.predict(few, federation, num_samples, seed)}
        make_draws = weighted_draws if program.weights_draws else equal_draws
        parts: dict[str, list[Tensor]] = {site.name: [] for site in program.observed}
        for chunk, draws in make_draws(few, num_samples, seed, federation):
            batch = federation.batch(chunk)
            if program.weights_draws:
                keys = noise.fold(few.key(seed, "predict"), few.federation.stream_ids[chunk])
                draws = draws.resample(1, num_samples, keys)
            nodes = run_model(few, model, draws, chunk, batch)
            for site in program.observed:
                value = nodes[site.name]["value"]
                parts[site.name].append(flatten_rows(value, site, batch, num_samples))
    return {name: torch.cat(values, 1) for name, values in parts.items()}


def log_likelihood(
    fitted: Fitted, federation: Federation, num_samples: int, seed: int
) -> dict[str, Tensor]:
    """Compute log p(observation | draw), see :meth:`bayesfed.Posterior.log_likelihood`."""
    few, program = fitted.select(federation.names), fitted.program
    parts: dict[str, list[Tensor]] = {site.name: [] for site in program.likelihood}
    for chunk, draws in equal_draws(few, num_samples, seed, federation):
        batch = federation.batch(chunk)
        own = federation is fitted.federation
        nodes = run_model(few, program.model, draws, chunk, batch, left_out=own)
        for site in program.likelihood:
            if not nodes[site.name]["is_observed"]:
                raise ValueError(
                    f"log_likelihood: the rows have no outcomes of site {site.name!r}: give the field that the model "
                    "reads for it"
                )
            fn, value = nodes[site.name]["fn"], nodes[site.name]["value"]
            leave_out = isinstance(fn, ClientMixture) and own
            log_prob = fn.left_out(value) if leave_out else fn.log_prob(value)
            if site.per_row:  # what is masked has no part in the posterior: 0, or NaN if missing
                mask, outside = nodes[site.name]["mask"], torch.nan if federation.gaps else 0.0
                log_prob = log_prob.where(torch.as_tensor(mask, device=log_prob.device), outside)
            parts[site.name].append(flatten_rows(log_prob, site, batch, num_samples))
    return {name: torch.cat(values, 1) for name, values in parts.items()}


def derived(
    fitted: Fitted, federation: Federation, num_samples: int, seed: int
) -> dict[str, Tensor]:
    """Compute the model's ``pyro.deterministic`` sites, see :meth:`bayesfed.Posterior.derived`."""
    if are_absent(federation.sufficient.fields):
        drawn = sample_globals(fitted, num_samples, seed, centre=False)
        return derive_globals(fitted, drawn, num_samples)
    few, rows = fitted.select(federation.names), rows_at_hand(federation)
    dims = fitted.program.derived
    if is_of_moments(federation):  # those of the rows are left out
        dims = {name: found for name, found in dims.items() if "observation" not in found}
    parts: dict[str, list[Tensor]] = {name: [] for name in dims}
    read = (rows,) if _derives_from_rows(few, rows, dims) else ()
    if read and is_of_moments(federation):
        raise RowsAbsent
    for chunk, draws in equal_draws(few, num_samples, seed, *read):
        batch = federation.batch(chunk, None if read else _first_rows(chunk))
        for name, found in derive(few, draws, chunk, batch).items():
            if name not in dims:
                continue
            if found.local:
                parts[name].append(flatten_rows(found.value, found, batch, draws.count))
            elif not parts[name]:
                shape = (draws.count, *found.value.shape[3:])
                parts[name].append(found.value[:, 0, 0].expand(shape))
    return {name: torch.cat(values, min(1, values[0].ndim - 1)) for name, values in parts.items()}


def _derives_from_rows(
    fitted: Fitted, federation: Federation, names: Mapping[str, tuple[str, ...]]
) -> bool:
    """Return whether a derived value is one of rows, or differs between all rows of a client and its first."""
    if any("observation" in dims for dims in names.values()):
        return True
    name = federation.names[int(federation.lengths.argmax())]
    one, rows = fitted.select([name]), federation.select([name])
    for chunk, draws in equal_draws(one, 1, 0, rows, centre=True):
        both = [derive(one, draws, chunk, rows.batch(chunk, r)) for r in (None, _first_rows(chunk))]
        whole, first = ([found[name].value for name in names] for found in both)
        if not all(torch.equal(*pair) for pair in zip(whole, first, strict=True)):
            return True
    return False


def _first_rows(chunk: Tensor) -> Tensor:
    return torch.zeros(len(chunk), 1, dtype=torch.int64)


def probabilities(
    fitted: Fitted, federation: Federation, num_samples: int, seed: int, *, centre: bool = False
) -> dict[str, Tensor]:
    """Compute class probabilities of every row, see :meth:`bayesfed.Posterior.probabilities`."""
    few, program = fitted.select(federation.names), fitted.program
    parts: dict[str, list[Tensor]] = {site.name: [] for site in program.observed}
    if program.joint:
        (site,) = program.observed
        for _, draws, batch, params in dependent_rows.predictive(
            few, federation, num_samples, seed
        ):
            if "probs" not in params:
                raise ValueError(f"site {site.name!r} is multivariate Normal: no classes")
            weight = draws.normalised_log_weights(len(batch)).exp().to(batch.scale)[..., None, None]
            parts[site.name].append((weight * params["probs"]).sum(0)[batch.mask])
        return {name: torch.cat(values) for name, values in parts.items()}
    found = (
        equal_draws(few, 1, seed, federation, centre=True)
        if centre
        else weighted_draws(few, num_samples, seed, federation)
    )
    for chunk, draws in found:
        batch = federation.batch(chunk)
        nodes = run_model(few, program.model, draws, chunk, batch)
        weight = draws.normalised_log_weights(len(batch)).exp().to(batch.scale)[..., None, None]
        for site in program.observed:
            fn = nodes[site.name]["fn"]
            fn = fn.base_dist if isinstance(fn, dist.MaskedDistribution) else fn
            if not fn.has_enumerate_support or fn.event_shape:
                raise ValueError(f"site {site.name!r} is {type(fn).__name__}: no classes")
            log_probs = fn.log_prob(fn.enumerate_support(expand=False)).movedim(0, -1)
            probs = (weight * log_probs.exp()).sum(0, keepdim=True)
            parts[site.name].append(flatten_rows(probs, site, batch, 1)[0])
    return {name: torch.cat(values) for name, values in parts.items()}


def discrete_probabilities(fitted: Fitted, num_samples: int, seed: int) -> dict[str, Tensor]:
    """Compute probabilities of the clients' discrete variables, see :meth:`bayesfed.Posterior.kinds`."""
    parts: dict[str, list[Tensor]] = {name: [] for name in fitted.program.kinds}
    for chunk, draws in equal_draws(fitted, num_samples, seed) if parts else ():
        log_p, sizes = discrete_log_joint(fitted, draws, chunk)
        grid = log_p.squeeze(2).softmax(-1).mean(0).unflatten(-1, tuple(sizes.values()))
        for axis, found in enumerate(parts.values(), 1):
            others = [a for a in range(1, grid.ndim) if a != axis]
            found.append(grid.sum(others) if others else grid)
    return {name: torch.cat(values) for name, values in parts.items()}
