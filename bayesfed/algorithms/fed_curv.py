"""FedCurv: FedAvg whose clients are kept from forgetting what the others have learnt.

    server    sends θ, Σ_j F_j and Σ_j F_j θ_j                                      (Shoham et al. 2019, section 3)
    client i  θ_i = θ; steps on  L_i(θ_i) + λ Σ_{j≠i} (θ_i − θ_j)ᵀ F_j (θ_i − θ_j)
              F_i ← diagonal of the Fisher information of L_i at θ_i, the mean over rows of (∇ log p(y | x, θ_i))²
    server    θ ← Σ n_i θ_i / Σ n_i

L_i is a mean over the client's rows, and so is F_i; the penalties of clients of all sizes weigh alike, as the authors
write them, while θ is the mean by rows of FedAvg. A client knows its own (F_i, F_i θ_i) and takes it out of the sums. A
step goes along ∇L_i and then makes the proximal step of the penalty, which is stable for every λ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesfed.algorithms.fed_avg import FedAvg, log_likelihood, mean_loss
from bayesfed.algorithms.protocol import Turn, Upload, mean, moved, moves, weighted
from bayesfed.data.batch import Batch
from bayesfed.elbo.elbo import client_losses
from bayesfed.elbo.program import Params, Program
from bayesfed.steps.curvature import Loss, layered, slopes
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.optimizer import State
from bayesfed.steps.point_estimates import against, at_rest, centre, zeros
from bayesfed.tracing.compiler import traceable


@dataclass(frozen=True)
class FedCurv(FedAvg):
    """Federated curvature, plain steps only; other settings as for :class:`~bayesfed.FedAvg`.

    Attributes:
        lam: λ.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.algorithms.fed_curv import FedCurv
        >>> train, test = datasets.digits(clients=5)
        >>> posterior = bf.fit(models.Network(models.mlp(64, 10)), train, FedCurv(), rounds=2, batch_size=10)
        >>> posterior.params["prior.loc"].shape
        torch.Size([650])
    """

    lam: float = 1.0
    remembered = ("fisher", "pull")
    no_noise = "noise would add up in the sums of the clients' curvatures: use FedAvg"

    def start(self, program: Program) -> State:
        """θ, and no penalty."""
        theta = super().start(program)
        return {"theta": theta, "fisher": zeros(theta), "pull": zeros(theta)}

    def start_clients(self, program: Program, server: State, batch: Batch) -> State:
        """F_i = 0."""
        theta = copies(server["theta"], len(batch))
        return {"fisher": zeros(theta), "pull": zeros(theta)}

    def broadcast(self, turn: Turn, server: State) -> Params:
        """θ and the sums of all clients' F_j and F_j θ_j."""
        return {f"{part}.{n}": v for part, values in server.items() for n, v in values.items()}

    def work(self, job: Job) -> Work:
        """Steps of K clients on their θ_i, and their new F_i and F_i θ_i."""
        theta, fisher, pull = (
            {name: job.message[f"{part}.{name}"] for name in job.program.init}
            for part in ("theta", "fisher", "pull")
        )
        others = {name: value - job.clients["fisher"][name] for name, value in fisher.items()}
        drawn = {name: value - job.clients["pull"][name] for name, value in pull.items()}
        at, lr = copies(theta, len(job)), job.rate * self.lr
        schedule = job.rows.schedule(self.local_epochs, self.local_steps).to(job.keys.device)
        for step, active in enumerate(schedule):
            at = self.pulled(job.program, at, others, drawn, job.rows(step), active, lr)
        new = self.curvature(job, at)
        kept = {"fisher": new, "pull": {name: new[name] * at[name] for name in new}}
        change = {
            f"{part}.{name}": kept[part][name] - before
            for part, values in job.clients.items()
            for name, before in values.items()
        }
        return Work(
            {f"theta.{n}": v for n, v in at.items()} | change, log_likelihood(job, at), kept
        )

    @traceable
    def pulled(
        self,
        program: Program,
        theta: Params,
        fisher: Params,
        pull: Params,
        batch: Batch,
        active: Tensor,
        lr: float,
    ) -> Params:
        """One step of the clients that are active."""
        own = leaves(theta)
        grads = gradients(mean_loss(program, own, batch), own)
        weight, found = 2 * lr * self.lam, {}
        for name, value in theta.items():
            moved = (value - lr * grads[name] + weight * pull[name]) / (1 + weight * fisher[name])
            found[name] = torch.where(against(active, value), moved, value)
        return found

    def curvature(self, job: Job, theta: Params) -> Params:
        """F_i of K clients at their θ_i."""
        flat = torch.cat([value.flatten(1) for value in theta.values()], 1)
        loss = _stacked(job.program, theta)
        kind = "layers" if layered(loss, flat, job.rows(0)) else "per-sample"
        return _apart(slopes(loss, flat, job.rows(None), kind)[1], theta)

    def encode(self, job: Job, work: Work) -> Upload:
        """θ_i − θ weighted by n_i, and the changes of the other two as they are."""
        theta = {name: v for name, v in work.found.items() if name.startswith("theta.")}
        rest = {name: v.squeeze(1) for name, v in work.found.items() if name not in theta}
        return weighted(moves(job, theta), job.counts) | rest

    def decode(self, turn: Turn, server: State, total: Upload) -> tuple[State, Tensor]:
        """The mean of θ_i, and the sums with what has changed of them."""
        by = mean(turn, total)
        theta = moved(server["theta"], {name: by[f"theta.{name}"] for name in server["theta"]})
        sums = {
            part: {name: value + total[f"{part}.{name}"] for name, value in server[part].items()}
            for part in ("fisher", "pull")
        }
        return {"theta": theta} | sums, torch.zeros(())

    def params(self, server: State) -> Params:
        """θ."""
        return server["theta"]


def _stacked(program: Program, like: Mapping[str, Tensor]) -> Loss:
    """−log p(D_i | θ) / n_i with clients at the centre of their prior, as a function of stacked θ_i ``(K, D)``."""

    def loss(flat: Tensor, batch: Batch) -> Tensor:
        theta = _apart(flat, like)
        at = at_rest(program, theta | centre(program, theta, batch), batch)
        losses = client_losses(program, at, batch, {}, 1)
        return losses.nll / losses.rows

    return loss


def _apart(flat: Tensor, like: Mapping[str, Tensor]) -> Params:
    """Stacked numbers ``(K, D)`` as parameters ``(K, 1, ...)``."""
    parts = flat.split([value[0].numel() for value in like.values()], 1)
    return {
        name: part.reshape(-1, *value.shape[1:])
        for (name, value), part in zip(like.items(), parts, strict=True)
    }
