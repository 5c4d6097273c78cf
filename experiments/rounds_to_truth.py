"""In how many rounds does SFVI have the posterior, and does it stop then? Makes rounds_to_truth.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/rounds_to_truth.py                                   # all problems, about an hour
    python experiments/rounds_to_truth.py "eight schools" --cohorts 1 0.5   # one of them

Runs have no number of rounds, and stop by themselves; problems.py has the problems. All figures are of the global
variables as the model has them, from 20,000 draws of what `bf.finish` gives after each round. These are importance
weighted where that improves q(θ).

"exchanges": the requests that each institution has to answer when the same fit runs between machines: its begin, the
rounds, and the evaluations of draws of θ for the weights, those of corrections that failed included. That the rounds or
the fit are over needs no answer: by post it goes with the next letter, and over sockets it is a message more.

"to NUTS": the round from which on every mean is within 0.1 standard deviations of NUTS' and every standard deviation
within 0.85 to 1.18 of it; "never" where the run ends outside. "end": the largest shift and the range of the ratios when
the run stops; "q": the same of q(θ) without importance weights. Seconds leave out the checks between rounds, and are in
whatever else the machine does: seconds_to_truth.py has better ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import runner
from distances import Moments, distance, moments, words
from problems import PROBLEMS, Problem, reference
from torch import Tensor

import bayesfed as bf
from bayesfed import fitting
from bayesfed.output.correction import CorrectionResult, correct
from bayesfed.output.fitted import Fitted
from bayesfed.output.log_densities import sum_log_weights

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
    """Fit once more, and count the exchanges that the fit takes between machines."""
    asked = 0

    def evaluate(*args: Any) -> Tensor:
        nonlocal asked
        asked += 1
        return sum_log_weights(*args)

    def by_exchanges(fitted: Fitted, **how: bool) -> CorrectionResult:
        return correct(fitted, evaluate, **how)

    with patch.object(fitting, "correct", by_exchanges):
        posterior = bf.fit(problem.model, federation, clients_per_round=cohort, seed=seed)
    begin = 1
    return begin + len(posterior.history["elbo"]) + asked


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
        for cohort in [0.01] if name == "10,000 clients" else given.cohorts:
            for seed in range(given.seeds):
                rows[name, f"{100 * cohort:g} %", seed] = [(name, cohort, seed)]
    runner.table(COLUMNS, rows, measure, given)


if __name__ == "__main__":
    main()
