"""Objectives with the clients' variables integrated out: by quadrature, by Laplace's method, for a Gaussian q(θ)."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

sys.path.append(str(Path(__file__).parent))
from program_densities import Hierarchy, maximum

NODES, DRAWS = 9, 1024
"""Quadrature nodes in each of a client's dimensions; draws of θ (half of them, and their mirror images)."""


def grid(width: int, nodes: int = NODES) -> tuple[Tensor, Tensor]:
    """Return nodes ``(Q, P)`` and weights ``(Q,)`` of Gauss–Hermite quadrature under N(0, I)."""
    x, weight = np.polynomial.hermite_e.hermegauss(nodes)
    points = torch.tensor(list(product(x, repeat=width)), dtype=torch.float64).reshape(-1, width)
    weights = torch.tensor(list(product(weight / weight.sum(), repeat=width)), dtype=torch.float64)
    return points, weights.reshape(-1, width).prod(-1)


def modes(hierarchy: Hierarchy, theta: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mode of p(w_i | θ, D_i) ``(T, N, P)`` by Newton's method, differentiable in θ, and its precision."""

    def slopes(w: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        w = w if w.requires_grad else w.requires_grad_()
        _, prior, likelihood = hierarchy(at, w)
        (grad,) = torch.autograd.grad((prior + likelihood).sum(), w, create_graph=True)
        rows = [
            torch.autograd.grad(grad[..., p].sum(), w, create_graph=True)[0]
            for p in range(w.shape[-1])
        ]
        return grad, -torch.stack(rows, -2)

    def density(w: Tensor) -> Tensor:
        with torch.no_grad():
            _, prior, likelihood = hierarchy(theta, w)
        return prior + likelihood

    w, fixed = start.detach().expand(len(theta), -1, -1).clone(), theta.detach()
    for _ in range(50):
        grad, precision = (x.detach() for x in slopes(w, fixed))
        values, vectors = torch.linalg.eigh(precision)
        floor = 1e-3 * values.abs().max(-1, keepdim=True).values
        inverse = (vectors / values.abs().maximum(floor)[..., None, :]) @ vectors.mT
        step = (inverse @ grad[..., None]).squeeze(-1)
        w, now = w.detach(), density(w.detach())
        for _halving in range(30):
            better = density(w + step) >= now - 1e-9
            step = torch.where(better[..., None], step, step / 2)
            if better.all():
                break
        w = w + step
        if float((step * grad).sum(-1).max()) < 1e-12:
            break
    w = w.detach()
    for _ in range(2):  # through these the mode depends on θ
        grad, precision = slopes(w, theta)
        w = w + torch.linalg.solve(precision, grad[..., None]).squeeze(-1)
    return w, slopes(w, theta)[1]


class Marginal:
    """Σ v_i log p(D_i | θ), the clients' variables integrated out by adaptive quadrature; with one node Laplace's."""

    def __init__(self, hierarchy: Hierarchy, nodes: int) -> None:
        self.hierarchy, self.nodes = hierarchy, grid(hierarchy.width, nodes)
        self.at: Tensor | None = None

    def __call__(self, theta: Tensor) -> Tensor:
        """Return ``(T,)`` at θ ``(T, D)``."""
        hierarchy, (points, weights) = self.hierarchy, self.nodes
        start = hierarchy.centres(theta) if self.at is None else self.at
        start = start if len(start) == len(theta) else hierarchy.centres(theta)
        mode, precision = modes(hierarchy, theta, start)
        self.at = mode.detach()
        root = torch.linalg.cholesky(precision)
        x = points[:, None, None, :, None].expand(-1, *root.shape[:-1], 1)
        away = torch.linalg.solve_triangular(root.mT, x, upper=True).squeeze(-1)
        w = (mode + away).flatten(0, 1)
        _, prior, likelihood = hierarchy(theta.repeat(len(points), 1), w)
        weight = weights.log() + points.square().sum(-1) / 2
        total = (prior + likelihood).unflatten(0, (len(points), -1)) + weight[:, None, None]
        log_det = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        normaliser = hierarchy.width / 2 * np.log(2 * np.pi)
        return (total.logsumexp(0) - log_det + normaliser).sum(-1)


def gaussian(hierarchy: Hierarchy) -> Tensor:
    """Return draws of the Gaussian q(θ) with the largest ELBO: ``(S, D)``."""
    size, marginal = hierarchy.size, Marginal(hierarchy, 1 if hierarchy.width > 1 else 5)
    half = SobolEngine(size, scramble=True, seed=0).draw(DRAWS // 2, dtype=torch.float64)
    noise = torch.distributions.Normal(0.0, 1.0).icdf(half.clamp(1e-6, 1 - 1e-6))
    noise = torch.cat([noise, -noise])
    rows, columns = torch.tril_indices(size, size, -1)
    mode, covariance = laplace(hierarchy)

    def parts(x: Tensor) -> Tensor:
        loc, scale, below = x.split([size, size, len(rows)])
        root = torch.diag(scale.exp()).index_put((rows, columns), below)
        return mode + (noise @ root.mT + loc) @ first.mT

    def value(x: Tensor) -> Tensor:
        theta = parts(x)
        prior = hierarchy(theta)[0]
        return (prior + marginal(theta)).mean() + x[size : 2 * size].sum()

    first = torch.linalg.cholesky(covariance)
    return parts(maximum(value, torch.zeros(2 * size + len(rows)), tries=1))


def laplace(hierarchy: Hierarchy) -> tuple[Tensor, Tensor]:
    """Return the mode of θ, the clients' variables integrated out by Laplace's method, and the covariance there."""
    marginal = Marginal(hierarchy, 1)

    def value(theta: Tensor) -> Tensor:
        return (hierarchy(theta[None])[0] + marginal(theta[None])).sum()

    mode = maximum(value, hierarchy.start)

    def gradient(theta: Tensor) -> Tensor:
        leaf = theta.clone().requires_grad_()
        return torch.autograd.grad(value(leaf), leaf)[0]

    step = 1e-4
    rows = [
        (gradient(mode + step * e) - gradient(mode - step * e)) / (2 * step)
        for e in torch.eye(hierarchy.size)
    ]
    hessian = torch.stack(rows)
    return mode, torch.linalg.inv(-(hessian + hessian.mT) / 2)
