"""Which method is the best on each recipe and with each number of personal steps? Makes summary.md.

    python experiments/mnist/summary.py

From the tables of run.py beside it, whose dates and commits hold. A line is a recipe and a number of steps; "kept"
stands for methods whose clients keep their variables or condition on their rows, beside FedAvg after its last number of
steps. Cells have the accuracy in percent, or the NLL, of the best method, and how far it is ahead of tuned FedAvg after
as many steps: the margin ± its standard error, the root of the sum of both squared errors over seeds. The last two
columns leave out label shares, sub-classes and two networks. Where FedAvg is the best the cell says so.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
import runner  # noqa: E402

RECIPES = ("few_images", "small_shards", "concept_drift", "new_clients")
RECIPES += ("dirichlet_03", "dirichlet_1", "balanced_test", "rotated_shards", "rotated_dirichlet")
COLUMNS = "recipe | steps | FedAvg | best accuracy | best NLL | accuracy, others' methods | NLL, others' methods"
OURS = ("label shares", "sub-classes", "two networks")
Score = tuple[float, float]
"""A mean over seeds and its standard error."""


def scores(recipe: str) -> dict[str, dict[str, tuple[Score, Score]]]:
    """Return accuracy and NLL by steps (the table's columns) and method."""
    lines = (HERE / f"{recipe}.md").read_text(encoding="utf-8").splitlines()
    heads, _, *rows = (
        [x.strip() for x in line[1:-1].split("|")] for line in lines if line[:1] == "|"
    )
    found: dict[str, dict[str, tuple[Score, Score]]] = {}
    for name, *cells in rows:
        for head, cell in zip(heads[1:], cells, strict=True):
            numbers = [float(x) for x in re.findall(r"[\d.]+", cell)]
            if (head.endswith("steps") or head == "kept") and len(numbers) == 5:
                accuracy, its, nll, error, _ = numbers
                found.setdefault(head.removesuffix(" steps"), {})[name] = (
                    (accuracy, its),
                    (nll, error),
                )
    return found


def margin(methods: dict[str, tuple[Score, Score]], tuned: tuple[Score, Score], which: int) -> str:
    """Return the best of methods and its margin over FedAvg, of accuracy (0) or NLL (1)."""
    sign, places = ((1, 1), (-1, 3))[which]
    best = max(methods, key=lambda name: sign * methods[name][which][0])
    (value, error), (known, its) = methods[best][which], tuned[which]
    if sign * (value - known) <= 0:
        return "FedAvg"
    both = (error**2 + its**2) ** 0.5
    return f"{best}: {value:.{places}f}, {sign * (value - known):+.{places}f} ± {both:.{places}f}"


def measure(recipe: str, steps: str) -> list[str]:
    """Return the cells of a line."""
    found = scores(recipe)
    methods = found[steps]
    tuned = methods.get("FedAvg") or found[[key for key in found if key != "kept"][-1]]["FedAvg"]
    others = {name: both for name, both in methods.items() if not any(x in name for x in OURS)}
    shown = f"{tuned[0][0]:.1f} / {tuned[1][0]:.3f}"
    cells = [margin(each, tuned, which) for each in (methods, others) for which in (0, 1)]
    return [shown, *cells]


def main() -> None:
    given = runner.arguments(__doc__)
    there = [recipe for recipe in RECIPES if (HERE / f"{recipe}.md").exists()]
    rows = [(recipe, steps) for recipe in there for steps in scores(recipe)]
    runner.table(COLUMNS, rows, measure, given)


if __name__ == "__main__":
    main()
