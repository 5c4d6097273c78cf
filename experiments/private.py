"""What are algorithms worth in private? Makes private.md.

    python experiments/private.py                  # minutes on two cores
    python experiments/private.py SFVI FedAvg --clients 100

A logistic regression of 100 or 1000 clients at ε = 1, 3, 10. Clients have 10 rows of three numbers and a yes or no,
drawn from models.hierarchical_logistic at μ_α = -0.5, τ_α = 0.7, μ_β = (1, -1, 0.5), τ_β = (0.3, 0.3, 0.3). All clients
take part in 30 rounds; Gaussian noise, δ = 10⁻⁵, an adaptive clip. Cells are the negative log-likelihood of 20 further
rows of every client, conditional on its own rows, and the error of μ_β: its root mean square distance from the truth;
where there is a posterior of it, also the largest shift of its mean from the one without privacy, in standard
deviations of the posterior without privacy and of its own. Means over the seeds, with their standard errors.
"""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import bayesfed as bf
from bayesfed import models

sys.path.append(str(Path(__file__).parent))
import runner

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
    """Return rows to learn from, and further rows."""
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
    """Return the posterior of one run."""
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


def measure(name: str, count: int, epsilon: float, seed: int) -> dict[str, Any]:
    """Return NLL of further rows, error of μ_β, its shift in standard deviations; or why there is none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            posterior = fitted(name, count, epsilon, seed)
        except (ValueError, FloatingPointError) as error:
            return {"refused": str(error).splitlines()[0]}
        warned = any("noise" in str(warning.message) for warning in caught)
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
    return found | {"warned": warned}


def cell(found: list[dict[str, Any]]) -> str:
    """Return the figures of all seeds as one cell."""
    if refusal := next((each["refused"] for each in found if "refused" in each), None):
        return refusal

    def shown(name: str, digits: str) -> str:
        return runner.plus_minus([each[name] for each in found], digits)

    text = f"{shown('nll', '.3f')} / {shown('distance', '.2f')}"
    if all("shift" in each for each in found):
        text += f" / {shown('shift', '.1f')} sd, {shown('own', '.1f')} of its own"
    warned = sum(one["warned"] for one in found)
    return text + (f" (warned {warned} of {len(found)})" if warned else "")


def main() -> None:
    given = runner.arguments(__doc__, jobs=2, clients=[100, 1000], seeds=3)
    kinds = " | ".join("not private" if math.isinf(e) else f"ε = {e:g}" for e in EPSILONS)
    rows = {
        (name, count): [(name, count, e, seed) for e in EPSILONS for seed in range(given.seeds)]
        for name in ALGORITHMS
        for count in given.clients
    }

    def cells(_: Any, found: list[dict[str, Any]]) -> list[str]:
        parts = range(0, len(found), given.seeds)
        return [cell(found[i : i + given.seeds]) for i in parts]

    runner.table(f"algorithm | clients | {kinds}", rows, measure, given, cells)


if __name__ == "__main__":
    main()
