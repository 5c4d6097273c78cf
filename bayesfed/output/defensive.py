"""Weighted draws of clients' variables given θ, from a proposal that is wider than the guide's q(w_i | θ).

    log p(w_l, D_i | θ) − log t(w_l),   w_l ~ t = ⅓ Σ_c t₅(m, c² V),   c = 1.1, 4, 16

m and V are the mean and the covariance of q(w_i | θ), those of draws from it where it is not one Normal vector, or
those of a Laplace approximation where clients' variables are drawn with one. The wide parts, a defensive mixture
(Hesterberg 1995, *Weighted average importance sampling and defensive mixture distributions*), reach a mode or a tail
that q lacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Size, Tensor

from bayesfed.elbo.elbo import log_ratio, run
from bayesfed.elbo.noise import Draw, fold, word
from bayesfed.elbo.program import Params
from bayesfed.output.conditionals import Conditionals, has_block
from bayesfed.output.evidence import Candidates
from bayesfed.output.student import FREEDOM, PER_SD, student_log_density

WIDTHS = 1.1, 4.0, 16.0
"""The standard deviations of the t distributions relative to those of q."""
LARGEST = 32
"""Numbers in a client's variables beyond which such a proposal does not reach the posterior."""


def stack(values: Params) -> Tensor:
    """Stack values of several sites, ``(S, K, 1, *event)`` each, into one vector for each client, ``(S, K, 1, P)``."""
    return torch.cat([value.reshape(*value.shape[:3], -1) for value in values.values()], -1)


def unstack(z: Tensor, shapes: Mapping[str, Size]) -> Params:
    """Take a vector ``(S, K, 1, P)`` apart into sites of these shapes ``event``: ``(S, K, 1, *event)`` each."""
    parts = z.split([shape.numel() for shape in shapes.values()], -1)
    return {
        name: part.reshape(*z.shape[:3], *shape)
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


class Centre(NamedTuple):
    """Where the proposals of K clients' variables lie at S draws of θ.

    Attributes:
        mean: m, ``(S, K, 1, P)``.
        root: a root of V, ``(S, K, 1, P, P)``.
        shapes: the guide's local random sites, in the order of the vectors.
    """

    mean: Tensor
    root: Tensor
    shapes: Mapping[str, Size]

    def at(self, draws: slice, clients: slice = slice(None)) -> Centre:
        """Return that of some draws of θ and some clients."""
        return Centre(self.mean[draws, clients], self.root[draws, clients], self.shapes)


def centre_of_draws(own: Params, count: int) -> Centre:
    """Return mean and covariance of L draws ``(L * S, K, 1, *event)`` at each of S = ``count`` draws of θ."""
    z = stack(own).double().unflatten(0, (-1, count))
    away = z - z.mean(0)
    covariance = torch.einsum("l...p,l...q->...pq", away, away) / (len(z) - 1)
    shapes = {name: value.shape[3:] for name, value in own.items()}
    return Centre(z.mean(0), torch.linalg.cholesky_ex(covariance)[0], shapes)


class Mixture(NamedTuple):
    """Draws from the mixture t around 0 for V = 1.

    Attributes:
        draws: L at each of S draws of θ, S = 1 if they are the same at all, ``(L, S, K, 1, P)``.
        log_density: log t of each, ``(L, S, K, 1)``.
    """

    draws: Tensor
    log_density: Tensor


def defensive_candidates(given: Conditionals, centre: Centre, mixture: Mixture) -> Candidates:
    """Make L candidates of K clients' variables at each draw of θ, and compute their log weights.

    Args:
        given: their posteriors; the guide's local sites have real values.
        centre: mean and covariance of the proposals.
        mixture: from :func:`draw_mixture`.
    """
    program, params, theta, batch, _ = given
    mean, root, shapes = centre
    each = len(mixture.draws)
    draws = mean + (root.double() @ mixture.draws[..., None]).squeeze(-1)
    log_t = mixture.log_density - root.double().diagonal(dim1=-2, dim2=-1).log().sum(-1)
    flat = draws.flatten(0, 1).to(batch.scale.dtype)
    values = unstack(flat, shapes)
    at = {name: value.repeat(each, *[1] * (value.ndim - 1)) for name, value in theta.items()}
    with torch.no_grad():
        if has_block(program):
            log_p = given.log_joint(flat.unflatten(0, (each, -1)))
        else:
            traces = run(program, params, at | values, batch, {}, len(flat))
            log_p = torch.as_tensor(log_ratio(*traces, local=True, skip=tuple(values)))
            log_p = log_p.expand(len(flat), len(batch)).unflatten(0, (each, -1))
    log_p = log_p.double()
    return Candidates(draws, (log_p - log_t.squeeze(-1)).nan_to_num(-torch.inf))


def draw_mixture(
    keys: Tensor,
    each: int,
    centre: Centre,
    widths: Sequence[float] = WIDTHS,
    *,
    common: bool = False,
    from_normal: bool = False,
) -> Mixture:
    """Draw from the mixture around 0 for V = 1.

    Args:
        keys: the clients' noise streams, ``(K,)``.
        each: L.
        centre: of the proposals that they are for.
        widths: c, of which L / len(c) candidates each are drawn.
        common: draw once for all draws of θ.
        from_normal: the first one is a draw from the standard Normal. One of all, chosen by weight, is then a step
            of a Markov chain that starts at q(w_i | θ) and leaves the posterior as it is (Andrieu, Lee & Vihola 2018,
            *Uniform ergodicity of the iterated conditional SMC and geometric ergodicity of particle Gibbs samplers*):
            it has a small part of the error of q, and none of that of the mixture.
    """
    size = centre.mean.shape[-1]
    tail = (each, 1 if common else len(centre.mean), size + FREEDOM)
    normal = Draw("normal", tail)(fold(keys, word("defensive")), torch.float32)  # (K, L, S, .)
    normal = normal.double().movedim(0, 2).unsqueeze(3)
    white, chi = normal[..., :size], normal[..., size:].square().sum(-1, keepdim=True)
    sizes = normal.new_tensor(widths) * PER_SD
    of = torch.arange(each, device=keys.device) % len(widths)
    own, white = white[:1], white * (FREEDOM / chi).sqrt() * sizes[of].reshape(-1, 1, 1, 1, 1)
    if from_normal:
        white = torch.cat([own, white[1:]])
    square = white.square().sum(-1)
    parts = [student_log_density(square / width**2, size) - size * width.log() for width in sizes]
    return Mixture(white, torch.stack(parts).logsumexp(0) - math.log(len(widths)))
