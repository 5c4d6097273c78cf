"""Steps of each client on its own copy of q(θ), and on φ_i: the local work of SFVI-Avg.

    client i  with its copy λ_i = λ: steps uphill on λ_i and φ_i of
                  E_q[log p(θ) − log q(θ)] + N · E_q[log p(w_i, D_i | θ) − log q(w_i | θ)]
              that is, as if all N clients were like it          (Hassan, Salomone & Mengersen 2023)

The copies step by plain gradients divided by a root mean square that the server keeps, equal for all: Adam
in each client would normalise each client's gradient by itself, and the mean of the normalised gradients is
zero in the wrong place.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.elbo.elbo import Noise, elbo_terms
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.full_rank import FullRank
from bayesfed.guides.globals import Gaussian
from bayesfed.guides.locals import Locals
from bayesfed.guides.mean_field import MeanField
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.local_loop import all_clients, local_loop
from bayesfed.steps.local_variational import LocalVariational, ascend, follow_origin, noise_of_steps
from bayesfed.steps.losses import zeros_like
from bayesfed.steps.optimizer import State
from bayesfed.steps.steps import Inputs
from bayesfed.tracing.compiler import traceable

Copies = tuple[State, Params, Params]
"""φ_i with Adam's moments, λ_i, and λ_i's mean squared gradients so far."""
MOST = 3.0
"""The largest gradient of a step, in root mean squares of the rounds before: where a step goes too far for the
curvature the next gradient is even larger, and only the next round measures it."""


@dataclass(frozen=True)
class OwnCopy(LocalVariational):
    """Steps on (λ_i, φ_i).

    Attributes:
        steps: steps in a round.
        draws: S, ELBO draws in a step.
        lr: rate of the steps on λ_i.
        local_lr: Adam's rate of the steps on φ_i.
    """

    steps: int = 10
    draws: int = 8
    lr: float = 0.05
    local_lr: float = 0.03
    gives = frozenset({"copy", "squares"})
    needs = frozenset({"size"})
    globals = (Gaussian, FullRank, MeanField)

    def run(self, job: Job, locals_: Locals) -> Work:
        """Return the copies λ_i, and the mean squares of their gradients."""
        program, size, rate = job.program, job.message.get("size", {}), job.rate
        clients = follow_origin(program, job.theta, job.clients, job.rows(None))
        own = copies(job.theta, len(job))
        streams = noise_of_steps(program, job.keys, self.steps, self.draws, theta=True)
        terms = []

        def step(state: Copies, number: int, active: Tensor | None) -> Copies:
            given = Inputs(job.rows(number), (rate,), constants=size)
            state, term = self.step(program, state, given, next(streams))
            terms.append(term)
            return state

        start = clients, own, zeros_like(own)
        schedule = all_clients(len(job), self.steps)
        clients, own, squares = local_loop(schedule, job.keys.device, start, step)
        # the terms at λ itself, before the copies part
        return Work({"copy": own, "squares": squares}, terms[0], clients)

    @traceable
    def step(
        self, program: Program, state: Copies, given: Inputs, supplied: Noise
    ) -> tuple[Copies, Tensor]:
        """Take one step on φ_i and λ_i; return also the terms ``(K,)``."""
        (clients, own, square), (rate,), size = state, given.rates, given.constants
        lam, phi = leaves(own), leaves(clients["params"])
        server, client = elbo_terms(program, {**lam, **phi}, given.batch, supplied, self.draws)
        term = client.mean(0)
        # φ_i climbs the client's own term; λ_i the ELBO of N clients like this one
        objective = server.mean(0).sum() + program.clients * term.sum()
        grad = gradients(objective, {**lam, **phi})
        with torch.no_grad():
            of_term = {name: grad[name] / program.clients for name in phi}
            clients = ascend(program, clients, of_term, rate * self.local_lr)
            new, squared = {}, {}
            for name, value in own.items():
                squared[name] = square[name] + grad[name].square() / self.steps
                sizes = (grad[name] / (size[name] + 1e-12)).clamp(-MOST, MOST)
                new[name] = value + rate * self.lr * torch.where(size[name] > 0, sizes, 0.0)
        return (clients, new, squared), term.detach()
