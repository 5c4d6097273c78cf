"""What does each part of the clients' guide earn? Makes ablation.md.

    pip install 'bayesfed[benchmarks]'
    python experiments/ablation.py                  # on a machine that does nothing else, a quarter of an hour
    python experiments/ablation.py count radon

SFVI with all clients on the problems of problems.py: as it is, and without one part of guides/hierarchical.py,

    closed form     clients start from their last values in place of the curvature of their likelihood
    conditioning    q(w_i) is mean-field in place of q(w_i | θ)
    landing         the gradient of log q includes the score of q, whose mean is zero (no sticking-the-landing)

All figures are of q(θ) without importance weights. "to its limit" is as in rounds_to_truth.py, the limit being that of
the guide as it is; the seconds are those until then, in the same process, tracing included. Runs stop by themselves or
after 200 rounds; "end" is the distance from the limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import runner
from distances import words
from problems import PROBLEMS, SMALL
from rounds_to_truth import follow, of_globals, reached

import bayesfed as bf
from bayesfed.guides.hierarchical import Hierarchical
from bayesfed.guides.sticking_the_landing import StickingTheLanding

COLUMNS = "problem | without | to its limit | seconds | stops | end"


def with_score(self: StickingTheLanding, family: Callable[..., Any], *params: Any) -> None:
    """Sample from and evaluate the density with the same parameters."""
    q = family(*params)
    self._set(q, q)


@contextmanager
def without(part: str) -> Iterator[bf.SFVI]:
    """Give SFVI without a part of its guide."""
    if part == "closed form":
        with patch.object(Hierarchical, "laplace_params", []):
            yield bf.SFVI(corrected=False)
    elif part == "landing":
        with patch.object(StickingTheLanding, "__init__", with_score):
            yield bf.SFVI(corrected=False)
    else:
        yield bf.SFVI(corrected=False, conditioned=False if part == "conditioning" else None)


def measure(name: str) -> list[list[str]]:
    """Fit a problem with and without each part."""
    problem, rows = PROBLEMS[name], []
    federation, whole = problem.data(), bf.SFVI(draws=64, corrected=False)
    limit = of_globals(bf.fit(problem.model, federation, whole, rounds=200, seed=9, progress=False))
    for part in ("–", "closed form", "conditioning", "landing"):
        with without(part) as algorithm:
            begin = time.perf_counter()
            run = bf.start(problem.model, federation, algorithm)
            started = time.perf_counter() - begin
            path, seconds, _ = follow(run, 200)
        to_limit = reached(path, limit)
        took = "" if to_limit == "never" else f"{started + seconds[int(to_limit) - 1]:.1f}"
        stops = f"{run.done}" if run.stopping.converged else f"{run.done}, moving"
        rows.append([part, to_limit, took, stops, words(path[-1], limit)])
    return rows


def main() -> None:
    runner.table(COLUMNS, SMALL, measure, runner.arguments(__doc__))


if __name__ == "__main__":
    main()
