"""pFedVEM: personal weights whose closeness to the common ones every client decides by its own uncertainty.

    p(w_j | w, ρ_j²) = N(w, ρ_j² I),   q(w_j) = N(μ_j, diag Σ_j)                          (Zhu et al. 2023, eq. 5)

    server    sends w, and the weights that all clients share (the body)
    client j  ρ_j² = (tr Σ_j + ‖μ_j − w‖²) / D in closed form; then steps on (μ_j, Σ_j), uphill in
              E_q[log p(D_j | w_j)] − λ KL(q(w_j) ‖ N(w, ρ_j² I)), the sum over its rows; then on its copy of
              the body; keeps q(w_j) and uploads (τ_j μ_j, τ_j) with τ_j = 1 / ρ_j², and the body
    server    w ← Σ τ_j μ_j / Σ τ_j (eq. 7); body ← mean, weighted by n_j

An uncertain or outlying client has a large ρ_j: it pulls w less and is pulled less. Which weights are personal is
the model's choice (``Network(..., local=["4."], spread="client")``), usually the last layer.

The authors' code lets every client train in every round and a random tenth of them upload: that is
``clients_per_round=1.0`` with ``upload_fraction=0.1``. ``clients_per_round=0.1`` alone trains the cohort only.
ρ_j² is taken before the local steps, as there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bayesfed import noise, optimizer
from bayesfed.algorithms.local import copies, descended, gradients, leaves, steps_taken
from bayesfed.federation import Federation, Model
from bayesfed.guides.factorised import factorised
from bayesfed.partition import client_losses, local_priors
from bayesfed.plates import Rows
from bayesfed.program import Params, Program, build

RHO = "prior.log_rho"


@dataclass(frozen=True)
class PFedVEM:
    """Personalised federated learning with variational expectation maximisation, and its point versions.

    Attributes:
        point: q(w_j) is a point instead of a mean-field Normal; with a model of ``spread="fixed"`` this is
            pFedMAP, Ditto's objective for the personal weights.
        head_epochs: passes over the rows for q(w_j) in a round; 0 leaves it where it starts (FedBABU).
        body_epochs: passes for the client's copy of the body, with w_j drawn from q.
        joint: both at once, on the same minibatches and for ``body_epochs`` (FedPer).
        lr: rate of Adam for q(w_j); its moments stay with the client.
        body_lr: rate of gradient descent on the body's mean loss.
        kl_weight: λ; 0 leaves the common w out (FedPer, FedRep, Local).
        particles: draws of w_j per step.
        init_scale: standard deviation of q(w_j) at the start.
        upload_fraction: which part of the cohort uploads, drawn at random each round.
    """

    point: bool = False
    head_epochs: int = 5
    body_epochs: int = 5
    joint: bool = False
    lr: float = 0.001
    body_lr: float = 0.01
    kl_weight: float = 1.0
    particles: int = 5
    init_scale: float = 0.1
    upload_fraction: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.upload_fraction <= 1:
            raise ValueError(f"upload_fraction is {self.upload_fraction}; it lies in (0, 1]")

    def program(self, model: Model, federation: Federation) -> Program:
        """The model with a factorised guide over its local sites."""
        guide = factorised(model, federation, point=self.point)
        return build(model, replace(guide, scale=self.init_scale), federation)

    def init(self, program: Program, federation: Federation) -> tuple[Params, optimizer.State]:
        """w and the body at the model's start; every q(w_j) around w."""
        local = program.init_locals(federation)
        server = {name: value.clone() for name, value in program.init.items()}
        some = federation.batch(torch.arange(1))
        first = {name: value[:1] for name, value in local.items()}
        for site, (loc, _) in local_priors(program, copies(server, 1) | first, some).items():
            local[f"{site}.loc"] = loc[0].expand_as(local[f"{site}.loc"]).clone()
        return server, optimizer.init(local, rows=len(federation))

    def broadcast(self, program: Program, server: Params, key: Tensor, cohort: int) -> Params:
        """w and the body."""
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
        """K clients at once: their q(w_j), their uploads ``(K, ...)`` and ELBO terms ``(K,)`` at the end."""
        theta = copies(message, len(keys))
        body = {name: value for name, value in theta.items() if not name.startswith("prior.")}
        state = clients
        if RHO in state["params"]:
            state = state | {"params": state["params"] | {RHO: log_rho(state["params"], theta)}}
        head = [name for name in state["params"] if name != RHO]
        head_steps = steps_taken(batch, self.head_epochs, None)
        body_steps = steps_taken(batch, self.body_epochs, None)
        if self.joint:
            head_steps = body_steps
        for step in range(int(torch.maximum(head_steps, body_steps).max())):
            if step < int(head_steps.max()):
                own = leaves({name: state["params"][name] for name in head})
                rest = {n: v for n, v in state["params"].items() if n not in own}
                params = theta | body | rest | own
                grads = gradients(self.elbo(program, params, batch, keys, step), own)
                grads |= {name: torch.zeros_like(value) for name, value in rest.items()}
                new = optimizer.ascend(state, grads, rate * self.lr)
                state = _where(step < head_steps, new, state)
            if self.joint:
                body = self.body_step(
                    program, theta, body, state, batch, keys, step, body_steps, rate
                )
        if not self.joint:
            for step in range(int(body_steps.max())):
                body = self.body_step(
                    program, theta, body, state, batch, keys, step, body_steps, rate
                )
        with torch.no_grad():
            last = theta | body | state["params"]
            losses = client_losses(
                program, last, batch(0), program.noise(keys, 1, local=True), particles=1
            )
        upload = self.encode(state["params"], theta | body, losses.rows, keys)
        return state, upload, -(losses.nll + losses.divergence)

    def body_step(
        self,
        program: Program,
        theta: Params,
        body: Params,
        state: optimizer.State,
        batch: Rows,
        keys: Tensor,
        step: int,
        steps: Tensor,
        rate: float,
    ) -> Params:
        """One step of gradient descent on the mean loss in each client's copy of the body."""
        if not body or step >= int(steps.max()):
            return body
        own = leaves(body)
        supplied = program.noise(noise.fold(keys, -1 - step), self.draws, local=True)
        params = theta | own | state["params"]
        losses = client_losses(program, params, batch(step), supplied, self.draws)
        grads = gradients(losses.nll / losses.rows, own)
        return descended(body, grads, rate * self.body_lr, step < steps)

    @property
    def draws(self) -> int:
        """Draws of w_j per step; a point needs one."""
        return 1 if self.point else self.particles

    def elbo(
        self, program: Program, params: Params, batch: Rows, keys: Tensor, step: int
    ) -> Tensor:
        """Each client's ELBO term, the KL weighed by λ: ``(K,)``."""
        supplied = program.noise(noise.fold(keys, step), self.draws, local=True)
        losses = client_losses(program, params, batch(step), supplied, self.draws)
        return -losses.nll - (self.kl_weight * losses.divergence if self.kl_weight else 0.0)

    def encode(self, phi: Params, theta: Params, rows: Tensor, keys: Tensor) -> Params:
        """(τ_j μ_j, τ_j) and (n_j body, n_j), of those who upload."""
        chosen = (noise.uniform(noise.fold(keys, noise.word("upload"))) < self.upload_fraction).to(
            rows
        )
        tau = torch.ones_like(rows)
        if RHO in phi:
            tau = (-2 * phi[RHO]).exp().reshape(-1)
        (loc,) = (value for name, value in phi.items() if name.endswith(".loc"))
        upload = {"prior.loc": (chosen * tau)[:, None] * loc.squeeze(1), "tau": chosen * tau}
        for name, value in theta.items():
            if not name.startswith("prior."):
                upload[name] = (chosen * rows)[:, None] * value.squeeze(1)
        return upload | {"rows": chosen * rows}

    def decode(
        self,
        program: Program,
        server: Params,
        total: Params,
        key: Tensor,
        rate: float,
        scale: float,
    ) -> tuple[Params, Tensor]:
        """The next w and body; as they were where nobody uploaded."""
        new = dict(server)
        if float(total["rows"]) > 0:
            for name in server:
                if name in total:
                    weight = total["tau"] if name.startswith("prior.") else total["rows"]
                    new[name] = total[name] / weight
        return new, torch.zeros(())

    def params(self, program: Program, server: Params) -> Params:
        """w and the body."""
        return server


def log_rho(phi: Params, theta: Params) -> Tensor:
    """log ρ_j = ½ log((tr Σ_j + ‖μ_j − w‖²) / D) of K clients: ``(K, 1, 1)`` (eq. 7, the M step)."""
    (loc,) = (value for name, value in phi.items() if name.endswith(".loc"))
    spread = (loc - theta["prior.loc"]).square()
    for name, value in phi.items():
        if name.endswith(".log_scale"):
            spread = spread + (2 * value).exp()
    return spread.mean(-1, keepdim=True).log() / 2


def _where(active: Tensor, new: optimizer.State, old: optimizer.State) -> optimizer.State:
    """The new state of the clients that are active, the old one of the others."""
    return {
        part: {
            name: torch.where(active.reshape(-1, *[1] * (v.ndim - 1)), v, old[part][name])
            for name, v in tensors.items()
        }
        for part, tensors in new.items()
    }
