"""Natural-gradient steps on a Gaussian q(z) = N(m, L Lᵀ), from gradients at its draws.

A term f of the ELBO, a client's or the server's, is approximated by a quadratic from its gradients at a round's draws:

    ∇f(z) ≈ h + H z,     H = E[∇²f],  h = E[∇f] − H m.

Quadratics add up. Where their sum approximates all terms of the ELBO but −log q, the steepest ascent of q is, in the
coordinates ε = L⁻¹(z − m) (Khan & Rue 2023, *The Bayesian learning rule*, eqs. 11–12),

    S = I + Lᵀ H L,    m ← m + ρ L B⁻¹ Lᵀ (h + H m),  B = I − S,
    Σ ← L (I − ρ S)⁻¹ Lᵀ where S < 0,   L exp(ρ S) Lᵀ where S > 0.

S is zero at the optimum, and B is the negative curvature of the model's log density, so that at ρ = 1 a quadratic ELBO
takes one step. Where the log density curves upwards, S > I, m moves as far as if it curved as much downwards: B has the
absolute eigenvalues of I − S, at least 1 (Dauphin et al. 2014, *Identifying and attacking the saddle point problem*).
Everything is in units of q, whatever the data, so the same rate serves eight clients and ten thousand.

Where noise of standard deviation τ is added to E[∇f], as under differential privacy, vᵀ S v has an error of about
n = τ ‖L v‖, which grows with the width of q. The part of an eigenvalue s beyond the largest eigenvalue of noise alone,
n √(2 D), steps as above. The rest is bounded by ±1 and steps by exp(ρ s / (1 + n²)), which widens q as much as it
narrows it. m moves by ρ L (B + N B⁻¹ N)⁻¹ Lᵀ (h + H m), N² = τ² LᵀL: the Kalman gain with q as
the prior of m.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

FARTHEST = 1.0
"""The largest change of m in a step of rate 1, in units of the prior's spread."""
NARROWEST, WIDEST = 30.0, 1.0
"""The largest eigenvalues of −S and of S that a step follows."""


class QuadraticTerm(NamedTuple):
    """A quadratic approximation of a term of the ELBO, whose gradient at z is h + H z.

    Attributes:
        pull: h, ``(..., D)``.
        slope: H ``(..., D, D)``, or its diagonal ``(..., D)``.
    """

    pull: Tensor
    slope: Tensor


class Direction(NamedTuple):
    """A natural-gradient step of rate 1 in the coordinates of q.

    Attributes:
        loc: the step of m, ``(D,)``.
        spread: S ``(D, D)``, or its diagonal ``(D,)``.
        noise: n along the eigenvectors of S, ``(D,)``.
    """

    loc: Tensor
    spread: Tensor
    noise: Tensor


def paired(noise: Tensor) -> Tensor:
    """Standard Normal draws ``(S, ..., D)`` in antithetic pairs ±ε, orthogonal to each other D at a time.

    The draws sum to zero and the lengths of the ε are kept, so that a quadratic is fitted exactly (Ren, Zhao & Ermon
    2019, *Adaptive antithetic sampling for variance reduction*; Yu et al. 2016, *Orthogonal random features*).

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


def fit_quadratic(
    loc: Tensor, scale: Tensor, z: Tensor, grads: Tensor, before: QuadraticTerm
) -> QuadraticTerm:
    """The quadratics of K terms, from their gradients at draws of q.

    Fewer draws than dimensions span few directions. In the others the slope keeps its former value, but for the
    smallest change that makes it symmetric and fits the gradients (Powell 1970, the symmetric update).

    Args:
        loc: m, ``(D,)``.
        scale: L ``(D, D)``; or the scales ``(D,)`` of a mean-field q, for a diagonal H.
        z: draws of q, ``(S, D)``.
        grads: ∇f at the draws, ``(K, S, D)``.
        before: the terms' former quadratics, ``(K, ...)``.
    """
    if scale.ndim == loc.ndim:
        return _fit_diagonal(loc, scale, z, grads)
    noise, inverse, span = _sampled_directions(loc, scale, z)
    old = scale.mT @ before.slope @ scale
    rest = grads @ scale - noise @ old  # residuals of the old slopes
    change = (rest - rest.mean(1, keepdim=True)).mT @ (noise - noise.mean(0)) @ inverse
    middle = span @ (change + change.mT) / 2 @ span
    slope = old + change + change.mT - middle
    inner = rest.mean(1) - change @ noise.mean(0)  # Lᵀ ∇f at m, less the old slopes' part
    down = torch.linalg.solve_triangular(scale.mT, inner.mT, upper=True).mT
    back = torch.linalg.solve_triangular(scale.mT, slope, upper=True)
    slope = torch.linalg.solve_triangular(scale, back, upper=False, left=False)
    slope = ((slope + slope.mT) / 2).contiguous()
    return QuadraticTerm(down - slope @ loc, slope)


def _sampled_directions(
    loc: Tensor, scale_tril: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return draws in the coordinates of q, the inverse of their Gram matrix, and the projection on their span."""
    noise = torch.linalg.solve_triangular(scale_tril, (z - loc).mT, upper=False).mT
    centred = noise - noise.mean(0)
    values, vectors = torch.linalg.eigh(centred.mT @ centred)
    spanned = (values > 1e-4 * values[-1]) & (values > 0)
    inverse = vectors * torch.where(spanned, 1 / values.clamp(min=1e-30), 0.0) @ vectors.mT
    return noise, inverse, vectors * spanned.to(values) @ vectors.mT


def _fit_diagonal(loc: Tensor, scale: Tensor, z: Tensor, grads: Tensor) -> QuadraticTerm:
    """Return :func:`fit_quadratic` with a diagonal H, for a mean-field q, L = diag(scale)."""
    noise, white = (z - loc) / scale, grads * scale
    mean, middle = white.mean(1), noise.mean(0)
    centred = noise - middle
    slope = ((white - mean[:, None]) * centred).sum(1) / centred.square().sum(0).clamp(min=1e-30)
    slope, pull = slope / scale.square(), (mean - slope * middle) / scale
    return QuadraticTerm(pull - slope * loc, slope)


def gradient_at(term: QuadraticTerm, z: Tensor) -> Tensor:
    """The gradient h + H z of quadratics at draws ``(S, D)``: ``(..., S, D)``."""
    if term.slope.ndim == term.pull.ndim:
        return term.pull[..., None, :] + term.slope[..., None, :] * z
    return term.pull[..., None, :] + z @ term.slope


def direction(
    loc: Tensor,
    scale: Tensor,
    term: QuadraticTerm,
    z: Tensor | None = None,
    entropy: float = 1.0,
    noise: float | Tensor | None = None,
) -> Direction:
    """The direction of a step, from the quadratic of all terms but −log q, in the span of some draws.

    Args:
        loc: m.
        scale: L, or the scales of a mean-field q.
        term: the quadratic.
        z: the draws that it was fitted to; by default it is right in all directions.
        entropy: the multiple of the identity that −log q adds to S. It serves a pushforward m + L f(ε) as well, since
            the entropy of any q depends on L alike. Less than 1 makes q narrower, by a factor of about √entropy.
        noise: τ of the mean gradient that the quadratic was fitted to.
    """
    if scale.ndim == loc.ndim:
        return _diagonal_direction(loc, scale, term, entropy, noise)
    unit = torch.eye(len(loc), dtype=loc.dtype, device=loc.device)
    span = unit if z is None else _sampled_directions(loc, scale, z)[2]
    spread = span @ (scale.mT @ term.slope @ scale + entropy * unit) @ span
    values, vectors = torch.linalg.eigh((spread + spread.mT) / 2)
    curvature = _curvature(values)
    mean = vectors.mT @ (span @ (scale.mT @ (term.pull + term.slope @ loc)))
    move, added = vectors @ (mean / curvature), torch.zeros_like(mean)
    if noise is not None:
        added = noise * torch.linalg.vector_norm(scale @ vectors, dim=0)
        squares, axes = torch.linalg.eigh(scale.mT @ scale)
        shaped_noise = noise * (axes * squares.clamp(min=0.0).sqrt()) @ axes.mT
        rest = shaped_noise @ (vectors / curvature) @ vectors.mT @ shaped_noise
        move = torch.linalg.solve((vectors * curvature) @ vectors.mT + rest, vectors @ mean)
    return Direction(move, (vectors * values) @ vectors.mT, added)


def step(
    loc: Tensor, scale: Tensor, direction: Direction, rate: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The mean ``(D,)`` and the Cholesky factor ``(D, D)``, or the scales ``(D,)`` of a mean-field q, after a step."""
    if scale.ndim == loc.ndim:
        widening = _widening(direction.spread, rate, direction.noise, 3.0)
        return loc + rate * _bounded(scale * direction.loc), scale * widening
    values, vectors = torch.linalg.eigh((direction.spread + direction.spread.mT) / 2)
    edge = math.sqrt(2 * len(values))  # Wigner (1958)
    root = scale @ (vectors * _widening(values, rate, direction.noise, edge))
    new, failed = torch.linalg.cholesky_ex(root @ root.mT)  # not finite where it fails
    return loc + rate * _bounded(scale @ direction.loc), torch.where(failed == 0, new, torch.nan)


def _diagonal_direction(
    loc: Tensor, scale: Tensor, term: QuadraticTerm, entropy: float, noise: float | Tensor | None
) -> Direction:
    """Return :func:`direction` of a mean-field q."""
    spread = entropy + scale.square() * term.slope
    added = scale * (0.0 if noise is None else noise)
    curvature = _curvature(spread)
    move = scale * (term.pull + term.slope * loc) / (curvature + added.square() / curvature)
    return Direction(move, spread, added)


def agreement(one: Direction, other: Direction) -> Tensor:
    """The inner product ``()`` of two directions in the Fisher metric, negative where the second reverses the first."""
    return (one.loc * other.loc).sum() + (one.spread * other.spread).sum() / 2


def _curvature(values: Tensor) -> Tensor:
    """Return the eigenvalues of B from those of S."""
    return (1 - values).abs().clamp(min=1.0)


def _widening(values: Tensor, rate: float | Tensor, noise: Tensor, edge: float) -> Tensor:
    """Return the factors of the widths along S's eigenvectors; eigenvalues of noise are up to ``edge`` times n."""
    certain = values.sign() * (values.abs() - edge * noise).clamp(min=0.0)
    rest = (values - certain).clamp(-WIDEST, WIDEST) / (1 + noise.square())
    down, up = certain.clamp(-NARROWEST, 0.0), (certain.clamp(min=0.0) + rest).clamp(max=WIDEST)
    return (1 - rate * down).rsqrt() * (rate / 2 * up).exp()


def _bounded(move: Tensor) -> Tensor:
    """Return a step of at most :data:`FARTHEST`."""
    return move / (move.abs().max() / FARTHEST).clamp(min=1.0)
