"""Which local variables share one Gaussian factor: those whose priors are Normal, each linear in others before it.

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
    """The names of the block's sites, in order, and B ``(P, P)``.

    Left out is a site whose scale depends on a local variable, whose location depends on one that is not in the block,
    or whose B is another one elsewhere.

    Args:
        found: the priors at two places or more, other values of the globals included.
    """
    slopes = [
        {
            name: {other: (_slopes(loc, x), _slopes(scale, x)) for other, x in at.items()}
            for name, (loc, scale) in priors.items()
        }
        for at, priors in found
    ]
    first, block = slopes[0], list[str]()
    for name, of in first.items():
        linear = all(
            torch.allclose(loc, elsewhere[name][other][0], rtol=1e-4, atol=1e-6) and not scale.any()
            for other, (loc, scale) in of.items()
            for elsewhere in slopes
        )
        if linear and all(other in block for other, (loc, _) in of.items() if loc.any()):
            block.append(name)
    if not block:
        return (), torch.zeros(0, 0)
    rows = [torch.cat([first[name][other][0] for other in block], -1) for name in block]
    return tuple(block), torch.cat(rows)


def _slopes(values: Tensor, x: Tensor) -> Tensor:
    """The derivatives of one client's ``(..., P)`` in x ``(D,)``: ``(P, D)``."""
    flat = values.reshape(-1, values.shape[-1])[0]
    if not flat.requires_grad:
        return x.new_zeros(len(flat), len(x))
    rows = [
        torch.autograd.grad(v, x, retain_graph=True, allow_unused=True, materialize_grads=True)[0]
        for v in flat
    ]
    return torch.stack(rows)
