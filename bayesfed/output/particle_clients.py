"""Draws of clients' variables at particles of θ, from Laplace approximations of their posteriors."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.noise import Draw, word
from bayesfed.elbo.program import Params, Program
from bayesfed.guides import newton
from bayesfed.guides.laplace_marginal import evaluate
from bayesfed.guides.particles import PARTICLE, ParticleGuide
from bayesfed.guides.triangular import inverse_root
from bayesfed.guides.unconstrained import delta_at, split
from bayesfed.output.client_draws import Draws
from bayesfed.output.evidence import log_volume


@torch.no_grad()
def draw_around_modes(
    program: Program, theta: Params, count: int, batch: Batch, keys: Tensor, centre: bool
) -> Draws:
    """Draw w_i of K clients at each draw of θ from the Laplace approximation there, with log p(w_i, D_i | θ) − log q.

    Args:
        program: one for which :func:`~bayesfed.guides.particles.has_modes` is true.
        theta: draws of the guide's global random sites, ``(S, 1, 1, *event)``.
        count: S.
        batch: the clients' rows.
        keys: the clients' noise streams, ``(K,)``.
        centre: return the modes.
    """
    guide: ParticleGuide = program.guide
    z = theta.get(PARTICLE, batch.scale.new_zeros(count, 1, 1, 0))
    particles, which = torch.unique(z[:, 0, 0], dim=0, return_inverse=True)
    _, mode, curvature = guide.log_evidence(particles[:, None, None], batch)
    root = inverse_root(newton.positive(curvature, guide.weakest))[which]
    path = word("around modes"), torch.arange(count, device=keys.device)[:, None, None]
    eps = Draw("normal", mode.shape[-1:])(keys[None, :, None], batch.scale.dtype, path)
    eps = torch.zeros_like(eps) if centre else eps
    u = mode[which] + (root @ eps[..., None]).squeeze(-1)
    at = split(z, guide.sizes) | split(u, guide.local_sizes)
    run = evaluate(guide.model, at, program.temper(batch))
    values = {name: delta_at(run.priors[name], value).v for name, value in at.items()}
    log_q = -eps.square().sum(-1) / 2 - log_volume(root)
    log_p = run.log_prob(guide.local_sizes) + run.log_prob(run.observed)
    return Draws(values, count, log_p.expand(count, len(batch)) - log_q.squeeze(-1))
