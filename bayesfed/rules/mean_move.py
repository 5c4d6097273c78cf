"""What rules share whose server moves θ by the clients' mean move, or by Newton steps where a run stops by itself."""

from typing import Any

import torch
from torch import Tensor

from bayesfed.elbo.program import Params, Program
from bayesfed.guides.fisher import prior_units
from bayesfed.rules import observed_information, quasi_newton
from bayesfed.rules.rule import Rule, Turn, add, moves, weighted_sum
from bayesfed.steps.job import INFORMATION, SINGLE, Job, Parts, Work
from bayesfed.steps.losses import per_client
from bayesfed.steps.optimizer import State
from bayesfed.steps.steps import Steps, gradient_of


class ByMeanMove(Rule):
    """A rule whose server moves θ by the clients' mean move, or by Newton steps on their mean single step.

    Where the steps give the information too, the gradient has noise (:mod:`bayesfed.rules.observed_information`);
    elsewhere it has none, and its changes show the curvature (:mod:`bayesfed.rules.quasi_newton`).
    """

    def newton(self, program: Program, steps: Steps) -> Params:
        """Return the first state of Newton steps."""
        names = gradient_of(steps, program)
        if INFORMATION not in steps.gives:
            return quasi_newton.begin(program, names)
        size = sum(program.init[name].numel() for name in names or ())
        return observed_information.begin(program, size) if 0 < size <= quasi_newton.MOST else {}

    def broadcast(self, turn: Turn, server: Any) -> Parts:
        """Return θ and what the rule sends beside it, and that clients take a single step."""
        message = super().broadcast(turn, server) | {part: server[part] for part in self.sends}
        state = server.get("newton", {})
        single = {SINGLE: {n: state[n] for n in ("calm", "gain") if n in state}} if state else {}
        return message | single

    def encode_single(self, job: Job, work: Work) -> tuple[Parts, State]:
        """Return the uploads of K clients that were asked for a single step, weighted by their rows."""
        upload = weighted_sum(moves(job, work.found["theta"]), job.counts)
        if INFORMATION in work.found:
            found = work.found[INFORMATION].items()
            upload[INFORMATION] = {n: per_client(job.counts, v) * v for n, v in found}
        return upload, {}

    def moved(
        self,
        turn: Turn,
        server: dict[str, Params],
        move: Params,
        information: Tensor | None = None,
    ) -> dict[str, Params]:
        """Return θ after a mean move, and the state of Newton steps, with the mean information if clients give it."""
        state, theta = server.get("newton"), server["theta"]
        if state is None:
            return {"theta": add(theta, move)}
        program = turn.program
        units = prior_units(program)
        if "information" in state:
            if information is None or not turn.whole:
                return server
            found, state = observed_information.advance(
                program, units, state, theta, move, information
            )
            return {"theta": theta | found, "newton": state}
        if "step" not in state:  # clients are at their own optimum, and θ stays
            return {"theta": theta, "newton": {"calm": (state["calm"] + 1) * turn.whole}}
        if not turn.whole:
            move = {name: torch.full_like(v, torch.nan) for name, v in move.items()}
        found, state = quasi_newton.advance(program, units, state, theta, move)
        return {"theta": theta | found, "newton": state}
