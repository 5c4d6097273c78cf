"""In how many rounds does SFVI have the posterior, and does it stop then? Makes rounds_to_truth.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/rounds_to_truth.py                                   # all problems, about an hour
    python experiments/rounds_to_truth.py "eight schools" --cohorts 1 0.5   # one of them

Runs have no number of rounds, and stop by themselves; problems.py has the problems. All figures are of the global
variables as the model has them, from 20,000 draws of what `bf.finish` gives after each round. These are importance
weighted where that improves q(θ).

"exchanges": how often each institution has to answer when the same fit runs between machines, counted in such a run:
the description of its data, the rounds, of which the first begins the run, and the evaluations of draws of θ for the
weights, those of corrections that failed included. The final draws, which need no answer, are not counted.

"to NUTS": the round from which on every mean is within 0.1 standard deviations of NUTS' and every standard deviation
within 0.85 to 1.18 of it; "never" where the run ends outside. "end": the largest shift and the range of the ratios when
the run stops; "q": the same of q(θ) without importance weights. It may be many standard deviations off when the run
stops: the weighted draws come from up to five proposals, each fitted to the draws of those before. Seconds leave out
the checks between rounds, and are in whatever else the machine does: seconds_to_truth.py has better ones.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import runner
from distances import Moments, distance, moments, words
from problems import PROBLEMS, Problem, reference

import bayesfed as bf
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.node import Node
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.server import run_server
from bayesfed.deploy.transport import Carrier

COLUMNS = "problem | clients a round | seed | to NUTS | stops | exchanges | end | end: q | seconds"


def of_globals(posterior: bf.Posterior) -> Moments:
    """Return the moments of the global variables; one client is enough to draw them."""
    one = posterior.select(posterior.federation.names[:1])
    return moments(one.sample(20_000), [site.name for site in posterior.program.globals])


def reached(path: list[Moments], truth: Moments) -> str:
    """Return the round from which on all figures are close to the truth, or "never"."""
    last = 0
    for number, found in enumerate(path):
        shift, least, most = distance(found, truth)
        if not (shift <= 0.1 and least >= 0.85 and most <= 1.18):
            last = number + 1
    return "never" if last == len(path) else str(last + 1)


def follow(
    run: bf.Run, most: int = 10**9, clock: Callable[[], float] = time.perf_counter
) -> tuple[list[Moments], list[float], bf.Posterior]:
    """Run to the end: moments after each round, seconds of the rounds until then, and the posterior."""
    path, seconds = [], []
    while run.done < min(run.rounds, most):
        begin = clock()
        bf.step(run)
        seconds.append(clock() - begin + (seconds[-1] if seconds else 0.0))
        posterior = bf.finish(run)
        path.append(of_globals(posterior))
    return path, seconds, posterior


def exchanges(problem: Problem, federation: bf.Federation, cohort: float, seed: int) -> int:
    """Fit between machines, of which one holds all clients, and count the exchanges."""
    plan = DeploymentPlan(problem.model, bf.SFVI(), clients_per_round=cohort, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        node = Node("all", federation, plan, Path(folder) / "all")
        carrier = Carrier(
            lambda: ["all"], lambda messages, wait: {n: node.handle(p) for n, p in messages.items()}
        )
        found = run_server(carrier, plan, Patience(("all",)), Path(folder) / "run.safetensors")
    end = 1
    return found.exchanges - end


def measure(name: str, cohort: float, seed: int) -> list[str]:
    """Fit a problem and follow it to its end."""
    problem = PROBLEMS[name]
    federation = problem.data()
    run = bf.start(problem.model, federation, clients_per_round=cohort, seed=seed)
    names = [site.name for site in run.program.globals]
    truth = moments(reference(name, problem, federation), names)
    path, seconds, posterior = follow(run)
    begin = time.perf_counter()
    bf.finish(run)
    took = seconds[-1] + time.perf_counter() - begin
    plain = of_globals(replace(posterior, correction=None))
    stops = runner.rounds_of(posterior)
    count = str(exchanges(problem, federation, cohort, seed))
    return [
        reached(path, truth),
        stops,
        count,
        words(path[-1], truth),
        words(plain, truth),
        f"{took:.1f}",
    ]


def main() -> None:
    given = runner.arguments(__doc__, cohorts=[1.0, 0.5, 0.1], seeds=3)
    rows = {}
    for name in PROBLEMS:
        for cohort in given.cohorts:
            for seed in range(given.seeds):
                rows[name, f"{100 * cohort:g} %", seed] = [(name, cohort, seed)]
    runner.table(COLUMNS, rows, measure, given)


if __name__ == "__main__":
    main()
