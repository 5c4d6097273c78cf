"""Do the PAC-Bayes bounds hold, and from how many clients and rows on are they not vacuous? Makes bounds.md.

    python experiments/pac_pfl/bounds.py                   # a minute

A client's label changes at a threshold of its own, near 0.3, and one in ten is wrong: so the risk of every hypothesis
(101 thresholds, 0-1 loss) is known. A prior is one of five bells over the thresholds, at 0.1, 0.3, ..., 0.9; the
hyper-prior takes each alike, so that ln Z, the optimal hyper-posterior and its divergence are sums, without Monte
Carlo. β = 2 √m.

"own": the client bound for the middle prior, which has seen no data (ε = 0). "shared": the client bound for the
hyper-posterior, τ such that ε = 0.1. "server" and "new": λ as that τ has it; one client gets a further row ("server",
Theorem 4.2; "new", Lemma 4.6). δ = 0.1. Each cell: mean risk, mean bound, share of 200 redrawn federations in which
the bound failed (client bounds: of clients); "vacuous" where the mean is 1 or more.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from regression import runner
from torch import Tensor

from bayesfed import PACPFL, bounds

GRID = torch.linspace(0, 1, 101, dtype=torch.float64)
CENTRES = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
PRIORS = (-((GRID - CENTRES[:, None]) ** 2) / (2 * 0.1**2)).softmax(1)
DELTA, FEDERATIONS, UPSILON = 0.1, 200, 1e-4


def drawn(clients: int, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw mean losses on the rows and risks, of each client and hypothesis: ``(n, H)`` twice."""
    at = 0.3 + 0.05 * torch.randn(clients, generator=generator, dtype=torch.float64)
    x = torch.rand(clients, rows, generator=generator, dtype=torch.float64)
    y = (x > at[:, None]) ^ (torch.rand(clients, rows, generator=generator) < 0.1)
    losses = torch.stack([((x > h) != y).double().mean(1) for h in GRID], 1)
    return losses, 0.1 + 0.8 * (GRID - at[:, None]).abs()


def measure(clients: int, rows: int) -> list[tuple[float, float, float]]:
    """Return risk, bound and share of failures of each bound."""
    generator = torch.Generator().manual_seed(clients * 10_000 + rows)
    beta = 2 * math.sqrt(rows)
    tau = 0.1 * rows / (2 * beta)
    lam = tau / (1 - tau) * beta * clients * (1 + UPSILON) if tau < 1 else 1e6
    lam = max(lam, 1.01 * (1 + UPSILON))
    algorithm = PACPFL(lam=lam, beta=beta, new_data_clients=1, upsilon=UPSILON)
    tau = algorithm.rule.temperature(clients, rows)
    shared = {"beta": beta, "low": 0.0, "high": 1.0, "delta": DELTA}
    found: dict[str, list[tuple[float, float]]] = {
        k: [] for k in ("own", "shared", "server", "new")
    }
    for _ in range(FEDERATIONS):
        losses, risks = drawn(clients, rows, generator)
        score = PRIORS.log() - beta * losses[:, None]  # (n, 5, H)
        log_z = score.logsumexp(2)
        risk = (score.softmax(2) * risks[:, None]).sum(2)  # of each client under each prior
        q = (tau * log_z.sum(0)).softmax(0)
        for i in range(clients):
            bound = bounds.client(float(log_z[i, 2]), rows=rows, **shared)
            found["own"].append((float(risk[i, 2]), bound))
            bound = bounds.client(float(q @ log_z[i]), rows=rows, tau=tau, **shared)
            found["shared"].append((float(q @ risk[i]), bound))
        kl = float((q * (5 * q).clamp(min=1e-300).log()).sum())
        settings = shared | {"lam": lam, "upsilon": UPSILON, "rows": [rows] * clients}
        bound = bounds.server(
            (log_z @ q).tolist(), kl, new_rows=[1] + [0] * (clients - 1), **settings
        )
        found["server"].append((float((risk @ q).mean()), bound))
        log_z_tau = float((tau * log_z.sum(0)).logsumexp(0)) - math.log(5)
        bound = bounds.new_client(log_z_tau, changed=1, **settings)
        new_losses, new_risks = drawn(1, rows, generator)
        posterior = (PRIORS.log() - beta * new_losses).softmax(1)
        found["new"].append((float(q @ (posterior * new_risks).sum(1)), bound))
    pairs = {name: torch.tensor(several) for name, several in found.items()}
    return [
        (*pair.mean(0).tolist(), float((pair[:, 0] > pair[:, 1]).double().mean()))
        for pair in pairs.values()
    ]


def cells(_: Any, found: list[list[tuple[float, float, float]]]) -> list[str]:
    """Return a cell for each bound."""
    return [
        f"{risk:.2f}, {bound:.2f}, {failed:.3f}" + (" vacuous" if bound >= 1 else "")
        for risk, bound, failed in found[0]
    ]


def main() -> None:
    rows = [(n, m) for n in (3, 10, 30, 100) for m in (5, 10, 20, 50, 100, 300)]
    columns = "clients n | rows m | own | shared | server | new"
    runner.table(columns, rows, measure, runner.arguments(__doc__), cells)


if __name__ == "__main__":
    main()
