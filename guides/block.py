"""Chains of Normal priors: which local variables have one whose location is linear in others before them.

    u_k = loc_k(θ) + Σ_j B_kj u_j + scale_k(θ) ε_k,   δ = (I − B) u

The innovations δ have independent Normal priors given θ, and u = (I − B)⁻¹ δ with a determinant of 1, so that a factor
over δ, times these priors, is one over u times the joint prior of the chain: a ward's level around its hospital's, a
path over time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Priors = tuple[Mapping[str, Tensor], Mapping[str, tuple[Tensor, Tensor]]]
"""Values of the local variables ``(P,)``, and location and scale of one client's Normal priors there, ``(..., P)``."""


def chained(found: Sequence[Priors]) -> tuple[tuple[str, ...], Tensor]:
    """Which sites are such, and B ``(P, P)`` over all local variables, in order, with zeros for the others.

    A site is not if its prior is not Normal, its scale depends on a local variable, or its location in another way at
    another place.

    Args:
        found: at two places or more, other values of the globals included, the local variables in order, and the
            priors that are Normal.
    """
    slopes = [
        {
            name: {other: (_slopes(loc, x), _slopes(scale, x)) for other, x in at.items()}
            for name, (loc, scale) in priors.items()
        }
        for at, priors in found
    ]
    first, (at, _) = slopes[0], found[0]
    normal = tuple(
        name
        for name, of in first.items()
        if all(
            torch.allclose(loc, elsewhere[name][other][0], rtol=1e-4, atol=1e-6) and not scale.any()
            for other, (loc, scale) in of.items()
            for elsewhere in slopes
        )
    )
    rows = [
        torch.cat(
            [
                first[name][o][0] if name in normal else x.new_zeros(len(y), len(x))
                for o, x in at.items()
            ],
            -1,
        )
        for name, y in at.items()
    ]
    return normal, torch.cat(rows).detach()


def _slopes(values: Tensor, x: Tensor) -> Tensor:
    """The derivatives of one client's ``(..., P)`` in x ``(D,)``: ``(P, D)``."""
    flat = values.reshape(-1, values.shape[-1])[0]
    if not flat.requires_grad:
        return x.new_zeros(len(flat), len(x))
    rows = [torch.autograd.grad(v, x, retain_graph=True, materialize_grads=True)[0] for v in flat]
    return torch.stack(rows)
