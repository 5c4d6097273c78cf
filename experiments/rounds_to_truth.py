"""In how many rounds SFVI has the posterior, and whether it knows: makes rounds_to_truth.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/rounds_to_truth.py                                   # all problems, about half an hour
    python experiments/rounds_to_truth.py "eight schools" --cohorts 1 0.5   # one of them

Runs without a number of rounds, which stop by themselves; problems.py has the problems. All figures are of the globals
as the model has them, at the end of each round, from 20,000 draws.

"to NUTS": the round from which on every mean is within .1 standard deviations of NUTS' and every standard deviation
within .85 to 1.18 of it; "never" where the run ends outside. "to its limit": the same against 200 rounds of all
clients with 64 draws (of 10,000 clients, 20 with 16), where no Gaussian over the unconstrained globals fits the
posterior so well. "end: NUTS", "end: limit": the largest shift and the range of the ratios when the run stops. Each
row is a seed. Seconds are in whatever else the machine does: see seconds_to_truth.py for those.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from problems import PROBLEMS, reference
from tables import grown, rounds_of
from torch import Tensor
from torch.distributions import biject_to

import bayesfed as bf
from bayesfed.elbo.program import Params, Program
from bayesfed.guides.full_rank import FullRank

HERE = Path(__file__).parent
HEADER = [
    "| problem | clients a round | seed | to NUTS | to its limit | stops | end: NUTS | end: limit | seconds |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
]
DRAWS = 20_000
Moments = tuple[Tensor, Tensor]


def moments(program: Program, params: Params, noise: Tensor) -> Moments:
    """Means and standard deviations ``(D,)`` of the globals under q(θ)."""
    loc, scale_tril = FullRank().normal(params)
    z, parts, at = loc + noise @ scale_tril.mT, [], 0
    for site in program.globals:
        start = program.guide.globals[site.name]
        size = start.loc.numel()
        u = start.loc + start.scale * z[:, at : at + size].reshape(-1, *start.loc.shape)
        parts.append(biject_to(site.support)(u.reshape(len(z), *u.shape[1:])).reshape(len(z), -1))
        at += size
    values = torch.cat(parts, 1)
    return values.mean(0), values.std(0)


def of_draws(program: Program, draws: Mapping[str, np.ndarray]) -> Moments:
    """The same of draws by site."""
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
    quiet: dict[str, Any] = {"progress": False}
    many = len(federation) > 1000
    long = bf.fit(
        problem.model,
        federation,
        bf.SFVI(draws=16 if many else 64),
        rounds=20 if many else 200,
        seed=9,
        **quiet,
    )
    program, size = long.program, len(long.params["global.loc"])
    noise = torch.randn(DRAWS, size, generator=torch.Generator().manual_seed(0))
    truth = of_draws(program, draws)
    limit = moments(program, long.params, noise)
    for cohort in cohorts:
        for seed in range(seeds):
            path: list[Moments] = []

            def see(done: bf.Round, path: list[Moments] = path) -> None:
                path.append(moments(program, done.params, noise))

            start = time.perf_counter()
            posterior = bf.fit(
                problem.model,
                federation,
                clients_per_round=cohort,
                seed=seed,
                callbacks=[see],
                **quiet,
            )
            seconds = time.perf_counter() - start
            cells = [
                stays(path, truth),
                stays(path, limit),
                rounds_of(posterior),
                cell(path[-1], truth),
                cell(path[-1], limit),
                f"{seconds:.1f}",
            ]
            yield " | ".join([name, f"{100 * cohort:g} %", str(seed), *cells])


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
    found = (
        f"| {row} |"
        for name in args.problems
        for row in rows(name, cohorts[name], args.seeds, args.radon)
    )
    grown(HERE / "rounds_to_truth.md", HEADER, found, list(PROBLEMS), columns=3)


if __name__ == "__main__":
    main()
