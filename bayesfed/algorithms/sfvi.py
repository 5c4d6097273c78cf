"""SFVI: structured federated variational inference, for any model/guide pair.

Maximises  E_q[log p(θ) − log q(θ)] + Σ_i E_q[log p(w_i, D_i | θ) − log q(w_i | θ)]  over the server's
parameters λ of q(θ) and every client's φ_i of q(w_i | θ) (Hassan, Salomone & Mengersen 2023, *Federated
variational inference methods for structured latent variable models*).

    server    sends draws θ = T_λ(ε), and the global parameters that a client reads directly
    client i  moves φ_i with its closed form (elbo/laplace.py), takes Adam steps on it, then uploads the
              gradient of its term in the draws
    server    adds the gradients and its own term's, and takes a natural-gradient step on λ (elbo/natural.py)

The paper's client uploads the gradient in λ; the chain rule splits it at θ, so a client uploads D numbers a
draw whatever the kind of q(θ) and the size of λ. Of λ itself it only reads where q(θ) lies. φ_i never leaves
the client. A model's global ``pyro.param`` are points: the server sends them, clients upload the gradient in them, and
the server takes Adam steps.

Under partial participation N / K times the cohort's sum is unbiased but as noisy as clients differ. So each
client uploads what has *changed*: the gradient less the mean gradient that it sent last, g_i. The server
keeps Σ_i g_i, which is exact, and scales the changes only (SAGA; Defazio, Bach & Lacoste-Julien 2014, eq. 1).
With all clients in every round nothing is different.

Where the sum is noisy, Σ_i g_i would add up the noise of all rounds, and a clipped change would not be what the client
remembers. Then clients upload the gradient itself and remember nothing: the cohort's sum times N / K is unbiased.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesfed.algorithms import optimizer
from bayesfed.algorithms.optimizer import State
from bayesfed.algorithms.protocol import Job, Turn, Upload, Work
from bayesfed.algorithms.schedules import gradients, leaves
from bayesfed.algorithms.structured import (
    Structured,
    begun,
    family_of,
    hierarchical,
    local_steps,
    moved,
)
from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo import noise
from bayesfed.elbo.build import build
from bayesfed.elbo.program import Params, Program
from bayesfed.elbo.terms import Noise, draw, server_pass
from bayesfed.guides.flow import Flow
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.mean_field import MeanField
from bayesfed.tracing.compiler import traceable


@dataclass(frozen=True)
class SFVI(Structured):
    """Structured federated variational inference, any model.

    Attributes:
        global_guide: family of the globals: MeanField, FullRank or Flow. By default full rank where the
            model has at most 100 global dimensions, else mean-field, with a warning.
        conditioned: whether local variables are conditioned on the globals (see
            :class:`~bayesfed.guides.Hierarchical`). By default up to 50 global dimensions.
        guide: a Pyro guide of your own instead of both.
        local_steps: Adam steps on φ_i per round.
        draws: S, ELBO draws per step.
        lr: the server's rate of natural-gradient steps on a Gaussian q(θ); half of it is Adam's, on what else
            there is (point globals, a guide of your own). A Flow's affine part takes natural-gradient steps
            while the rate is above half, the spline resting; then all of it takes Adam's.
        local_lr: the clients' Adam rate.
        lr_decay: both rates fall, as half a cosine, to this fraction of their start.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> bf.fit(models.eight_schools, datasets.eight_schools(), bf.SFVI(global_guide=bf.Flow()), rounds=2)
        Posterior: SFVI (Flow globals, conditioned locals), 2 rounds, 8 clients; globals mu, tau; locals theta
        2 rounds are too few to tell whether the fit still moves
    """

    global_guide: MeanField | FullRank | Flow | None = None
    conditioned: bool | None = None
    guide: Callable[[Any], Any] | None = None
    local_steps: int = 10
    draws: int = 8
    lr: float = 0.1
    local_lr: float = 0.03
    lr_decay: float = 0.01
    remembered = ("sent",)

    def program(self, model: Model, federation: Federation) -> Program:
        """The model with the guide that these settings choose."""
        if self.guide is not None:
            return build(model, self.guide, federation)
        return hierarchical(model, federation, self.global_guide, self.conditioned)

    def start(self, program: Program) -> State:
        """λ with Adam's moments, and the sum of what the server knows of the clients."""
        server = optimizer.init({n: v.clone() for n, v in program.init.items()})
        with torch.no_grad():
            key = noise.key(0).to(program.schema.device)
            theta = draw(program, program.init, program.noise(key, 1, local=False), 1)
        known = {name: torch.zeros_like(value[0, 0, 0]) for name, value in theta.items()}
        known |= {name: torch.zeros_like(program.init[name]) for name in program.direct}
        return server | {"known": known}

    def start_clients(self, program: Program, server: State, batch: Batch) -> State:
        """φ_i, and what the client has sent: nothing yet."""
        sent = {n: v.new_zeros(len(batch), *v.shape) for n, v in server["known"].items()}
        return begun(program, batch) | {"sent": sent}

    def broadcast(self, turn: Turn, server: State) -> Params:
        """Draws of θ for every local step, ``(steps · S, 1, 1, ...)``, and the global parameters."""
        count = self.local_steps * self.draws
        with torch.no_grad():
            supplied = turn.program.noise(turn.key, count, local=False)
            message = draw(turn.program, server["params"], supplied, count)
        return message | server["params"]

    def work(self, job: Job) -> Work:
        """Steps of K clients on φ_i; found are the gradients in each draw, ``(K, draws, ...)``."""
        program = job.program
        kept = {part: tensors for part, tensors in job.clients.items() if part != "sent"}
        params = {name: job.message[name] for name in program.init}
        clients, grads, terms = local_steps(
            program,
            {name: job.message[name] for name in program.random},
            params,
            moved(program, params, kept, job.rows(None)),
            job.rows,
            job.keys,
            steps=self.local_steps,
            draws=self.draws,
            lr=job.rate * self.local_lr,
        )
        sent = {name: grad.sum(1) for name, grad in grads.items()}
        return Work(grads, terms, clients | {"sent": sent})

    def encode(self, job: Job, work: Work) -> Upload:
        """The gradients less their last mean, and by how much that changes; the gradients, where it may not count."""
        if job.private:
            return work.found
        before, upload = job.clients["sent"], {}
        for name, grad in work.found.items():
            upload[name] = grad - before[name][:, None] / grad.shape[1]
            upload[f"change.{name}"] = work.clients["sent"][name] - before[name]
        return upload

    def decode(self, turn: Turn, server: State, total: Upload) -> tuple[State, Tensor]:
        """A step on λ."""
        program, rate = turn.program, turn.rate
        supplied = program.noise(turn.key, self.local_steps * self.draws, local=False)
        automatic = self.guide is None and bool(program.random)
        natural = automatic and family_of(program).natural(rate)
        return self.server_step(program, server, total, supplied, natural, rate, turn.scale)

    @traceable
    def server_step(
        self,
        program: Program,
        server: State,
        total: Upload,
        supplied: Noise,
        natural: bool,
        rate: float,
        scale: float,
    ) -> tuple[State, Tensor]:
        """A step on λ, where ``natural`` a natural-gradient one on the family's own parameters."""
        count = self.local_steps * self.draws
        params = leaves(server["params"])
        term, theta = server_pass(program, params, supplied, count)
        if not params:
            return server, term.mean()
        gradient, known = {}, {}
        for name, before in server["known"].items():
            # a number times a traced rate, which is in double precision, would be so too
            gradient[name] = (scale * total[name]).to(before.dtype) + before / len(total[name])
            known[name] = before + total.get(f"change.{name}", 0.0)
        surrogate = term.mean()
        for name, grad in gradient.items():
            at = params[name] if name in params else theta[name][-len(grad) :, 0, 0]
            surrogate = surrogate + (grad * at).sum()
        ascended: Params = {}
        if natural:
            (site,) = program.random
            (own,) = torch.autograd.grad(term.sum(), theta[site], retain_graph=True)
            used = len(gradient[site])
            z, own = (x[-used:, 0, 0].detach() for x in (theta[site], own))
            g = own + used * gradient[site]
            ascended = family_of(program).ascend(server["params"], z, g, rate * self.lr)
        if rest := {name: value for name, value in params.items() if name not in ascended}:
            found = gradients(surrogate, rest)
            with torch.no_grad():
                adam = {
                    "params": rest,
                    **{part: server[part] for part in ("mean", "square", "step")},
                }
                adam = optimizer.ascend(adam, found, rate * self.lr / 2, beta2=0.99)
            server = {part: tensors | adam.get(part, {}) for part, tensors in server.items()}
        server = server | {"params": server["params"] | ascended, "known": known}
        return server, term.mean().detach()

    def params(self, server: State) -> Params:
        """λ."""
        return server["params"]
