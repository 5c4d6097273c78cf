"""What each part of the clients' guide earns: makes ablation.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/ablation.py                  # on a machine that does nothing else, a quarter of an hour
    python experiments/ablation.py count radon

SFVI with all clients on the problems of problems.py: as it is, and without one part of guides/hierarchical.py,

    closed form     clients begin where they were in place of the curvature of their likelihood
    conditioning    q(w_i) is mean-field in place of q(w_i | θ)
    landing         the gradient of log q has the score of q in it, whose mean is zero

All is of q(θ), whose draws nobody weighs. "to its limit" as in rounds_to_truth.py, the limit being that of the guide as
it is; the seconds are those until then, in the same process, tracing included. Runs stop by themselves or after 200
rounds; "end" is how far from the limit.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from problems import PROBLEMS
from rounds_to_truth import Moments, cell, found, stays
from tables import grown

import bayesfed as bf
from bayesfed.guides.hierarchical import Hierarchical
from bayesfed.guides.sticking_the_landing import StickingTheLanding

HERE = Path(__file__).parent
MOST = 200
HEADER = [
    "| problem | without | to its limit | seconds | stops | end |",
    "| --- | --- | --- | --- | --- | --- |",
]


def with_score(self: StickingTheLanding, family: Callable[..., Any], *params: Any) -> None:
    """Draws and weighs with the same parameters."""
    q = family(*params)
    self._set(q, q)


@contextmanager
def without(part: str) -> Iterator[bf.SFVI]:
    """SFVI without a part of its guide."""
    if part == "closed form":
        with patch.object(Hierarchical, "laplace_params", []):
            yield bf.SFVI(corrected=False)
    elif part == "landing":
        with patch.object(StickingTheLanding, "__init__", with_score):
            yield bf.SFVI(corrected=False)
    else:
        yield bf.SFVI(corrected=False, conditioned=False if part == "conditioning" else None)


def rows(name: str, data: Path) -> Iterator[str]:
    """A row for each part."""
    problem = PROBLEMS[name]
    federation = problem.data(data)
    long = bf.fit(
        problem.model,
        federation,
        bf.SFVI(draws=64, corrected=False),
        rounds=200,
        seed=9,
        progress=False,
    )
    limit = found(long)
    for part in ("–", "closed form", "conditioning", "landing"):
        path: list[Moments] = []
        seconds: list[float] = []
        with without(part) as algorithm:
            begin = time.perf_counter()
            run = bf.start(problem.model, federation, algorithm)
            spent = time.perf_counter() - begin
            while run.done < min(run.rounds, MOST):
                begin = time.perf_counter()
                bf.step(run)
                spent += time.perf_counter() - begin
                seconds.append(spent)
                path.append(found(bf.finish(run)))
        near = stays(path, limit)
        took = "" if near == "never" else f"{seconds[int(near) - 1]:.1f}"
        stops = f"{run.done}" if run.stopping.converged else f"{run.done}, moving"
        yield " | ".join([name, part, near, took, stops, cell(path[-1], limit)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    small = [name for name in PROBLEMS if name != "10,000 clients"]
    parser.add_argument("problems", nargs="*", default=small, metavar="problem")
    parser.add_argument(
        "--radon", type=Path, default=HERE.parent.parent / "shared/data/radon_mn.json"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table = (f"| {row} |" for name in args.problems for row in rows(name, args.radon))
    grown(HERE / "ablation.md", HEADER, table, small, columns=2)


if __name__ == "__main__":
    main()
