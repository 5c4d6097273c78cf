"""A tenth of the clients sends what is no number, a million times as much, or the opposite. Makes bad_clients.md.

    python experiments/bad_clients.py               # minutes on two cores

The logistic regression of ``private.py`` with 100 clients, all of which take part in 30 rounds; ten of them change
every upload that they send. Cells are the distance of μ_β from the truth (root mean square), beside that with good
clients only: as it is, and with ``privacy=Privacy()``, which clips uploads to the median of their norms, without noise.
"refused": how many of the ten were left out in every round. What is not refused gets through: a million times as much
moves the model wherever nothing clips it, and nothing tells an upload of the opposite sign from one of a client that is
different.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bayesfed as bf
from bayesfed import models

sys.path.append(str(Path(__file__).parent))
from private import ALGORITHMS, SLOPES, clients
from tables import done, keep

HERE = Path(__file__).parent
BAD = 10
ATTACKS = {"none": 1.0, "not a number": math.nan, "a million times": 1e6, "the opposite": -1.0}


def spoilt(algorithm: Any, factor: float) -> Any:
    """The algorithm whose first ten clients multiply what they send."""

    def encode(self: Any, job: Any, work: Any) -> dict[str, Tensor]:
        bad = job.rows(0).index < BAD
        upload = super(cls, self).encode(job, work)
        shape = {name: [-1, *[1] * (value.ndim - 1)] for name, value in upload.items()}
        return {
            name: torch.where(bad.reshape(shape[name]), factor * value, value)
            for name, value in upload.items()
        }

    cls = dataclasses.dataclass(frozen=True)(
        type(type(algorithm).__name__, (type(algorithm),), {"encode": encode})
    )
    fields = {f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm)}
    return cls(**fields)


def distance(name: str, attack: str, clipped: bool) -> dict[str, Any]:
    """Of μ_β from the truth; and how many were refused in every round. Or why the run ended."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, _ = clients(100, 0)
    make = {"PVI": bf.PVI, "FOLA": bf.FOLA, **ALGORITHMS}[name]
    algorithm = make() if attack == "none" else spoilt(make(), ATTACKS[attack])
    warnings.simplefilter("ignore")
    try:
        run = bf.start(
            models.hierarchical_logistic,
            train,
            algorithm,
            rounds=30,
            privacy=bf.Privacy() if clipped else None,
        )
        while run.done < run.rounds:
            bf.step(run)
        beta = bf.finish(run).sample(1000)["mu_beta"].reshape(1000, 3).mean(0)
    except (ValueError, FloatingPointError, RuntimeError) as error:
        return {"error": type(error).__name__ + ": " + str(error).splitlines()[0][:80]}
    refused = int((run.refused == run.rounds).sum())
    return {"distance": float((beta - SLOPES).square().mean().sqrt()), "refused": refused}


def cell(found: dict[str, Any]) -> str:
    """A figure, and how many were refused."""
    if "error" in found:
        return str(found["error"])
    far = found["distance"]
    shown = f"{far:.2f}" if far < 100 else f"{far:.0e}"
    return shown + (f", {found['refused']} refused" if found["refused"] else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["SFVI", "PVI", "FOLA", "FedAvg", "FedABML", "PACPFL"]
    parser.add_argument("--algorithms", nargs="+", choices=names, default=names)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="take fits that are stored")
    asked = parser.parse_args()
    header = [f"| algorithm | clip | {' | '.join(ATTACKS)} |", "| --- " * (2 + len(ATTACKS)) + "|"]
    calls = [
        (name, attack, clipped)
        for name in asked.algorithms
        for clipped in (False, True)
        for attack in ATTACKS
    ]
    results: dict[tuple[str, bool], dict[str, str]] = {}
    for (name, attack, clipped), found in done(distance, calls, asked.jobs, asked.resume):
        row = results.setdefault((name, clipped), {})
        row[attack] = cell(found)
        if len(row) == len(ATTACKS):
            clip = "the median" if clipped else "none"
            text = f"| {name} | {clip} | {' | '.join(row[each] for each in ATTACKS)} |"
            keep(HERE / "bad_clients.md", header, text, names, columns=2)
            print(text, flush=True)


if __name__ == "__main__":
    main()
