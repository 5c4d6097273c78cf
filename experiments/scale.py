"""Time and memory against the number of clients and the cohort: makes scale.md.

    python experiments/scale.py

Clients of 5 to 50 rows drawn from the varying-intercept model. Each line runs in a process of its own; memory is
the highest resident size less what the process held once the packages were loaded. The last columns compare the
posterior of the population's mean with the value that the data were drawn from, in posterior sd.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch

import bayesfed as bf
from bayesfed import models

HERE = Path(__file__).parent
HEADER = [
    "| clients | rows | cohort | data MB | locals MB | peak MB | ms a round | s in all | mu, sd away | sd of mu |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
]


# a client that takes part a few times in all must learn more at each visit, and the server wait for it
RARE = bf.SFVI(local_steps=40, local_lr=0.1, lr=0.03)


def draw(clients: int) -> bf.Federation:
    """mu = 1.5, tau = 0.5, beta = -0.7, sigma = 0.8."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 51, (clients,), generator=generator)
    owner = torch.repeat_interleave(torch.arange(clients), lengths)
    alpha = 1.5 + 0.5 * torch.randn(clients, generator=generator)
    x = torch.randn(len(owner), 1, generator=generator)
    y = alpha[owner] - 0.7 * x[:, 0] + 0.8 * torch.randn(len(owner), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return bf.Federation({"x": x, "y": y}, offsets, tuple(f"client {i}" for i in range(clients)))


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one(clients: int, cohort: int, rounds: int) -> dict[str, float]:
    torch.set_num_threads(1)
    bf.fit(models.varying_intercept, draw(20), rounds=2)
    before = megabytes()
    federation = draw(clients)
    posterior = bf.fit(
        models.varying_intercept,
        federation,
        RARE,
        rounds=rounds,
        clients_per_round=cohort,
        seed=0,
    )
    peak = megabytes() - before
    q = posterior.program.guide
    z = posterior.params["global.loc"]
    start = q.globals["mu"]
    mu = float(start.loc + start.scale * z[0])
    sd = float(start.scale * posterior.params["global.log_scale"][0].exp())
    seconds = posterior.history["seconds"]
    return {
        "rows": federation.rows,
        "data": sum(v.nbytes for v in federation.fields.values()) / 2**20,
        "locals": 3 * sum(v.nbytes for v in posterior.local_params.values()) / 2**20,
        "peak": peak,
        "round": 1000 * float(seconds.median()),
        "all": float(seconds.sum()),
        "mu": (mu - 1.5) / sd,
        "sd": sd,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one", nargs=3, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(*args.one)))
        return
    print("\n".join(HEADER))
    lines = []
    sizes = [(1_000, 100, 15), (10_000, 100, 500), (100_000, 100, 15), (10_000, 1_000, 15)]
    for clients, cohort, rounds in sizes:
        command = [sys.executable, __file__, "--one", str(clients), str(cohort), str(rounds)]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        f = json.loads(ran.stdout.splitlines()[-1])
        fitted = f"{f['mu']:.1f} | {f['sd']:.4f}" if rounds >= 500 else "(15 rounds only) | "
        lines.append(
            f"| {clients:,} | {f['rows']:,} | {cohort:,} | {f['data']:.1f} | {f['locals']:.1f} | "
            f"{f['peak']:.0f} | {f['round']:.0f} | {f['all']:.0f} | {fitted} |"
        )
        print(lines[-1], flush=True)
    fresh = HERE / "scale.tmp"
    fresh.write_text("\n".join([*HEADER, *lines]) + "\n")
    fresh.replace(HERE / "scale.md")


if __name__ == "__main__":
    main()
