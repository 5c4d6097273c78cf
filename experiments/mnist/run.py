"""Which method makes the best personal classifiers of MNIST? Makes few_images.md and a table of each other recipe.

    python experiments/mnist/run.py                                    # every recipe and method, hours on two cores
    python experiments/mnist/run.py few_images --methods FedAvg FedABML --seeds 3 --jobs 2 --data PATH

PATH is an MNIST npz with train_images, train_labels, test_images and test_labels. An MLP 784-100-10, 10 % of the
clients in a round ("all train": all of them, and 10 % upload), 5 local epochs, batches of 50, 100 rounds, gradient
descent but for the heads of PFedVEM. Then every client takes some gradient steps on its own rows from the server's
network; stateful methods, and PACPFL, which only conditions (one step a round, 250 rounds), have a column "kept"
instead. The prediction of a posterior is the mean over 20 draws of it (60 with PACPFL).

Rates of local and of personal steps are chosen from eight and three values, and a setting of its own where a method has
one, of those in the last column. Rates with gradients that are scaled are a part of the one in the table: a hundredth
for the bodies of PFedVEM and pFedMAP and for PACPFL, a tenth for CAFeMe with momentum. Rows that were made earlier have
fewer values. Choices are made on seed 0, by the NLL on validation images of the first 30 clients (all 50 of
concept_drift) without personal steps or after the last number of them, whichever is lower. The search starts in the
middle of the values and goes to a neighbour while that is better, so that the choice is better than both of its
neighbours. The table is of test images, mean ± standard error over the seeds: accuracy % / NLL / ECE of all clients'
rows together.

Every method has a second row, in which predictions and personal steps have the clients' label shares as well
(bayesfed.models.label_shares), with the best settings for it among those that the search tried. Where clients' label
shares are alike the two rows agree. "Two networks" are each trained by half of the clients of a round, and take half of
the personal steps; their weights are averaged over about ten rounds, and their predictions with each other: the work is
that of one.

A row bears a method's name only if its settings leave in force what the method is about. The KL has a weight around 1
in FedABML, as in its paper's objective, and around 0.1 in pFedBayes, its ζ (``lam`` in both); the prior's scale is
learnt, and θ_i takes natural steps of half a rate, where a whole one would put it on φ and make FedAvg of both. For the
same reason pFedMe's θ_i goes half of the way to w_i in a step. Ditto trains the common network by FedAvg beside the
personal ones, each held to it by λ. "Local" is 20 rounds of 5 epochs of every client by itself.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import recipes
import torch
from methods import METHODS, Method

import bayesfed as bf
from bayesfed import metrics
from bayesfed.models import LabelShares, start_subclasses
from bayesfed.settings import SettingsError

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
import runner  # noqa: E402

RATES = (0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
PERSONAL = (0.03, 0.1, 0.3)
PERSONAL_RATE = "personal rate"
SHARES = ", label shares"
"""What the name of a method's second row ends with."""


@dataclass(frozen=True)
class Recipe:
    """A way to deal images, and its schedule.

    Attributes:
        make: deals the images of a file, by a seed.
        steps: the personal steps after which clients are judged.
        rounds: times those of a method.
        fraction: times the part of the clients that a method has in a round.
        epochs: of a client in a round, unless a method counts steps.
        batch: rows of a minibatch.
        own_rows: the number of rows that old clients personalise with where new ones are judged.
        judged: the number of clients whose validation images settings are chosen by.
    """

    make: Callable[[str, int], recipes.Task]
    steps: tuple[int, ...] = (0, 5, 25, 50)
    rounds: int = 1
    fraction: float = 1.0
    epochs: int = 5
    batch: int = 50
    own_rows: int = 20
    judged: int = 30


RECIPES = {
    "few_images": Recipe(recipes.few_images),
    "small_shards": Recipe(recipes.small_shards),
    "concept_drift": Recipe(recipes.concept_drift, judged=50),
    "new_clients": Recipe(recipes.new_clients, (0, 1, 5, 20, 50)),
    "dirichlet_03": Recipe(recipes.dirichlet_03),
    "dirichlet_1": Recipe(recipes.dirichlet_1),
    "balanced_test": Recipe(recipes.balanced_test),
    "rotated_shards": Recipe(recipes.rotated_shards, (0, 5, 50), 10, 0.625, 1, 30, 200),
    "rotated_dirichlet": Recipe(recipes.rotated_dirichlet, (0, 5, 50), 10, 0.625, 1, 30, 30),
}


JOINED = ("new_clients", "rotated_shards", "rotated_dirichlet")
"""Recipes in which new clients are judged."""


def is_kept(recipe: str, name: str) -> bool:
    """Return whether clients are judged by their states; new clients have none."""
    return METHODS[name].kept and recipe not in JOINED


Scores = list[tuple[float, float, float]]


def with_epochs(steps: Any, epochs: int) -> Any:
    """Return steps with that many passes over a client's rows, where they count passes."""
    if hasattr(steps, "phases"):
        return replace(steps, phases=tuple(with_epochs(phase, epochs) for phase in steps.phases))
    return replace(steps, epochs=epochs) if hasattr(steps, "epochs") else steps


def fitted(
    task: recipes.Task, recipe: str, method: Method, point: dict[str, float], seed: int
) -> list[bf.Posterior]:
    """Return the posterior of each network before any personal steps."""
    return [
        fitted_network(task, recipe, method, point, seed + 1000 * number)
        for number in range(method.networks)
    ]


def fitted_network(
    task: recipes.Task, recipe: str, method: Method, point: dict[str, float], seed: int
) -> bf.Posterior:
    """Return the posterior of one of a method's networks."""
    torch.manual_seed(seed)
    schedule = RECIPES[recipe]
    rows = task.train.rows / len(task.train)
    batches = schedule.epochs * math.ceil(rows / schedule.batch)
    algorithm, model = method.make(task.classes, batches, **point)
    if getattr(model, "subclasses", 1) > 1:
        module = start_subclasses(model.module, task.train, model.subclasses)
        model = replace(model, module=module)
    if schedule.epochs != Recipe.epochs:
        algorithm = algorithm.replace(steps=with_epochs(algorithm.steps, schedule.epochs))
    shares = LabelShares.learn(task.train, classes=task.classes)
    run = bf.start(
        replace(model, label_shares=shares),
        task.train,
        algorithm,
        rounds=method.rounds * schedule.rounds,
        clients_per_round=method.fraction * schedule.fraction / method.networks,
        batch_size=schedule.batch,
        seed=seed,
        execution=bf.Execution(compile=True) if method.compiled else None,
    )
    for _ in range(method.rounds * schedule.rounds):
        bf.step(run)
    return bf.finish(run)


def scores(
    posteriors: Sequence[bf.Posterior],
    own: bf.Federation,
    rows: bf.Federation,
    draws: int,
    rate: float,
    steps: Sequence[int],
) -> Scores:
    """Return (accuracy %, NLL, ECE) after each number of personal steps on a client's own rows; none: as kept.

    Several networks share the steps.
    """
    found = []
    for count in steps or (None,):
        each = list(posteriors)
        if count is not None:
            shared = math.ceil(count / len(each))
            each = [one.personalize(own, steps=shared, lr=rate, batch_size=50) for one in each]
        probabilities = sum(one.probabilities(rows, draws)["y"] for one in each) / len(each)
        overall = metrics.classification(probabilities, rows["y"], rows.owner, rows.names).overall
        found.append((100 * overall["accuracy"], overall["nll"], overall["ece"]))
    return found


def of_all_clients(posterior: bf.Posterior, rows: bf.Federation) -> bf.Federation:
    """Return rows that have the label shares of all clients together, so that a client's own make no difference."""
    mean = torch.tensor(posterior.program.model.label_shares.mean)
    return replace(rows, fields=rows.fields | {"shares": mean.expand(rows.rows, -1)})


def both(
    posteriors: Sequence[bf.Posterior], own: bf.Federation, rows: bf.Federation, *how: Any
) -> dict[str, Scores]:
    """Return :func:`scores` with the label shares of all clients together (""), and with each client's own."""
    alike = (of_all_clients(posteriors[0], part) for part in (own, rows))
    return {"": scores(posteriors, *alike, *how), SHARES: scores(posteriors, own, rows, *how)}


def some_of(federation: bf.Federation, count: int) -> bf.Federation:
    """Return the first rows of each client."""
    first = torch.arange(count)
    rows = (federation.offsets[:-1, None] + first).flatten()
    fields = {name: value[rows] for name, value in federation.fields.items()}
    offsets = count * torch.arange(len(federation) + 1)
    return bf.Federation(fields, offsets, federation.names)


def judge(
    task: recipes.Task, recipe: str, name: str, posteriors: Sequence[bf.Posterior], rate: float
) -> dict[str, float]:
    """Return the validation NLL of both rows of a method at a personal rate, the lower of before and after all steps.

    Where new clients are judged, old ones personalise with as few rows as these have.
    """
    own = task.train if task.new is None else some_of(task.train, RECIPES[recipe].own_rows)
    first = task.train.names[: RECIPES[recipe].judged]
    steps = () if is_kept(recipe, name) else (0, RECIPES[recipe].steps[-1])
    how = METHODS[name].draws, rate, steps
    found = both(posteriors, own.select(first), task.valid.select(first), *how)
    nlls = {row: [nll for _, nll, _ in each] for row, each in found.items()}
    return {
        row: min(x if math.isfinite(x) else math.inf for x in each) for row, each in nlls.items()
    }


def tune(data: str, recipe: str, name: str) -> dict[str, tuple[float, dict[str, float], float]]:
    """Return the lowest validation NLL of both rows of a method, its settings and its personal rate, on seed 0."""
    method, task = METHODS[name], RECIPES[recipe].make(data, 0)
    fit = cache(lambda **point: fitted(task, recipe, method, point, 0))
    tried: dict[str, list[tuple[float, dict[str, float], float]]] = {"": [], SHARES: []}

    def loss(point: dict[str, float]) -> float:
        rate = point.pop(PERSONAL_RATE, math.nan)
        try:
            found = judge(task, recipe, name, fit(**point), rate)
        except SettingsError:
            raise
        except (FloatingPointError, ValueError):  # the second: probabilities that are not finite
            found = dict.fromkeys(tried, math.inf)
        for row, nll in found.items():
            tried[row].append((nll, point, rate))
        return found[SHARES if method.shares else ""]

    personal = {} if is_kept(recipe, name) else {PERSONAL_RATE: PERSONAL}
    runner.descend(loss, {"rate": RATES} | method.grid | personal)
    return {row: min(found, key=lambda one: one[0]) for row, found in tried.items()}


def measure(
    data: str, recipe: str, name: str, point: dict[str, float], rate: float, seed: int
) -> dict[str, Scores]:
    """Return the test scores of a seed, of both rows."""
    method = METHODS[name]
    task = RECIPES[recipe].make(data, seed)
    posteriors = fitted(task, recipe, method, point, seed)
    own, rows = (task.train, task.test) if task.new is None else task.new
    steps = () if is_kept(recipe, name) else RECIPES[recipe].steps
    return both(posteriors, own, rows, method.draws, rate, steps)


def table(recipe: str, given: Any) -> None:
    """Tune and judge methods on a recipe, and put their rows into its table."""
    data, steps = str(given.data), RECIPES[recipe].steps
    calls = [(data, recipe, name) for name in given.methods]
    rows, chosen = {}, {}
    for (_, _, name), found in runner.results(tune, calls, given):
        grid = {"rate": RATES, PERSONAL_RATE: PERSONAL, **METHODS[name].grid}
        for row, (_, point, rate) in found.items():
            values = {**point} if is_kept(recipe, name) else {**point, PERSONAL_RATE: rate}
            chosen[name + row] = "; ".join(
                f"{setting} {value:g} of {grid[setting][0]:g} to {grid[setting][-1]:g}"
                for setting, value in values.items()
            )
            call = (data, recipe, name, point, rate)
            rows[name + row] = [(*call, seed) for seed in range(given.seeds)]
    order = [name + row for name in METHODS for row in ("", SHARES)]

    def cells(key: tuple[str], found: list[dict[str, Scores]]) -> list[str]:
        made = []
        row = SHARES if key[0].endswith(SHARES) else ""
        for scored in zip(*(one[row] for one in found), strict=True):  # one number of steps
            accuracy, nll, ece = zip(*scored, strict=True)
            error = sum(ece) / len(ece)
            made.append(
                f"{runner.plus_minus(accuracy, '.1f')} / {runner.plus_minus(nll)} / {error:.3f}"
            )
        made = [*["–"] * len(steps), *made] if len(made) == 1 else [*made, "–"]
        return [*made, given.seeds, chosen[key[0]]]

    heads = " | ".join(f"{count} steps" for count in steps)
    columns = f"method | {heads} | kept | seeds | chosen of the grid"
    given.rows = list(rows)
    rows = {name: rows.get(name, []) for name in order}
    runner.table(columns, rows, measure, given, cells, path=HERE / f"{recipe}.md")


def main() -> None:
    how = {"methods": list(METHODS), "seeds": 3, "data": runner.MNIST}
    given = runner.arguments(__doc__, jobs=2, **how)
    asked, given.rows = given.rows or list(RECIPES), []
    for recipe in asked:
        table(recipe, given)


if __name__ == "__main__":
    main()
