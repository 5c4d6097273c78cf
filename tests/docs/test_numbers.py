"""Measured numbers in the documentation are those of the tables under ``experiments``.

A claim is a sentence of a page with ``{}`` for each number, and the numbers as the table has them. Where a table has
been made anew, the failure shows the sentence to write.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scripts import load

ROOT = Path(__file__).resolve().parents[2]
NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?"
readme = load("docs/readme.py")

Row = dict[str, list[str]]
CLAIMS: list[tuple[str, str, Callable[[], tuple]]] = []


def claim(page: str, sentence: str) -> Callable:
    """Register a function that gives a sentence's numbers."""

    def keep(numbers: Callable[[], tuple]) -> Callable:
        CLAIMS.append((page, sentence, numbers))
        return numbers

    return keep


def table(name: str) -> list[Row]:
    return readme.rows(ROOT / "experiments" / f"{name}.md")


def numbers(rows: list[Row], column: str, which: int = 0) -> list[float]:
    """All numbers in a column, or in the second of its name."""
    cells = " ".join(row[column][which] for row in rows).replace(",", "")
    return [float(number) for number in re.findall(NUMBER, cells)]


def ends(values: list[float]) -> tuple[str, str]:
    return f"{min(values)}", f"{max(values)}"


@claim(
    "speed.md",
    "{} to {} s for the first fit of a process, {} to {} s for the next; one chain of NumPyro's NUTS on the pooled "
    "data takes {} to {} and {} to {} s.",
)
def _seconds():
    rows = table("seconds_to_truth")
    ours = ends(numbers(rows, "bayesfed cold")), ends(numbers(rows, "warm"))
    nuts = ends(numbers(rows, "NumPyro cold")), ends(numbers(rows, "warm", 1))
    return sum((*ours, *nuts), ())


@claim(
    "speed.md",
    "With 100,000 rows of 50 to 10,000 clients it takes {} to {} s for Gaussian outcomes, {} to {} s for Bernoulli and "
    "{} to {} s for Poisson outcomes, {} to {} times as long as glmmTMB.",
)
def _rows():
    return _seconds_of("100000")


@claim(
    "speed.md",
    "With a million rows it takes {} to {}, {} to {} and {} to {} s, {} to {} times as long as glmmTMB.",
)
def _million_rows():
    return _seconds_of("1000000")


def _seconds_of(size):
    rows = [r for r in table("seconds_to_rows") if r["rows"] == [size]]
    found = [
        ends(numbers([r for r in rows if r["outcome"] == [outcome]], "bayesfed: cold, s"))
        for outcome in ("gaussian", "bernoulli", "poisson")
    ]
    return (*sum(found, ()), *ends(numbers(rows, "cold ÷ glmmTMB")))


@claim(
    "speed.md",
    "takes {} to {} s from the command to its files, of which imports take {} to {} s and the fit {} to {} s",
)
def _whole_command():
    rows = table("whole_command")
    return sum((ends(numbers(rows, name)) for name in ("whole", "import", "fit")), ())


@claim(
    "algorithms.md",
    "`FedPop` ends within {} standard deviations of NUTS of its maximum after {} to {} rounds, on {} models",
)
def _fedpop():
    rows = [row for row in table("matrix") if row["algorithm"] == ["FedPop"]]
    distance = max(numbers(rows, "own: globals"))
    rounds = [int(value) for value in numbers(rows, "rounds")]
    return (f"{distance}", f"{min(rounds)}", f"{max(rounds)}", f"{len(rows)}")


@claim(
    "overview.md",
    "with a tenth of the clients in a round in up to {} (`experiments/rounds_to_truth.md`).",
)
def _rounds():
    rows = [r for r in table("rounds_to_truth") if r["clients a round"] == ["10 %"]]
    return (int(max(numbers(rows, "stops"))),)


@claim(
    "other_tools.md",
    "| {} to {} with all clients in each round, and {} to {} exchanges in all",
)
def _rounds_of_all():
    rows = [r for r in table("rounds_to_truth") if r["clients a round"] == ["100 %"]]
    found = [numbers(rows, column) for column in ("stops", "exchanges")]
    return tuple(int(end) for column in found for end in (min(column), max(column)))


@claim(
    "overview.md",
    "Of the {} programs of `experiments/first_try.md` {} have all means within {} standard deviations of NUTS' and "
    "all spreads within {} and {};",
)
def _programs():
    rows, good = table("first_try"), 0
    for row in rows:
        shifts = numbers([row], "globals: shift") + numbers([row], "locals: shift")
        ratios = numbers([row], "sd ratio") + numbers([row], "sd ratio", 1)
        good += max(shifts) <= 0.15 and min(ratios) >= 0.8 and max(ratios) <= 1.25
    return len(rows), good, 0.15, 0.8, 1.25


@claim(
    "overview.md",
    "All of {} posteriors of posteriordb have means, spreads and tails of NUTS' at the first try",
)
def _posteriordb():
    goals = [row["goal"][0] for row in table("posteriordb")]
    assert set(goals) == {"met"}
    return (len(goals),)


@claim(
    "formulas.md",
    "models of these families means are within {} standard deviations of NUTS, and standard deviations are {} to {} "
    "times those of NUTS: `experiments/families.md`",
)
def _families():
    rows = table("families")
    assert len(rows) == 11  # as the sentence says
    shifts = numbers(rows, "globals: shift") + numbers(rows, "locals: shift")
    return max(shifts), *ends(numbers(rows, "sd ratio") + numbers(rows, "sd ratio", 1))


@claim(
    "calibration.md",
    "In {} replications of each of {} models 90 % intervals cover {} to {} % of true values by variable, "
    "and {} to {} % on average over a model's variables",
)
def _coverage():
    rows = table("coverage")
    done = numbers(rows, "replications")
    share = {(r["model"][0], r["variable"][0]): float(r["90 %"][0].split(" ")[0]) for r in rows}
    of_variables = [x for (_, variable), x in share.items() if variable != "all"]
    of_models = [x for (_, variable), x in share.items() if variable == "all"]
    (replications,) = {int(n) for n in done}
    return replications, len(of_models), *ends(of_variables), *ends(of_models)


@claim(
    "overview.md",
    "With minibatches it may be {} standard deviations off, or not have converged after 500 rounds "
    "(`experiments/accuracy.md`).",
)
def _minibatches():
    rows = [r for r in table("accuracy") if r["guide"] == ["default"] and "a step" in r["run"][0]]
    assert any("500" in row["rounds"][0] for row in rows)
    return (round(max(numbers(rows, "mean, locals")), 1),)


@claim("overview.md", "{} clients of 10,000 weights train in the memory of a cohort")
def _growth():
    (row,) = (r for r in table("benchmarks/growth") if "weights" in r["algorithm"][0])
    return (row["clients"][0],)


@claim(
    "overview.md",
    "round-off grows to relative differences of up to {}: runs whose sums are added in another order",
)
def _agreement():
    rows = table("deployment/agreement")
    worst = max(float(row[c][0]) for row in rows for c in ("global", "clients' own"))
    return (round(worst, 1),)


@claim("effects.md", "agree with lme4 and emmeans within {} standard errors.")
def _emmeans():
    shifts = numbers([r for r in table("effects") if r["shift in se"][0]], "shift in se")
    return (f"{max(map(abs, shifts))}",)


@claim(
    "formulas.md",
    "On four classic data sets means are within {} standard deviations of bambi's NUTS, and standard deviations are "
    "{} to {} times those of NUTS:",
)
def _formulas():
    rows = table("formulas")
    return (f"{max(numbers(rows, 'shift in sd'))}", *ends(numbers(rows, "ratio of sd")))


@claim(
    "privacy.md",
    "the slopes of 100 clients lie {} of its standard deviations at ε = 10, {} at 3 and {} at 1 from where they are "
    "without privacy, those of 1000 clients {} at ε = 10, {} at 3 and {} at 1",
)
def _private():
    found = []
    for clients in ("100", "1000"):
        (row,) = (
            r for r in table("private") if (r["algorithm"], r["clients"]) == (["SFVI"], [clients])
        )
        cells = (row[f"ε = {e}"][0] for e in (10, 3, 1))
        found += [re.search(r"([\d.]+) ± [\d.]+ of its own", cell)[1] for cell in cells]
    return tuple(found)


@claim(
    "speed.md",
    "whenever and however often it was killed ({} times `kill -9`: `experiments/kills.md`)",
)
def _kills():
    rows = table("kills")
    assert all(row["runs"] == row["bit-identical"] for row in rows)
    return (int(sum(numbers(rows, "kills"))),)


@claim(
    "deployment_faults.md",
    "SFVI ends {} standard deviations from the run in which none is missing, with stale updates {}; PVI, which has not "
    "converged after 40 rounds in either run, {} and {}.",
)
def _stale():
    rows = {row["algorithm"][0]: row for row in table("deployment/unlucky")}
    cells = [rows[a][f"30 % {what}"][0] for a in ("SFVI", "PVI") for what in ("missing", "late")]
    return tuple(cell.split(" sd")[0] for cell in cells)


@claim("deployment_faults.md", "Honest uploads have been up to {} times as long as the median")
def _lengths():
    rows = table("deployment/lengths")
    return (max(numbers(rows, "longest upload, in medians")),)


@claim(
    "deployment_by_post.md",
    "By default the fits of `experiments/deployment/letters.md` needed {} to {} letters, of which {} to {} were for "
    "importance weights. Where letters must be few, give a number of rounds and `corrected = false` under "
    "`[algorithm]`: five rounds need {} letters.",
)
def _letters():
    rows = {row["fit"][0]: row for row in table("deployment/letters")}
    assert {row["difference"][0] for row in rows.values()} == {"0"}
    usual = [row for fit, row in rows.items() if fit.endswith(", SFVI")]
    few = rows["eight schools, 5 rounds, without importance weights"]
    counts = [numbers(usual, f"letters {what}") for what in ("answered", "for weights")]
    found = [f"{of(values):.0f}" for values in counts for of in (min, max)]
    return (*found, few["letters answered"][0])


@claim(
    "networks.md",
    "On MNIST with 20 images a client in Dirichlet(0.3) shares the accuracy is {} %, of θ alone {} %, after 50 "
    "personal steps {} %; on a balanced test {}, {} and {} %",
)
def _label_shares():
    found = []
    for name in ("dirichlet_03", "balanced_test"):
        rows = {row["method"][0]: row for row in table(f"mnist/{name}")}
        plain, shares = rows["FedAvg"], rows["FedAvg, label shares"]
        cells = (shares["0 steps"], plain["0 steps"], plain["50 steps"])
        found += [re.findall(NUMBER, cell[0])[0] for cell in cells]
    return tuple(found)


@claim(
    "networks.md",
    "two networks with label shares have {} % and an NLL of {}, one has {} % and {} "
    "(`experiments/mnist/few_images.md`); where clients mean different digits by a label, two networks with "
    "sub-classes have {} % and {}, one has {} % and {}",
)
def _two_networks():
    found = []
    for name, extra in (("few_images", "label shares"), ("concept_drift", "sub-classes")):
        rows = {row["method"][0]: row for row in table(f"mnist/{name}")}
        for method in (f"FedAvg, two networks, {extra}", f"FedAvg, {extra}"):
            accuracy, _, nll, *_ = re.findall(NUMBER, rows[method]["0 steps"][0])
            found += [accuracy, nll]
    return tuple(found)


@pytest.mark.parametrize(("page", "sentence", "of"), CLAIMS, ids=[c[2].__name__ for c in CLAIMS])
def test_that_numbers_are_those_of_the_table(page, sentence, of):
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    right = sentence.format(*of())
    assert right in text, f"docs/{page} should say: {right}"


def test_that_another_number_is_found():
    page, sentence, of = CLAIMS[0]
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    first, *others = of()
    assert sentence.format(f"1{first}", *others) not in text
