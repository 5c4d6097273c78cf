"""What do clients do to a fit that send no numbers, far too much, or the opposite? Makes bad_clients.md.

    python experiments/bad_clients.py               # minutes on two cores

The logistic regression of private.py with 100 clients, all of which take part in 30 rounds; ten of them change every
upload that they send. Cells are the root mean square distance of μ_β from the truth, beside that with good clients
only: as it is, and with ``privacy=Privacy()``, which clips uploads to the median of their norms, without noise.
"refused": how many of the ten were left out in every round. What is not refused counts: uploads a million times too
large move SFVI and PACPFL, and stop PVI and FedABML, where nothing clips them. Clipped at the median they stop no run,
but SFVI, PVI and FOLA end 0.6 to 0.7 away. An upload of the opposite sign may come from a client that differs.
"""

from __future__ import annotations

import math
from typing import Any

import runner
import torch
from private import ALGORITHMS, SLOPES, clients

import bayesfed as bf
from bayesfed import models
from bayesfed.engine.parts import flat, nested
from bayesfed.steps import Job, Work

NAMES = ("SFVI", "PVI", "FOLA", "FedAvg", "FedABML", "PACPFL")
BAD = 10
ATTACKS = {"none": 1.0, "not a number": math.nan, "a million times": 1e6, "the opposite": -1.0}


def spoilt(rule: Any, factor: float) -> Any:
    """Return the rule with the uploads of the first ten clients multiplied."""

    class Spoilt(type(rule)):  # type: ignore[misc]
        def encode(self, job: Job, work: Work) -> Any:
            """Return the uploads, and what the clients remember of them."""
            upload, memory = super().encode(job, work)
            bad = job.rows(0).index < BAD
            changed = {
                name: torch.where(bad.reshape(-1, *[1] * (value.ndim - 1)), factor * value, value)
                for name, value in flat(upload).items()
            }
            return nested(changed), memory

    return Spoilt(**vars(rule))


def measure(name: str, attack: str, clipped: bool) -> str:
    """Return the distance of μ_β from the truth and how many were refused in every round, or why the run ended."""
    train, _ = clients(100, 0)
    algorithm = {"PVI": bf.PVI, "FOLA": bf.FOLA, **ALGORITHMS}[name]()
    how = {"rounds": 30, "privacy": bf.Privacy() if clipped else None}
    try:
        attacked = algorithm.replace(rule=spoilt(algorithm.rule, ATTACKS[attack]))
        run = bf.start(models.hierarchical_logistic, train, attacked, **how)
        while run.done < run.rounds:
            bf.step(run)
        beta = bf.finish(run).sample(1000)["mu_beta"].reshape(1000, 3).mean(0)
    except (ValueError, FloatingPointError, RuntimeError) as error:
        return type(error).__name__ + ": " + str(error).splitlines()[0][:80]
    refused = int((run.refused == run.rounds).sum())
    far = float((beta - SLOPES).square().mean().sqrt())
    return (f"{far:.2f}" if far < 100 else f"{far:.0e}") + (f", {refused} refused" * (refused > 0))


def main() -> None:
    given = runner.arguments(__doc__, jobs=2)
    rows = {
        (name, "the median" if clipped else "none"): [(name, attack, clipped) for attack in ATTACKS]
        for name in NAMES
        for clipped in (False, True)
    }
    columns = f"algorithm | clip | {' | '.join(ATTACKS)}"
    runner.table(columns, rows, measure, given, cells=lambda _, found: found)


if __name__ == "__main__":
    main()
