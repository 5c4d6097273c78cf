"""Does FOLA stay at the pooled posterior that it finds? Makes fola_drift.md.

    python experiments/fola_drift.py            # about ten minutes on one core

Linear regression, y = x β_i + N(0, 1), five weights, eight clients that differ in β_i (standard deviation 1), in the
scale of each of their inputs (0.7 to 1.4) and in size (20 to 100 rows). Losses are quadratic, so the pooled
posterior N(μ*, (n Λ*)⁻¹) is known; the prior is next to nothing (1e-6 n). Every client takes 50 full-batch steps in a
round, except in the rows of `FOLA()`: the algorithm with its usual settings.

The table holds, after so many rounds, means over the seeds ± standard errors of

    D      ½ (μ_S − μ*)ᵀ n Λ* (μ_S − μ*)    in nats: draws from the posterior have 2.5 on average
    ratio  the mean over weights of Λ_S / diag Λ*

With curvatures of the Hessian and the paper's λ = 1 FOLA drifts away again; with λ = r − 1 in round r, and in cavity
form, it does not. In cavity form a client's own factor is left out of its prior, damped by ρ; K is the number of
clients. Undamped, with the eigenvalues of the Hessian only and correlated inputs, it diverges. "separate" inputs: each
row has one input, so Λ* is diagonal and FOLA's Gaussian can be exact. "correlated": any two inputs of a client have
correlation 0.3.
"""

from __future__ import annotations

from typing import Any

import runner
import torch
from torch import Tensor, nn

import bayesfed as bf
from bayesfed.models import Network

ROUNDS = (1, 2, 5, 10, 50, 100)
WEIGHTS, CLIENTS = 5, 8
STEPS = {"lr": 0.2, "local_steps": 50}
METHODS: dict[str, dict[str, Any]] = {
    "eq. 24, λ = 1 (the paper)": STEPS | {"cavity": False},
    "eq. 24, λ = r − 1": STEPS | {"cavity": False, "prior_weight": None},
    "cavity, ρ = 1 / K": STEPS | {"cavity": True, "damping": 1 / CLIENTS},
    "cavity, ρ = 1": STEPS | {"cavity": True, "damping": 1.0},
}
HESSIAN = {"fisher": "hessian", "online": False}
CASES: dict[tuple[str, str], dict[str, Any]] = {
    ("separate", "diagonal of the Hessian"): HESSIAN | {"covariance": "diagonal"},
    ("correlated", "diagonal of the Hessian"): HESSIAN | {"covariance": "diagonal"},
    ("correlated", "per-sample, online, diagonal"): {
        "fisher": "per-sample",
        "covariance": "diagonal",
    },
    ("correlated", "eigenvalues of the Hessian"): HESSIAN | {"covariance": "e-full"},
    ("correlated", "Hessian"): HESSIAN | {"covariance": "full"},
    ("correlated", "per-sample, online"): {"fisher": "per-sample", "covariance": "full"},
}
DEFAULT = "`FOLA()`"


def regression(design: str, seed: int) -> bf.Federation:
    """Return clients with inputs ``x`` ``(5,)`` and targets ``y``."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    centre, clients = draw(WEIGHTS), {}
    for i in range(CLIENTS):
        rows = int(torch.randint(20, 101, (), generator=rng))
        scale = 0.7 * 2 ** torch.rand(WEIGHTS, generator=rng)
        if design == "separate":
            x = torch.eye(WEIGHTS)[torch.arange(rows) % WEIGHTS] * WEIGHTS**0.5
            x = x * draw(rows, 1).sign()
        else:
            x = 0.7**0.5 * draw(rows, WEIGHTS) + 0.3**0.5 * draw(rows, 1)
        x = x * scale
        y = x @ (centre + draw(WEIGHTS)) + draw(rows)
        clients[f"client {i}"] = {"x": x, "y": y}
    return bf.Federation.from_arrays(clients)


def measure(design: str, settings: dict[str, Any], seed: int) -> list[tuple[float, float]]:
    """Return D and the ratio after the rounds of the table."""
    torch.set_default_dtype(torch.float64)
    federation = regression(design, seed)
    x, y = federation.fields["x"], federation.fields["y"]
    precision = x.mT @ x  # n Λ*
    mode = torch.linalg.solve(precision, x.mT @ y)
    line = nn.Linear(WEIGHTS, 1, bias=False)
    nn.init.zeros_(line.weight)
    model = Network(line, local=(), likelihood="normal")
    algorithm = bf.FOLA(**settings, gamma=1e-6 * len(y))
    fit, found = bf.start(model, federation, algorithm, rounds=ROUNDS[-1]), []
    for r in range(1, ROUNDS[-1] + 1):
        bf.step(fit)
        if r in ROUNDS:
            error, found_precision = fit.server.loc - mode, fit.server.precision
            if found_precision.ndim == 2:
                found_precision = found_precision.diagonal()
            ratio = (found_precision * len(y) / precision.diagonal()).mean()
            found.append((float(error @ precision @ error / 2), float(ratio)))
    return found


def cells(_: Any, found: list[list[tuple[float, float]]]) -> list[list[str]]:
    """Return a row of D and one of the ratio from the seeds' figures."""
    rows = []
    for i, (name, *digits) in enumerate((("D", ".3g", ".1g"), ("ratio", ".3f"))):
        at = range(len(ROUNDS))
        rows.append([name, *(runner.plus_minus([run[r][i] for run in found], *digits) for r in at)])
    return rows


def main() -> None:
    given, rows = runner.arguments(__doc__, seeds=5), {}
    for (design, curvature), settings in CASES.items():
        whole = settings == HESSIAN | {"covariance": "full"}
        for name, method in (METHODS | ({DEFAULT: {}} if whole else {})).items():
            how = method | (settings if method else {})
            rows[design, curvature, name] = [(design, how, seed) for seed in range(given.seeds)]
    columns = f"inputs | F̄ | method | figure | {' | '.join(f'round {r}' for r in ROUNDS)}"
    runner.table(columns, rows, measure, given, cells)


if __name__ == "__main__":
    main()
