"""Personal classifiers on MNIST, every method tuned over the same small grid: makes the tables of this folder.

    python experiments/mnist/run.py                                    # every recipe and method, hours on two cores
    python experiments/mnist/run.py few_images --methods FedAvg FedABML --seeds 3 --jobs 2 --data PATH

PATH is an MNIST npz with train_images, train_labels, test_images and test_labels. An MLP 784-100-10, 10 % of the
clients in a round ("all train": all of them, and 10 % upload), 5 local epochs, batches of 50, 100 rounds, gradient
descent but for the heads of PFedVEM. Then every client takes some gradient steps on its own rows from what the server
has; methods whose clients keep their networks, or only condition (PACPFL: one step a round, 250 rounds), have a column
"kept" instead. A posterior's prediction is the mean over 20 draws of it (60 with PACPFL), a point's is one.

Rates of local and of personal steps are chosen from the same grid for every method, and where a method has
one more setting, that from two values: on seed 0, by the NLL on validation images after the last number of steps. The
table is of test images, mean ± standard error over the seeds: accuracy % / NLL / ECE of all clients' rows together.

A row bears a method's name only if its settings leave in force what the method is about. FedABML weighs the KL by 1, as
in its paper's objective, or 0.1, pFedBayes by its ζ (``lam`` in both); the prior's scale is learnt, and θ_i takes
natural steps of half a rate, where a whole one would put it on φ and make FedAvg of both. For the same reason pFedMe's
θ_i goes half of the way to w_i in a step. Ditto trains the common network by FedAvg beside the personal ones, each held
to it by λ; where the common weights are the mean of the personal ones, the row is pFedMAP.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import recipes
import torch

import bayesfed as bf
from bayesfed import metrics
from bayesfed.algorithms import FAMILY
from bayesfed.models import Modulated, Network, mlp

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from tables import combinations, done, keep  # noqa: E402

DATA = HERE.parents[2] / "shared/data/mnist.npz"
PERSONAL = (0.1, 0.3)
DRAWS = 20


@dataclass(frozen=True)
class Recipe:
    """How clients get their images, the rates that are tried, the personal steps after which they are judged."""

    make: Callable[[Path, int], recipes.Task]
    rates: tuple[float, ...] = (0.3, 0.7)
    steps: tuple[int, ...] = (0, 5, 25, 50)


RECIPES = {
    "few_images": Recipe(recipes.few_images, (0.1, 0.3, 0.7)),
    "small_shards": Recipe(recipes.small_shards, (0.1, 0.3, 0.7)),
    "concept_drift": Recipe(recipes.concept_drift),
    "new_clients": Recipe(recipes.new_clients, (0.1, 0.3, 0.7), (0, 1, 5, 20, 50)),
}


@dataclass(frozen=True)
class Method:
    """A method of the table.

    Attributes:
        make: from the number of classes, a client's average number of rows and a point of the grid: the algorithm and
            the model.
        grid: what is tried of its settings, beside the recipe's rates.
        kept: clients keep their networks, or condition on their rows, and are judged by that.
        rounds: of training; 0 for clients by themselves.
        fraction: of the clients in a round.
        draws: of the posterior, for predictions; a point is one whatever is asked for.
    """

    make: Callable[..., tuple[Any, Any]]
    grid: dict[str, tuple[float, ...]] = field(default_factory=dict)
    kept: bool = False
    rounds: int = 100
    fraction: float = 0.1
    draws: int = DRAWS

    def points(self, recipe: Recipe) -> list[dict[str, float]]:
        """Every combination of the grid's values."""
        grid = {"rate": recipe.rates[: 1 if self.rounds == 0 else None], **self.grid}
        return combinations(grid)


def network(classes: int, **settings: Any) -> Network:
    return Network(mlp(784, 100, classes), **settings)


def plain(
    parts: Callable[..., Any], classes: int, rows: float, *, rate: float, **point: float
) -> Any:
    """A method of points."""
    return parts(lr=rate, **point), network(classes)


def fedprox(classes: int, rows: float, *, rate: float, mu: float) -> Any:
    return bf.FedAvg(lr=rate, proximal=mu), network(classes)


def maml(classes: int, rows: float, *, rate: float, inner: float) -> Any:
    return bf.PerFedAvg(lr=inner, prior_lr=rate), network(classes)


def pfedme(classes: int, rows: float, *, rate: float, lam: float) -> Any:
    """θ_i goes half of the way to w_i in a step."""
    return bf.PFedMe(lam=lam, lr=rate, prior_lr=0.5 / lam), network(classes)


def abml(parts: Callable[..., Any], classes: int, rows: float, *, rate: float, lam: float) -> Any:
    """Rates are those of natural steps: η is ``rate``, η' of θ_i a half."""
    algorithm = parts(lr=rate, prior_lr=0.5, kl_weight=lam, draws=3)
    return algorithm, network(classes, spread="learnt", scale=0.1)


def pfedmap(classes: int, rows: float, *, rate: float, rho: float) -> Any:
    """The common weights are the mean of the personal ones."""
    algorithm = FAMILY["PFedMAP"](lr=rate, optimizer="sgd")
    return algorithm, network(classes, scale=rho)


def headed(parts: Callable[..., Any], classes: int, rows: float, *, rate: float) -> Any:
    """A personal last layer on a shared body."""
    return parts(lr=rate), network(classes, local=["2."])


def vem(classes: int, rows: float, *, rate: float, head: float, **settings: Any) -> Any:
    """Adam for the head, as its authors' code has; ``rate`` is the body's."""
    algorithm = bf.PFedVEM(lr=head, body_lr=rate, **settings)
    return algorithm, network(classes, local=["2."], spread="client", scale=0.1)


def cafeme(classes: int, rows: float, *, rate: float, inner: float) -> Any:
    """As many steps on ω_i in a round as the others take, each through one inner step on 20 rows; scale and shift.

    Momentum makes ten times a rate of what it is.
    """
    model = Modulated(mlp(784, 100, classes), mlp(784, 100), context=100, film=True)
    algorithm = bf.CAFeMe(
        inner_lr=inner,
        lr=rate / 10,
        optimizer="momentum",
        inner_steps=1,
        outer_steps=5 * math.ceil(rows / 50),
        support_rows=20,
    )
    return algorithm, model


def pacpfl(classes: int, rows: float, *, rate: float, tau: float) -> Any:
    """Priors N(m, s²) over the weights; conditioning by 60 draws from them. ``rate`` / 100 is Adam's.

    Particles start at draws of the hyper-prior, N(start, 0.1²); τ = 20 counts as a hyper-prior that is √20 as wide.
    """
    algorithm = bf.PACPFL(particles=3, draws=3, lr=rate / 100, tau=tau)
    return algorithm, network(classes, spread="learnt", scale=0.02, hyper_scale=0.1)


METHODS = {
    "Local": Method(partial(plain, bf.FedAvg), rounds=0),
    "FedAvg": Method(partial(plain, bf.FedAvg)),
    "FedProx": Method(fedprox, {"mu": (0.01, 0.1)}),
    "Per-FedAvg": Method(maml, {"inner": PERSONAL}),
    "pFedMe": Method(pfedme, {"lam": (0.5, 2.0)}),
    "pFedBayes": Method(partial(abml, FAMILY["PFedBayes"]), {"lam": (0.05, 0.5)}),
    "Ditto": Method(partial(plain, bf.Ditto), {"lam": (0.1, 1.0)}, kept=True),
    "pFedMAP": Method(pfedmap, {"rho": (0.2, 1.0)}, kept=True),
    "FedPer": Method(partial(headed, bf.FedPer), kept=True),
    "FedRep": Method(partial(headed, bf.FedRep), kept=True),
    "FedBABU": Method(partial(headed, bf.FedBABU)),
    "PFedVEM": Method(vem, {"head": (0.01, 0.03)}, kept=True),
    "PFedVEM, all train": Method(
        partial(vem, upload_fraction=0.1), {"head": (0.003, 0.01)}, kept=True, fraction=1.0
    ),
    "CAFeMe": Method(cafeme, {"inner": PERSONAL}),
    "PACPFL": Method(pacpfl, {"tau": (1.0, 20.0)}, kept=True, rounds=250, draws=3 * DRAWS),
    "FedABML": Method(partial(abml, bf.FedABML), {"lam": (0.1, 1.0)}),
}


def is_kept(recipe: str, name: str) -> bool:
    """Whether clients are judged by the networks that they kept; those who join later have none."""
    return METHODS[name].kept and recipe != "new_clients"


Scores = list[tuple[float, float, float]]


def fitted(task: recipes.Task, method: Method, point: dict[str, float], seed: int) -> bf.Posterior:
    """The posterior, before any personal steps."""
    torch.manual_seed(seed)
    algorithm, model = method.make(task.classes, task.train.rows / len(task.train), **point)
    if "personal_steps" in algorithm.__dataclass_fields__:
        algorithm = replace(algorithm, personal_steps=0)  # scores() takes them
    run = bf.start(
        model,
        task.train,
        algorithm,
        rounds=max(method.rounds, 1),
        clients_per_round=method.fraction,
        batch_size=50,
        seed=seed,
    )
    for _ in range(method.rounds):
        bf.step(run)
    return bf.finish(run)


def scores(
    posterior: bf.Posterior,
    own: bf.Federation,
    rows: bf.Federation,
    draws: int,
    rate: float,
    steps: Sequence[int],
) -> Scores:
    """(accuracy %, NLL, ECE) after each number of personal steps on a client's own rows; none: as kept."""
    found = []
    for count in steps or (None,):
        personal = posterior
        if count is not None:
            personal = posterior.personalize(own, steps=count, lr=rate, batch_size=50)
        probabilities = personal.probabilities(rows, draws)["y"]
        overall = metrics.classification(probabilities, rows["y"], rows.owner, rows.names).overall
        found.append((100 * overall["accuracy"], overall["nll"], overall["ece"]))
    return found


def some_of(federation: bf.Federation, count: int) -> bf.Federation:
    """The first rows of each client."""
    first = torch.arange(count)
    rows = (federation.offsets[:-1, None] + first).flatten()
    fields = {name: value[rows] for name, value in federation.fields.items()}
    offsets = count * torch.arange(len(federation) + 1)
    return bf.Federation(fields, offsets, federation.names)


def tried(
    data: Path, recipe: str, name: str, point: dict[str, float]
) -> list[tuple[float, float, Scores]]:
    """For each personal rate: validation NLL after the last number of steps, the rate, the scores.

    Where new clients are what counts, old ones personalise with as few rows as these have.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of fits that diverge: their scores say so
    method = METHODS[name]
    task = RECIPES[recipe].make(data, 0)
    own = task.train if task.new is None else some_of(task.train, 20)
    kept = is_kept(recipe, name)
    last = () if kept else RECIPES[recipe].steps[-1:]
    found = []
    try:
        posterior = fitted(task, method, point, 0)
        for rate in (math.nan,) if kept else PERSONAL:
            values = scores(posterior, own, task.valid, method.draws, rate, last)
            nll = values[0][1]
            found.append((nll if math.isfinite(nll) else math.inf, rate, values))
    except (FloatingPointError, ValueError):  # the second: probabilities that are not finite
        found.append((math.inf, math.nan, [(math.nan, math.inf, math.nan)]))
    return found


def judged(
    data: Path, recipe: str, name: str, point: dict[str, float], rate: float, seed: int
) -> Scores:
    """The test scores of a seed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    method = METHODS[name]
    task = RECIPES[recipe].make(data, seed)
    posterior = fitted(task, method, point, seed)
    own, rows = (task.train, task.test) if task.new is None else task.new
    steps = () if is_kept(recipe, name) else RECIPES[recipe].steps
    return scores(posterior, own, rows, method.draws, rate, steps)


def table(
    recipe: str, names: Sequence[str], data: Path, seeds: int, jobs: int, resume: bool
) -> None:
    """Tune and judge methods on a recipe, and put their rows into its table."""
    best: dict[str, tuple[float, float, dict[str, float]]] = {}
    trials = [(name, point) for name in names for point in METHODS[name].points(RECIPES[recipe])]
    start = time.perf_counter()
    for (*_, name, point), found in done(
        tried, [(data, recipe, *trial) for trial in trials], jobs, resume
    ):
        for nll, rate, values in found:
            shown = ", ".join(f"{key} {value:g}" for key, value in point.items())
            print(
                f"{time.perf_counter() - start:5.0f} s  {recipe} {name}: {shown}, personal "
                f"{rate:g}: {values[0][0]:.2f} / {values[0][1]:.3f} / {values[0][2]:.3f}",
                flush=True,
            )
            if nll < best.get(name, (math.inf,))[0]:
                best[name] = (nll, rate, point)
    of_seed: dict[str, dict[int, Scores]] = {name: {} for name in best}
    runs = [(name, best[name][2], best[name][1], seed) for name in best for seed in range(seeds)]
    for (_, _, name, *_, seed), found in done(
        judged, [(data, recipe, *run) for run in runs], jobs, resume
    ):
        of_seed[name][seed] = found
        if len(of_seed[name]) == seeds:
            values = torch.tensor([of_seed[name][s] for s in range(seeds)], dtype=torch.float64)
            row = _row(recipe, name, values, best[name])
            print(row, flush=True)
            keep(HERE / f"{recipe}.md", _header(recipe), row, list(METHODS))


def _header(recipe: str) -> list[str]:
    columns = [f"{count} steps" for count in RECIPES[recipe].steps]
    return [
        f"| method | {' | '.join(columns)} | kept | seeds | chosen of the grid |",
        "| --- |" + " --- |" * (len(columns) + 3),
    ]


def _row(
    recipe: str, name: str, values: torch.Tensor, best: tuple[float, float, dict[str, float]]
) -> str:
    """Of scores ``(seeds, steps, 3)``."""
    seeds = len(values)
    mean, error = values.mean(0).tolist(), (values.std(0) / seeds**0.5).tolist()
    cells = [
        f"{m[0]:.1f} ± {e[0]:.1f} / {m[1]:.3f} ± {e[1]:.3f} / {m[2]:.3f}"
        for m, e in zip(mean, error, strict=True)
    ]
    nothing = ["–"] * len(RECIPES[recipe].steps)
    cells = [*nothing, cells[0]] if is_kept(recipe, name) else [*cells, "–"]
    grid = {"rate": RECIPES[recipe].rates, **METHODS[name].grid}
    chosen = [f"{key} {value:g} of {grid[key]}" for key, value in best[2].items()]
    if not is_kept(recipe, name):
        chosen.append(f"personal {best[1]:g} of {PERSONAL}")
    return f"| {name} | {' | '.join(cells)} | {seeds} | {'; '.join(chosen)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", default=list(RECIPES), metavar="recipe")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="fits at a time")
    parser.add_argument("--data", type=Path, default=DATA, help="the npz")
    parser.add_argument(
        "--resume", action="store_true", help="take fits that an earlier run of the same code made"
    )
    args = parser.parse_args()
    for recipe in args.recipes:
        table(recipe, args.methods, args.data, args.seeds, args.jobs, args.resume)


if __name__ == "__main__":
    main()
