"""What algorithms are worth in private: a logistic regression of 100 or 1000 clients at ε = 1, 3, 10. Makes private.md.

    python experiments/private.py                  # minutes on two cores
    python experiments/private.py --clients 100 --epsilons 10 inf --algorithms SFVI FedAvg

Clients have 10 rows of three numbers and a yes or no, drawn from models.hierarchical_logistic at μ_α = -0.5, τ_α = 0.7,
μ_β = (1, -1, 0.5), τ_β = (0.3, 0.3, 0.3). All clients take part in 30 rounds; Gaussian noise, δ = 10⁻⁵; the clip is the
adaptive one. Cells are the negative log-likelihood of 20 further rows of every client, which knows its own rows, and
the error of μ_β: its root mean square distance from the truth; where there is a posterior of it, also the
largest shift of its mean from that without privacy, in standard deviations of the posterior without and in its own.
Means over the seeds, with their standard errors. "alone" is what
clients know whose neighbours tell nothing: the model under its prior.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import bayesfed as bf
from bayesfed import models

sys.path.append(str(Path(__file__).parent))
from tables import done, keep

HERE = Path(__file__).parent
SLOPES = torch.tensor([1.0, -1.0, 0.5])
ALGORITHMS: dict[str, Any] = {
    "SFVI": lambda: bf.SFVI(),
    "FedAvg": lambda: bf.FedAvg(lr=0.3),
    "PerFedAvg": lambda: bf.PerFedAvg(lr=0.1, prior_lr=0.3),
    "PFedMe": lambda: bf.PFedMe(),
    "FedABML": lambda: bf.FedABML(),
    "Ditto": lambda: bf.Ditto(lr=0.3),
    "PACPFL": lambda: bf.PACPFL(particles=2, draws=20, lr=0.1),
}
EPSILONS = (math.inf, 10.0, 3.0, 1.0)


def clients(count: int, seed: int) -> tuple[bf.Federation, bf.Federation]:
    """Rows to learn from, and further rows."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    alpha, beta = -0.5 + 0.7 * normal(count, 1), SLOPES + 0.3 * normal(count, 3)
    x = normal(count, 30, 3)
    chance = (alpha + (x * beta[:, None]).sum(-1)).sigmoid()
    y = (torch.rand(count, 30, generator=generator) < chance).float()
    parts = [{"x": x[:, rows], "y": y[:, rows]} for rows in (slice(10), slice(10, None))]
    both = (
        {f"client {i}": {name: value[i] for name, value in part.items()} for i in range(count)}
        for part in parts
    )
    train, test = (bf.Federation.from_arrays(each) for each in both)
    return train, test


def fitted(name: str, count: int, epsilon: float, seed: int, rounds: int = 30) -> bf.Posterior:
    """The posterior of one run."""
    torch.manual_seed(seed)
    privacy = None if math.isinf(epsilon) else bf.Privacy(epsilon=epsilon)
    return bf.fit(
        models.hierarchical_logistic,
        clients(count, seed)[0],
        ALGORITHMS[name](),
        rounds=rounds,
        privacy=privacy,
        seed=seed,
        progress=False,
    )


def worth(name: str, count: int, epsilon: float, seed: int) -> dict[str, Any]:
    """NLL of further rows, distance of μ_β, its shift in standard deviations; or why there is none."""
    torch.set_num_threads(1)
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            posterior = fitted(name, count, epsilon, seed)
        except (ValueError, FloatingPointError) as error:
            return {"refused": str(error).splitlines()[0]}
        said += [str(warning.message) for warning in caught]
        test = clients(count, seed)[1]
        nll = -posterior.predictive(test, num_samples=100).log_prob(test["y"]).mean()
        beta = posterior.sample(1000)["mu_beta"].reshape(1000, 3)
        found = {
            "nll": float(nll),
            "distance": float((beta.mean(0) - SLOPES).square().mean().sqrt()),
        }
        if not math.isinf(epsilon) and float(beta.std(0).min()) > 0:
            plain = fitted(name, count, math.inf, seed).sample(1000)["mu_beta"].reshape(1000, 3)
            shift = (beta.mean(0) - plain.mean(0)).abs()
            found["shift"] = float((shift / plain.std(0)).max())
            found["own"] = float((shift / beta.std(0)).max())
    return found | {"said": said}


def cell(found: list[dict[str, Any]]) -> str:
    """The figures of all seeds."""
    if refusal := next((each["refused"] for each in found if "refused" in each), None):
        return refusal

    def shown(name: str, digits: int) -> str:
        values = [each[name] for each in found]
        error = f" ± {stdev(values) / math.sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
        return f"{mean(values):.{digits}f}{error}"

    text = f"{shown('nll', 3)} / {shown('distance', 2)}"
    if all("shift" in each for each in found):
        text += f" / {shown('shift', 1)} sd, {shown('own', 1)} of its own"
    warned = sum(any("noise" in each for each in one["said"]) for one in found)
    return text + (f" (warned {warned} of {len(found)})" if warned else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1000])
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="take fits that are stored")
    asked = parser.parse_args()
    calls = [
        (name, count, epsilon, seed)
        for name in asked.algorithms
        for count in asked.clients
        for epsilon in asked.epsilons
        for seed in range(asked.seeds)
    ]
    results: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    columns = [f"ε = {epsilon:g}" if epsilon < math.inf else "not private" for epsilon in EPSILONS]
    header = [
        f"| algorithm | clients | {' | '.join(columns)} |",
        "| --- " * (2 + len(columns)) + "|",
    ]
    for (name, count, epsilon, _), found in done(worth, calls, asked.jobs, asked.resume):
        results.setdefault((name, count, epsilon), []).append(found)
        cells = [results.get((name, count, each), []) for each in EPSILONS]
        if all(len(each) == asked.seeds for each in cells):
            row = f"| {name} | {count} | {' | '.join(map(cell, cells))} |"
            keep(HERE / "private.md", header, row, list(ALGORITHMS), columns=2)
            print(row, flush=True)


if __name__ == "__main__":
    main()
