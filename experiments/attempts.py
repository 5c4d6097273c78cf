"""What is said of mistakes, of correct programs, and of fits that have not converged? Makes attempts.md and two more.

    python experiments/attempts.py                 # all three tables, about half an hour
    python experiments/attempts.py --tables programs

attempts.md: mistakes of the kind that Pyro itself lets pass, and the first sentence of the refusal, warning or caveat.
attempts_programs.md: generated programs that are correct (tests/invariants/programs.py), started with any warning an
error. attempts_converged.md: fits of mu ~ N(0, s), a_i ~ N(mu, 1), y_ij ~ N(a_i, 1), whose posterior of mu is known,
for several s, numbers of rounds, cohorts and seeds: how far they are off, in standard deviations or log standard
deviations, and how far the caveat says that they have to go. A fit is "done" within 0.25 and "not done" beyond 0.5; it
is "said to move" if the caveat states a distance, and "warned of" if that is more than 1.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import runner
import torch
from mistakes import ATTEMPTS, EAGER, federation, hierarchy

import bayesfed as bf

HERE = runner.ROOT / "experiments"


def answer(make: Callable[[], Any]) -> str:
    """Return the answer to an attempt; empty if there is none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = make()
        except (ValueError, TypeError, KeyError) as error:
            return f"refused: {error}"
    for warning in caught:
        return f"warned: {warning.message}"
    if isinstance(found, str):
        return found
    if caveat := getattr(found, "caveat", ""):
        return f"with the result: {caveat}"
    return ""


def attempt(number: int) -> list[str]:
    """Make a mistake; the cell has the answer."""
    _, make = ATTEMPTS[number]
    return [answer(make).replace("|", "\\|").replace("\n", " ") or "**nothing**"]


def attempts(given: Any) -> None:
    rows = {(text,): [(number,)] for number, (text, _) in enumerate(ATTEMPTS)}
    runner.table("mistake | answer", rows, attempt, given, lambda _, found: found[0])


# -- programs that are right -----------------------------------------------------------------------


def start(seed: int) -> str:
    """Start a correct program; the words of an error or warning."""
    sys.path.append(str(runner.ROOT / "tests/invariants"))
    model, data = importlib.import_module("programs").program(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            bf.start(model, data, rounds=1, batch_size=2 if seed % 2 else None)
        except Exception as error:
            return str(error)
    return ""


def programs(given: Any) -> None:
    def cells(_: Any, found: list[str]) -> list[Any]:
        alarms = [f"program {seed}: {words}" for seed, words in enumerate(found) if words]
        return [len(found), len(alarms), "; ".join(alarms)]

    columns, path = (
        "programs | started | refused or warned of | words",
        HERE / "attempts_programs.md",
    )
    rows = {"generated, correct": [(seed,) for seed in range(200)]}
    runner.table(columns, rows, start, given, cells, path=path)


# -- fits that have converged, and fits that have not ----------------------------------------------

KINDS = ("done", "between", "not done")


def converge(width: float, rounds: int, cohort: float, seed: int) -> tuple[float, float]:
    """Fit for some rounds; how far from exact mu is, and how far the fit says that it has to go."""
    data = federation()
    weight = 1 / (1 + 1 / data.lengths.double())
    means = torch.stack([data.select([name])["y"].double().mean() for name in data.names])
    precision = weight.sum() + width**-2
    exact, sd = (weight * means).sum() / precision, precision**-0.5
    posterior = bf.fit(
        hierarchy(prior=lambda f: dist.Normal(0.0, width)),
        data,
        bf.SFVI(local_steps=2),
        rounds=rounds,
        clients_per_round=cohort,
        seed=seed,
        progress=False,
        execution=EAGER,
    )
    draws = posterior.sample(4000)["mu"].double()
    error = max(abs(float((draws.mean() - exact) / sd)), abs(float((draws.std() / sd).log())))
    return error, max(posterior.moving.values(), default=0.0)


def converged(given: Any) -> None:
    how = ((1.0, 0), (0.5, 1), (0.5, 2), (1.0, 3))
    rows = {
        (f"{width:g}", rounds): [(width, rounds, *each) for each in how]
        for width in (5.0, 40.0, 100.0, 1000.0)
        for rounds in (45, 70, 110, 160, 250)
    }
    every: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def cells(_: Any, found: list[tuple[float, float]]) -> list[str]:
        for error, far in found:
            kind = "done" if error < 0.25 else "not done" if error > 0.5 else "between"
            every[kind].append(far)
        said = " ".join(f"{far:.2f}" if far else "–" for _, far in found)
        return [" ".join(f"{error:.2f}" for error, _ in found), said]

    def note() -> str:
        return "\n".join(
            f"{kind}: {len(far)} fits, {sum(f > 0 for f in far)} said to move, {sum(f > 1 for f in far)} warned of."
            for kind, far in every.items()
        )

    path = HERE / "attempts_converged.md"
    runner.table(
        "prior sd | rounds | off | said", rows, converge, given, cells, path=path, note=note
    )


TABLES = {"attempts": attempts, "programs": programs, "converged": converged}


def main() -> None:
    given = runner.arguments(__doc__, tables=list(TABLES))
    for name in given.tables:
        TABLES[name](given)


if __name__ == "__main__":
    main()
