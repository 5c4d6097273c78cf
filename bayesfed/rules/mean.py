"""Means of the clients' copies of θ, and rules that differ from it by a line: FedNova, SCAFFOLD, a median."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bayesfed.data.batch import Batch
from bayesfed.elbo.program import Params, Program
from bayesfed.rules.quasi_newton import ByMeanMove
from bayesfed.rules.rule import NO_TERM, Turn, add, mean_of, moves, weighted_sum
from bayesfed.settings import Count
from bayesfed.steps.gradients import copies
from bayesfed.steps.job import SINGLE, Job, Parts, Work
from bayesfed.steps.losses import per_client, zeros_like
from bayesfed.steps.optimizer import State
from bayesfed.steps.steps import Steps

Server = dict[str, Params]


@dataclass(frozen=True)
class Mean(ByMeanMove):
    """θ ← θ + Σ π_i (θ_i − θ), with π_i = n_i / Σ n or 1 / K (McMahan et al. 2017, Algorithm 1).

    Attributes:
        by: ``"rows"``: clients count by their numbers of rows, except under noise, when these stay secret; or
            ``"clients"``: all count alike.
        averaged_rounds: the posterior has θ̄, an average over about the last rounds, in place of the last θ, which
            clients are sent all the same (Polyak and Juditsky 1992): θ̄ ← θ̄ + (θ − θ̄) / averaged_rounds. It takes out
            much of what the last cohorts' rows and minibatches happen to be. 1: the last θ. Quasi-Newton steps are not
            averaged.
    """

    by: Literal["rows", "clients"] = "rows"
    averaged_rounds: Count = 1
    by_gradient = True

    def start(self, program: Program) -> Server:
        """Return θ, and its average of no round."""
        server: Server = super().start(program)
        if self.averaged_rounds == 1:
            return server
        none = program.schema.scale.new_zeros(())
        return server | {"average": dict(server["theta"]), "averaged": {"rounds": none}}

    def params(self, server: Server) -> Params:
        """Return θ̄ if there is one, else θ."""
        return server.get("average", server["theta"])

    def broadcast(self, turn: Turn, server: Server) -> Parts:
        """Return the last θ, and whether clients take a single step."""
        message = super().broadcast(turn, server)
        return message | {"theta": server["theta"]} if "average" in server else message

    def encode(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return the moves, weighted."""
        weight = job.counts if self.by == "rows" and not job.private else None
        return weighted_sum(moves(job, work.found["theta"]), weight), {}

    def decode(self, turn: Turn, server: Server, total: Parts) -> tuple[Server, Tensor]:
        """Return θ moved by the mean, and θ̄."""
        found = self.moved(turn, server, mean_of(turn, total))
        if "average" not in server:
            return found, NO_TERM
        most = 1 if "newton" in server else self.averaged_rounds
        rounds = (server["averaged"]["rounds"] + 1).clamp(max=most)
        average = {n: v.lerp(found["theta"][n], 1 / rounds) for n, v in server["average"].items()}
        return found | {"average": average, "averaged": {"rounds": rounds}}, NO_TERM


@dataclass(frozen=True)
class OfOne(Mean):
    """The θ_i of a single client, the one that ``federation.pool()`` has: the baseline of pooled rows."""

    by_gradient = True

    def accept(self, program: Program, steps: Steps, name: str) -> Program:
        """Refuse a federation of several clients.

        Raises:
            ValueError: their number.
        """
        if program.clients > 1:
            raise ValueError(
                f"{name} is for a single client with all rows, and there are {program.clients}: give it "
                "federation.pool(), or take FedAvg"
            )
        return super().accept(program, steps, name)


@dataclass(frozen=True)
class MedianOfInstitutions(Mean):
    """Between machines, the median over institutions of their mean moves, number by number, in place of the mean.

    A few institutions that lie then move little, whatever they send; and institutions that differ from most count
    less. In one process there are no institutions, and it is refused; so it is with secure sums and under noise, where
    no institution's sum is seen.
    """

    def combine(self, totals: Sequence[Parts], clients: Sequence[Tensor]) -> Parts:
        """Return a sum in which every client has the median of the institutions' mean moves."""
        rows = [
            total.get("weight", {}).get("rows", n) for total, n in zip(totals, clients, strict=True)
        ]
        there = [(total["theta"], n) for total, n in zip(totals, rows, strict=True) if bool(n > 0)]
        weight = torch.stack([n for _, n in there]).sum() if there else torch.zeros(())
        theta = {
            name: weight * torch.stack([moves[name] / n for moves, n in there]).median(0).values
            for name in (there[0][0] if there else ())
        }
        return {"theta": theta}


@dataclass(frozen=True)
class NormalisedMean(ByMeanMove):
    """θ ← θ + τ̄ Σ π_i (θ_i − θ) / τ_i for clients that take τ_i steps (FedNova, Wang et al. 2020)."""

    by_gradient = True
    needs = frozenset({"theta", "steps"})
    no_noise = "its weights are the clients' numbers of rows and of steps: use FedAvg"

    def encode(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return the mean move of a step and the numbers of steps, weighted by n_i."""
        taken = work.found["steps"]["count"]
        move = {n: v / per_client(taken, v) for n, v in moves(job, work.found["theta"]).items()}
        upload = weighted_sum(move, job.counts)
        return upload | {"steps": {"count": (taken * job.counts[:, None]).squeeze(1)}}, {}

    def decode(self, turn: Turn, server: Server, total: Parts) -> tuple[Server, Tensor]:
        """Return θ after as many mean steps as clients take on average."""
        steps = mean_of(turn, total, "steps")["count"]
        move = {name: steps * value for name, value in mean_of(turn, total).items()}
        return self.moved(turn, server, move), NO_TERM


@dataclass(frozen=True)
class ControlVariates(ByMeanMove):
    """SCAFFOLD (Karimireddy et al. 2020, Algorithm 1, option II): clients' steps are corrected by c − c_i, their drift.

    c_i ← c_i − c + (θ − θ_i) / (steps · η). Clients remember c_i; the server's c is the mean of all.
    """

    by_gradient = True
    needs = frozenset({"theta", "path"})
    sends = frozenset({"control"})
    no_noise = "noise would add up in the control variate: use FedAvg"

    def start(self, program: Program) -> Server:
        """Return θ, and c = 0."""
        return super().start(program) | {"control": zeros_like(program.init)}

    def start_clients(self, program: Program, server: Server, batch: Batch) -> State:
        """Return c_i = 0."""
        return {"control": zeros_like(copies(server["theta"], len(batch)))}

    def prepare(self, job: Job) -> Parts:
        """Return the correction c − c_i of the gradients, whose mean is 0: none where clients take one step."""
        if SINGLE in job.message:
            return {}
        own = job.clients["control"]
        return {"correction": {n: c - own[n] for n, c in job.message["control"].items()}}

    def encode(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return θ_i − θ and the change of c_i, each client counting alike."""
        move, way = moves(job, work.found["theta"]), work.found["path"]["length"]
        own = job.clients["control"]
        change = {n: -v / per_client(way, v) - job.message["control"][n] for n, v in move.items()}
        upload = weighted_sum(move) | {"control": weighted_sum(change)["theta"]}
        return upload, {"control": own | {n: own[n] + v for n, v in change.items()}}

    def decode(self, turn: Turn, server: Server, total: Parts) -> tuple[Server, Tensor]:
        """Return the mean of θ_i, and c + (K / N) times the mean of the changes."""
        change = {n: v / turn.program.clients for n, v in total["control"].items()}
        moved = self.moved(turn, server, mean_of(turn, total))
        return moved | {"control": add(server["control"], change)}, NO_TERM
