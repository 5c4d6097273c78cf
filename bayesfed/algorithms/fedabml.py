"""FedABML: Bayesian meta-learning with an amortised posterior for every client.

    p(w_i | θ) = N(m_θ, diag σ_θ²),  q(w_i | φ_i) = N(m_i, diag σ_i²),  σ = exp(ν),  w = m + ε σ
    L_i(φ, θ)  = (−E_q[log p(D_i | w)] + λ KL(q(w | φ) ‖ p(w | θ))) / n_i          (FedABML, eq. 3.5)

    server    sends θ
    client i  φ = θ_i = θ; then R times (Algorithm 1), each with fresh noise
                  φ   ← φ   − η  ∇_φ L_i(φ, θ_i)
                  θ_i ← θ_i − η' ∇_θ L_i(φ, θ_i)
              and uploads θ_i; nothing is kept: the posterior is made anew from θ by gradient steps (eq. 3.8)
    server    θ ← the mean of the θ_i

The gradient in m is stiff where σ_θ is small: a step on λ KL / n_i contracts m − m_θ by η λ / (n_i σ_θ²), and
beyond 2 it diverges. So m is stepped in units of σ_θ (its gradient is multiplied by σ_θ²), which leaves η λ / n_i;
``whitened=False`` is the paper's plain step.

Other parts make other methods, see :mod:`bayesfed.algorithms.family`: a point for q, the gradient of θ taken
*through* the inner steps (MAML), φ uploaded in place of θ_i (FedAvg).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed import noise, optimizer
from bayesfed.algorithms.local import copies, descended, gradients, steps_taken
from bayesfed.federation import Federation, Model
from bayesfed.guides.factorised import factorised
from bayesfed.partition import client_losses, local_priors
from bayesfed.plates import Batch, Rows
from bayesfed.program import Params, Program, build

ALTERNATING, FIRST_ORDER, SECOND_ORDER = "alternating", "first-order", "second-order"


@dataclass(frozen=True)
class FedABML:
    """Amortised Bayesian meta-learning, and what its parts make by other choices.

    Attributes:
        point: q is a point instead of a mean-field Normal.
        gradient: ``"alternating"``: φ goes on from step to step beside θ_i; ``"first-order"`` and
            ``"second-order"``: each step of θ_i starts φ at θ_i again, takes ``inner_steps`` on one minibatch
            and the gradient of the loss on the next one through them, second order or with the steps detached.
        upload: ``"prior"`` (θ_i) or ``"posterior"`` (φ in the place of θ_i's location and scale; θ_i itself
            then stands still).
        local_epochs: R, passes over a client's rows in a round.
        local_steps: R in minibatches, instead.
        inner_steps: k, steps on φ before each one on θ_i.
        lr: η.
        prior_lr: η'.
        kl_weight: λ.
        kl_per_row: whether the KL is divided by n_i, as the likelihood is. False weighs it against the mean
            loss, as FedProx, pFedMe and Ditto do.
        particles: s, draws of w per step.
        whitened: step on locations in units of σ_θ.
        weighted: the server's mean is weighted by n_i.
        personal_steps: gradient steps in which a client makes its posterior from θ.
    """

    point: bool = False
    gradient: str = ALTERNATING
    upload: str = "prior"
    local_epochs: int = 5
    local_steps: int | None = None
    inner_steps: int = 1
    lr: float = 1.0
    prior_lr: float = 1.0
    kl_weight: float = 1.0
    kl_per_row: bool = True
    particles: int = 5
    whitened: bool = True
    weighted: bool = False
    personal_steps: int = 50

    def __post_init__(self) -> None:
        if self.gradient not in (ALTERNATING, FIRST_ORDER, SECOND_ORDER):
            raise ValueError(
                f"gradient is {self.gradient!r}: use 'alternating', 'first-order' or 'second-order'"
            )
        if self.upload not in ("prior", "posterior"):
            raise ValueError(f"upload is {self.upload!r}: use 'prior' or 'posterior'")

    def program(self, model: Model, federation: Federation) -> Program:
        """The model with a factorised guide over its local sites."""
        return build(model, factorised(model, federation, point=self.point), federation)

    def init(self, program: Program, federation: Federation) -> tuple[Params, optimizer.State]:
        """θ at the model's start. Clients keep nothing."""
        return {name: value.clone() for name, value in program.init.items()}, {}

    def broadcast(self, program: Program, server: Params, key: Tensor, cohort: int) -> Params:
        """θ."""
        return server

    def client_update(
        self,
        program: Program,
        message: Params,
        clients: optimizer.State,
        batch: Rows,
        keys: Tensor,
        rate: float,
    ) -> tuple[optimizer.State, Params, Tensor]:
        """K clients at once: no state, their uploads ``(K, ...)`` and their ELBO terms ``(K,)`` at the end."""
        theta = copies(message, len(keys))
        phi = start(program, theta, batch(0))
        steps = steps_taken(batch, self.local_epochs, self.local_steps)
        term = torch.zeros(len(keys))
        for step in range(int(steps.max())):
            active = step < steps
            if self.gradient == ALTERNATING:
                for inner in range(self.inner_steps):
                    phi, theta = self.inner(
                        program, phi, theta, batch(step), noise.fold(keys, 2 * step + 1 + 1000 * inner), rate, active
                    )
                if self.upload == "posterior":
                    continue
                leaves = {n: v.detach().requires_grad_() for n, v in theta.items()}
                loss = self.loss(program, leaves | phi, batch(step), noise.fold(keys, 2 * step))
            else:
                leaves = {n: v.detach().requires_grad_() for n, v in theta.items()}
                adapted = start(program, leaves, batch(0))
                second = self.gradient == SECOND_ORDER
                first = (self.inner_steps + 1) * step
                for inner in range(self.inner_steps):
                    fold = noise.fold(keys, 2 * (first + inner) + 1)
                    loss = self.loss(program, leaves | adapted, batch(first + inner), fold)
                    grads = gradients(loss, adapted, create_graph=True)
                    scaled = self.scaled(program, leaves, grads, batch(0))
                    adapted = {
                        n: v - rate * self.lr * (scaled[n] if second else scaled[n].detach())
                        for n, v in adapted.items()
                    }
                last = first + self.inner_steps
                loss = self.loss(program, leaves | adapted, batch(last), noise.fold(keys, 2 * last))
            grads = self.scaled(program, leaves, gradients(loss, leaves), batch(0), prior=True)
            theta = descended(leaves, grads, rate * self.prior_lr, active)
            theta = {name: value.detach() for name, value in theta.items()}
        last_rows = batch(0)
        with torch.no_grad():
            losses = client_losses(
                program, theta | phi, last_rows, program.noise(keys, self.particles, local=True), self.particles
            )
            term = -(losses.nll + losses.divergence)
        if self.upload == "posterior":
            theta = theta | self.as_prior(program, phi, theta)
        weight = losses.rows if self.weighted else torch.ones_like(losses.rows)
        upload = {n: v.squeeze(1) * weight.reshape(-1, *[1] * (v.ndim - 2)) for n, v in theta.items()}
        return {}, upload | {"weight": weight}, term

    def decode(
        self, program: Program, server: Params, total: Params, key: Tensor, rate: float, scale: float
    ) -> tuple[Params, Tensor]:
        """The mean of the uploads; the server has no ELBO term of its own."""
        return {n: total[n] / total["weight"] for n in server}, torch.zeros(())

    def params(self, program: Program, server: Params) -> Params:
        """θ."""
        return server
