"""How near to the pooled posterior does FOLA come with each kind of covariance on MNIST? Makes fola_covariance.md.

    python experiments/mnist/fola_covariance.py --data PATH      # ten minutes on two cores

The questions of Figs. 10 to 12 of FOLA's paper (Liu et al. 2024) on fewer images: 3,000 of the training images, dealt
to two clients with five digits each. Softmax regression on images pooled to 7 × 7 (500 numbers, each with the prior
N(0, 1)); batches of 300, lr = 0.5, E = 10; λ = 1 but in one row. GA is the accuracy % of the server's weights on the
test images, LA is Σ π_n times the accuracy of client n's weights after its steps. "full" and "e-full" take Hessians,
"diagonal" the squared gradients of rows, over all steps ("online") or after the last. μ* and Σ* are the mode and the
inverse Hessian of the pooled posterior, by L-BFGS in double precision, D(θ) = ½ (θ − μ*)ᵀ Σ*⁻¹ (θ − μ*), AE = D(θ_S)
and LF = Σ π_n D(θ_n), in nats: draws from the posterior have a D of 250 on average. Cells are means over the seeds ±
standard errors.

The paper's Figs. 10 to 12 are curves (a 780-10 network, lr = 0.01, E = 1, batches of 200): "full" has nearly 90 % in 3
rounds, the others need more than 10; LA after 10 rounds is above 80 % with "full" and below 60 % with the others;
"diagonal", offline, has less than 83 % after 10 rounds, less than FedAvg; "e-full" is much as FedAvg; with offline
curvature the curves swing after a few rounds.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import recipes
import torch
from fola import ROUNDS, accuracy, curve, mean_cell, mean_of_clients, tensors
from run import runner
from torch import Tensor, nn

import bayesfed as bf
from bayesfed.models import mlp

SIDE = 7
STEPS = {"lr": 0.5, "local_epochs": 10}
ROWS_A_STEP = 300
GAMMA = 1.0
"""The prior's precision."""
HESSIAN = {"fisher": "hessian"}
COVARIANCES: dict[tuple[str, str], dict[str, Any]] = {
    (name, "online" if online else "offline"): how | {"online": online}
    for name, how in {
        "full": HESSIAN | {"covariance": "full"},
        "e-full": HESSIAN | {"covariance": "e-full"},
        "diagonal": {"fisher": "per-sample", "covariance": "diagonal"},
    }.items()
    for online in (True, False)
}
OTHERS: dict[tuple[str, str], dict[str, Any]] = {
    ("full, λ = r − 1", "offline"): COVARIANCES["full", "offline"] | {"prior_weight": None},
    ("none (FedAvg)", "–"): {},
}


def pooled_images(rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return images of 7 × 7 means of pixels, in double precision."""
    x, y = rows
    images = x.double().reshape(-1, 1, 28, 28)
    return nn.functional.avg_pool2d(images, 28 // SIDE).flatten(1), y


def loss(theta: Tensor, x: Tensor, y: Tensor, gamma: float) -> Tensor:
    """Return minus the log posterior density of a softmax regression's weights, by class, and biases."""
    classes = len(theta) // (x.shape[1] + 1)
    weight, bias = theta[:-classes].reshape(classes, -1), theta[-classes:]
    likelihood = nn.functional.cross_entropy(x @ weight.T + bias, y, reduction="sum")
    return likelihood + gamma / 2 * theta.square().sum()


def posterior(x: Tensor, y: Tensor, classes: int, gamma: float) -> tuple[Tensor, Tensor]:
    """Return the mode of the pooled posterior by L-BFGS, and the Hessian there."""
    theta = x.new_zeros(classes * (x.shape[1] + 1)).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [theta],
        max_iter=5000,
        tolerance_grad=1e-7,
        tolerance_change=0,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(theta, x, y, gamma)
        value.backward()
        return value

    optimizer.step(closure)
    mode = theta.detach()
    hessian = torch.autograd.functional.hessian(lambda at: loss(at, x, y, gamma), mode)
    return mode, hessian


def distance(theta: Tensor, mode: Tensor, precision: Tensor) -> float:
    """Return D(θ) = ½ (θ − μ*)ᵀ Σ*⁻¹ (θ − μ*)."""
    gap = theta - mode
    return float(gap @ precision @ gap / 2)


def covariance(data: str, images: int, how: dict[str, Any], seed: int) -> list[list[float]]:
    """Return GA, LA, AE and LF after each round, of two clients with five digits each."""
    source = recipes.load(data)
    rng = np.random.default_rng(seed)
    rows, first = rng.permutation(len(source.train_y))[:images], rng.permutation(10)[:5]
    x, y = pooled_images(tensors(source.train_x[rows], source.train_y[rows]))
    test = pooled_images(tensors(source.test_x, source.test_y))
    mine = torch.isin(y, torch.from_numpy(first))
    parts = {"client 0": mine, "client 1": ~mine}
    federation = bf.Federation.from_arrays(
        {name: {"x": x[part], "y": y[part]} for name, part in parts.items()}
    )
    module = mlp(SIDE**2, 10).double()
    for value in module.parameters():
        nn.init.zeros_(value)
    mode, precision = posterior(x, y, 10, GAMMA)

    def figures(r: int, theta: Tensor, notes: list[tuple[float, Tensor]]) -> list[float]:
        return [
            accuracy(module, theta, test),
            mean_of_clients(notes, lambda own: accuracy(module, own, test)),
            distance(theta, mode, precision),
            mean_of_clients(notes, lambda own: distance(own, mode, precision)),
        ]

    algorithm = bf.FOLA(**STEPS, **how, gamma=GAMMA) if how else bf.FedAvg(**STEPS)
    found = curve(module, federation, algorithm, ROUNDS, figures, batch_size=ROWS_A_STEP, seed=seed)
    optimum = [accuracy(module, mode, test), math.nan, 0.0, math.nan]
    return [*found, *[[math.nan] * 4] * (len(ROUNDS) - len(found)), optimum]


def main() -> None:
    given = runner.arguments(__doc__, jobs=2, images=3000, seeds=3, data=runner.MNIST)
    every = COVARIANCES | OTHERS
    rows = {
        key: [(str(given.data), given.images, how, seed) for seed in range(given.seeds)]
        for key, how in every.items()
    }

    def cells(_: Any, found: list[list[list[float]]]) -> list[Any]:
        at = (ROUNDS.index(1), ROUNDS.index(5), ROUNDS.index(10))
        made = [
            mean_cell([run[r][i] for run in found], digits)
            for i, digits in enumerate((".1f", ".1f", ".0f", ".0f"))
            for r in at
        ]
        return [*made, mean_cell([run[-1][0] for run in found], ".1f"), given.seeds]

    heads = " | ".join(
        f"{name}, round {r}" for name in ("GA", "LA", "AE", "LF") for r in (1, 5, 10)
    )
    columns = f"covariance | curvature | {heads} | GA of μ* | seeds"
    runner.table(columns, rows, covariance, given, cells)


if __name__ == "__main__":
    main()
