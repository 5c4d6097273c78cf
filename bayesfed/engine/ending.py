"""When a run ends: which stopping rule it has without held-out rows."""

from typing import Any

from bayesfed.elbo import noise
from bayesfed.elbo.program import Program
from bayesfed.engine.cohort import cohort_size
from bayesfed.engine.plan import Plan
from bayesfed.engine.stopping.arrival import Arrival
from bayesfed.engine.stopping.convergence import convergence
from bayesfed.engine.stopping.drift import NATS, NATS_PER_ROW
from bayesfed.engine.stopping.fixed_rounds import FixedRounds
from bayesfed.engine.stopping.rule import Stopping
from bayesfed.guides.globals import Point
from bayesfed.rules.quasi_newton import MOST
from bayesfed.rules.rule import Turn


def stopping_rule(plan: Plan, program: Program, server: Any) -> Stopping:
    """Return the stopping rule of a plan without held-out rows.

    Raises:
        ValueError: the algorithm needs a number of rounds here.
    """
    algorithm, size = plan.algorithm, cohort_size(plan.clients_per_round, program.clients)
    if plan.rounds is not None:
        return FixedRounds(program, plan.rounds, algorithm.lr_decay)
    rule: Stopping | None = None
    if algorithm.progress(Turn(program, noise.key(0), size), server) is not None:
        share = size / program.clients
        rule = convergence(algorithm, program, algorithm.params(server), share)
    if rule is None and isinstance(server, dict) and "newton" in server:
        rule = Arrival(NATS + NATS_PER_ROW * program.rows)
    if rule is None:
        points = not program.random and not isinstance(algorithm.globals, Point)
        few = sum(value.numel() for value in program.init.values()) <= MOST
        suits = points and few and program.locals and size == program.clients
        other = ", or take PFedVEM, which stops by itself" if suits else ""
        raise ValueError(
            f"rounds: {algorithm} has no q(θ) here whose standard deviations say when it has "
            f"converged: give a number of rounds, or held_out, rows that end the run{other}"
        )
    return rule
