"""Comparison of the log densities of one model that is run in two ways, at the same values, on two clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bayesfed.data.federation import Federation
from bayesfed.elbo.log_density import log_density
from bayesfed.vmap.mixtures import Mixture

ROWS = 64
"""The most rows of a client that are compared."""
CLIENT_ADVICE = (
    "Every client has its own entry at dim -2 and its rows at dim -1, so that len(federation) and len(obs[...]) count "
    "the clients of a batch. Reduce over a dimension, value.sum(-1), not value.sum(); work out means over rows or "
    "clients beforehand; rows that are one event belong into `with federation.jointly()`; observe inside "
    "`with federation.observations()`, in no loop or plate of your own over rows or clients; give priors constants, "
    "and no site outside the clients plate a value from inside"
)
"""The remedies for a model in which the density of one client depends on others."""

Densities = Mapping[str, Tensor]
"""Sample site to log densities: of S draws, K clients and B rows, or sums of these."""


def two_clients(federation: Federation, other: int | None = None) -> tuple[Tensor, Tensor]:
    """The longest client and another, by default a short one, whose rows are padded.

    Returns:
        Positions of the clients, int64 ``(2,)``, and of at most :data:`ROWS` rows of each, ``(2, B)``, -1 for padding.
    """
    lengths = federation.lengths.tolist()
    long = max(range(len(lengths)), key=lengths.__getitem__)
    others = [i for i in range(len(lengths)) if i != long] or [long]
    # a client of one row is the last choice: padding repeats that row
    short = min(others, key=lambda i: (lengths[i] < 2, lengths[i])) if other is None else other
    rows = [min(ROWS, lengths[long]), min(ROWS, lengths[short])]
    if rows[0] == rows[1] > 1 and lengths[short] < lengths[long]:  # other batches have padding
        rows[1] -= 1
    slots = torch.arange(rows[0])
    positions = torch.stack([slots, torch.where(slots < rows[1], slots, -1)])
    return torch.tensor([long, short]), positions


def densities(nodes: Mapping[str, Any], first: bool = False) -> dict[str, Tensor]:
    """The log densities of sample sites, one for each draw, client and row.

    Args:
        nodes: the sample sites of a trace.
        first: take the first component of each mixture instead of the whole.
    """
    found = {}
    for name, node in nodes.items():
        mixture = first and isinstance(node["fn"], Mixture)
        found[name] = log_density(node, node["fn"].first if mixture else None)
    return found


def same(one: Densities, other: Densities) -> bool:
    """Return whether the densities of all sites are equal up to the round-off of sums in another order."""
    if not one.keys() <= other.keys():
        return False
    return all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
        for a, b in (torch.broadcast_tensors(one[name], other[name]) for name in one)
    )


def check_same(
    one: Densities, other: Densities, problem: str, *, between_draws: bool = False
) -> None:
    """Fail on a site whose sums over rows differ by more than single precision accounts for.

    Args:
        one: the densities ``(S, K)`` by site.
        other: the same of another run, of these sites at least.
        problem: the end of the error message, after the name of the site.
        between_draws: compare the difference between the first two draws. Padding may add the same number to every
            draw, such as a normaliser, which changes no posterior.

    Raises:
        ValueError: names the site.
    """
    for site, value in one.items():
        expected, round_off = other[site].to(value), 1e-2 + 1e-5 * float(value.abs().max())
        if between_draws:
            value, expected = value[0] - value[1], expected[0] - expected[1]
        error = (value - expected).abs()
        if (error > round_off + 1e-3 * expected.abs()).any() or (
            error.isnan() & expected.isfinite()
        ).any():
            raise ValueError(f"the log density of site {site!r} {problem}")
