"""The gradient of a client's log marginal likelihood at each particle of θ (PAC-PFL).

    Z_i(φ) = E_{w ~ P_φ} exp(−(β / n_i) Σ_{rows of D_i} ℓ(w, row)),   ℓ = −log p: with β = n_i the marginal likelihood
    client i  uploads ∇_φκ ln Z_i(φ_κ) for each particle, on a minibatch                                  (Algorithm 2)
              and ∇²_φκ ln Z_i(φ_κ), where the server asks for it and adds no noise

For Gaussian processes ln Z_i is known in closed form (eq. 33). Where a client has at most 20 variables Laplace's method
gives it (exact for Normal likelihoods). For other models, such as networks, it is logsumexp − ln L of the log
likelihoods of L draws from the prior (eq. 38), which is the Rényi bound at α = 0 with the prior as guide: where rows
say much more than the prior, it is far too low, and its maximum elsewhere.

A client, old or new, conditions: it takes no gradient step and uploads nothing. Draws of φ and w from the prior count
by exp(−(β / n_i) Σ ℓ), and so particles by their Z_i (eq. 37).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.elbo import Noise, client_terms
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.globals import Particles
from bayesfed.guides.locals import FromPrior, Locals
from bayesfed.guides.particles import PARTICLE, PARTICLES, has_modes
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import CURVED, Job, Work
from bayesfed.steps.losses import per_client
from bayesfed.steps.steps import Steps
from bayesfed.tracing.compiler import traceable


@dataclass(frozen=True)
class Evidence(Steps):
    """∇ ln Z_i at each particle, and its mean over particles in the model's ``pyro.param``."""

    gives = frozenset({"gradients", "curvature"})
    globals = (Particles,)
    locals = (FromPrior,)

    def run(self, job: Job, locals_: Locals) -> Work:
        """Return ∇ ln Z_i of K clients on a minibatch, in each particle ``(K, 1, k, D)`` and in the parameters.

        Where the server asks for it, ∇² ln Z_i too, ``(K, 1, k, D, D)``; 0 of a client where it is not finite.
        """
        program, curved = job.program, CURVED in job.message and not job.private
        supplied = program.noise(job.keys, len(job.theta[PARTICLES]) * _draws(program), local=True)
        slopes, curvature, evidence = self.slopes(program, job.theta, job.rows(0), supplied, curved)
        return Work({"gradients": slopes, "curvature": curvature}, evidence.mean(0))

    @traceable
    def slopes(
        self, program: Program, message: Params, batch: Batch, supplied: Noise, curved: bool
    ) -> tuple[Params, Params, Tensor]:
        """Return ∇_φκ ln Z_i(φ_κ), mean_κ ∇_η ln Z_i(φ_κ); ∇²_φκ ln Z_i(φ_κ); and ln Z_i(φ_κ) ``(k, K)``."""
        theta = leaves(copies(message, len(batch)))  # φ (K, 1, k, D), η (K, 1, ...)
        phi = theta[PARTICLES].permute(2, 0, 1, 3)
        params = {**theta, PARTICLES: message[PARTICLES]}
        evidence = log_evidence(program, params, phi, batch, supplied)
        curvature = {}
        if curved:
            found = particle_curvature(evidence, theta[PARTICLES])
            finite = found.isfinite().flatten(1).all(1)
            curvature = {PARTICLES: torch.where(per_client(finite, found), found, 0.0)}
        return particle_gradients(evidence, theta), curvature, evidence.detach()

    def adapt(self, job: Job, theta: Params, own: Params, steps: int, lr: float | None) -> Params:
        """Return no parameters: a client conditions on its rows."""
        return {}


def log_evidence(
    program: Program, params: Mapping[str, Tensor], phi: Tensor, batch: Batch, supplied: Noise
) -> Tensor:
    """Return ln Z_i(φ_κ), ``(k, K)``, of particles ``(k, K or 1, 1, D)``."""
    if has_modes(program):
        return program.guide.log_evidence(phi, batch)[0]
    draws = _draws(program)
    repeated = {PARTICLE: phi.repeat_interleave(draws, 0)}
    tempered = program.temper(batch)
    terms = client_terms(program, params, repeated, tempered, supplied, draws * len(phi))
    return terms.unflatten(0, (len(phi), draws)).logsumexp(1) - math.log(draws)


def particle_gradients(values: Tensor, theta: Params) -> Params:
    """Return, of values ``(k, ...)``, the gradient of each in its particle, and of their mean in the parameters."""
    found = gradients(values, theta)
    return {n: v if n == PARTICLES else v / len(values) for n, v in found.items()}


def particle_curvature(values: Tensor, phi: Tensor) -> Tensor:
    """Return, of values ``(k, ...)``, the second derivatives of each in its particle: ``(..., k, D, D)``."""
    (grad,) = torch.autograd.grad(values.sum(), phi, create_graph=True, materialize_grads=True)
    if not grad.requires_grad:
        return torch.zeros_like(phi)[..., None].expand(*phi.shape, phi.shape[-1])
    rows = [
        torch.autograd.grad(grad[..., d].sum(), phi, retain_graph=True, materialize_grads=True)[0]
        for d in range(phi.shape[-1])
    ]
    return torch.stack(rows, -1)


def exact(program: Program) -> bool:
    """Return whether ln Z_i takes no draws of a client's variables."""
    return program.guide.local_scaling is not None or not program.locals


def _draws(program: Program) -> int:
    return program.local_draws if program.locals else 1
