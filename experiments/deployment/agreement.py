"""A fit over three institutions beside the same fit in one process, seed for seed: makes agreement.md.

    python experiments/deployment/agreement.py       # a few minutes

Nodes are in this process, and are reached through the messages that travel otherwise. Differences are round-off: sums
are added in another order. They are of the guide's global parameters, of the clients' own ones, both relative to the
largest of the tensor, and of the ELBO of the last round. Beside them those of one process in which two clients run
together, in place of as many as go: what round-off does to the method.
"""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy.institutions import Patience
from bayesfed.deploy.node import Node
from bayesfed.deploy.plan import Plan
from bayesfed.deploy.server import run_server
from bayesfed.deploy.transport import Carrier

HERE = Path(__file__).parent
INSTITUTIONS = 3


def network() -> Any:
    """A small classifier of digits."""
    return models.Network(models.mlp(64, 10))


DIGITS = {"rounds": 5, "clients_per_round": 0.5, "batch_size": 10}
CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "SFVI, until converged": (models.varying_slope, datasets.grunfeld, bf.SFVI(), {}),
    "SFVI, half of the clients": (
        models.varying_slope,
        datasets.grunfeld,
        bf.SFVI(),
        {"rounds": 20, "clients_per_round": 0.5},
    ),
    "SFVIAvg": (models.varying_slope, datasets.grunfeld, bf.SFVIAvg(), {"rounds": 10}),
    "PVI": (models.eight_schools, datasets.eight_schools, bf.PVI(), {"rounds": 10}),
    "PVI, far from the posterior": (
        models.varying_slope,
        datasets.grunfeld,
        bf.PVI(),
        {"rounds": 10},
    ),
    "FedABML": (network(), "digits", bf.FedABML(), DIGITS),
    "PFedVEM": (network(), "digits", bf.PFedVEM(), DIGITS),
    "FOLA": (network(), "digits", bf.FOLA(), DIGITS),
    "PACPFL": (models.varying_slope, datasets.grunfeld, bf.PACPFL(), {"rounds": 10}),
    "CAFeMe": ("modulated", "digits", bf.CAFeMe(), DIGITS),
}


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest number of its tensor."""
    return max(
        (
            float((found[n] - v).abs().max() / v.abs().max().clamp(min=1e-12))
            for n, v in expected.items()
        ),
        default=0.0,
    )


def compared(case: str) -> str:
    """A row of the table."""
    model, data, algorithm, schedule = CASES[case]
    federation = datasets.digits(clients=9)[0] if data == "digits" else data()
    if model == "modulated":
        model = models.Modulated(models.mlp(64, 16, 10), models.mlp(64, 8), context=8)
    plan = Plan(model, algorithm, **schedule)
    cuts = [round(i * len(federation) / INSTITUTIONS) for i in range(INSTITUTIONS + 1)]
    with tempfile.TemporaryDirectory() as folder:
        nodes = {
            f"node{i}": Node(
                f"node{i}", federation.select(federation.names[a:b]), plan, f"{folder}/node{i}"
            )
            for i, (a, b) in enumerate(pairwise(cuts))
        }
        carrier = Carrier(
            lambda: list(nodes), lambda sent, _: {at: nodes[at].handle(p) for at, p in sent.items()}
        )
        begin = time.perf_counter()
        over = run_server(carrier, plan, Patience(tuple(nodes)), f"{folder}/server.safetensors")
        seconds = time.perf_counter() - begin
        own = [part.posterior.local_params for s in nodes.values() for part in s._runs.values()]
    begin = time.perf_counter()
    here = bf.fit(model, federation, algorithm, **schedule)
    alone = time.perf_counter() - begin
    two = bf.Execution(chunk_size=2, compile=False)
    other = bf.fit(model, federation, algorithm, execution=two, **schedule)
    local = {name: torch.cat([part[name] for part in own]) for name in here.local_params}
    rounds = [len(p.history["elbo"]) for p in (over.posterior, here)]
    elbo = [float(p.history["elbo"][-1]) for p in (over.posterior, here)]
    cells = [
        f"{rounds[0]} / {rounds[1]}",
        f"{worst(over.params, here.params):.1e}",
        f"{worst(local, dict(here.local_params)):.1e}",
        f"{worst(other.params, here.params):.1e}",
        f"{abs(elbo[0] - elbo[1]):.1e} of {elbo[1]:.1f}",
        f"{seconds:.1f} / {alone:.1f}",
    ]
    return f"| {case} | " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table and write it."""
    heads = [
        "",
        "rounds",
        "global",
        "clients' own",
        "global, other chunks",
        "ELBO",
        "seconds, nodes / here",
    ]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for case in CASES if len(sys.argv) == 1 else sys.argv[1:]:
        lines.append(compared(case))
        print(lines[-1], flush=True)
    if len(sys.argv) == 1:
        (HERE / "agreement.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
