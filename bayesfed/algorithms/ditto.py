"""Ditto: a common network by FedAvg, and beside it a personal one for every client, held near the common one.

    server    sends θ
    client i  θ_i = θ; steps on its rows,  θ_i ← θ_i − η ∇L_i(θ_i);  uploads n_i θ_i and n_i
              steps on w_i, which it keeps,  w_i ← w_i − η (∇L_i(w_i; θ) + λ (w_i − c(θ)))
    server    θ ← Σ n_i θ_i / Σ n_i                                       (Li et al. 2021, Algorithm 1)

L_i is the mean loss over rows. The common network does not know of the personal ones, which makes Ditto robust and
tells it from pFedMAP, whose common weights are the mean of the personal. In a hierarchical model c(θ), what w_i is
drawn to, is the centre of its prior p(w_i | θ), and θ is fitted with every client at that centre.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bayesfed.algorithms.fed_avg import FedAvg
from bayesfed.data.batch import Batch
from bayesfed.data.federation import Federation, Model
from bayesfed.elbo.elbo import client_losses
from bayesfed.elbo.program import Params, Program
from bayesfed.steps import optimizer
from bayesfed.steps.gradients import copies, gradients, leaves
from bayesfed.steps.job import Job, Work
from bayesfed.steps.optimizer import State
from bayesfed.steps.point_estimates import beginning, everyone, owning, squared
from bayesfed.tracing.compiler import traceable


@dataclass(frozen=True)
class Ditto(FedAvg):
    """Federated averaging with personal points beside it (Li et al. 2021).

    Attributes:
        lam: λ.

    The other settings are those of :class:`~bayesfed.FedAvg`; rate, epochs and optimiser are those of both networks.

    Example:
        >>> import bayesfed as bf
        >>> from bayesfed import datasets, models
        >>> from bayesfed.algorithms.ditto import Ditto
        >>> train, test = datasets.digits(clients=5)
        >>> model = models.Network(models.mlp(64, 10))
        >>> posterior = bf.fit(model, train, Ditto(), rounds=5, batch_size=10)
        >>> accuracy = (posterior.probabilities(test)["y"].argmax(1) == test["y"]).float().mean()
        >>> bool(accuracy > 0.9)
        True
    """

    lam: float = 0.1

    def program(self, model: Model, federation: Federation) -> Program:
        """The model with points for all its variables.

        Raises:
            ValueError: nothing is a client's own.
        """
        return owning(super().program(model, federation), type(self).__name__)

    def start_clients(self, program: Program, server: Params, batch: Batch) -> State:
        """Every w_i at the centre of its prior."""
        return {"params": beginning(program, copies(server, len(batch)), batch)}

    def work(self, job: Job) -> Work:
        """Steps of K clients on their θ_i, and on their w_i."""
        schedule = job.rows.schedule(self.local_epochs, self.local_steps)
        own = self.own_steps(job, job.clients["params"], schedule, job.rate * self.lr)
        return super().work(job)._replace(clients={"params": own})

    def own_steps(self, job: Job, own: Params | None, schedule: Tensor, lr: float) -> Params:
        """w_i of K clients after their steps, by default from the centre of their prior."""
        program, theta = job.program, copies(job.message, len(job))
        middle = beginning(program, theta, job.rows(0))
        state = optimizer.begin(self.optimizer, own or middle, rows=len(job))
        for step, active in enumerate(optimizer.told(schedule, job.keys.device)):
            state = self.own_step(program, theta, middle, state, job.rows(step), active, lr)
        return state["params"]

    @traceable
    def own_step(
        self,
        program: Program,
        theta: Params,
        middle: Params,
        own: State,
        batch: Batch,
        active: Tensor | None,
        lr: float,
    ) -> State:
        """One step on w_i of the clients that are active."""
        w = leaves(own["params"])
        losses = client_losses(program, theta | w, batch, {}, 1)
        loss = losses.nll / losses.rows + self.lam / 2 * squared(w, middle)
        return optimizer.descend(self.optimizer, own, gradients(loss, w), lr, active)

    def personalize(self, job: Job, steps: int | None = None, lr: float | None = None) -> Params:
        """w_i of K clients that took no part: the same steps, from the centre of their prior."""
        schedule = everyone(job, self.personal_steps if steps is None else steps)
        return self.own_steps(job, None, schedule, self.lr if lr is None else lr)
