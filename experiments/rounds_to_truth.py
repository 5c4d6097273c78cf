"""In how many rounds SFVI has the posterior, and whether it knows: makes rounds_to_truth.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/rounds_to_truth.py                                   # all problems, about an hour
    python experiments/rounds_to_truth.py "eight schools" --cohorts 1 0.5   # one of them

Runs without a number of rounds, which stop by themselves; problems.py has the problems. All figures are of the globals
as the model has them, from 20,000 draws of what `bf.finish` gives after each round: weighed by all clients where that
mends q(θ), for which they are asked two to four times more than the rounds say.

"to NUTS": the round from which on every mean is within .1 standard deviations of NUTS' and every standard deviation
within .85 to 1.18 of it; "never" where the run ends outside. "end": the largest shift and the range of the ratios when
the run stops; "q": the same of q(θ) as it is. Each row is a seed. Seconds, with all that is looked at between rounds
left out, are in whatever else the machine does: see seconds_to_truth.py for those.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from problems import PROBLEMS, reference
from tables import grown, rounds_of
from torch import Tensor

import bayesfed as bf
from bayesfed.elbo.program import Program

HERE = Path(__file__).parent
HEADER = [
    "| problem | clients a round | seed | to NUTS | stops | end | end: q | seconds |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
]
DRAWS = 20_000
Moments = tuple[Tensor, Tensor]


def of_draws(program: Program, draws: Mapping[str, np.ndarray | Tensor]) -> Moments:
    """Means and standard deviations ``(D,)`` of the globals, of draws by site."""
    parts = [torch.as_tensor(draws[site.name]) for site in program.globals]
    values = torch.cat([part.reshape(len(part), -1) for part in parts], 1).double()
    return values.mean(0).float(), values.std(0).float()


def distance(found: Moments, truth: Moments) -> tuple[float, float, float]:
    """The largest shift, the least and the largest ratio."""
    ratio = found[1] / truth[1]
    return (
        float(((found[0] - truth[0]) / truth[1]).abs().max()),
        float(ratio.min()),
        float(ratio.max()),
    )


def stays(path: list[Moments], truth: Moments) -> str:
    """The round from which on all are near the truth."""
    near = []
    for found in path:
        shift, least, most = distance(found, truth)
        near.append(shift <= 0.1 and least >= 0.85 and most <= 1.18)
    if not near[-1]:
        return "never"
    return str(max((i + 1 for i, good in enumerate(near) if not good), default=0) + 1)


def cell(found: Moments, truth: Moments) -> str:
    """A distance in words."""
    shift, least, most = distance(found, truth)
    return f"{shift:.2f}, {least:.2f}–{most:.2f}"


def rows(name: str, cohorts: list[float], seeds: int, data: Path) -> Iterator[str]:
    """A row for each cohort and seed."""
    problem = PROBLEMS[name]
    federation = problem.data(data)
    draws = reference(name, problem, federation)
    for cohort in cohorts:
        for seed in range(seeds):
            run = bf.start(problem.model, federation, clients_per_round=cohort, seed=seed)
            truth, path, seconds = of_draws(run.program, draws), [], 0.0
            posterior = None
            while run.done < run.rounds:
                start = time.perf_counter()
                bf.step(run)
                seconds += time.perf_counter() - start
                start = time.perf_counter()
                posterior = bf.finish(run)
                last = time.perf_counter() - start
                path.append(found(posterior))
            assert posterior is not None
            cells = [
                stays(path, truth),
                rounds_of(posterior),
                cell(path[-1], truth),
                cell(found(replace(posterior, correction=None)), truth),
                f"{seconds + last:.1f}",
            ]
            yield " | ".join([name, f"{100 * cohort:g} %", str(seed), *cells])


def found(posterior: bf.Posterior) -> Moments:
    """Those of a posterior."""
    few = posterior.select(posterior.federation.names[:1])
    return of_draws(posterior.program, few.sample(DRAWS))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problems", nargs="*", default=list(PROBLEMS), metavar="problem")
    parser.add_argument("--cohorts", nargs="*", type=float, default=[1.0, 0.5, 0.1])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--radon", type=Path, default=HERE.parent.parent / "shared/data/radon_mn.json"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cohorts = {name: [0.01] if name == "10,000 clients" else args.cohorts for name in args.problems}
    table = (
        f"| {row} |"
        for name in args.problems
        for row in rows(name, cohorts[name], args.seeds, args.radon)
    )
    grown(HERE / "rounds_to_truth.md", HEADER, table, list(PROBLEMS), columns=3)


if __name__ == "__main__":
    main()
