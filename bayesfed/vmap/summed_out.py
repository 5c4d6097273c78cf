"""Checks of the variables that are summed or integrated out, and the number of nodes of their integrals.

A latent variable of a row, a discrete one of a client and a missing covariate can be summed or integrated out if some
outcome depends on them, and nothing else does.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo import handlers
from bayesfed.vmap import quadrature
from bayesfed.vmap.compare import densities, same
from bayesfed.vmap.mixtures import Mixture
from bayesfed.vmap.one_client import OneClient
from bayesfed.vmap.probe import Probe

DRAWS = 16
"""Draws of the prior at which integrals are compared."""


def sum_out(probe: Probe, gaps: bool) -> OneClient:
    """The program that sums or integrates out the variables that a probe has met.

    Args:
        probe: a run of the program.
        gaps: the data have missing values.

    Raises:
        ValueError: no outcome depends on a variable, or something depends on it that is not an outcome of the row or
            client.
    """
    marginalised, of_rows = probe.marginalised, probe.of_rows
    _check_needed(list(marginalised), probe.nodes)
    dependents = {name: _dependents(probe, name) for name in (*marginalised, *of_rows[:-1])}
    covariates = {name for name in of_rows if dependents.get(name)}
    for name in (*marginalised, *(covariates if gaps else ())):
        of_row = name in of_rows or marginalised[name].of_row
        outcomes = of_rows if of_row else probe.layouts
        _check_dependents(name, dependents[name].difference(outcomes), of_row)
    latent = frozenset(name for name, variable in marginalised.items() if variable.of_row)
    kinds = tuple(name for name in marginalised if name not in latent)
    program = replace(probe.program, latent=latent, kinds=kinds, covariates=frozenset(covariates))
    integrals = any(variable.values is None for variable in marginalised.values())
    if integrals or (covariates and gaps):
        return _with_enough_nodes(program, probe.batch, probe.params)
    return program


def _check_needed(names: Sequence[str], nodes: Mapping[str, Any]) -> None:
    """Fail on a variable that no outcome depends on: it may itself be an outcome whose field is missing."""
    needed = set()
    for node in nodes.values():
        if isinstance(node["fn"], Mixture):
            needed |= _variables_read(node["fn"], node["value"])
    for name in names:
        if name in needed:
            continue
        stem = name.removesuffix("_unobserved")
        if stem != name and f"{stem}_observed" in nodes:
            raise ValueError(
                f"site {stem!r} has obs_mask=. Leave it out, and mark what was not observed as missing: NaN in the "
                "outcome's field and missing='keep', or `with poutine.mask(mask=...)` around the site"
            )
        raise ValueError(
            f"no outcome depends on latent site {name!r}, which is to be summed or integrated out. If it is an "
            "outcome, its field is missing from the federation, so that obs.get(...) is None, or obs= is; else leave "
            "it out"
        )


def _variables_read(mixture: Mixture, value: Tensor) -> set[str]:
    """The variables of a mixture whose values the density depends on."""
    found, variables = set(), mixture.variables
    grid = mixture.each(value).unflatten(-1, tuple(variables.values()))
    for axis, name in enumerate(variables, -len(variables)):
        if not torch.equal(grid.amax(axis), grid.amin(axis)):
            found.add(name)
    parts = (part for part in mixture.components if isinstance(part, Mixture))
    return found.union(*(_variables_read(part, value) for part in parts))


def _dependents(probe: Probe, name: str) -> set[str]:
    """The sites and derived values that change when a site of a row, or a client's discrete one, changes its value."""
    before, after = densities(probe.nodes, first=True) | dict(probe.derived), {}
    with suppress(Exception):  # the value may be an index that is too large
        after = probe.changed_by(name)
    return {n for n, value in before.items() if n != name and not same({n: value}, after)}


def _check_dependents(name: str, others: Collection[str], of_row: bool) -> None:
    """Fail if anything but outcomes depends on a variable that is summed or integrated out."""
    for other in others:
        if not of_row:
            raise ValueError(
                f"{other!r} depends on site {name!r}, which is discrete, of a client, and summed out: it has no value "
                f"of which {other!r} could be made. Leave it out; posterior.kinds() gives each client's probabilities"
            )
        raise ValueError(
            f"{other!r} depends on site {name!r}, which is of a row and, where it has no data, summed or integrated "
            "out: only what is observed inside the observations plate may depend on it. Leave "
            f"{other!r} out, or move it there"
        )


def _with_enough_nodes(program: OneClient, batch: Batch, params: Mapping[str, Tensor]) -> OneClient:
    """Choose the number of nodes of integrals: the first that about twice as many hardly differ from.

    Warns:
        UserWarning: no number is enough, because the integrand is not smooth.
    """
    with handlers.given(batch.device, params, draws=DRAWS), poutine.trace() as tracer:
        program.run(batch)
    nodes = handlers.sample_sites(tracer.trace)
    values = {name: node["value"] for name, node in nodes.items() if not node["is_observed"]}
    before, (last, *more) = densities(nodes), quadrature.NODES
    for count in more:
        finer = replace(program, points=count)
        with handlers.given(batch.device, params, values=values, draws=DRAWS):
            now = densities(handlers.sample_sites(poutine.trace(finer).get_trace(batch)))
        differ = [_differing_draws(before[name], density) for name, density in now.items()]
        draws = torch.stack(differ).any(0)
        if not draws.any():
            return replace(program, points=last)
        before, last = now, count
    if draws.sum() > DRAWS // 4:
        warnings.warn(
            f"the integral over a row's own variable has not converged with {count} nodes: a clamp, a step or an "
            "absolute value in its outcome? Write something smooth, such as softplus, or compare with a fit without it",
            stacklevel=2,
        )
    return finer


def _differing_draws(one: Tensor, other: Tensor) -> Tensor:
    """The draws at which the log density of any row differs noticeably: bool ``(S,)``."""
    gap = (one - other).abs() > 1e-3 + 1e-4 * other.abs()
    return gap.expand(DRAWS, *gap.shape[1:]).flatten(1).any(1)
