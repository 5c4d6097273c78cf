"""How a program is run for all clients and draws of a batch: as it is, where that is right, else under vmap.

A program written for one client and one draw is right under vmap (:mod:`bayesfed.vmap.one_client`). Many are so as well
with draws and clients as dimensions in front, which takes fewer operations: both are tried, at draws of the prior.
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
from torch.distributions import transform_to

from bayesfed.data.batch import OBSERVATIONS, Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import handlers, noise
from bayesfed.elbo.log_density import log_density
from bayesfed.elbo.mixtures import Mixture
from bayesfed.elbo.sites import NeedsOneClient, sites
from bayesfed.vmap import quadrature
from bayesfed.vmap.error_messages import explained
from bayesfed.vmap.one_client import OneClient

ROWS = 64
"""Rows of a client that are looked at."""
DRAWS = 2
PROBES = 16
"""Draws of the prior at which integrals are looked at."""


def for_batches(model: Model, federation: Federation) -> Model:
    """The model as it is to be run on batches.

    Raises:
        ValueError: it cannot be run (names the line and what to write instead); or, for all clients at once and without
            draws, it says something else than for each alone (names the site).

    Example:
        >>> import bayesfed as bf, pyro, pyro.distributions as dist
        >>> from bayesfed.vmap.choose import for_batches
        >>> def effects(federation, first=lambda effect: effect[..., 0]):
        ...     effect = pyro.sample("effect", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        ...     with federation.clients(), federation.observations() as obs:
        ...         pyro.sample("y", dist.Normal(first(effect), 1.0), obs=obs.get("y"))
        >>> data = bf.Federation.from_arrays({"a": {"y": [1.0, 3.0]}, "b": {"y": [2.0]}})
        >>> for_batches(effects, data) is effects
        True
        >>> type(for_batches(lambda f: effects(f, lambda effect: effect[0]), data)).__name__
        'OneClient'
    """
    one, batch = OneClient(model), federation.batch(*two(federation))
    with noise.seeded(0), torch.no_grad():
        try:
            with handlers.given(batch.device) as found:
                one.run(batch)
            params = _apart(found.seen, len(batch))
            with handlers.given(batch.device, params, draws=DRAWS), poutine.trace() as tracer:
                seen = one.run(batch)
        except Exception as error:
            return _as_it_is(model, federation, batch, error)
        nodes, layouts = handlers.sample_sites(tracer.trace), seen.layouts
        values = {name: node["value"] for name, node in nodes.items() if not node["is_observed"]}
        try:
            alone = _densities(nodes)
            with handlers.given(batch.device, params, values=values, draws=DRAWS):
                again = _densities(handlers.sample_sites(poutine.trace(one).get_trace(batch)))
        except Exception:  # of data, which others look at
            return model
        if not _equal(alone, again):  # it draws numbers of its own
            return model
        taken = seen.rows.taken
        _check_needed(list(taken), nodes)
        of_rows = [name for name in layouts if OBSERVATIONS in handlers.plates(nodes[name])]
        at = one, batch, params, values
        dependent = {name: _dependent(*at, name) for name in (*taken, *of_rows[:-1])}
        covariates = {name for name in of_rows if dependent.get(name)}
        for name in (*taken, *(covariates if federation.gaps else ())):
            of_row = name in of_rows or taken[name].of_row
            _check_of_rows(name, dependent[name] - set(of_rows if of_row else layouts), of_row)
        latent = frozenset(name for name, one_of in taken.items() if one_of.of_row)
        kinds = tuple(name for name in taken if name not in latent)
        continuous = [name for name in taken if taken[name].values is None]
        one = OneClient(model, latent, kinds, frozenset(covariates))
        if continuous or (covariates and federation.gaps):
            one = _fine_enough(one, batch, params)
        with suppress(Exception):
            with handlers.given(batch.device, params, values=values, draws=DRAWS):
                together = handlers.sample_sites(poutine.trace(model).get_trace(batch))
            if (
                not covariates
                and layouts.keys() == together.keys()
                and _alike(nodes, together)
                and _equal(alone, _densities(together))
            ):
                return model
        with handlers.given(batch.device, values=values, draws=DRAWS):
            alone = _densities(handlers.sample_sites(poutine.trace(one).get_trace(batch)), True)
        totals = []
        for draw in range(DRAWS):
            own = {name: layouts[name].pooled(value[draw]) for name, value in values.items()}
            own |= {name: v.layout.pooled(v.value[draw]) for name, v in taken.items()}
            try:
                with handlers.given(batch.device, values=own):
                    pooled = _densities(
                        handlers.sample_sites(poutine.trace(model).get_trace(batch))
                    )
            except Exception:
                return one  # it cannot be run on pooled data
            totals.append({name: float(density.sum()) for name, density in pooled.items()})
    for name, density in alone.items():
        width = len(batch) if layouts[name].local else density.shape[1]
        each = density.expand(DRAWS, width, -1).double().sum((1, 2))
        gap, expected = totals[0][name] - totals[1][name], float(each[0] - each[1])
        size = float(each.abs().max())
        if abs(gap - expected) > 1e-2 + 1e-5 * size + 1e-3 * abs(expected):
            raise ValueError(
                f"the log density of site {name!r} depends on which other clients are in the batch: run for two "
                "clients at once it is another than for each alone. Every client has its own entry at dim -2 and its "
                "rows at dim -1. Reduce over a dimension, value.sum(-1), not value.sum(); work out means over clients "
                "beforehand, and give priors constants"
            )
    return one


def _fine_enough(one: OneClient, batch: Batch, params: Mapping[str, Tensor]) -> OneClient:
    """The program with as many nodes of its integrals as about twice as many hardly differ from, at draws of the prior.

    Warns:
        UserWarning: there are not that many: what is integrated is not smooth.
    """
    with handlers.given(batch.device, params, draws=PROBES), poutine.trace() as tracer:
        one.run(batch)
    nodes = handlers.sample_sites(tracer.trace)
    values = {name: node["value"] for name, node in nodes.items() if not node["is_observed"]}
    before, (last, *more) = _densities(nodes), quadrature.NODES
    for count in more:
        finer = replace(one, points=count)
        with handlers.given(batch.device, params, values=values, draws=PROBES):
            nodes = handlers.sample_sites(poutine.trace(finer).get_trace(batch))
        now = _densities(nodes)
        off = torch.stack([_off(before[name], density) for name, density in now.items()]).any(0)
        if not off.any():
            return replace(one, points=last)
        before, last = now, count
    if off.sum() > PROBES // 4:
        warnings.warn(
            f"the integral over a row's own variable is not settled with {count} nodes: a clamp, a step or an absolute "
            "value in its outcome? Write something smooth, such as softplus, or compare with a fit without it",
            stacklevel=2,
        )
    return finer


def _off(one: Tensor, other: Tensor) -> Tensor:
    """At which draws log densities differ by more than a trifle for a row: ``(S,)``."""
    gap = (one - other).abs() > 1e-3 + 1e-4 * other.abs()
    return gap.expand(PROBES, *gap.shape[1:]).flatten(1).any(1)


def _dependent(
    one: OneClient,
    batch: Batch,
    params: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    name: str,
) -> set[str]:
    """The sites, and what ``pyro.deterministic`` names, that are others where a site of a row has another value."""

    def found(moved: str | None) -> dict[str, Tensor]:
        at = handlers.given(batch.device, params, values=values, draws=DRAWS)
        with at, handlers.Derived() as derived, poutine.trace() as tracer:
            one.run(batch, moved)
        values_of = {name: derivation.value for name, derivation in derived.found.items()}
        return _densities(handlers.sample_sites(tracer.trace), first=True) | values_of

    before, after = found(None), {}
    with suppress(Exception):  # an index that is too large
        after = found(name)
    return {
        other for other in before if other != name and not _equal({other: before[other]}, after)
    }


def _check_of_rows(name: str, others: Collection[str], of_row: bool) -> None:
    """Fail on what has no sum or integral over a variable of a row, or of a client."""
    for other in others:
        if not of_row:
            raise ValueError(
                f"{other!r} depends on site {name!r}, which is discrete, of a client, and summed out: it has no value "
                f"of which {other!r} could be made. Leave it out; posterior.kinds() tells each client's probabilities"
            )
        raise ValueError(
            f"{other!r} depends on site {name!r}, which is of a row and, where it has no data, summed or integrated "
            "out: only what is observed inside the observations plate may depend on it. Leave "
            f"{other!r} out, or move it there"
        )


def _check_needed(names: Sequence[str], nodes: Mapping[str, Any]) -> None:
    """Fail on a variable that is summed out and that no outcome depends on: it may be an outcome without its field."""
    needed = set()
    for node in nodes.values():
        if isinstance(node["fn"], Mixture):
            needed |= _needed(node["fn"], node["value"])
    for name in names:
        if name not in needed:
            raise ValueError(
                f"no outcome depends on latent site {name!r}, which is to be summed or integrated out. If it is an "
                "outcome, its field is missing from the federation, so that obs.get(...) is None; else leave it out"
            )


def _needed(law: Mixture, value: Tensor) -> set[str]:
    """The variables of a mixture on whose values the density depends."""
    found, variables = set(), law.variables
    grid = law.each(value).unflatten(-1, tuple(variables.values()))
    for axis, name in enumerate(variables, -len(variables)):
        if not torch.equal(grid.amax(axis), grid.amin(axis)):
            found.add(name)
    return found.union(*(_needed(part, value) for part in law.laws if isinstance(part, Mixture)))


def _as_it_is(model: Model, federation: Federation, batch: Batch, error: Exception) -> Model:
    """The model, which cannot be run for one client and one draw, if it can be for all; else what is wrong."""
    name = getattr(model, "__name__", type(model).__name__)
    said = explained(error, name)
    with suppress(Exception):
        with handlers.given(batch.device, draws=DRAWS):
            model(batch)
        sites(model, federation)
        return model
    if said is not error:
        try:
            sites(model, federation)
        except NeedsOneClient:
            raise said from None
        except Exception as other:
            raise explained(other, name) from other
    raise said from None if said is error else error


def _apart(seen: Mapping[str, Any], clients: int) -> dict[str, Tensor]:
    """Parameters, unconstrained, of which every client has a copy of its own."""
    params = {}
    for name, found in seen.items():
        value = transform_to(found["constraint"]).inv(found["value"])
        if not found["local"]:
            value = value.expand(clients, 1, *value.shape)
        params[name] = value + 0.1 * torch.randn_like(value)
    return params


def two(federation: Federation) -> tuple[Tensor, Tensor]:
    """The longest client and a short one, of which rows are padded, and the positions of rows to look at."""
    lengths = federation.lengths.tolist()
    long = max(range(len(lengths)), key=lengths.__getitem__)
    others = [i for i in range(len(lengths)) if i != long] or [long]
    # of one row the padding looks like it
    short = min(others, key=lambda i: (lengths[i] < 2, lengths[i]))
    rows = [min(ROWS, lengths[long]), min(ROWS, lengths[short])]
    if rows[0] == rows[1] > 1 and lengths[short] < lengths[long]:  # there is padding, if not here
        rows[1] -= 1
    slots = torch.arange(rows[0])
    positions = torch.stack([slots, torch.where(slots < rows[1], slots, -1)])
    return torch.tensor([long, short]), positions


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether these are the same sites, on the same side of the boundary."""

    def seen(nodes: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: (node["fn"].event_shape, handlers.plates(node) - {handlers.DRAWS})
            for name, node in nodes.items()
        }

    return seen(one) == seen(other)


def _densities(nodes: Mapping[str, Any], first: bool = False) -> dict[str, Tensor]:
    """The log densities of sites, one for each draw, client and row; of mixtures all or the first."""

    def density(node: Any) -> Tensor:
        fn = node["fn"].first if first and isinstance(node["fn"], Mixture) else node["fn"]
        return log_density(node, fn)

    return {name: density(node) for name, node in nodes.items()}


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Up to round-off of sums in another order."""
    if not one.keys() <= other.keys():
        return False
    return all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
        for a, b in (torch.broadcast_tensors(one[name], other[name]) for name in one)
    )
