"""How much longer than others' may an honest institution's upload be? Makes lengths.md.

    python experiments/deployment/lengths.py

The server refuses an upload that is, for each of its clients, more than a thousand times as long as the institutions'
median. Here are the institutions of unlucky.py, all honest, in ten rounds: the longest upload of any round, in medians
of its round. An upload below that, such as a tenfold false one, cannot be refused by its length.
"""

from __future__ import annotations

import tempfile
from statistics import median_low
from typing import Any
from unittest.mock import patch

import in_process
from in_process import runner

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy import collect
from bayesfed.deploy.plan import DeploymentPlan

FIRMS = (models.varying_slope, datasets.grunfeld)
SCHOOLS = (models.eight_schools, datasets.eight_schools)
CASES = {
    "SFVI, firms": (*FIRMS, bf.SFVI(corrected=False)),
    "SFVIAvg, firms": (*FIRMS, bf.SFVIAvg()),
    "PVI, firms": (*FIRMS, bf.PVI()),
    "SFVI, schools": (*SCHOOLS, bf.SFVI(corrected=False)),
    "PVI, schools": (*SCHOOLS, bf.PVI()),
}


def measure(name: str) -> list[Any]:
    """Return the largest ratio of any round, and the round."""
    (model, data, algorithm), ratios = CASES[name], []
    check = collect.Collector._refuse_large

    def note(collector: collect.Collector, replies: dict[str, Any]) -> list[str]:
        lengths = [collect._norm(parts) for parts in replies.values()]
        ratios.append(max(lengths) / median_low(lengths))
        return check(collector, replies)

    federation = data()
    with (
        patch.object(collect.Collector, "_refuse_large", note),
        tempfile.TemporaryDirectory() as folder,
    ):
        count = min(10, len(federation))
        in_process.fit(
            DeploymentPlan(model, algorithm, rounds=10), federation, folder, institutions=count
        )
    return [f"{max(ratios):.1f}", 1 + ratios.index(max(ratios))]


def main() -> None:
    columns = "algorithm, data | longest upload, in medians | in round"
    runner.table(columns, list(CASES), measure, runner.arguments(__doc__))


if __name__ == "__main__":
    main()
