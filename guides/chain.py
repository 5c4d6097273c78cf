"""Chains of Normal priors: local variables whose prior's location is linear in other local variables.

    u_k = loc_k(θ) + Σ_j B_kj u_j + scale_k(θ) ε_k,   δ = (I − B) u

The innovations δ have independent Normal priors given θ, and u = (I − B)⁻¹ δ with a determinant of 1. So a factor over
δ, times these priors, is a factor over u times the joint prior of the chain. Examples are the level of a ward around
that of its hospital, and a random walk over time.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bayesfed.guides.local import NormalPrior
from bayesfed.guides.newton import jacobian

Priors = tuple[Mapping[str, Tensor], Mapping[str, NormalPrior]]
"""Values of the local variables ``(P,)``, and one client's Normal priors there."""


def find_chain(priors: Sequence[Priors]) -> tuple[tuple[str, ...], Tensor]:
    """The sites that belong to a chain, and B ``(P, P)`` over all local variables, in order, zero for other sites.

    A site does not belong to it if its prior is not Normal, if the scale depends on a local variable, or if the
    location depends on one with another slope at another point.

    Args:
        priors: at two points or more, which differ in the globals too: the local variables in order, and the priors
            that are Normal.
    """
    slopes = [
        {
            name: {
                other: (_slopes(prior.loc, x), _slopes(_spread(prior), x))
                for other, x in values.items()
            }
            for name, prior in normal.items()
        }
        for values, normal in priors
    ]
    first, (values, _) = slopes[0], priors[0]
    chained = tuple(
        name
        for name in first
        if all(
            torch.allclose(loc, point[name][other][0], rtol=1e-4, atol=1e-6) and not scale.any()
            for other, (loc, scale) in first[name].items()
            for point in slopes
        )
    )
    rows = [
        torch.cat(
            [
                first[name][other][0] if name in chained else x.new_zeros(len(y), len(x))
                for other, x in values.items()
            ],
            -1,
        )
        for name, y in values.items()
    ]
    return chained, torch.cat(rows).detach()


def _spread(prior: NormalPrior) -> Tensor:
    """Return the scales, or the entries of the root of the covariance, ``(..., P)`` or ``(..., P²)``."""
    return prior.scale if prior.root is None else prior.root.flatten(-2)


def _slopes(values: Tensor, x: Tensor) -> Tensor:
    """Return the derivatives of one client's ``(..., P)`` in x ``(D,)``: ``(P, D)``."""
    return jacobian(values.reshape(-1, values.shape[-1])[0], x)
