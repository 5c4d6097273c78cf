"""The mean of θ_i beside the sums of the clients' curvatures (FedCurv, Shoham et al. 2019, section 3)."""

from dataclasses import dataclass

from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.program import Params, Program
from bayesfed.rules.quasi_newton import ByMeanMove
from bayesfed.rules.rule import NO_TERM, Turn, add, mean_of, moves, weighted_sum
from bayesfed.steps.gradients import copies
from bayesfed.steps.job import SINGLE, Job, Parts, Work
from bayesfed.steps.losses import zeros_like
from bayesfed.steps.optimizer import State

Server = dict[str, Params]
SUMS = ("fisher", "pull")


@dataclass(frozen=True)
class SummedCurvature(ByMeanMove):
    """θ is the mean by rows; the server sends θ, Σ_j F_j and Σ_j F_j θ_j, out of which a client takes its own."""

    by_gradient = True
    needs = frozenset({"theta", "fisher"})
    sends = frozenset(SUMS)
    no_noise = "noise would add up in the sums of the clients' curvatures: use FedAvg"

    def start(self, program: Program) -> Server:
        """Return θ, and no penalty."""
        return super().start(program) | {part: zeros_like(program.init) for part in SUMS}

    def start_clients(self, program: Program, server: Server, batch: Batch) -> State:
        """Return F_i = 0."""
        return {part: zeros_like(copies(server["theta"], len(batch))) for part in SUMS}

    def prepare(self, job: Job) -> Parts:
        """Return the sums over the other clients; none where clients take one step: θ_j converges to θ."""
        others = 0.0 if SINGLE in job.message else 1.0
        return {
            part: {n: others * (v - job.clients[part][n]) for n, v in job.message[part].items()}
            for part in SUMS
        }

    def encode(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return θ_i − θ weighted by n_i, and the changes of the other two as they are."""
        theta, fisher = work.found["theta"], work.found["fisher"]
        own = {"fisher": fisher, "pull": {n: f * theta[n] for n, f in fisher.items()}}
        change = {
            part: {n: (v - job.clients[part][n]).squeeze(1) for n, v in values.items()}
            for part, values in own.items()
        }
        return weighted_sum(moves(job, theta), job.counts) | change, own

    def decode(self, turn: Turn, server: Server, total: Parts) -> tuple[Server, Tensor]:
        """Return the mean of θ_i, and the sums with their changes."""
        moved = self.moved(turn, server, mean_of(turn, total))
        return moved | {part: add(server[part], total[part]) for part in SUMS}, NO_TERM
