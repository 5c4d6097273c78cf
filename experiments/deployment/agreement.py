"""Does a fit over three institutions agree with the same fit in one process, seed for seed? Makes agreement.md.

    python experiments/deployment/agreement.py       # a few minutes

Institutions are workers in this process, reached through the messages that otherwise travel. Differences begin as
round-off: sums are added in another order. With half of the clients in a round SFVI, and in the clients' variables PVI,
amplify it on the way to where they converge, as much in one process ("other chunks"). They are of the guide's global
parameters, of the clients' own ones, both relative to the largest of the tensor, and of the ELBO of the last round.
Beside them are those of one process in which two clients run together, in place of all: the effect of round-off on the
method.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import in_process
import torch
from in_process import runner

import bayesfed as bf
from bayesfed import datasets, models
from bayesfed.deploy.plan import DeploymentPlan


def network() -> Any:
    """Return a small classifier of digits."""
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
    """Return the largest difference, relative to the largest number of its tensor."""
    return max(
        (
            float((found[n] - v).abs().max() / v.abs().max().clamp(min=1e-12))
            for n, v in expected.items()
        ),
        default=0.0,
    )


def measure(case: str) -> list[str]:
    """Fit over institutions, in one process, and in other chunks."""
    model, data, algorithm, schedule = CASES[case]
    federation = datasets.digits(clients=9)[0] if data == "digits" else data()
    if model == "modulated":
        model = models.Modulated(models.mlp(64, 16, 10), models.mlp(64, 8), context=8)
    plan, begin = DeploymentPlan(model, algorithm, **schedule), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        over, sites = in_process.fit(plan, federation, folder, institutions=3)
        seconds = time.perf_counter() - begin
        own = [part.posterior.local_params for s in sites.values() for part in s._runs.values()]
    begin = time.perf_counter()
    here = bf.fit(model, federation, algorithm, **schedule)
    alone = time.perf_counter() - begin
    two = bf.Execution(chunk_size=2, compile=False)
    other = bf.fit(model, federation, algorithm, execution=two, **schedule)
    local = {name: torch.cat([part[name] for part in own]) for name in here.local_params}
    rounds = [len(p.history["elbo"]) for p in (over.posterior, here)]
    elbo = [float(p.history["elbo"][-1]) for p in (over.posterior, here)]
    return [
        f"{rounds[0]} / {rounds[1]}",
        f"{worst(over.params, here.params):.1e}",
        f"{worst(local, dict(here.local_params)):.1e}",
        f"{worst(other.params, here.params):.1e}",
        f"{abs(elbo[0] - elbo[1]):.1e} of {elbo[1]:.1f}",
        f"{seconds:.1f} / {alone:.1f}",
    ]


def main() -> None:
    columns = "fit | rounds | global | clients' own | global, other chunks | ELBO | seconds, institutions / here"
    runner.table(columns, list(CASES), measure, runner.arguments(__doc__))


if __name__ == "__main__":
    main()
