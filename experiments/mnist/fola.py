"""Is FOLA ahead of FedAvg and FedCurv in the first rounds on MNIST, and by what? Makes fola.md and fola_ablation.md.

    python experiments/mnist/fola.py                                   # two tables, about an hour on two cores
    python experiments/mnist/fola.py --tables ablation --data PATH
    python experiments/mnist/fola.py 0.1 --tables rounds               # rows of one α

The questions of the MNIST section of FOLA's paper (Liu et al. 2024, Figs. 3 to 5 and 9) on fewer images: 3,000 of the
training images, dealt in equal parts to N clients, all of which take part in every round. GA is the accuracy % of the
server's network on the test images, LA is Σ π_n times the accuracy of client n's network after its steps, on test
images of all digits. Cells are means over the seeds ± standard errors.

fola.md and fola_ablation.md: the paper's MLP, 784-500-300-10; clients have Dirichlet(α) shares of the digits, and draw
other shares where a digit has run out; batches of 20; LA is of every fifth test image. FOLA takes the squared gradients
of single rows over all steps (online) and next to no prior; λ = 100, since at λ = 1 the prior loss has next to no
effect here. FedCurv has λ = 1. "the paper's" lr and E are those of its Fig. 5. "chosen" are those of lr = 0.01, 0.03,
0.1 and E = 1, 5 with the highest accuracy on 2,000 other training images, the mean of those after rounds 1 and 2 on
seed 0.

fola_ablation.md has α = 0.01, N = 20, lr = 0.1 and E = 5. "product" is FOLA's aggregation, without which the server
takes the plain mean; without "prior loss" λ is 0; "offline" takes the curvature after the last step. The prior loss
with the plain mean is no composition of the package's parts: a rule of this script makes it.

The paper's MLP reaches 97.57 % where all images are in one place; its figures of the first round are means of 30 runs.
Figs. 3 to 5 and 9 are curves without printed numbers: at large α the methods are alike, at small α FOLA loses little
and FedAvg much, and more clients cost accuracy; product and prior loss together are ahead of each alone.
"""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import recipes
import torch
from run import HERE, runner
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

import bayesfed as bf
from bayesfed.models import Network, mlp
from bayesfed.rules import ProductOfGaussians

SIZES = (784, 500, 300, 10)
ROUNDS = (1, 2, 5, 10)
TRIED = 2
"""The rounds of a trial of the grid."""
BATCH = 20
HELD = 2000
"""The number of validation images."""
LOCAL = 5
"""LA is of every fifth test image."""
PAPER = {"rate": 0.01, "epochs": 5}
GRID = {"rate": (0.01, 0.03, 0.1), "epochs": (1, 5)}
SETTINGS = [(0.01, 20), (0.1, 20), (1, 20), (100, 20), (0.01, 5), (0.01, 100)]
"""The Dirichlet distribution's α, and the number of clients."""
LAMBDA = 100.0
"""FOLA's λ."""
WEAK = 1e-7
"""The prior's precision for each row: next to none."""


# -- methods ---------------------------------------------------------------------------------------


class MeanBesideGaussians(ProductOfGaussians):
    """FOLA's Gaussian with the plain mean of the clients' modes for μ_S: its prior loss without its aggregation."""

    def encode(self, job: Any, work: Any) -> tuple[Any, Any]:
        """Return FOLA's upload, and n_i (θ_i − μ_S)."""
        upload, state = super().encode(job, work)
        move = work.found["mode"]["theta"] - job.message["gaussian"]["loc"]
        return upload | {"mean": {"move": job.counts[:, None] * move}}, state

    def decode(self, turn: Any, server: Any, total: Any) -> tuple[Any, Tensor]:
        """Return FOLA's precisions at the mean."""
        found, term = super().decode(turn, server, total)
        return found._replace(loc=server.loc + total["mean"]["move"] / server.rows), term


def fola(
    *, rate: float, epochs: int, rows: int, weight: float = LAMBDA, online: bool = True
) -> Any:
    """Return FOLA with the squared gradients of single rows, as in the paper's eq. 22."""
    point = {"lr": rate, "local_epochs": epochs, "gamma": WEAK * rows, "prior_weight": weight}
    return bf.FOLA(covariance="diagonal", fisher="per-sample", online=online, **point)


def fedavg(*, rate: float, epochs: int, rows: int) -> Any:
    return bf.FedAvg(lr=rate, local_epochs=epochs)


def fedcurv(*, rate: float, epochs: int, rows: int) -> Any:
    return bf.FedCurv(lr=rate, local_epochs=epochs, lam=1.0)


def prior_loss_alone(**point: Any) -> Any:
    """Return FOLA's local steps with the plain mean of θ_i."""
    return fola(**point).replace(rule=MeanBesideGaussians(prior_weight=LAMBDA))


METHODS: dict[str, Callable[..., Any]] = {"FedAvg": fedavg, "FedCurv": fedcurv, "FOLA": fola}
PARTS: dict[str, Callable[..., Any]] = {
    "neither (FedAvg)": fedavg,
    "product": partial(fola, weight=0.0),
    "product, offline": partial(fola, weight=0.0, online=False),
    "prior loss": prior_loss_alone,
    "product and prior loss (FOLA)": fola,
    "product and prior loss, offline": partial(fola, online=False),
}


# -- clients ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Deal:
    """Clients' training images, and images for all: ``(x, y)`` each."""

    train: bf.Federation
    valid: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def dealt(labels: np.ndarray, alpha: float, clients: int, seed: int) -> list[np.ndarray]:
    """Return each client's positions in ``labels``: equally many, in Dirichlet(α) shares of the digits.

    Where a client's digits have run out it draws other shares, of those that are left.
    """
    rng = np.random.default_rng(seed)
    digits = labels.max() + 1
    left = [list(rng.permutation(np.flatnonzero(labels == digit))) for digit in range(digits)]
    hands = []
    for _ in range(clients):
        hand: list[int] = []
        shares = rng.dirichlet(np.full(digits, alpha))
        while missing := len(labels) // clients - len(hand):
            for digit, wanted in enumerate(rng.multinomial(missing, shares)):
                hand += left[digit][:wanted]
                left[digit] = left[digit][wanted:]
            there = np.array([len(pile) > 0 for pile in left])
            shares = np.zeros(digits)
            shares[there] = rng.dirichlet(np.full(there.sum(), alpha))
        hands.append(rng.permutation(hand))
    return hands


def tensors(images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return flat images in [0, 1] and labels."""
    x = torch.from_numpy(images.reshape(len(images), -1)).float() / 255
    return x, torch.from_numpy(labels.astype(np.int64))


def deal(data: str, images: int, alpha: float, clients: int, seed: int) -> Deal:
    """Return some of the training images as clients and others for validation, and all test images."""
    source = recipes.load(data)
    order = np.random.default_rng(seed).permutation(len(source.train_y))
    own, held = order[:images], order[images : images + HELD]
    x, y = tensors(source.train_x[own], source.train_y[own])
    hands = dealt(source.train_y[own], alpha, clients, seed)
    fields = {f"client {i}": {"x": x[hand], "y": y[hand]} for i, hand in enumerate(hands)}
    return Deal(
        bf.Federation.from_arrays(fields),
        tensors(source.train_x[held], source.train_y[held]),
        tensors(source.test_x, source.test_y),
    )


# -- rounds ----------------------------------------------------------------------------------------


def noting(algorithm: Any, notes: list[tuple[float, Tensor]]) -> Any:
    """Return the algorithm with a rule that notes each client's n_i and θ_i when it makes its upload."""
    kind: Any = type(algorithm.rule)

    class Noting(kind):  # type: ignore[misc]
        def encode(self, job: Any, work: Any) -> Any:
            notes.extend(zip(job.counts.tolist(), copies(work.found), strict=True))
            return super().encode(job, work)

    return algorithm.replace(rule=Noting(**vars(algorithm.rule)))


def copies(found: dict[str, Any]) -> Tensor:
    """Return the θ_i ``(K, D)`` of the steps of FOLA, FedAvg or FedCurv."""
    if "mode" in found:
        return found["mode"]["theta"].clone()
    return found["theta"]["shared"].squeeze(1).clone()


def server_theta(run: Any) -> Tensor:
    """Return the server's θ ``(D,)``."""
    return run.server["theta"]["shared"] if isinstance(run.server, dict) else run.server.loc


def accuracy(module: nn.Module, theta: Tensor, rows: tuple[Tensor, Tensor]) -> float:
    """Return the percentage of rows that a module with these weights names rightly."""
    own = copy.deepcopy(module)
    vector_to_parameters(theta, own.parameters())
    x, y = rows
    with torch.no_grad():
        return 100 * float((own(x).argmax(1) == y).double().mean())


def mean_of_clients(notes: list[tuple[float, Tensor]], figure: Callable[[Tensor], float]) -> float:
    """Return Σ π_i figure(θ_i), with π_i = n_i / n."""
    every = sum(n for n, _ in notes)
    return sum(n / every * figure(theta) for n, theta in notes)


def curve(
    module: nn.Module,
    federation: bf.Federation,
    algorithm: Any,
    rounds: tuple[int, ...],
    figures: Callable[[int, Tensor, list[tuple[float, Tensor]]], list[float]],
    **options: Any,
) -> list[list[float]]:
    """Return the figures of the server's θ and the clients' after some rounds; not those after it has diverged."""
    notes: list[tuple[float, Tensor]] = []
    found = []
    run = bf.start(
        Network(module, local=()),
        federation,
        noting(algorithm, notes),
        rounds=rounds[-1],
        execution=bf.Execution(chunk_size=1),
        **options,
    )
    with contextlib.suppress(FloatingPointError, ValueError):  # the second: not finite any more
        for r in range(1, rounds[-1] + 1):
            notes.clear()
            bf.step(run)
            if r in rounds:
                found.append(figures(r, server_theta(run), notes))
    return found


# -- networks --------------------------------------------------------------------------------------


def network_curve(
    setting: tuple[str, int, float, int, int],
    make: Callable[..., Any],
    point: dict[str, Any],
    rounds: tuple[int, ...],
    valid: bool,
) -> list[list[float]]:
    """Return GA, and after the first and the last round LA, after some rounds; of validation images GA alone."""
    task = deal(*setting)
    torch.manual_seed(setting[-1])
    module = mlp(*SIZES)
    rows = task.valid if valid else task.test
    few = tuple(part[::LOCAL] for part in rows)

    def figures(r: int, theta: Tensor, notes: list[tuple[float, Tensor]]) -> list[float]:
        ga = accuracy(module, theta, rows)
        if valid or r not in (1, rounds[-1]):
            return [ga]
        return [ga, mean_of_clients(notes, lambda own: accuracy(module, own, few))]

    algorithm = make(**point, rows=setting[1])
    found = curve(
        module, task.train, algorithm, rounds, figures, batch_size=BATCH, seed=setting[-1]
    )
    missing = range(len(found), len(rounds))
    return found + [[math.nan] * (1 if valid else 2) for _ in missing]


def tune(
    data: str, images: int, alpha: float, clients: int, method: str, point: dict[str, Any]
) -> float:
    """Return the mean accuracy on validation images after the rounds of a trial, of seed 0."""
    rounds = tuple(r for r in ROUNDS if r <= TRIED)
    setting = (data, images, alpha, clients, 0)
    found = network_curve(setting, METHODS[method], point, rounds, True)
    return statistics.mean(ga for (ga,) in found)


def measure(
    data: str,
    images: int,
    alpha: float,
    clients: int,
    method: str,
    point: dict[str, Any],
    seed: int,
) -> list[list[float]]:
    make = (METHODS | PARTS)[method]
    return network_curve((data, images, alpha, clients, seed), make, point, ROUNDS, False)


def mean_cell(values: list[float], digits: str) -> str:
    """Return mean ± standard error, or how many of the runs have no figure, since they diverged."""
    lost = sum(math.isnan(value) for value in values)
    return f"{lost} of {len(values)} diverged" if lost else runner.plus_minus(values, digits)


def accuracies(found: list[list[list[float]]]) -> list[str]:
    """Return the cells of GA after each round, and of LA after the first and the last."""
    ga = [mean_cell([run[i][0] for run in found], ".1f") for i in range(len(ROUNDS))]
    return [*ga, *(mean_cell([run[i][1] for run in found], ".1f") for i in (0, -1))]


HEADS = " | ".join([*(f"GA, round {r}" for r in ROUNDS), "LA, round 1", f"LA, round {ROUNDS[-1]}"])


def rounds_table(given: Any) -> None:
    """Make fola.md."""
    where = (str(given.data), given.images)
    keys = [(alpha, n, name) for alpha, n in SETTINGS for name in METHODS]
    trials = {
        key: [(*where, *key, point) for point in runner.combinations(GRID)]
        for key in keys
        if not given.rows or str(key[0]) in given.rows
    }
    best = runner.best(tune, trials, lambda ga: math.inf if math.isnan(ga) else -ga, given)
    points = {key: {"the paper's": PAPER, "chosen": call[-1]} for key, (call, _) in best.items()}
    rows = {
        (*key, how): [(*where, *key, points[key][how], seed) for seed in range(given.seeds)]
        if key in points
        else []  # a row that is not asked for has its place in the order
        for key in keys
        for how in ("the paper's", "chosen")
    }

    def cells(key: tuple[Any, ...], found: list[Any]) -> list[Any]:
        point = points[key[:-1]][key[-1]]
        return [point["rate"], point["epochs"], *accuracies(found), given.seeds]

    columns = f"α | N | method | lr and E | lr | E | {HEADS} | seeds"
    runner.table(columns, rows, measure, given, cells, path=HERE / "fola.md")


def ablation_table(given: Any) -> None:
    """Make fola_ablation.md."""
    where, point = (str(given.data), given.images, *SETTINGS[0]), PAPER | {"rate": 0.1}
    rows = {name: [(*where, name, point, seed) for seed in range(given.seeds)] for name in PARTS}

    def cells(_: Any, found: list[Any]) -> list[Any]:
        return [*accuracies(found), given.seeds]

    path = HERE / "fola_ablation.md"
    runner.table(f"parts | {HEADS} | seeds", rows, measure, given, cells, path=path)


TABLES = {"rounds": rounds_table, "ablation": ablation_table}


def main() -> None:
    options = {"images": 3000, "seeds": 3, "tables": list(TABLES), "data": runner.MNIST}
    given = runner.arguments(__doc__, jobs=2, **options)
    for name in given.tables:
        TABLES[name](given)


if __name__ == "__main__":
    main()
