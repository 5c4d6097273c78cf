"""Which λ, k and s does FedABML need, and do new clients gain? Makes fedabml_settings.md and fedabml_new_clients.md.

    python experiments/mnist/fedabml_settings.py --data PATH            # both tables, about 40 minutes on one core
    python experiments/mnist/fedabml_settings.py λ k s --data PATH      # fedabml_settings.md alone, 30 minutes
    python experiments/mnist/fedabml_settings.py two five --data PATH   # fedabml_new_clients.md alone, 12 minutes

Cells are accuracy % / NLL / ECE of all judged clients' test rows together, mean ± standard error over the seeds, as in
run.py. Predictions have the label shares of all clients together.

fedabml_settings.md varies the weight of the KL (λ), the steps on φ for each step on θ_i (k) and the draws of a step
(s), one at a time, around λ = 1, k = 5, s = 3; the centre is in all three groups. The recipe is few_images: 100 clients
with 20 images each, rounds and batches as in run.py, natural steps of rate 0.3 on φ and 0.5 on θ_i, then 0, 5 and 50
personal steps of rate 0.3. Rates are the same in all rows, and not chosen for any. In a natural step the pull of the KL
is the same at every λ and that of the likelihood in proportion to 1 / λ, so that λ is a rate as well. The network is
784-20-10, with which a fit takes half a minute. The network of few_images.md has 100 hidden units and takes six times
as long, so that the figures of the two tables cannot be compared.

The paper has curves by round for CIFAR-10 (its Figure 3) and EMNIST (Figure 4) and prints no numbers. It finds k = 5
sufficient, with little gain up to 7, and small k poor on CIFAR-10; s = 5 sufficient, with little gain from more; a
larger λ no better in general and poor on CIFAR-10, so that λ is to be tuned by data set; and hardly any effect of the
three on EMNIST.

fedabml_new_clients.md is the protocol of the paper's Table 2 in small: 20 of 100 clients train, the other 80 join
afterwards and fine-tune for 0 to 10 epochs on their own 20 images, and the cells are of these 80. Clients have two
digits each (small_shards) or five (few_images), two of the 20 are in a round (10 %), and there are 100 rounds of 5
epochs; the network is 784-100-10. An epoch of 20 images is one step, the paper's of 500 is ten. Rates of local and of
personal steps are chosen out of (0.1, 0.3, 0.7) and (0.03, 0.1, 0.3) on seed 0, by the NLL of validation images of the
20 clients after 10 epochs. Other settings are λ = 1 for FedABML, and those of few_images.md for Per-FedAvg (inner rate
0.1) and pFedMe (λ = 0.5). Rows "published" are the accuracies of the paper's Table 2, of CIFAR-10 with a convolutional
network and two or five classes a client: for orientation, since data, network and epochs are others. There FedABML is
ahead of the other three from the first epoch on; without any it is behind FedAvg with two classes, ahead with five.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import recipes
import torch
from methods import DRAWS, LATER, METHODS, Method
from run import HERE, PERSONAL, Recipe, Scores, fitted_network, of_all_clients, runner, scores

import bayesfed as bf
from bayesfed.models import Network, mlp

HIDDEN, STEPS = 20, (0, 5, 50)
PERSONAL_RATE = 0.3
CENTRE = {"λ": 1.0, "k": 5, "s": 3}
GRID = {"λ": (0.01, 0.1, 0.3, 1.0, 3.0, 10.0), "k": (1, 2, 5, 10), "s": (1, 3, 5, 10)}

EPOCHS = (0, 1, 2, 5, 10)
TRAINING = 20
"""The number of clients that train; the others join later."""
DEALS: dict[str, Callable[..., recipes.Task]] = {
    "small_shards": recipes.small_shards,
    "few_images": recipes.few_images,
}
RATES = (0.1, 0.3, 0.7)
OTHERS: dict[str, dict[str, float]] = {
    "FedABML": {"lam": 1.0},
    "FedAvg": {},
    "Per-FedAvg": {"inner": 0.1},
    "pFedMe": {"lam": 0.5},
}
"""Methods whose clients join later, and their settings beside the rates."""
PUBLISHED = {
    ("two classes of CIFAR-10, published", "FedABML"): (16.09, 77.12, 79.61, 81.75, 83.23),
    ("two classes of CIFAR-10, published", "FedAvg"): (19.18, 75.19, 75.71, 77.37, 78.45),
    ("two classes of CIFAR-10, published", "Per-FedAvg"): (18.00, 71.29, 72.13, 76.24, 80.08),
    ("two classes of CIFAR-10, published", "pFedMe"): (14.42, 71.99, 71.81, 72.14, 72.33),
    ("five classes of CIFAR-10, published", "FedABML"): (29.52, 62.02, 62.79, 64.50, 66.11),
    ("five classes of CIFAR-10, published", "FedAvg"): (25.54, 60.01, 60.41, 60.48, 61.63),
    ("five classes of CIFAR-10, published", "Per-FedAvg"): (19.82, 48.08, 51.49, 54.90, 58.71),
    ("five classes of CIFAR-10, published", "pFedMe"): (20.90, 54.81, 55.04, 54.86, 55.48),
}
"""Accuracies of the paper's Table 2 after the same numbers of epochs."""


# -- one setting at a time -------------------------------------------------------------------------


def small_abml(classes: int, batches: int, *, lam: float, k: int, s: int) -> Any:
    """Return FedABML with run.py's rates, and a network with fewer hidden units."""
    algorithm = bf.FedABML(lr=0.3, prior_lr=0.5, kl_weight=lam, inner_steps=k, draws=s, **LATER)
    return algorithm, Network(mlp(784, HIDDEN, classes), spread="learnt", scale=0.1)


def settings() -> dict[tuple[str, str], dict[str, float]]:
    """Return the settings of each row: those of the centre but for one."""
    return {
        (name, f"{value:g}"): CENTRE | {name: value}
        for name, values in GRID.items()
        for value in values
    }


def vary(data: str, lam: float, k: int, s: int, seed: int) -> Scores:
    """Return the test scores of a setting after personal steps."""
    task = recipes.few_images(data, seed)
    point = {"lam": lam, "k": k, "s": s}
    posterior = fitted_network(task, "few_images", Method(small_abml), point, seed)
    own, rows = (of_all_clients(posterior, part) for part in (task.train, task.test))
    return scores([posterior], own, rows, DRAWS, PERSONAL_RATE, STEPS)


# -- clients that join later -----------------------------------------------------------------------


def joining(task: recipes.Task) -> recipes.Task:
    """Return the same task, in which the first clients train and the others join later."""
    first, last = task.train.names[:TRAINING], task.train.names[TRAINING:]
    return recipes.Task(
        train=task.train.select(first),
        valid=task.valid.select(first),
        test=task.test.select(first),
        classes=task.classes,
        new=(task.train.select(last), task.test.select(last)),
    )


def trained(task: recipes.Task, name: str, rate: float, seed: int) -> bf.Posterior:
    """Return the posterior of the clients that train, of a network without label shares."""
    torch.manual_seed(seed)
    method = METHODS[name]
    algorithm, model = method.make(task.classes, Recipe.epochs, rate=rate, **OTHERS[name])
    run = bf.start(
        model,
        task.train,
        algorithm,
        rounds=method.rounds,
        clients_per_round=method.fraction,
        batch_size=Recipe.batch,
        seed=seed,
    )
    for _ in range(method.rounds):
        bf.step(run)
    return bf.finish(run)


def chosen(data: str, recipe: str, name: str) -> tuple[float, float]:
    """Return the rate and the personal rate with the lowest validation NLL after all epochs, on seed 0."""
    task = joining(DEALS[recipe](data, 0))
    tried = []
    for rate in RATES:
        posterior = trained(task, name, rate, 0)
        for personal in PERSONAL:
            judged = scores([posterior], task.train, task.valid, DRAWS, personal, EPOCHS[-1:])
            ((_, nll, _),) = judged
            tried.append((nll, rate, personal))
    _, rate, personal = min(tried)
    return rate, personal


def join(data: str, recipe: str, name: str, seeds: int) -> tuple[tuple[float, float], list[Scores]]:
    """Return the chosen rates, and the test scores of the clients that join, by seed."""
    rate, personal = chosen(data, recipe, name)
    found = []
    for seed in range(seeds):
        task = joining(DEALS[recipe](data, seed))
        assert task.new is not None
        own, rows = task.new
        posterior = trained(task, name, rate, seed)
        found.append(scores([posterior], own, rows, DRAWS, personal, EPOCHS))
    return (rate, personal), found


# -- tables ----------------------------------------------------------------------------------------


def cells(seeds: list[Scores]) -> list[str]:
    """Return accuracy, NLL and ECE by number of steps."""
    made = []
    for scored in zip(*seeds, strict=True):
        accuracy, nll, ece = zip(*scored, strict=True)
        shown = f"{runner.plus_minus(accuracy, '.1f')} / {runner.plus_minus(nll)}"
        made.append(f"{shown} / {sum(ece) / len(ece):.3f}")
    return made


def joined_cells(key: tuple[str, str], found: list[Any]) -> list[Any]:
    """Return the cells of a method, or those of the paper."""
    if key in PUBLISHED:
        return [*(f"{accuracy:.1f}" for accuracy in PUBLISHED[key]), 5, ""]
    (((rate, personal), seeds),) = found
    return [*cells(seeds), len(seeds), f"rate {rate:g}, personal rate {personal:g}"]


def main() -> None:
    given = runner.arguments(__doc__, seeds=3, data=runner.MNIST)
    data = str(given.data)
    varied = {
        key: [(data, *point.values(), seed) for seed in range(given.seeds)]
        for key, point in settings().items()
    }
    heads = " | ".join(f"{count} steps" for count in STEPS)
    runner.table(
        f"setting | value | {heads} | seeds",
        varied,
        vary,
        given,
        lambda _, found: [*cells(found), len(found)],
    )
    digits = {"two digits": "small_shards", "five digits": "few_images"}
    joined = {
        (label, name): [(data, recipe, name, given.seeds)]
        for label, recipe in digits.items()
        for name in OTHERS
    }
    heads = " | ".join(f"{count} epochs" for count in EPOCHS)
    runner.table(
        f"a client has | method | {heads} | seeds | chosen",
        joined | {key: [] for key in PUBLISHED},
        join,
        given,
        joined_cells,
        path=HERE / "fedabml_new_clients.md",
    )


if __name__ == "__main__":
    main()
