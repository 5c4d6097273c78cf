"""What does one upload of moments save, and what does it cost? Makes moments.md.

    python experiments/deployment/moments.py

Three institutions and a server in this process, with `reveal = "moments"` and without. Exchanges are those of
`GlobalPosterior.exchanges`: the description of the data and the message at the end are two of them, so that moments
take one between. "Mean" and "sd" compare 20,000 draws of each global variable between both, of which those of rounds
are importance weighted: the largest distance of means, in standard deviations, and the range of the ratios of
standard deviations. "Later": the messages to institutions for a fit without the first client and for
leave-one-client-out, after this. "Singled out": the rows of the client of which moments single out fewest, as 1 /
leverage; nodes refuse fewer than 3, or what their settings say; here they accept all.
"""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import in_process
import numpy as np
import torch
from in_process import runner

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.data.moments import largest_leverage
from bayesfed.deploy.global_posterior import GlobalPosterior
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.node import Node
from bayesfed.deploy.node_moments import Consent
from bayesfed.deploy.plan import DeploymentPlan
from bayesfed.deploy.server import run_server

NAMES = ("east", "middle", "west")


def simulated(clients: int, rows: int) -> bf.Federation:
    """Return hospitals with a random intercept and slope."""
    generator = np.random.default_rng(0)
    found = {}
    for i in range(clients):
        x = generator.normal(size=rows)
        a, b = generator.normal([1.0, 0.5], [0.7, 0.3])
        found[f"h{i}"] = {"x": x[:, None], "y": a + b * x + generator.normal(size=rows)}
    return bf.Federation.from_arrays(found)


CASES: dict[str, tuple[Any, Any]] = {
    "eleven firms, 20 years each": (models.varying_slope, datasets.grunfeld),
    "30 hospitals, 100 rows each": (models.varying_slope, lambda: simulated(30, 100)),
    "100 hospitals, 1,000 rows each": (models.varying_slope, lambda: simulated(100, 1000)),
}


def run(
    plan: DeploymentPlan, federation: bf.Federation, folder: Path
) -> tuple[GlobalPosterior, list[int]]:
    """Return the result, and the sizes of all messages that the institutions sent, in bytes."""
    cuts = [round(i * len(federation) / len(NAMES)) for i in range(len(NAMES) + 1)]
    consent, sent = Consent("moments", fewest_rows=1), list[int]()
    nodes = {
        name: Node(
            name, federation.select(federation.names[a:b]), plan, folder / name, consent=consent
        )
        for name, (a, b) in zip(NAMES, pairwise(cuts), strict=True)
    }

    def exchange(messages: Any, wait: Any) -> dict[str, bytes]:
        found = {name: nodes[name].handle(payload) for name, payload in messages.items()}
        sent.extend(map(len, found.values()))
        return found

    carrier = in_process.Carrier(lambda: list(NAMES), exchange)
    return run_server(carrier, plan, Patience(NAMES), folder / "run.safetensors"), sent


def measure(name: str) -> list[str]:
    """Return a row of the table."""
    model, make = CASES[name]
    federation = make()
    fits = {}
    for reveal in (None, "moments"):
        with tempfile.TemporaryDirectory() as folder:
            plan = DeploymentPlan(model, bf.SFVI(), reveal=reveal)  # type: ignore[arg-type]
            fits[reveal] = run(plan, federation, Path(folder))
    (plain, before), (found, after) = fits[None], fits["moments"]
    one, other = found.sample(20_000), plain.sample(20_000)
    shifts = [((one[n].mean(0) - v.mean(0)).abs() / v.std(0)).max() for n, v in other.items()]
    ratios = torch.cat([(one[n].std(0) / v.std(0)).flatten() for n, v in other.items()])
    moments = found.moments
    assert moments is not None
    few, until = moments.federation(), len(after)
    bf.fit(model, few.select(few.names[1:]), progress=False)
    bf.leave_one_client_out(found.posterior, 500)
    return [
        str(federation.rows),
        str(plain.exchanges),
        str(found.exchanges),
        f"{sum(before) / 1000:.0f}",
        f"{sum(after) / 1000:.0f}",
        f"{float(max(shifts)):.3f}",
        f"{float(ratios.min()):.2f}–{float(ratios.max()):.2f}",
        str(len(after) - until),
        f"{1 / float(largest_leverage(federation).max()):.1f}",
    ]


def main() -> None:
    """Fit all cases."""
    given = runner.arguments(__doc__)
    columns = (
        "fit | rows | exchanges in rounds | exchanges by moments | kB sent in rounds | kB sent by moments | mean | "
        "sd | later | singled out"
    )
    runner.table(columns, list(CASES), measure, given)


if __name__ == "__main__":
    main()
