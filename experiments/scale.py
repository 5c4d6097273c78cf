"""How do time and memory grow with the number of clients and the cohort? Makes scale.md.

    python experiments/scale.py

Clients of 5 to 50 rows are drawn from the varying-intercept model. Each row runs in a process of its own; memory is
the highest resident size less that of the process once the packages were loaded. The last columns compare the posterior
of the global variables (mu, tau, beta, sigma) with NUTS on the same model, in which the clients' intercepts are
integrated out in closed form: the largest shift of a mean in NUTS' standard deviations, and the range of the ratios.
"""

from __future__ import annotations

import resource

import pyro
import runner
import torch
from distances import cells
from pyro import poutine
from pyro.infer import MCMC, NUTS
from torch import Tensor

import bayesfed as bf
from bayesfed import models

COLUMNS = "clients | cohort | rows | data MB | locals MB | peak MB | rounds | ms a round | mean | sd ratio"
SIZES = [(1_000, 100, 15), (10_000, 100, 1000), (100_000, 100, 15), (10_000, 1_000, 15)]


def draw(clients: int) -> bf.Federation:
    """Draw clients with mu = 1.5, tau = 0.5, beta = -0.7, sigma = 0.8."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 51, (clients,), generator=generator)
    owner = torch.repeat_interleave(torch.arange(clients), lengths)
    alpha = 1.5 + 0.5 * torch.randn(clients, generator=generator)
    x = torch.randn(len(owner), 1, generator=generator)
    y = alpha[owner] - 0.7 * x[:, 0] + 0.8 * torch.randn(len(owner), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return bf.Federation({"x": x, "y": y}, offsets, tuple(f"client {i}" for i in range(clients)))


def exact(federation: bf.Federation) -> dict[str, Tensor]:
    """Return NUTS' draws of the global variables: y_i ~ N(mu + x beta, sigma² I + tau² 11ᵀ) for each client."""
    owner, n = federation.owner, federation.lengths.double()
    x, y = federation["x"][:, 0].double(), federation["y"].double()
    trace = poutine.trace(models.varying_intercept).get_trace(federation.select(["client 0"]))
    priors = {name: trace.nodes[name]["fn"] for name in ("mu", "tau", "beta", "sigma")}

    def marginal() -> None:
        mu, tau, beta, sigma = (pyro.sample(name, prior) for name, prior in priors.items())
        residual = y - mu - x * beta
        sums = torch.zeros_like(n).index_add(0, owner, residual)
        squares = residual.square().sum()
        # (sigma² I + tau² 11ᵀ)⁻¹ = (I − 11ᵀ tau² / (sigma² + n tau²)) / sigma²
        total = sigma.square() + n * tau.square()
        quadratic = squares - (tau.square() / total * sums.square()).sum()
        log_det = ((n - 1) * 2 * sigma.log() + total.log()).sum()
        pyro.factor("y", -(quadratic / sigma.square() + log_det) / 2)

    pyro.set_rng_seed(0)
    mcmc = MCMC(NUTS(marginal), num_samples=1000, warmup_steps=500, disable_progbar=True)
    mcmc.run()
    return {name: value.squeeze(-1) for name, value in mcmc.get_samples().items()}


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(clients: int, cohort: int, rounds: int) -> list[str]:
    """Fit that many clients and compare long runs with NUTS."""
    bf.fit(models.varying_intercept, draw(20), rounds=2)
    before, federation = megabytes(), draw(clients)
    how = {"rounds": rounds, "clients_per_round": cohort, "seed": 0}
    posterior = bf.fit(models.varying_intercept, federation, **how)
    peak = megabytes() - before
    data, states = (
        sum(value.nbytes for value in tensors.values()) / 2**20
        for tensors in (federation.fields, posterior.local_params)
    )
    found = ["", ""]
    if rounds >= 500:
        draws = posterior.select(["client 0"]).sample(20_000)  # enough for the global variables
        found = cells(draws, exact(federation), set())[:2]
    ms = 1000 * float(posterior.history["seconds"].median())
    sizes = [f"{federation.rows:,}", f"{data:.1f}", f"{3 * states:.1f}"]
    return [*sizes, f"{peak:.0f}", f"{rounds:,}", f"{ms:.0f}", *found]


def main() -> None:
    rows = {(f"{size[0]:,}", f"{size[1]:,}"): [size] for size in SIZES}
    runner.table(COLUMNS, rows, measure, runner.arguments(__doc__), alone=True)


if __name__ == "__main__":
    main()
