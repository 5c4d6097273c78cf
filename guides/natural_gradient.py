"""Natural-gradient steps on a Gaussian q(z) = N(m, L Lᵀ), from gradients at its draws.

What clients and the server have seen of a term f of the ELBO at the draws of a round is a quadratic, a *site*

    ∇f(z) ≈ h + H z,     H = E[∇²f],  h = E[∇f] − H m.

Sites add up, and where all terms of the ELBO but −log q are one site, the steepest ascent of q is, in the coordinates
ε = L⁻¹(z − m) (Khan & Rue 2023, *The Bayesian learning rule*, eqs. 11–12),

    S = I + Lᵀ H L,    m ← m + ρ L B⁻¹ Lᵀ (h + H m),  B = I − S,
    Σ ← L (I − ρ S)⁻¹ Lᵀ where S < 0,   L exp(ρ S) Lᵀ where S > 0.

S is zero at the optimum, and B is the curvature of the model's own log density, so that at ρ = 1 a quadratic ELBO
takes one step. Where it curves upwards, S > I, m goes as far as if it curved as much downwards: B has the absolute
eigenvalues of I − S, at least 1 (Dauphin et al. 2014, *Identifying and attacking the saddle point problem*). Everything
is of the size of q whatever the data, so one rate serves eight clients and ten thousand.

Where noise of standard deviation τ is added to E[∇f], as under differential privacy, vᵀ S v is off by about
n = τ ‖L v‖: the wider q is, the more of it is noise. What of an eigenvalue s is beyond the largest of noise alone,
n √(2 D), steps as above; the rest is kept in ±1 and steps by exp(ρ s / (1 + n²)), which widens as much as it narrows.
m moves by ρ L (B + N B⁻¹ N)⁻¹ Lᵀ (h + H m), N² = τ² LᵀL: Kalman's gain, were q what is known of m.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

FARTHEST = 1.0
"""How far a step of rate 1 may move m, in units of the prior's spread."""
NARROWEST, WIDEST = 30.0, 1.0
"""The largest eigenvalues of −S and of S that a step follows."""


class Site(NamedTuple):
    """h ``(..., D)`` and H ``(..., D, D)``, or its diagonal ``(..., D)``."""

    pull: Tensor
    slope: Tensor


class Direction(NamedTuple):
    """A step of rate 1 in the coordinates of q: that of m ``(D,)``, S ``(D, D)`` or its diagonal, and n ``(D,)``."""

    loc: Tensor
    spread: Tensor
    noise: Tensor


def paired(noise: Tensor) -> Tensor:
    """Standard normal draws ``(S, ..., D)`` made to sum to nothing and to be orthogonal, D at a time.

    Each pair of draws becomes ±ε, whose lengths stay; the sites of quadratics are then exact (Ren, Zhao & Ermon 2019,
    *Adaptive antithetic sampling for variance reduction*; Yu et al. 2016, *Orthogonal random features*).

    Example:
        >>> import torch
        >>> from bayesfed.guides.natural_gradient import paired
        >>> draws = paired(torch.randn(8, 4))
        >>> bool((draws[::2] + draws[1::2] == 0).all()), bool((draws[::2] @ draws[::2].T).triu(1).abs().max() < 1e-5)
        (True, True)
    """
    flat = noise.reshape(len(noise), noise.shape[-1])
    blocks = []
    for block in flat[: len(flat) // 2].split(max(1, flat.shape[1])):
        frame = torch.linalg.qr(block.mT).Q.mT
        blocks.append(frame * torch.linalg.vector_norm(block, dim=1, keepdim=True))
    half = torch.cat(blocks) if blocks else flat[:0]
    pairs = torch.stack([half, -half], 1).flatten(0, 1)
    return torch.cat([pairs, flat[len(pairs) :]]).reshape(noise.shape)


def site(loc: Tensor, scale_tril: Tensor, z: Tensor, grads: Tensor, before: Site) -> Site:
    """Sites of K terms, from their gradients at the draws of q.

    Fewer draws than dimensions see few directions: in the others a site keeps the slope that it had, and changes by as
    little as makes it right (Powell 1970, the symmetric update).

    Args:
        loc: m, ``(D,)``.
        scale_tril: L, ``(D, D)``.
        z: draws of q, ``(S, D)``.
        grads: ∇f at the draws, ``(K, S, D)``.
        before: the terms' sites, ``(K, ...)``.
    """
    noise, inverse, span = _seen(loc, scale_tril, z)
    old = scale_tril.mT @ before.slope @ scale_tril
    rest = grads @ scale_tril - noise @ old  # what the old slopes do not explain
    change = (rest - rest.mean(1, keepdim=True)).mT @ (noise - noise.mean(0)) @ inverse
    middle = span @ (change + change.mT) / 2 @ span
    slope = old + change + change.mT - middle
    inner = rest.mean(1) - change @ noise.mean(0)  # Lᵀ ∇f at m, but for what the old slopes say
    down = torch.linalg.solve_triangular(scale_tril.mT, inner.mT, upper=True).mT
    back = torch.linalg.solve_triangular(scale_tril.mT, slope, upper=True)
    slope = torch.linalg.solve_triangular(scale_tril, back, upper=False, left=False)
    slope = ((slope + slope.mT) / 2).contiguous()
    return Site(down - slope @ loc, slope)


def _seen(loc: Tensor, scale_tril: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draws in the coordinates of q, the inverse of their Gram matrix, and the projection on what they span."""
    noise = torch.linalg.solve_triangular(scale_tril, (z - loc).mT, upper=False).mT
    centred = noise - noise.mean(0)
    values, vectors = torch.linalg.eigh(centred.mT @ centred)
    seen = (values > 1e-4 * values[-1]) & (values > 0)
    inverse = vectors * torch.where(seen, 1 / values.clamp(min=1e-30), 0.0) @ vectors.mT
    return noise, inverse, vectors * seen.to(values) @ vectors.mT


def diagonal_site(loc: Tensor, scale: Tensor, z: Tensor, grads: Tensor) -> Site:
    """The same for a mean-field q, L = diag(scale): H is taken diagonal."""
    noise, white = (z - loc) / scale, grads * scale
    mean, middle = white.mean(1), noise.mean(0)
    centred = noise - middle
    slope = ((white - mean[:, None]) * centred).sum(1) / centred.square().sum(0).clamp(min=1e-30)
    slope, pull = slope / scale.square(), (mean - slope * middle) / scale
    return Site(pull - slope * loc, slope)


def at(site: Site, z: Tensor) -> Tensor:
    """What a site says of ∇f at draws ``(S, D)``: ``(..., S, D)``."""
    if site.slope.ndim == site.pull.ndim:
        return site.pull[..., None, :] + site.slope[..., None, :] * z
    return site.pull[..., None, :] + z @ site.slope


def direction(
    loc: Tensor,
    scale_tril: Tensor,
    of: Site,
    z: Tensor,
    entropy: float = 1.0,
    noise: float | Tensor | None = None,
) -> Direction:
    """Where a step goes, from the site of all terms but −log q: nowhere that the draws have not seen.

    Args:
        loc: m.
        scale_tril: L.
        of: the site.
        z: the draws that it was made from.
        entropy: what −log q adds to S, in identities. So a pushforward m + L f(ε) steps too: the entropy of any q grows
            alike with L. Less than 1 makes q narrower, by a factor of about √entropy.
        noise: τ, of the mean gradient that the site was made from.
    """
    unit = torch.eye(len(loc), dtype=loc.dtype, device=loc.device)
    _, _, span = _seen(loc, scale_tril, z)
    spread = span @ (scale_tril.mT @ of.slope @ scale_tril + entropy * unit) @ span
    values, vectors = torch.linalg.eigh((spread + spread.mT) / 2)
    bent = _bent(values)
    mean = vectors.mT @ (span @ (scale_tril.mT @ (of.pull + of.slope @ loc)))
    move, added = vectors @ (mean / bent), torch.zeros_like(mean)
    if noise is not None:
        added = noise * torch.linalg.vector_norm(scale_tril @ vectors, dim=0)
        squares, axes = torch.linalg.eigh(scale_tril.mT @ scale_tril)
        shaken = noise * (axes * squares.clamp(min=0.0).sqrt()) @ axes.mT
        rest = shaken @ (vectors / bent) @ vectors.mT @ shaken
        move = torch.linalg.solve((vectors * bent) @ vectors.mT + rest, vectors @ mean)
    return Direction(move, (vectors * values) @ vectors.mT, added)


def step(
    loc: Tensor, scale_tril: Tensor, to: Direction, rate: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The next mean ``(D,)`` and Cholesky factor ``(D, D)``."""
    values, vectors = torch.linalg.eigh((to.spread + to.spread.mT) / 2)
    edge = math.sqrt(2 * len(values))  # Wigner (1958)
    root = scale_tril @ (vectors * _widening(values, rate, to.noise, edge))
    new, failed = torch.linalg.cholesky_ex(root @ root.mT)  # not finite rather than wrong
    return loc + rate * _bounded(scale_tril @ to.loc), torch.where(failed == 0, new, torch.nan)


def diagonal_direction(
    loc: Tensor, scale: Tensor, of: Site, noise: float | Tensor | None = None
) -> Direction:
    """The same for a mean-field q."""
    spread = 1 + scale.square() * of.slope
    added = scale * (0.0 if noise is None else noise)
    bent = _bent(spread)
    return Direction(
        scale * (of.pull + of.slope * loc) / (bent + added.square() / bent), spread, added
    )


def diagonal_step(
    loc: Tensor, scale: Tensor, to: Direction, rate: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The next mean and scales ``(D,)``."""
    return loc + rate * _bounded(scale * to.loc), scale * _widening(to.spread, rate, to.noise, 3.0)


def agreement(one: Direction, other: Direction) -> Tensor:
    """The inner product of two directions in Fisher's metric, ``()``: negative where the second goes back."""
    return (one.loc * other.loc).sum() + (one.spread * other.spread).sum() / 2


def _bent(values: Tensor) -> Tensor:
    """The eigenvalues of B from those of S."""
    return (1 - values).abs().clamp(min=1.0)


def _widening(values: Tensor, rate: float | Tensor, noise: Tensor, edge: float) -> Tensor:
    """By what the widths along the eigenvectors of S are multiplied; those of noise go up to ``edge`` times n."""
    certain = values.sign() * (values.abs() - edge * noise).clamp(min=0.0)
    rest = (values - certain).clamp(-WIDEST, WIDEST) / (1 + noise.square())
    down, up = certain.clamp(-NARROWEST, 0.0), (certain.clamp(min=0.0) + rest).clamp(max=WIDEST)
    return (1 - rate * down).rsqrt() * (rate / 2 * up).exp()


def _bounded(move: Tensor) -> Tensor:
    """A move of at most :data:`FARTHEST`."""
    return move / (move.abs().max() / FARTHEST).clamp(min=1.0)
