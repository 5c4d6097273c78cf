"""The largest norm of an honest institution's upload beside the others': makes lengths.md.

    python experiments/deployment/lengths.py

The server refuses an upload whose norm, a client, is more than a thousand times the institutions' median. The table has
the institutions of unlucky.py, all honest, for ten rounds: the largest norm of any round, in medians of its round. An
upload below that, such as a hostile one of ten times the norm, cannot be refused by its norm.
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
from bayesfed.deploy.plan import Plan

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
    """Return the largest ratio of any round, and the round."""
    model, data, algorithm = CASES[name]
    found: list[float] = []
    check = collect.Collector._refuse_large

    def noting_check(collector: collect.Collector, replies: dict) -> list[str]:
        norms = [collect._norm(parts) for parts in replies.values()]
        found.append(max(norms) / median_low(norms))
        return check(collector, replies)

    collect.Collector._refuse_large = noting_check
    try:
        with tempfile.TemporaryDirectory() as folder:
            federation = data()
            unlucky.INSTITUTIONS = min(10, len(federation))
            unlucky.over_nodes(Plan(model, algorithm, rounds=ROUNDS), federation, folder)
    finally:
        collect.Collector._refuse_large = check
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
