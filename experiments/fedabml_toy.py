"""The toy of the FedABML paper, section 5.1: how far a server ends from the pooled posterior mean.

    python experiments/fedabml_toy.py           # makes fedabml_toy.md and .png, minutes on one core

Two clients with losses ½ (w − μ_i)ᵀ Σ_i⁻¹ (w − μ_i) in two dimensions; the variances of Σ_i along its axes are 1 and
0.1, and its axes are turned by 54° to 90° between the clients. The pooled posterior mean is
(Σ_1⁻¹ + Σ_2⁻¹)⁻¹ (Σ_1⁻¹ μ_1 + Σ_2⁻¹ μ_2). A round has 10 local steps on both clients, whatever the method; μ_i, axes and
start differ from seed to seed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import bayesfed as bf
from bayesfed import noise
from bayesfed.algorithms.fedabml import FedABML

HERE = Path(__file__).parent
ROUNDS = (1, 5, 10, 20, 50)
STEPS = 10
NOTE = """
What the table says:

- Any FedAvg of a fixed rate trades speed against bias: ten steps of a client towards its own μ_i saturate in its steep
  direction first, so the rates that are fast stop far from the pooled mean (client drift).
- With a fixed σ_θ FedABML is on the same trade-off. θ_i follows φ with weight η' λ / (n_i σ_θ²) (whitened: η' λ / n_i); at
  1 it lands on φ in every step, which is FedAvg with rate η (whitened: η σ_θ²).
- What puts it ahead is the learnt σ_θ together with whitened steps. Every round turns what the clients' posteriors have
  become into the next prior, so the precision 1 / σ_θ² collects the data's precision anew each time and grows about
  linearly with the rounds. Steps in units of σ_θ² so fall like 1 / round: drift falls with them.
- The same schedule given to FedAvg (η / round) is the control: what FedABML gains here is the schedule, found from the
  data and for each weight, and not a different fixed point. σ_θ is then no longer how much clients differ.
- In the paper's plain steps (not whitened) the rate of φ does not follow σ_θ, and the gain is gone. A smaller σ_θ makes them
  stiff instead: η' λ / (n_i σ_θ²) beyond 2 diverges.
"""


@dataclass(frozen=True)
class Toy:
    """One draw of the problem."""

    federation: bf.Federation
    start: Tensor
    target: Tensor


def toy(seed: int) -> Toy:
    """Two clients with one row each: ``mu`` ``(2,)`` and ``precision`` ``(2, 2)``."""
    rng = torch.Generator().manual_seed(seed)
    base = math.pi * torch.rand((), generator=rng)
    mu, precision = 2 * torch.randn(2, 2, generator=rng), torch.zeros(2, 2, 2)
    for i in range(2):
        angle = base + i * math.pi / 2 * (0.6 + 0.4 * torch.rand((), generator=rng))
        axis = torch.stack([angle.cos(), angle.sin()])
        precision[i] = 10 * torch.eye(2) - 9 * axis.outer(axis)
    target = torch.linalg.solve(precision.sum(0), (precision @ mu[..., None]).sum(0)[:, 0])
    clients = {
        f"client {i}": {"mu": mu[i][None], "precision": precision[i][None]} for i in range(2)
    }
    return Toy(bf.Federation.from_arrays(clients), 2 * torch.randn(2, generator=rng), target)


def quadratic(start: Tensor, scale: float, *, learnt: bool) -> Callable[[bf.Federation], None]:
    """The clients' objective as a Pyro program: N(μ_i; w, Σ_i) has that loss."""

    def model(federation: bf.Federation) -> None:
        loc = pyro.param("prior.loc", start.clone, event_dim=1)
        sd = torch.full_like(start, scale)
        if learnt:
            sd = pyro.param("prior.log_scale", sd.log(), event_dim=1).exp()
        with federation.clients():
            w = pyro.sample("w", dist.Normal(loc, sd).to_event(1))
            with federation.observations() as obs:
                seen = dist.MultivariateNormal(w, precision_matrix=obs["precision"])
                pyro.sample("mu", seen, obs=obs["mu"])

    return model


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    algorithm: FedABML
    scale: float = 1.0
    learnt: bool = False
    annealed: bool = False


def fedavg(lr: float, *, annealed: bool = False) -> Method:
    algorithm = FedABML(
        point=True, upload="posterior", kl_weight=0, whitened=False, local_steps=STEPS, lr=lr
    )
    return Method(algorithm, annealed=annealed)


def fedabml(lr: float, prior_lr: float, scale: float, *, learnt: bool, whitened: bool) -> Method:
    algorithm = FedABML(lr=lr, prior_lr=prior_lr, local_steps=STEPS, whitened=whitened)
    return Method(algorithm, scale, learnt)


METHODS = {
    "FedAvg, η = 0.003": fedavg(0.003),
    "FedAvg, η = 0.01": fedavg(0.01),
    "FedAvg, η = 0.03": fedavg(0.03),
    "FedAvg, η = 0.05 / round": fedavg(0.05, annealed=True),
    "FedABML, η = 0.3, η' = 1, σ_θ from 0.5": fedabml(0.3, 1.0, 0.5, learnt=True, whitened=True),
    "the same, σ_θ = 0.5 fixed": fedabml(0.3, 1.0, 0.5, learnt=False, whitened=True),
    "fixed, η = 0.03, η' = 1": fedabml(0.03, 1.0, 0.5, learnt=False, whitened=True),
    "plain steps, η = 0.01, η' = 0.1, σ_θ from 0.3": fedabml(
        0.01, 0.1, 0.3, learnt=True, whitened=False
    ),
}
DRAWN = {
    "FedAvg, η = 0.003",
    "FedAvg, η = 0.01",
    "FedAvg, η = 0.03",
    "FedAvg, η = 0.05 / round",
} | {"FedABML, η = 0.3, η' = 1, σ_θ from 0.5"}


def distances(method: Method, seed: int) -> tuple[Tensor, float]:
    """‖m_θ − target‖ after every round, and the mean σ_θ after the last."""
    problem, algorithm = toy(seed), method.algorithm
    federation = problem.federation
    model = quadratic(problem.start, method.scale, learnt=method.learnt)
    program = algorithm.program(model, federation)
    server, _ = algorithm.init(program, federation)
    batch, found = federation.batch(), []
    for r in range(1, ROUNDS[-1] + 1):
        key = noise.fold(noise.key(seed), r)
        keys = noise.fold(key, federation.streams)
        rate = 1 / r if method.annealed else 1.0
        _, upload, _ = algorithm.client_update(program, server, {}, lambda step: batch, keys, rate)
        total = {name: value.sum(0) for name, value in upload.items()}
        server, _ = algorithm.decode(program, server, total, key, rate, 1.0)
        found.append((server["prior.loc"] - problem.target).norm())
    sd = server["prior.log_scale"].exp().mean() if method.learnt else method.scale
    return torch.stack(found), float(sd)


def band(runs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over seeds ``(seeds, rounds)`` and half the width of its 95 % interval (Student's t)."""
    from scipy.stats import t

    quantile = float(t.ppf(0.975, len(runs) - 1))
    return runs.mean(0), quantile * runs.std(0) / len(runs) ** 0.5


def table(found: dict[str, tuple[Tensor, float]], seeds: int) -> Iterator[str]:
    yield f"Made by `python experiments/fedabml_toy.py --seeds {seeds}`; its first lines say what this is.\n"
    yield f"Distance of the server's mean to the pooled posterior mean: mean over {seeds} seeds ± half its 95 % interval.\n"
    yield "| | " + " | ".join(f"round {r}" for r in ROUNDS) + " | σ_θ at the end |"
    yield "| --- |" + " --- |" * (len(ROUNDS) + 1)
    for name, (runs, sd) in found.items():
        mean, half = (value.tolist() for value in band(runs))
        cells = [f"{mean[r - 1]:.3f} ± {half[r - 1]:.2g}" for r in ROUNDS]
        spread = f"{sd:.3f}" if name.startswith(("FedABML", "the", "fixed", "plain")) else ""
        yield f"| {name} | " + " | ".join(cells) + f" | {spread} |"
    yield NOTE.rstrip()


def draw(found: dict[str, tuple[Tensor, float]], path: Path) -> None:
    """Distances by round, with their bands."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for name, (runs, _) in found.items():
        if name not in DRAWN:
            continue
        mean, half = band(runs)
        rounds = range(1, len(mean) + 1)
        (line,) = axes.plot(rounds, mean, label=name)
        low = (mean - half).clamp(min=1e-3)
        axes.fill_between(rounds, low, mean + half, alpha=0.15, color=line.get_color(), lw=0)
    axes.set(yscale="log", xlabel="round", ylabel="distance to the pooled posterior mean")
    axes.set_ylim(bottom=0.02)
    axes.legend(fontsize="small")
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, dpi=150, format="png")
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, method in METHODS.items():
        runs = [distances(method, seed) for seed in range(args.seeds)]
        found[name] = torch.stack([run for run, _ in runs]), sum(sd for _, sd in runs) / len(runs)
    lines = list(table(found, args.seeds))
    print("\n".join(lines))
    temporary = HERE / "fedabml_toy.md.tmp"
    temporary.write_text("\n".join(lines) + "\n")
    temporary.replace(HERE / "fedabml_toy.md")
    draw(found, HERE / "fedabml_toy.png")


if __name__ == "__main__":
    main()
