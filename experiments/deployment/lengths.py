"""How much longer than others' an honest node's upload may be: makes lengths.md.

    python experiments/deployment/lengths.py

The server refuses an upload that is, a client of it, more than a thousand times as long as the nodes' median. Here are
the nodes of unlucky.py, all honest, ten rounds: the longest upload of any round, in medians of its round. What lies
below that cannot be refused by its length, such as a liar's tenfold one.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from statistics import median_low

import unlucky

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy import collect
from bayesfed.deploy.institutions import Institutions
from bayesfed.deploy.plan import Plan
from bayesfed.engine.run import Run

HERE = Path(__file__).parent
ROUNDS = 10
FIRMS = (models.varying_slope, datasets.grunfeld)
SCHOOLS = (models.eight_schools, datasets.eight_schools)
CASES = {
    "SFVI, firms": (*FIRMS, bf.SFVI(corrected=False)),
    "SFVIAvg, firms": (*FIRMS, bf.SFVIAvg()),
    "PVI, firms": (*FIRMS, bf.PVI()),
    "SFVI, schools": (*SCHOOLS, bf.SFVI(corrected=False)),
    "PVI, schools": (*SCHOOLS, bf.PVI()),
}


def longest(name: str) -> tuple[float, int]:
    """The largest ratio of any round, and the round."""
    model, data, algorithm = CASES[name]
    found: list[float] = []
    checks = collect._too_large

    def noted(nodes: Institutions, run: Run, replies: dict) -> list[str]:
        lengths = [collect._length(parts) for parts in replies.values()]
        found.append(max(lengths) / median_low(lengths))
        return checks(nodes, run, replies)

    collect._too_large = noted
    try:
        with tempfile.TemporaryDirectory() as folder:
            federation = data()
            unlucky.INSTITUTIONS = min(10, len(federation))
            unlucky.over_nodes(Plan(model, algorithm, rounds=ROUNDS), federation, folder)
    finally:
        collect._too_large = checks
    return max(found), 1 + found.index(max(found))


def main() -> None:
    """Print the table and write it."""
    warnings.simplefilter("ignore")
    lines = ["| algorithm, data | longest upload, in medians | in round |", "| --- | --- | --- |"]
    for name in CASES:
        ratio, number = longest(name)
        lines.append(f"| {name} | {ratio:.1f} | {number} |")
        print(lines[-1], flush=True)
        (HERE / "lengths.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
