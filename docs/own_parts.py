"""Parts of one's own: two rules and client steps that the package does not have, used like its own parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import bayesfed as bf
from bayesfed.guides.globals import Point
from bayesfed.guides.locals import AtPrior
from bayesfed.rules import Mean, Rule, mean_of, moves
from bayesfed.settings import Rate
from bayesfed.steps import Descent, Job, Steps, Work, local_loop, optimizer
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.losses import client_loss, zeros_like


# start: FedAdam
@dataclass(frozen=True)
class FedAdam(Mean):
    """Adam on the server, with the mean move of the clients as its gradient (Reddi et al. 2021, Algorithm 2).

        Δ = Σ π_i (θ_i − θ);  m ← β₁ m + (1 − β₁) Δ;  v ← β₂ v + (1 − β₂) Δ²;  θ ← θ + η m̂ / (√v̂ + τ)

    with m̂ and v̂ free of the bias of their start at zero (Kingma & Ba 2015). The moments are part of the server's state.

    Attributes:
        lr: η, about the distance that a parameter moves in a round.
        tau: τ, the adaptivity.
    """

    lr: Rate = 0.03
    tau: Rate = 1e-3

    def start(self, program):
        """Return θ, zero moments and the number of steps, as the optimizer keeps them."""
        return optimizer.init(super().start(program)["theta"])

    def params(self, server):
        """Return θ."""
        return server["params"]

    def decode(self, turn, server, total):
        """Return the state after one step of Adam; parameters that no client moves have the gradient zero."""
        gradient = zeros_like(server["params"]) | mean_of(turn, total)
        state = optimizer.ascend(server, gradient, turn.rate * self.lr, eps=self.tau, beta2=0.99)
        return state, torch.zeros(())


# end: FedAdam


# start: TrimmedMean
@dataclass(frozen=True)
class TrimmedMean(Rule):
    """The mean, number by number, of those clients' moves that are within a threshold c.

        θ ← θ + Σ_i 1[|Δ_i| ≤ c] Δ_i / Σ_i 1[|Δ_i| ≤ c],   Δ_i = θ_i − θ

    The usual trimmed mean sorts the clients' moves, which no sum can do. Here both sums are uploads, and the server
    adapts c so that a fraction q of the clients is left out, as adaptive clipping does (Andrew et al. 2021):
    c ← c exp(η (s − q)), s being the share that was left out in this round.

    Attributes:
        fraction: q.
        first: c of the first round.
        speed: η.
    """

    fraction: float = 0.1
    first: Rate = 0.1
    speed: Rate = 1.0
    sends = frozenset({"threshold"})

    def start(self, program):
        """Return θ, and a threshold for each of its numbers."""
        threshold = {n: torch.full_like(v, self.first) for n, v in program.init.items()}
        return super().start(program) | {"threshold": threshold}

    def broadcast(self, turn, server):
        """Return θ and the thresholds."""
        return server

    def encode(self, job: Job, work: Work):
        """Return the moves within the thresholds, and which they are."""
        move = moves(job, work.found["theta"])
        inside = {n: v.abs() <= job.message["threshold"][n] for n, v in move.items()}
        kept = {n: torch.where(inside[n], v, 0.0).squeeze(1) for n, v in move.items()}
        return {
            "theta": kept,
            "inside": {n: v.to(kept[n]).squeeze(1) for n, v in inside.items()},
        }, {}

    def decode(self, turn, server, total):
        """Return θ moved by the means, and the next thresholds."""
        theta, threshold = dict(server["theta"]), dict(server["threshold"])
        for name, count in total["inside"].items():
            theta[name] = theta[name] + total["theta"][name] / count.clamp(min=1.0)
            left_out = 1.0 - count / turn.cohort
            threshold[name] = threshold[name] * (self.speed * (left_out - self.fraction)).exp()
        return {"theta": theta, "threshold": threshold}, torch.zeros(())


# end: TrimmedMean


# start: LastingMomentum
@dataclass(frozen=True)
class LastingMomentum(Steps):
    """Gradient descent whose velocity each client keeps from round to round (heavy ball, Polyak 1964).

        v_i ← 0.9 v_i + ∇ L_i(θ_i);  θ_i ← θ_i − η v_i

    ``Descent(optimizer="momentum")`` starts every round with v_i = 0 instead.

    Attributes:
        lr: η.
        epochs: passes over a client's rows in a round.
    """

    lr: Rate = 0.02
    epochs: int = 1
    globals = (Point,)
    locals = (AtPrior,)

    def start_clients(self, program, theta, batch, locals_):
        """Return v_i = 0 for each of K clients."""
        return {"velocity": zeros_like(copies(theta, len(batch)))}

    def run(self, job: Job, locals_) -> Work:
        """Take the steps of a round from θ as it was sent, and from the velocities of the last round."""

        def step(state, number, active):
            own = leaves(state["params"])
            loss = client_loss(job.program, own, job.rows(number), at_prior=True)
            grads = gradients(loss, own)
            return optimizer.descend("momentum", state, grads, job.rate * self.lr, active)

        start = job.clients | {"params": copies(job.theta, len(job))}
        end = local_loop(job.rows.schedule(self.epochs), job.keys.device, start, step)
        with torch.no_grad():
            loss = client_loss(job.program, end["params"], job.rows(0), at_prior=True)
        return Work({"theta": end["params"]}, -job.counts * loss, {"velocity": end["velocity"]})

    def adapt(self, job, theta, own, steps, lr):
        """Fine-tune the clients' own variables by plain descent."""
        return Descent("locals", lr=self.lr).adapt(job, theta, own, steps, lr)


# end: LastingMomentum


# start: compositions
def with_momentum(lr: float = 0.02) -> bf.Algorithm:
    """Return FedAvg with lasting momentum and adaptive trimming: ``name = "own_parts.py:with_momentum"``."""
    return bf.FedAvg().replace(
        steps=LastingMomentum(lr=lr), rule=TrimmedMean(), name="FedAvg with momentum"
    )


adam = bf.FedAvg().replace(rule=FedAdam(), name="FedAdam")
# end: compositions


if __name__ == "__main__":
    schools: Any = bf.datasets.eight_schools()
    for own in (adam, with_momentum()):
        bf.testing.check_algorithm(own, bf.models.eight_schools, schools)
        print(bf.fit(bf.models.eight_schools, schools, own, rounds=20))
